# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``NVTE_EXT_DEBUG=1``: the last runs of regions, and what each drew, for the text of a mismatch."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformer_engine_ext.pytorch.rng import moves
from transformer_engine_ext.pytorch.rng.recording import Recording
from transformer_engine_ext.pytorch.rng.snapshot import Rewound

__all__ = ["LENGTH", "Run", "append_history", "describe_function", "forget"]

#: How many runs are kept: forward and recompute of the last eight regions, if they alternate.
LENGTH = 16

_runs: deque[Run] = deque(maxlen=LENGTH)
_numbers = itertools.count(1)
_ended = itertools.count(1)
_count = 0


class Run:
    """One run, forward or recompute, of one region.

    Parameters
    ----------
    region : Region
        Gets a number at its forward, which its recomputes are found by.
    recording : Snapshot, Rewound or None
        The streams that the run is known to use; None with ``preserve_rng_state=False``.
    phase : str
        ``"forward"`` or ``"recompute"``.
    """

    # Not the region, nor the function: a run that is remembered keeps no activation and no argument alive.
    __slots__ = ("_before", "_recording", "draws", "end", "engine", "function", "moved", "number", "phase")

    def __init__(self, region: Any, recording: Recording | None, phase: str) -> None:
        if not hasattr(region, "number"):
            region.number = next(_numbers)
        self.number: int = region.number
        self.phase = phase
        self.function = describe_function(region._function)
        self.engine = "reentrant" if region.reentrant else "non-reentrant"
        self.draws: Counter[str] = Counter()
        self.end = ""
        # Positions only, from which words and offsets are counted when somebody asks.
        self.moved: list[tuple[str, Any, Any, Any]] = []
        self._recording = recording
        known = recording.snapshot if isinstance(recording, Rewound) else recording
        self._before = moves.retake(known.streams) if known is not None else []

    def close(self, error: BaseException | None) -> None:
        """Note where the streams stand, and remember the run."""
        global _count
        if error is not None:
            self.end = "stopped early" if type(error).__name__ == "StopRecompute" else f"raised {type(error).__name__}"
        recording, self._recording = self._recording, None
        streams = list(self._before)
        if recording is not None:
            # See Note [First touch]
            streams += recording.streams if isinstance(recording, Rewound) else recording.streams[len(streams) :]
        self.moved = [(name, backend, entry, backend.position(handle)) for name, backend, handle, entry in streams]
        self._before = []
        _count = next(_ended)
        _runs.append(self)

    def __str__(self) -> str:
        drawn = [
            f"{backend.distance(entry, position)} from {name!r}"
            for name, backend, entry, position in self.moved
            if not backend.unmoved(entry, position)
        ]
        calls = [f"{name} x{count}" for name, count in self.draws.items()]
        text = f"region {self.number}, {self.phase} of {self.function}, {self.engine}: "
        text += f"drew {', '.join(drawn)}" if drawn else "drew nothing"
        if calls:
            text += f", by {', '.join(calls)}"
        return f"{text} ({self.end})" if self.end else text


def describe_function(function: Callable[..., Any]) -> str:
    """Return the name of what a region runs, and the line where it is defined if that can be found."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        name, code = type(function).__name__, getattr(type(function).forward, "__code__", None)
    else:
        name = getattr(function, "__qualname__", None) or type(function).__name__
        code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def append_history(error: BaseException) -> None:
    """Append the remembered runs to an error's text, once, however many regions it passes through."""
    if getattr(error, "_has_history", False) or not _runs:
        return
    error._has_history = True  # type: ignore[attr-defined]
    error.args = (f"{error}\n{_report(list(_runs))}",)


def forget() -> None:
    """Forget all runs."""
    _runs.clear()


def _report(runs: Sequence[Run]) -> str:
    where = ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        where = f" on rank {torch.distributed.get_rank()}"
    lines = [f"The last {len(runs)} of {_count} runs of regions{where} (NVTE_EXT_DEBUG=1), the latest last:"]
    return "\n".join(lines + [f"  {run}" for run in runs])
