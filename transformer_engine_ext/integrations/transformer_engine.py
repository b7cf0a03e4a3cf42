# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The region hook for Transformer Engine: its phase flags, its engine switch and its FP8 state follow our regions.

It needs no ``patch()``: it installs itself at the first region that starts with Transformer Engine imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from operator import itemgetter
from typing import Any

from transformer_engine_ext.integrations.fp8_state import FP8State, Open
from transformer_engine_ext.pytorch.recompute import register_region_hook
from transformer_engine_ext.pytorch.recompute.phase import current, set_fp8_probe

__all__ = ["TransformerEngineHook", "current_hook", "install_hook"]

_DISTRIBUTED = "transformer_engine.pytorch.distributed"
_MLP = "transformer_engine.pytorch.module.layernorm_mlp"

# (region, phase): since 2.19, and before.
_FLAGS = (
    ("_IN_ACTIVATION_RECOMPUTE_REGION", "_ACTIVATION_RECOMPUTE_PHASE"),
    ("_FP8_ACTIVATION_RECOMPUTE_ENABLED", "_FP8_ACTIVATION_RECOMPUTE_PHASE"),
)
_SWITCH = "_USE_REENTRANT_ACTIVATION_RECOMPUTE"


def _always() -> bool:
    return True


def _none(scope: object) -> tuple[bool, ...]:
    return ()


class TransformerEngineHook:
    """Drives Transformer Engine's module globals, which every bound copy of its predicates reads.

    Parameters
    ----------
    distributed : module
        ``transformer_engine.pytorch.distributed``.
    fp8 : FP8State or None
        Access to the FP8 state; None if this version keeps it in a way that is not known.
    """

    # Note [Transformer Engine hears of any enclosing recompute]
    # Its flag "recompute phase" is true where any enclosing region is being recomputed, also in the forward of a region
    # nested in that recompute: a module there runs for a second time, so it must use its first run's scales and must
    # not count its amaxes again. Our own predicate of that name keeps to the innermost region.
    def __init__(self, distributed: Any, fp8: FP8State | None) -> None:
        self._scope = vars(distributed)
        self._fp8 = fp8
        self._names: tuple[str, ...] = next(
            (pair for pair in _FLAGS if all(hasattr(distributed, name) for name in pair)), ()
        )
        if self._names and hasattr(distributed, _SWITCH):
            self._names = (*self._names, _SWITCH)
        self._flags: Callable[[Any], tuple[bool, ...]] = itemgetter(*self._names) if self._names else _none

    def set_flags(self, values: tuple[bool, ...]) -> tuple[bool, ...]:
        """Set Transformer Engine's flags (in a region, in a recompute, reentrant); returns those that held before."""
        scope = self._scope
        before = self._flags(scope)
        for name, value in zip(self._names, values, strict=False):
            scope[name] = value
        return before

    # Note [The engine switch does not outlive the region]
    # LayerNormMLP asks for the engine in its forward and, under the non-reentrant one, gives up its fused bias-GELU for
    # good. That fusion is deterministic, and our non-reentrant engine runs the same kernels twice, so inside our
    # regions that module's copy of the question is answered with yes: nothing of it is changed by a region, and its
    # numbers are those of the run without checkpointing.
    def _shield(self) -> Any:
        module = sys.modules.get(_MLP)
        asked = getattr(module, "use_reentrant_activation_recompute", None)
        if module is None or asked is None:
            return None
        vars(module)["use_reentrant_activation_recompute"] = _always
        return module, asked

    @staticmethod
    def _unshield(token: Any) -> None:
        module, asked = token
        vars(module)["use_reentrant_activation_recompute"] = asked

    def enter_forward(self, memory: dict[str, Any], reentrant: bool, recompute: bool = False) -> Open:
        """Set the flags, note the FP8 state, and keep the scales that modules put aside."""
        region = Open(memory, recompute, reentrant)
        if self._fp8 is not None:
            self._fp8.enter(region)
        # See Note [Transformer Engine hears of any enclosing recompute]
        scope = self._scope
        region.flags = self._flags(scope)
        for name, value in zip(self._names, (True, current.phase.recomputing, reentrant), strict=False):
            scope[name] = value
        if not reentrant:
            region.shield = self._shield()  # See Note [The engine switch does not outlive the region]
        return region

    def leave_forward(self, memory: dict[str, Any], region: Open) -> None:
        """Put flags and FP8 state back."""
        if region.shield is not None:
            self._unshield(region.shield)
        scope = self._scope
        for name, value in zip(self._names, region.flags, strict=False):
            scope[name] = value
        if self._fp8 is not None:
            self._fp8.leave(region)

    def enter_recompute(self, memory: dict[str, Any], reentrant: bool) -> Open:
        """Set the flags and the forward's FP8 state; updates of scales are out of reach meanwhile."""
        return self.enter_forward(memory, reentrant, recompute=True)

    leave_recompute = leave_forward


_hook: TransformerEngineHook | None = None


def current_hook() -> TransformerEngineHook | None:
    """Return the installed hook, installing it if Transformer Engine is imported; None without it."""
    if _hook is None:
        install_hook()
    return _hook


def install_hook() -> None:
    """Register the hook, if ``transformer_engine.pytorch.distributed`` is imported and has what it needs."""
    global _hook
    distributed = sys.modules.get(_DISTRIBUTED)
    if distributed is None or _hook is not None:
        return
    fp8 = None
    manager = getattr(distributed, "FP8GlobalStateManager", None) or _find_manager()
    if manager is not None:
        fp8 = FP8State(manager)
        set_fp8_probe(fp8.enabled)
    hook = TransformerEngineHook(distributed, fp8)
    if hook._names or fp8 is not None:
        _hook = hook
        register_region_hook(hook)


def _find_manager() -> Any:
    for name in ("quantization", "fp8"):
        try:
            module = import_module(f"transformer_engine.pytorch.{name}")
        except (ImportError, OSError, AssertionError):
            continue
        return getattr(module, "FP8GlobalStateManager", None)
    return None
