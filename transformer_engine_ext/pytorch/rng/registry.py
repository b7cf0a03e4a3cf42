# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""All streams of the process, and Transformer Engine's small RNG helpers by their names."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

__all__ = [
    "get_all_rng_states",
    "get_cuda_rng_state",
    "graph_safe_rng_available",
    "is_graph_safe_rng_state",
    "register_tracker",
    "set_all_rng_states",
    "set_cuda_rng_state",
    "unregister_trackers",
]


class _Tracker(Protocol):
    _states: dict[str, Generator]


# Weak, so that a tracker that nobody holds any more drops out; numbered, so that the order is that of construction.
_trackers: weakref.WeakKeyDictionary[_Tracker, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)
# Held: generators take no weak references before torch 2.13.
_extra: dict[str, Any] = {}


def register_tracker(tracker: _Tracker) -> None:
    """Let ``get_all_rng_states`` see a tracker for as long as it lives."""
    if tracker not in _trackers:
        _trackers[tracker] = next(_numbers)


def unregister_trackers(kind: type) -> None:
    """Let ``get_all_rng_states`` no longer see trackers of a class and of its subclasses."""
    for tracker in [known for known in _trackers if isinstance(known, kind)]:
        del _trackers[tracker]


def get_all_rng_states() -> dict[str, Any]:
    """Return the handles of all streams of all live trackers, and those given to ``set_all_rng_states``.

    Returns
    -------
    dict of str to torch.Generator
        A new dict. Where two trackers hold different streams of one name, the later one's key is
        ``"name@number"`` with the tracker's number in the process.
    """
    states: dict[str, Any] = {}
    for tracker, number in sorted(_trackers.items(), key=lambda item: item[1]):
        for name, handle in tracker._states.items():
            if states.setdefault(name, handle) is not handle:
                states[f"{name}@{number}"] = handle
    held = {id(handle) for handle in states.values()}
    for name, handle in _extra.items():
        if id(handle) not in held:
            states[name if name not in states else f"{name}@set"] = handle
    return states


def set_all_rng_states(states: Mapping[str, Any]) -> None:
    """Make further streams known to ``get_all_rng_states``; replaces those of an earlier call.

    Parameters
    ----------
    states : mapping of str to torch.Generator
        Streams that belong to no tracker of this package, say another library's; those that do are known anyway.
        The streams are kept alive until the next call, the mapping is not kept.
    """
    held = {id(handle) for tracker in _trackers for handle in tracker._states.values()}
    _extra.clear()
    _extra.update((name, handle) for name, handle in states.items() if id(handle) not in held)


def graph_safe_rng_available() -> bool:
    """Tell whether this build of torch has generators that can be used inside CUDA graph capture."""
    return hasattr(torch.cuda.CUDAGraph, "register_generator_state") and all(
        hasattr(Generator, name) for name in ("graphsafe_set_state", "graphsafe_get_state", "clone_state")
    )


def is_graph_safe_rng_state(state: object) -> bool:
    """Tell whether a state is a generator that can be used inside CUDA graph capture."""
    return graph_safe_rng_available() and isinstance(state, Generator)


def get_cuda_rng_state(
    device: int | str | torch.device = "cuda", clone: bool = False, graph_safe: bool = True
) -> Tensor | Generator:
    """Return the state of a CUDA device's default generator.

    Parameters
    ----------
    device : int, str or torch.device
        A CUDA device; without an index, the current one.
    clone : bool
        With ``graph_safe``: return an independent copy instead of another handle on the live state.
    graph_safe : bool
        Return a ``torch.Generator``; else the 16 bytes of its value.
    """
    generator = _default_of(device)
    if not graph_safe:
        return generator.get_state()
    handle: Generator = generator.clone_state() if clone else generator.graphsafe_get_state()
    return handle


def set_cuda_rng_state(
    new_state: Tensor | Generator, device: int | str | torch.device = -1, graph_safe: bool = True
) -> None:
    """Set the state of a CUDA device's default generator.

    Parameters
    ----------
    new_state : torch.Tensor or torch.Generator
        With ``graph_safe`` a generator, which the default generator is bound to; else 16 ``uint8`` bytes.
    device : int, str or torch.device
        A CUDA device; -1 is the current one.
    graph_safe : bool
        See ``new_state``.
    """
    generator: Any = _default_of("cuda" if device == -1 else device)
    if graph_safe:
        generator.graphsafe_set_state(new_state)
    else:
        generator.set_state(new_state)


def _default_of(device: int | str | torch.device) -> Generator:
    torch.cuda.init()
    index = device if isinstance(device, int) else torch.device(device).index
    generator: Generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    return generator
