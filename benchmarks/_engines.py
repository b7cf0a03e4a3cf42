# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The checkpoint engines that are compared, each behind the same call."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from transformer_engine_ext.pytorch import te_checkpoint

__all__ = ["DIRECT", "Engine", "engines", "transformer_engine"]

#: Returns the tracker that is passed to engines which take one.
GetTracker = Callable[[], Any]


@functools.cache
def transformer_engine() -> Any:
    """Return ``transformer_engine.pytorch``, or None where it cannot be used (not installed, or no GPU)."""
    if not torch.cuda.is_available():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import transformer_engine.pytorch as te
        except Exception:  # a broken installation raises whatever it likes
            return None
    return te


@dataclass(frozen=True)
class Engine:
    """A way to run a region.

    Attributes
    ----------
    name : str
        For rows and labels.
    family : str
        ``"ours"``, ``"te"``, ``"torch"`` or ``"direct"`` (no checkpointing at all).
    reentrant : bool or None
        Which kind.
    call : callable
        ``call(get_tracker, function, *args)``.
    """

    name: str
    family: str
    reentrant: bool | None
    call: Callable[..., Any]


def _direct(get_tracker: GetTracker | None, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


#: The function itself, which keeps its activations.
DIRECT = Engine("no checkpointing", "direct", None, _direct)


def _ours(reentrant: bool, preserve: bool) -> Callable[..., Any]:
    def call(get_tracker: GetTracker | None, function: Callable[..., Any], *args: Any) -> Any:
        return te_checkpoint(
            function, *args, use_reentrant=reentrant, get_rng_state_tracker=get_tracker, preserve_rng_state=preserve
        )

    return call


def _torch(reentrant: bool, preserve: bool) -> Callable[..., Any]:
    def call(get_tracker: GetTracker | None, function: Callable[..., Any], *args: Any) -> Any:
        return torch_checkpoint(function, *args, use_reentrant=reentrant, preserve_rng_state=preserve)

    return call


def _te(te: Any, reentrant: bool) -> Callable[..., Any]:
    def call(get_tracker: GetTracker | None, function: Callable[..., Any], *args: Any) -> Any:
        return te.checkpoint(function, *args, use_reentrant=reentrant, get_rng_state_tracker=get_tracker)

    return call


def engines(device: str, without_rng: bool = False) -> list[Engine]:
    """Return the engines that run here: this package's, torch's, and on CUDA Transformer Engine's.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda"``.
    without_rng : bool
        Also those of torch and of this package with ``preserve_rng_state=False``.
    """
    te = transformer_engine() if device == "cuda" else None
    found = []
    for reentrant, kind in ((True, "reentrant"), (False, "non-reentrant")):
        found.append(Engine(f"ours {kind}", "ours", reentrant, _ours(reentrant, True)))
        found.append(Engine(f"torch {kind}", "torch", reentrant, _torch(reentrant, True)))
        if te is not None:
            found.append(Engine(f"te {kind}", "te", reentrant, _te(te, reentrant)))
        if without_rng:
            found.append(Engine(f"ours {kind} no rng", "ours", reentrant, _ours(reentrant, False)))
            found.append(Engine(f"torch {kind} no rng", "torch", reentrant, _torch(reentrant, False)))
    return found
