# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Saved-tensor hooks of the non-reentrant engine: forward leaves places for tensors, and a recompute fills them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine_ext.errors import SavedTensorMismatchError
from transformer_engine_ext.pytorch.recompute import debug
from transformer_engine_ext.pytorch.recompute.arguments import PackedCall, unpack_call
from transformer_engine_ext.pytorch.recompute.inputs import SavedInputs, changed_in_place
from transformer_engine_ext.pytorch.recompute.operator_log import OperatorLogs
from transformer_engine_ext.pytorch.recompute.region import Region, StopRecompute
from transformer_engine_ext.pytorch.rng import Rewound, moves
from transformer_engine_ext.pytorch.rng.audit import mismatch

__all__ = ["Saving", "pop_hooks_of", "users_hooks"]

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_sequence_number = torch._C._autograd._get_sequence_nr
_graph_task = torch._C._current_graph_task_id
# torch's GraphExecGroup joins several backward passes into one.
_exec_group: Callable[[], object] | None = getattr(torch._C, "_get_graph_exec_group", None)

Metadata = tuple[torch.Size, torch.dtype, torch.device]

_TIP = (
    "The function must run the same operators in forward and recompute. For a list of them, pass debug=True or use "
    "torch.utils.checkpoint.set_checkpoint_debug_enabled(True); determinism_check='none' turns the comparison of "
    "shapes off. Code that must run once only can ask transformer_engine_ext.pytorch.is_recomputing()."
)


class _Place(dict[object, tuple[Tensor, int | None]]):
    """Where one saved tensor would be, by backward pass: filled by a recompute, emptied by the unpack that follows.

    The graph holds it, the region only refers to it: a place that the graph has let go needs no tensor.
    """

    # A dict of its own, since one with an attribute takes twice as long to make.
    __slots__ = ("__weakref__",)


class Saving:
    """One region on this engine: its places, and the hooks that fill them.

    Attributes
    ----------
    places : list of weakref
        One for every tensor that forward saved, in order.
    metadata : list of tuple, or None
        Shape, dtype and device of each; None with ``determinism_check="none"``.
    """

    def __init__(
        self,
        region: Region,
        packed: PackedCall,
        inputs: SavedInputs,
        early_stop: bool,
        check: bool,
        logs: OperatorLogs | None,
    ) -> None:
        self.region = region
        self.packed = packed
        self.inputs = inputs
        self.early_stop = early_stop
        self.logs = logs
        self.places: list[weakref.ref[_Place]] = []
        self.metadata: list[Metadata] | None = [] if check else None
        # By place: identity and version of a leaf; see Note [Parameters must not change in between].
        self.versions: dict[int, tuple[int, int]] = {}
        self.last_save = -1
        # Where the default CUDA generator stood at the last save; see Note [An early stop is audited].
        self.clock = region.cuda_clock()
        self.last_position = 0
        # Whether autograd nodes were made behind the last save; unknown (True) until forward has ended.
        self.open_end = True
        self.ended = False
        self.loose = False
        self.recomputed: set[object] = set()

    # Hooks of the forward.

    # Note [Hooks that are not the user's]
    # Since torch 2.14 selective checkpointing looks for the user's saved-tensor hooks around it, and skips those that
    # say that they belong to a checkpoint and which hooks lie below them. Only while they are in force: a reference to
    # the user's hooks that the graph keeps would be a cycle that no collector could break.
    _checkpoint_internal = True
    _user_hooks: object = None

    def __call__(self, tensor: Tensor) -> _Place:
        """Return the place that the graph keeps instead of a tensor that forward saves."""
        place = _Place()
        # Note [Parameters must not change in between]
        # What a recompute computes with is whatever the function's closure holds by then. An optimizer's step between
        # forward and backward changes its parameters in place, which autograd would refuse if it had saved them.
        if tensor.requires_grad and tensor.is_leaf:
            self.versions[len(self.places)] = id(tensor), tensor._version
        self.places.append(weakref.ref(place))
        if self.metadata is not None:
            self.metadata.append((tensor.shape, tensor.dtype, tensor.device))
        if moves.mark is not None:
            self.last_save, self.last_position = moves.mark(self.clock)
        else:
            self.last_save = _sequence_number()
            if self.clock is not None:
                self.last_position = self.clock.get_offset()
        return place

    # Note [One recompute per backward pass]
    # The first unpack of a backward pass (a graph task) runs the function again and fills all places that the graph
    # still holds; every further unpack of that pass takes from them and empties them, also with retain_graph, so that
    # recomputed tensors live no longer than needed. Passes may overlap (a backward inside another one): tensors are
    # kept per task. Outside of any pass (somebody reads grad_fn._saved_self) the task is -1, which is no identity, so
    # such a read recomputes for itself.
    def load(self, place: _Place) -> Tensor:
        """Return the tensor of a place, by a recompute if it is the first that this backward pass asks for.

        Raises
        ------
        SavedTensorMismatchError
            If the recompute saved other tensors, or this one was handed out before.
        RuntimeError
            If the tensor, or an argument of the region, was changed in place.
        """
        task: object = None if _exec_group is None else _exec_group()
        if task is None:
            task = _graph_task()
            if task == -1:
                task = object()
        if task not in self.recomputed:
            try:
                self._recompute(task)
            except SavedTensorMismatchError as error:
                if self.logs is None:
                    raise
                raise SavedTensorMismatchError(f"{error}\n{self.logs.report()}") from None
            self.recomputed.add(task)
        try:
            tensor, version = place.pop(task)
        except KeyError:
            raise SavedTensorMismatchError(
                "Unpack is being triggered for a tensor that was already unpacked once in this backward pass. Read "
                "ctx.saved_tensors once and keep the result: recomputed tensors are freed as they are handed out"
            ) from None
        # Autograd leaves this check out for tensors that went through hooks. See Note [Parameters must not change in
        # between].
        if version is not None and version != tensor._version:
            raise changed_in_place("a tensor that the checkpointed function needs for its backward", tensor, version)
        return tensor

    def _recompute(self, task: object) -> None:
        tensors = self.inputs.load()
        run = _Run(self, task)
        if _top_hooks(False) is not None:
            run._user_hooks = users_hooks()
        try:
            try:
                _push_hooks(run, _identity)
                self.region.recompute(*unpack_call(self.packed, tensors), run.start)
            finally:
                pop_hooks_of(run)
                run._user_hooks = None
            run.check()
        except BaseException as error:
            run.empty()
            debug.explain(error)
            raise
        finally:
            run.release()


class _Run:
    """One recompute: counts what it saves and compares it with the forward."""

    __slots__ = (
        "_user_hooks",
        "count",
        "different",
        "early_stop",
        "rewound",
        "saving",
        "stopped_at",
        "surplus",
        "task",
    )
    _checkpoint_internal = True  # See Note [Hooks that are not the user's]

    def __init__(self, saving: Saving, task: object) -> None:
        self.saving = saving
        self.task = task
        self.count = 0
        self.surplus = 0
        self.rewound: Rewound | None = None
        self.stopped_at: int | None = None
        self._user_hooks: object = None
        self.different: list[str] = []
        # Note [Smart stop]
        # Stopping through C++ by an exception costs about 30 us. Where forward made no autograd node behind its last
        # save, nothing worth skipping is left, so the function simply returns: cheaper, and the audit can compare
        # where every stream ended.
        self.early_stop = saving.early_stop and saving.open_end

    def start(self, rewound: Rewound) -> None:
        self.rewound = rewound

    def _may_stop(self) -> bool:
        # See Note [An early stop is audited]
        return self.rewound is None or self.rewound.may_stop()

    # See Note [One recompute per backward pass]
    def __call__(self, tensor: Tensor) -> Tensor:
        saving, number, identity = self.saving, self.count, id(tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()  # a new object
        if number >= len(saving.places):
            self.surplus += 1
            return tensor
        self.count = number + 1
        place = saving.places[number]()
        # The graph may have let a place go, by a backward inside the region; then nobody will ask for its tensor.
        if place is not None:
            version: int | None
            try:
                version = tensor._version
            except RuntimeError:  # an inference tensor, which does not count; asking first would take as long again
                version = None
            if saving.versions:
                saved = saving.versions.get(number)
                if saved is not None and saved[0] == identity:
                    version = saved[1]
            place[self.task] = tensor, version
            metadata = saving.metadata
            if metadata is not None:
                found = (tensor.shape, tensor.dtype, tensor.device)
                if found != metadata[number]:
                    self.different.append(
                        f"tensor at position {number}:\n"
                        f"  saved metadata: {_described(metadata[number])}\n"
                        f"  recomputed metadata: {_described(found)}"
                    )
        if self.early_stop and self.count == len(saving.places) and self._may_stop():
            if saving.clock is not None:
                self.stopped_at = saving.clock.get_offset()
            raise StopRecompute
        # Not the place: the function may run a backward of its own over the graph of the recompute.
        return tensor

    def check(self) -> None:
        saving = self.saving
        if not saving.ended:
            # A backward inside the region: forward goes on behind this point, so counts may differ from now on.
            saving.loose = saving.loose or self.surplus > 0
            return
        if self.stopped_at is not None and self.stopped_at != saving.last_position:
            line = (
                "  the default CUDA generator (or the stream it was bound to): at the last tensor that backward needs, "
                f"forward stood at offset {saving.last_position}, recompute at {self.stopped_at}"
            )
            raise mismatch([line])
        expected, saved = len(saving.places), self.count + self.surplus
        if expected != saved and not saving.loose:
            raise SavedTensorMismatchError(
                "A different number of tensors was saved during the original forward and recomputation.\n"
                f"Number of tensors saved during forward: {expected}\n"
                f"Number of tensors saved during recomputation: {saved}\n{_TIP}"
            )
        if self.different:
            raise SavedTensorMismatchError(
                "Recomputed values for the following tensors have different metadata than during the forward pass.\n"
                + "\n".join(self.different)
                + f"\n{_TIP}"
            )

    def release(self) -> None:
        """Forget the region.

        The graph of the recompute holds the hook for as long as somebody holds a tensor of it (a module that keeps its
        last output, say, which the region's function leads back to): a cycle that no collector could break.
        """
        del self.saving, self.rewound

    def empty(self) -> None:
        """Let go of what was filled: a recompute that fails must not keep its activations alive with the graph."""
        for reference in self.saving.places:
            place = reference()
            if place is not None:
                place.pop(self.task, None)


def _described(metadata: Metadata) -> str:
    shape, dtype, device = metadata
    return f"shape {tuple(shape)}, {dtype}, {device}"


# Note [An interrupt may come between two lines]
# Hooks that stay on autograd's stack poison every graph that is built later. A KeyboardInterrupt can be raised as soon
# as the call that pushes them returns, so that call stands inside the try, and what is on top decides about the pop.
def pop_hooks_of(pack: object) -> None:
    """Take a region's hooks off autograd's stack, if they got there."""
    hooks: Any = _top_hooks(False)
    if hooks is not None and hooks[0] is pack:
        _pop_hooks()


def users_hooks() -> object:
    """Return the hooks that a tensor saved now would go through, past those of checkpoints; None without any."""
    hooks: Any = _top_hooks(False)
    while hooks is not None and getattr(hooks[0], "_checkpoint_internal", False):
        hooks = hooks[0]._user_hooks
    return hooks


def _identity(tensor: Tensor) -> Tensor:
    return tensor
