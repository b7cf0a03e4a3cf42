# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What ``rng_guard`` watches: where streams stand before and after each recompute, and what is bound at the end."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Generator

from transformer_engine_ext.pytorch.recompute.hooks import register_region_hook, unregister_region_hook
from transformer_engine_ext.pytorch.rng import get_all_rng_states
from transformer_engine_ext.pytorch.rng.coverage import cuda_in_use
from transformer_engine_ext.pytorch.rng.devices import DeviceBackend, backend_of, get_backend

__all__ = ["RNGGuard"]

#: Name, backend, handle and value of a stream.
_Standing = tuple[str, Any, Generator, Any]


class _Binding(NamedTuple):
    """What a device's default generator is bound to, and over how many other bindings."""

    backend: DeviceBackend
    device: int
    handle: Generator
    depth: int


# Note [Recompute costs the stream nothing]
# After backward every stream stands where it would stand without checkpointing: a recompute draws the forward's numbers
# again and puts every stream back. The engines keep this for all streams that they cover. What they cannot see (a
# stream's handle passed as generator=, a stream that another thread forks for the region, preserve_rng_state=False)
# moves on without an error, and the guard reports it.
class RNGGuard:
    """Watches regions that start inside; a context manager, and a region hook.

    Attributes
    ----------
    recomputes : int
        How many recomputes were seen. A test that asserts it proves that it tests recomputing at all.
    problems : list of str
        What was found so far.

    Notes
    -----
    Seen are the regions of ``te_checkpoint``, not those of other checkpoints; the default generators, the streams of
    all trackers of this package, and those given to ``set_all_rng_states``. Draws of another thread during a recompute
    look like the recompute's own.
    """

    def __init__(self) -> None:
        self.recomputes = 0
        self.problems: list[str] = []
        self._bound: dict[str, _Binding] = {}
        self._finished = False

    def __enter__(self) -> RNGGuard:
        self._bound = _bindings()
        register_region_hook(self)
        return self

    def __exit__(self, *exception: object) -> None:
        unregister_region_hook(self)

    def finish(self) -> str:
        """Compare the bindings with those at the beginning, put them back, and return what was found, or ""."""
        if not self._finished:
            self._finished = True
            self.problems += _put_back(self._bound, "when the test ended")
        if not self.problems:
            return ""
        return "\n".join(["rng_guard found:", *(f"  {problem}" for problem in self.problems), _CAUSES])

    # The hook.

    def enter_forward(self, memory: dict[str, Any], reentrant: bool) -> None:
        """Do nothing."""

    def leave_forward(self, memory: dict[str, Any], token: Any) -> None:
        """Do nothing."""

    def enter_recompute(self, memory: dict[str, Any], reentrant: bool) -> tuple[list[_Standing], dict[str, _Binding]]:
        """Note where every stream stands."""
        self.recomputes += 1
        return _standings(), _bindings()

    def leave_recompute(self, memory: dict[str, Any], token: Any) -> None:
        """Compare with where the streams stand now."""
        # See Note [Recompute costs the stream nothing]
        standings, bound = token
        where = f"recompute {self.recomputes}"
        for name, backend, handle, value in standings:
            position = backend.position(handle)
            if not backend.unmoved(value, position):
                moved = backend.distance(value, position)
                self.problems.append(f"{where} moved stream {name!r} by {moved}; it must leave every stream in place")
        self.problems += _put_back(bound, f"by {where}")


_CAUSES = (
    "Likely causes: the function draws with generator= from a tracked stream (use tracker.fork(name) instead), another "
    "thread drew meanwhile, preserve_rng_state=False, or a fork that was entered and never left"
)


def _standings() -> list[_Standing]:
    found: list[_Standing] = []
    for name, handle in get_all_rng_states().items():
        if isinstance(handle, Generator):
            backend = backend_of(handle)
            found.append((name, backend, handle, backend.take(handle)))
    for device, (backend, _, handle, _) in _bindings().items():
        # A bound stream of a tracker is in the list already; two CUDA handles of one stream do no harm.
        if not any(known is handle for _, _, known, _ in found):
            found.append((f"default ({device})", backend, handle, backend.take(handle)))
    return found


def _bindings() -> dict[str, _Binding]:
    """Return what each default generator is bound to."""
    places = {"cpu": ("cpu", 0)} | {f"cuda:{index}": ("cuda", index) for index in cuda_in_use()}
    bound = {}
    for device, (kind, index) in places.items():
        backend = get_backend(kind)
        bound[device] = _Binding(backend, index, backend.default(index), backend.depth(index))
    return bound


def _put_back(bound: dict[str, _Binding], when: str) -> list[str]:
    """Bind the default generators to what they were bound to; return what was in the way."""
    problems = []
    for device, (backend, index, now, depth) in _bindings().items():
        before = bound.get(device)
        # A device that was first used in between was bound to its own stream.
        left = depth > 0 if before is None else not _same_stream(before.handle, now)
        if left:
            names = [name for name, handle in get_all_rng_states().items() if _same_stream(handle, now)]
            stream = f"stream {names[0]!r}" if names else "another stream"
            problems.append(f"the default generator of {device} was left bound to {stream} {when}")
        if before is None:
            backend.unwind(index, 0)
        elif left or depth > before.depth:  # also a binding to the very same stream, which changes no draw
            backend.unwind(index, before.depth, before.handle)
    return problems


def _same_stream(first: Any, second: Generator) -> bool:
    """Tell whether two handles belong to one stream."""
    if first is second or not isinstance(first, Generator) or first.device != second.device:
        return first is second
    if first.device.type == "cpu":
        return False
    before, other = first.get_state(), second.get_state()
    if not torch.equal(before, other) or torch.cuda.is_current_stream_capturing():
        return torch.equal(before, other)
    # CUDA handles tell nothing of the state that they share: move one and see whether the other moves with it.
    first.set_offset(first.get_offset() + 4)
    together = torch.equal(first.get_state(), second.get_state())
    first.set_state(before)
    return together
