# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's process-wide FP8 state, as a region sees it: read, put back, and kept apart per region."""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine_ext.errors import RecomputeMismatchError

__all__ = ["FP8State", "Open", "open_regions"]

# Attribute names since Transformer Engine 2.15 (on `FP8GlobalStateManager.quantization_state`), and before (on
# the manager class itself).
_FIELDS = {
    "fp8_enabled": "FP8_ENABLED",
    "fp8_calibration": "FP8_CALIBRATION",
    "fp8_recipe": "FP8_RECIPE",
    "fp8_distributed_group": "FP8_DISTRIBUTED_GROUP",
    "fp8_graph_capturing": "FP8_GRAPH_CAPTURING",
    "autocast_depth": "FP8_AUTOCAST_DEPTH",
    "is_first_fp8_module": "IS_FIRST_FP8_MODULE",
}


class Open:
    """One region that is running: its memory, and whether it is being recomputed.

    Attributes
    ----------
    memory : dict
        ``"stash"``: queue to the scales that were put into it, in order.
    cursor : dict
        Queue to how many of them this recompute has taken.
    live, buffers, flags, shield
        What leaving puts back: an autocast's settings, the buffers of amaxes, and two things of the hook's.
    """

    __slots__ = ("buffers", "cursor", "flags", "live", "memory", "recompute", "reentrant", "shield")

    def __init__(self, memory: dict[str, Any], recompute: bool, reentrant: bool) -> None:
        self.memory = memory
        self.recompute = recompute
        self.reentrant = reentrant
        self.cursor: dict[int, int] = {}
        self.live: tuple[Any, ...] = ()
        self.buffers: Any = None
        self.flags: tuple[bool, ...] = ()
        self.shield: Any = None

    def keep(self, queue: _Queue, entry: Any) -> None:
        """Put a module's scales aside."""
        kept: dict[int, tuple[_Queue, list[Any]]] = self.memory.setdefault("stash", {})
        kept.setdefault(id(queue), (queue, []))[1].append(entry)

    def take(self, queue: _Queue) -> Any:
        """Return the scales that the module's next run in this recompute must use."""
        _, entries = self.memory.get("stash", {}).get(id(queue), (queue, []))
        number = self.cursor.get(id(queue), 0)
        if number >= len(entries):
            raise RecomputeMismatchError(
                "an FP8 module of Transformer Engine asks for the scales of its forward in the recompute of a "
                f"checkpointed region, and its forward there kept {len(entries)} of them: the module ran more often "
                "than in forward, or its forward ran without FP8. The function must run the same modules under the "
                "same autocast in forward and recompute"
            )
        self.cursor[id(queue)] = number + 1
        return entries[number]


class _Opened(threading.local):
    def __init__(self) -> None:
        self.regions: list[Open] = []


_opened = _Opened()


def open_regions() -> list[Open]:
    """Return the regions that this thread is running, outermost first."""
    return _opened.regions


# Note [FP8 scales belong to the region]
# For the recompute of delayed scaling, Transformer Engine puts a module's scales into a queue of that module in forward
# and takes the oldest in the recompute. So regions that are recomputed in another order than they ran, again
# (retain_graph), or never, get each other's scales. Here the queue asks which region is running: scales go into the
# memories of all open regions (an outer region's recompute runs the inner one's modules too), and a recompute takes its
# own, in order. Without a region of ours the queue is the queue that it was.
class _Queue(deque[Any]):
    def append(self, entry: Any) -> None:
        regions = _opened.regions
        if not regions or any(region.recompute for region in regions):
            super().append(entry)
            return
        for region in regions:
            region.keep(self, entry)

    def popleft(self) -> Any:
        inner: list[Open] = []
        for region in reversed(_opened.regions):
            if region.recompute:
                entry = region.take(self)
                # Regions that run forward inside this recompute will be recomputed themselves.
                for other in inner:
                    other.keep(self, entry)
                return entry
            inner.append(region)
        return super().popleft()


class _Queues(list[Any]):
    """All queues; Transformer Engine appends a plain ``deque`` for each module that it sees for the first time."""

    def append(self, queue: Any) -> None:
        super().append(_Queue(queue))


class _Watch:
    """What the routed state notes between two of Transformer Engine's writes."""

    def __init__(self) -> None:
        self.entered = True  # an autocast was entered or left since the first-module flag was last used up
        self.enabled_before = False
        self.silent = False


_watch = _Watch()
_routed: dict[type, type] = {}


def _routed_class(base: Any, manager: Any) -> type:
    """Return a subclass of the state's class that can stand in for it while a region runs."""
    if base in _routed:
        return _routed[base]
    first, enabled, depth = base.is_first_fp8_module, base.fp8_enabled, base.autocast_depth

    # Note [FP8 updates happen once]
    # - The first FP8 module under an autocast runs the reduction of the backward's amaxes; the flag that says "first"
    #   is used up by it. In a recompute, modules of Transformer Engine put the flag back after having used it up, so
    #   every module of the region would run the reduction. That restore is the one write of True that no write of
    #   `fp8_enabled` precedes; it is left out.
    # - Leaving the outermost autocast updates the forward's scales. If that autocast lies inside the region, the update
    #   is due in forward, where a reentrant region runs without grad, so that Transformer Engine leaves it out; it is
    #   made up for here. In the recompute it would come a second time: the buffers it goes through are empty then.
    def set_first(state: Any, value: bool) -> None:
        if value and not _watch.entered and not _watch.silent and any(region.recompute for region in _opened.regions):
            return
        if not value:
            _watch.entered = False
        first.__set__(state, value)

    def set_enabled(state: Any, value: bool) -> None:
        _watch.enabled_before, _watch.entered = enabled.__get__(state), True
        enabled.__set__(state, value)

    def set_depth(state: Any, value: int) -> None:
        left = depth.__get__(state) == 1 and value == 0
        depth.__set__(state, value)
        regions = _opened.regions
        if (
            left
            and not _watch.silent
            and _watch.enabled_before
            and regions
            and regions[-1].reentrant
            and not any(region.recompute for region in regions)
            and not torch.is_grad_enabled()
            and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        ):
            manager.reduce_and_update_fp8_tensors(forward=True)

    members = {
        "__slots__": (),
        "is_first_fp8_module": property(first.__get__, set_first),
        "fp8_enabled": property(enabled.__get__, set_enabled),
        "autocast_depth": property(depth.__get__, set_depth),
    }
    _routed[base] = type(f"Routed{base.__name__}", (base,), members)
    return _routed[base]


class FP8State:
    """Access to the state behind ``FP8GlobalStateManager``, in the layouts of Transformer Engine 2.0 to 2.20.

    Parameters
    ----------
    manager : type
        ``FP8GlobalStateManager``.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._names: tuple[str, ...] = ()
        self._depth = 0
        # The class of the state, and the one that stands in for it while a region runs.
        self._kind: Any = None
        self._routed_kind: Any = None
        self._fields_of(self._holder())

    def _holder(self) -> Any:
        return getattr(self._manager, "quantization_state", self._manager)

    def _fields_of(self, holder: Any) -> None:
        new = hasattr(holder, "is_first_fp8_module") and not callable(holder.is_first_fp8_module)
        names = _FIELDS if new else _FIELDS.values()
        found = tuple(name for name in names if hasattr(holder, name))
        self._names = found if len(found) > 1 else ()
        self._enabled = "fp8_enabled" if new else "FP8_ENABLED"
        self._get: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*found) if len(found) > 1 else lambda _: ()
        self._first = "is_first_fp8_module" if new else "IS_FIRST_FP8_MODULE"
        self._can_route = new

    def enabled(self) -> bool:
        """Tell whether FP8 is on now."""
        return bool(getattr(self._holder(), self._enabled, False))

    # enter and leave run for every region, hence no helpers here but for what is rare.
    def enter(self, region: Open) -> None:
        """Route scales and flags by region from now on, and keep what an autocast sets, as it is now.

        In a recompute the forward's settings are in force until ``leave``, and updates of scales are out of reach.
        """
        # See Note [FP8 scales belong to the region]
        holder = getattr(self._manager, "quantization_state", self._manager)
        region.live = live = self._get(holder)
        queues = getattr(holder, "fp8_tensors_recompute_buffer", None)
        if isinstance(queues, list) and type(queues) is not _Queues:
            # Never empty: Transformer Engine replaces an empty list by one of its own. Positions stay what they were.
            holder.fp8_tensors_recompute_buffer = _Queues(map(_Queue, queues or [()]))
        self._depth += 1
        kind = type(holder)
        if self._can_route and kind is not self._routed_kind and kind not in _routed.values():
            self._kind, self._routed_kind = kind, _routed_class(kind, self._manager)
            holder.__class__ = self._routed_kind
        _opened.regions.append(region)
        if not region.recompute:
            region.memory["autocast"] = live
            return
        # See Note [FP8 updates happen once]
        region.buffers = getattr(holder, "global_amax_buffer", None)
        if region.buffers is not None:
            holder.global_amax_buffer = {}
        wanted = region.memory.get("autocast")
        if wanted is not None:
            if not all(map(operator.is_, live, wanted)):
                self._write(holder, wanted)
            _watch.entered = True

    def leave(self, region: Open) -> None:
        """Undo ``enter``."""
        holder = getattr(self._manager, "quantization_state", self._manager)
        if region.recompute:
            if not all(map(operator.is_, self._get(holder), region.live)):
                self._write(holder, region.live)
            _watch.entered = True
            if region.buffers is not None:
                holder.global_amax_buffer = region.buffers
        # See Note [FP8 updates happen once]: without grad, modules leave the first-module flag alone, and it would be
        # the next region's otherwise.
        elif region.reentrant and region.memory.get("stash") and region.live and region.live[0]:
            setattr(holder, self._first, False)
        _opened.regions.remove(region)
        self._depth -= 1
        if self._depth == 0 and type(holder) is self._routed_kind:
            holder.__class__ = self._kind

    def _write(self, holder: Any, values: tuple[Any, ...]) -> None:
        """Set what an autocast sets; as a rule nothing of it has changed."""
        _watch.silent = True
        try:
            for name, value, live in zip(self._names, values, self._get(holder), strict=True):
                if live is not value:
                    setattr(holder, name, value)
        finally:
            _watch.silent = False
