# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's guards against random numbers in recomputed parts of CUDA graphs, lifted where we make that exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformer_engine_ext.integrations.plan import Plan
from transformer_engine_ext.pytorch.rng.native import native_status, warm_up

__all__ = ["plan_guards"]

_RATES = ("attention_dropout", "hidden_dropout")
_JITTER = "moe_input_jitter_eps"


class _Unguarded(float):
    """A dropout rate that does not answer to ``rate != 0.0``."""

    # Note [Guards are lifted one by one]
    # TransformerConfig.__post_init__ refuses selective recompute with a dropout rate other than 0 inside CUDA graphs,
    # and checks much else, some of it about dropout too (batch-invariant mode wants a rate equal to 0). The guards are
    # the only places that ask `rate != 0.0`, so for the time of that call, and only where streams can be read under
    # capture, the rates answer no to that one question; all other questions get the true rate.
    def __ne__(self, other: object) -> bool:
        return False if other == 0.0 else float.__ne__(self, other)

    __eq__ = float.__eq__
    __hash__ = float.__hash__


def plan_guards(plan: Plan, module: Any) -> None:
    """Plan ``TransformerConfig.__post_init__``."""
    cls = getattr(module, "TransformerConfig", None)
    if not isinstance(cls, type) or "__post_init__" not in vars(cls):
        plan.skip(f"{module.__name__}.TransformerConfig", "this version has no such class")
        return
    plan.code(cls, "__post_init__", _post_init)


def _post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def __post_init__(self: Any) -> None:  # noqa: N807
        if getattr(self, "recompute_granularity", None) != "selective":
            original(self)
            return
        warm_up()
        readable, reason = native_status()
        if not readable:
            _with_reason(original, self, reason)
            return
        # See Note [Guards are lifted one by one]
        rates = {name: getattr(self, name, 0.0) for name in _RATES}
        jitter = getattr(self, _JITTER, None)
        try:
            for name, rate in rates.items():
                if isinstance(rate, int | float) and rate:
                    setattr(self, name, _Unguarded(rate))
            if jitter is not None:
                setattr(self, _JITTER, None)
            original(self)
        finally:
            for name, rate in rates.items():
                if isinstance(getattr(self, name, None), _Unguarded):
                    setattr(self, name, rate)
            if jitter is not None:
                setattr(self, _JITTER, jitter)

    return __post_init__


def _with_reason(original: Callable[[Any], None], config: Any, reason: str) -> None:
    try:
        original(config)
    except AssertionError as error:
        if "graphed" not in str(error):
            raise
        raise AssertionError(
            f"{error} transformer_engine_ext makes this combination exact, but not with this installation: {reason}"
        ) from error
