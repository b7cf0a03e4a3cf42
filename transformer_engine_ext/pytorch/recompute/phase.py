# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Phase flags: is this thread inside a checkpointed region, and is that region being recomputed?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, NamedTuple

__all__ = [
    "FORWARD",
    "PHASES",
    "RECOMPUTE",
    "Phase",
    "activation_recompute_forward",
    "current",
    "current_phase",
    "enter_engine",
    "enter_phase",
    "get_activation_recompute_contexts",
    "in_checkpoint_region",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
    "is_recomputing",
    "leave_phase",
    "set_fp8_probe",
    "use_reentrant_activation_recompute",
]

FORWARD, RECOMPUTE = "forward", "recompute"


class Phase(NamedTuple):
    """Flags of one moment.

    Attributes
    ----------
    innermost : str or None
        ``"forward"`` or ``"recompute"``: what the innermost region is doing. None outside of regions.
    recomputing : bool
        Whether any enclosing region is being recomputed.
    reentrant : bool
        Whether the innermost region runs on the reentrant engine; True outside of regions, as in Transformer Engine.
    """

    innermost: str | None = None
    recomputing: bool = False
    reentrant: bool = True


OUTSIDE = Phase()
#: All phases that a region can be in, made once: a region enters two.
PHASES = {
    (innermost, recomputing, reentrant): Phase(innermost, recomputing, reentrant)
    for innermost in (FORWARD, RECOMPUTE)
    for recomputing in (False, True)
    for reentrant in (False, True)
}


class _Current(threading.local):
    phase = OUTSIDE


#: This thread's flags, as ``phase``. Regions read and write it as enter_phase and leave_phase do, without the calls.
current = _Current()


# Note [Phase flags are saved and restored]
# Entering a phase hands out the flags that held before, and leaving puts exactly those back: a region inside another
# one ends in the outer region's phase, not outside of all. The flags belong to the thread that runs the region, and
# they are set from what the region knows of itself, never looked up in the thread that ran its forward: autograd runs
# the backward of CUDA tensors, and of deep nestings, in threads of its own.
def enter_phase(innermost: str, reentrant: bool) -> Phase:
    """Enter a region's phase.

    Parameters
    ----------
    innermost : str
        ``FORWARD`` or ``RECOMPUTE``.
    reentrant : bool
        Whether the region runs on the reentrant engine.

    Returns
    -------
    Phase
        The flags that held before, for ``leave_phase``.
    """
    before = current.phase
    current.phase = PHASES[innermost, before.recomputing or innermost == RECOMPUTE, reentrant]
    return before


def enter_engine(reentrant: bool) -> Phase:
    """Say which engine was asked for, where a region needs none since autograd is off; undone by ``leave_phase``.

    The forward of an outer reentrant region runs without grad, and code in it that asks
    ``use_reentrant_activation_recompute`` must hear there what it will hear in the recompute.
    """
    before = current.phase
    current.phase = before._replace(reentrant=bool(reentrant))
    return before


def leave_phase(before: Phase) -> None:
    """Put back the flags that ``enter_phase`` returned."""
    current.phase = before


def current_phase() -> Phase:
    """Return the flags of this thread."""
    return current.phase


def is_recomputing() -> bool:
    """Tell whether this code runs for a second time, in the recompute of an enclosing region.

    Code that counts, or keeps statistics, asks this to count once; see also ``in_checkpoint_region``.
    """
    return current.phase.recomputing


def in_checkpoint_region() -> bool:
    """Tell whether this code runs inside a checkpointed region, in forward or in recompute."""
    return current.phase.innermost is not None


def _no_fp8() -> bool:
    return False


_fp8_probe: Callable[[], bool] = _no_fp8


def set_fp8_probe(probe: Callable[[], bool] | None) -> None:
    """Say how to find out whether FP8 is enabled; None: it never is."""
    global _fp8_probe
    _fp8_probe = _no_fp8 if probe is None else probe


def is_fp8_activation_recompute_enabled() -> bool:
    """Tell whether this code runs inside a checkpointed region with FP8 enabled (Transformer Engine's predicate)."""
    return current.phase.innermost is not None and _fp8_probe()


def in_fp8_activation_recompute_phase() -> bool:
    """Tell whether the innermost region is being recomputed, in any precision (Transformer Engine's predicate)."""
    return current.phase.innermost == RECOMPUTE


def use_reentrant_activation_recompute() -> bool:
    """Tell whether the innermost region runs on the reentrant engine (Transformer Engine's predicate)."""
    return current.phase.reentrant


class _Entered(threading.local):
    """Flags to put back, innermost last; of each thread its own, since one context may be shared by several."""

    def __init__(self) -> None:
        self.before: list[Phase] = []


class activation_recompute_forward(AbstractContextManager[None], ContextDecorator):  # noqa: N801 (its name elsewhere)
    """Set the phase flags by hand, as code with a checkpoint of its own does (Megatron-core, FSDP wrappers).

    Parameters
    ----------
    activation_recompute : bool
        Whether the code inside belongs to a checkpointed region.
    recompute_phase : bool
        Whether it is that region's recompute.

    Notes
    -----
    May be entered any number of times, also nested; the contexts of the two phases may be built apart from each other.
    """

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        super().__init__()
        self.activation_recompute = activation_recompute
        self.recompute_phase = recompute_phase
        self._entered = _Entered()

    def __enter__(self) -> None:
        before = current.phase
        self._entered.before.append(before)
        if not self.activation_recompute:
            current.phase = before._replace(innermost=None)
        else:
            enter_phase(RECOMPUTE if self.recompute_phase else FORWARD, before.reentrant)

    def __exit__(self, *exception: Any) -> None:
        leave_phase(self._entered.before.pop())


def get_activation_recompute_contexts() -> tuple[activation_recompute_forward, activation_recompute_forward]:
    """Return the contexts of forward and recompute, for ``context_fn=``."""
    return (
        activation_recompute_forward(activation_recompute=True, recompute_phase=False),
        activation_recompute_forward(activation_recompute=True, recompute_phase=True),
    )
