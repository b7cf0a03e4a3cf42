# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's helpers that save and set all RNG states, and its own tracker: saved states become values."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Generator

from transformer_engine_ext.errors import UnsupportedCaptureError
from transformer_engine_ext.integrations.plan import Plan
from transformer_engine_ext.integrations.tracker_states import carrying
from transformer_engine_ext.pytorch.rng import Snapshot, StreamStates, moves
from transformer_engine_ext.pytorch.rng.capture import SavedWords, capturing
from transformer_engine_ext.pytorch.rng.devices import backend_of

__all__ = ["plan_states", "plan_tracker"]


# Note [Megatron's helpers hold a snapshot]
# Megatron's CheckpointFunction and CheckpointWithoutOutput save with _get_all_rng_states and, in backward, run
# `with _fork_rng(): _set_all_rng_states(*saved)`. The third of the saved values carries a snapshot of ours, and setting
# it inside a fork rewinds to that snapshot until the fork ends: in place, and under capture on the device. Nobody says
# here when a region ends, so under capture the words are kept at once and of all streams.
class _Held(dict[str, Any]):
    def __init__(self, states: Mapping[str, Any], tracker: Any) -> None:
        super().__init__(states)
        self.tracker = tracker
        self.name = getattr(tracker, "_current_state_name", None)
        self.snapshot = snapshot = Snapshot((), None, tracker)
        if snapshot.captured:
            snapshot.words = SavedWords(
                [(name, handle) for name, backend, handle, _ in snapshot.streams if backend.device_type == "cuda"]
            )


class _Forks(threading.local):
    def __init__(self) -> None:
        self.open: list[ExitStack] = []


_forks = _Forks()


def _put_back(snapshot: Snapshot, tracker: Any, name: str | None) -> None:
    if snapshot.captured:
        snapshot.rewind_within(snapshot.streams)
    else:
        moves.rewind(snapshot.streams)
        if snapshot.foreign is not None:
            snapshot.foreign.rewind()
    if name is not None:
        tracker._current_state_name = name


def plan_states(plan: Plan, module: Any) -> None:
    """Plan ``_get_all_rng_states``, ``_set_all_rng_states`` and ``_fork_rng``."""
    setter = getattr(module, "_set_all_rng_states", None)
    names = ("_get_all_rng_states", "_set_all_rng_states", "_fork_rng")
    if setter is None or len(inspect.signature(setter).parameters) != 3:
        reason = "this version saves something else than three states, by value"
        if setter is None:
            reason = "this version has no such helper; it saves with its tracker's get_states, which gives values"
        for name in names:
            plan.skip(f"{module.__name__}.{name}", reason)
        return

    def get_all(original: Callable[[], tuple[Any, Any, Any]]) -> Callable[[], tuple[Any, Any, Any]]:
        def _get_all_rng_states() -> tuple[Any, Any, Any]:
            cpu, cuda, states = original()
            return cpu, cuda, _Held(states, module.get_cuda_rng_tracker())

        return _get_all_rng_states

    def set_all(original: Callable[..., None]) -> Callable[..., None]:
        def _set_all_rng_states(cpu: Any, cuda: Any, states: Any) -> None:
            if not isinstance(states, _Held):
                original(cpu, cuda, states)
            elif _forks.open:
                _forks.open[-1].enter_context(states.snapshot.rewound())
                if states.name is not None:
                    states.tracker._current_state_name = states.name
            elif capturing():
                raise UnsupportedCaptureError(
                    "_set_all_rng_states of Megatron-core was called under CUDA graph capture outside of _fork_rng, so "
                    "nothing says when the live states come back. Call it inside `with _fork_rng():`"
                )
            else:
                _put_back(states.snapshot, states.tracker, states.name)

        return _set_all_rng_states

    def fork(original: Callable[..., Any]) -> Callable[..., Any]:
        def _fork_rng() -> Iterator[None]:
            tracker = module.get_cuda_rng_tracker()
            name = getattr(tracker, "_current_state_name", None)
            snapshot = Snapshot((), None, tracker)
            with ExitStack() as stack:
                stack.callback(_put_back, snapshot, tracker, name)
                _forks.open.append(stack)
                stack.callback(_forks.open.remove, stack)
                yield

        return _fork_rng

    plan.code(module, names[0], get_all)
    plan.code(module, names[1], set_all)
    plan.code(module, names[2], fork)


def plan_tracker(plan: Plan, module: Any) -> None:
    """Plan ``get_states`` and ``set_states`` of Megatron's own tracker."""
    cls = getattr(module, "CudaRNGStatesTracker", None)
    if not isinstance(cls, type):
        plan.skip(f"{module.__name__}.CudaRNGStatesTracker", "this version has no such class")
        return

    def get(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
        def get_states(self: Any) -> dict[str, Any]:
            states = original(self)
            if not states or not all(isinstance(state, Generator) for state in states.values()):
                return states
            values = {name: backend_of(handle).read(handle) for name, handle in states.items()}
            return carrying(StreamStates(states, values))

        return get_states

    def put(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def set_states(self: Any, states: Any) -> None:
            if not isinstance(states, StreamStates):
                # A copy: a fork writes into the dict, which is the caller's, and may be set a second time.
                original(self, dict(states) if isinstance(states, dict) else states)
                return
            mine, handles = self.states_, {}
            for name, handle in states.items():
                value = states.value_of(name)
                handles[name] = mine.get(name, handle) if value is not None else handle
                if value is not None and isinstance(handles[name], Generator):
                    backend_of(handles[name]).write(handles[name], value)
            original(self, handles)

        return set_states

    plan.code(cls, "get_states", get)
    plan.code(cls, "set_states", put)
