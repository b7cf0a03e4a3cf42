# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Snapshot of all streams that a checkpointed region uses, and the rewind to it for a recompute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Generator, Tensor

from transformer_engine_ext.errors import UnsupportedCaptureError, UnsupportedDeviceError
from transformer_engine_ext.pytorch.rng import capture, coverage, moves, native
from transformer_engine_ext.pytorch.rng.capture import SavedWords, set_host_offset
from transformer_engine_ext.pytorch.rng.coverage import Foreign, cuda_in_use, default_name, default_streams
from transformer_engine_ext.pytorch.rng.devices import CPU, backend_of, same_value
from transformer_engine_ext.pytorch.rng.recording import Recording, Stream, StreamTable, stack

__all__ = ["Rewound", "Snapshot"]


class Snapshot(Recording):
    """Values of the default streams at a region's entry, and of tracked streams at their first touch.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Tensor arguments of the region. See Note [Which devices are covered].
    function : callable, optional
        What the region calls; the devices of a module's parameters count as those of tensors do.
    tracker : object, optional
        Tracker of another library that was passed to the region: covered whole, at entry.

    Raises
    ------
    UnsupportedDeviceError
        If a tensor lives on a device type whose default generator can be neither read nor written.
    StreamStateTypeError
        If ``tracker`` is no tracker, or holds something that is no stream.
    """

    __slots__ = ("bound", "captured", "cuda_ready", "ends", "foreign", "foreign_ends", "in_use", "words")

    def __init__(
        self, tensors: Sequence[Tensor], function: Callable[..., Any] | None = None, tracker: object | None = None
    ) -> None:
        self.births = self.tables = ()
        self.ends: list[Any] | None = None
        self.foreign_ends: dict[str, Tensor] = _NO_STATES
        self.cuda_ready = self.captured = False
        self.words: SavedWords | None = None
        self.in_use = coverage.alone or cuda_in_use()
        if self.in_use:
            self.cuda_ready = True
            self.captured = capture.stream_captures()
            if not native._warm:
                native.warm_up()
        self.streams = default_streams(tensors, function, self.in_use)
        self.known = {id(stream[2]) for stream in self.streams}
        # Note [Binding follows the region]
        # A region may be called inside a fork. Its "default" draws then belong to the forked stream, so the recompute,
        # which usually runs outside that fork, binds the default generator to the stream it was bound to at entry.
        self.bound = len(self.streams)
        self.foreign: Foreign | None = None
        if tracker is not None:
            self.foreign = Foreign(tracker)
            for name, handle in self.foreign.generators():
                backend = backend_of(handle)
                self.record(name, backend, handle, moves.take(backend, handle))

    def finish(self) -> None:
        """Note where every covered stream stands at the end of forward; the audit compares with it.

        Raises
        ------
        UnsupportedDeviceError
            If a CUDA device was first used inside the region, so that its generator was not covered at entry.
        """
        # See Note [Which devices are covered]
        if len(self.in_use) != len(torch.cuda.default_generators):  # else no device is left to be used first
            in_use = cuda_in_use()
            if in_use != self.in_use:
                self._refuse_new_devices(in_use)
        self.ends = moves.positions(self.streams)
        if self.foreign is not None:
            self.foreign_ends = self.foreign.positions()
        if self.captured:
            self.words = self.save_words()

    def _refuse_new_devices(self, in_use: Sequence[int]) -> None:
        for index in in_use:
            if not any(name == default_name(index) for name, _, _, _ in self.streams):
                touch = "torch.cuda.init()" if not self.cuda_ready else f"torch.empty(1, device='cuda:{index}')"
                raise UnsupportedDeviceError(
                    f"device cuda:{index} was used for the first time inside a checkpointed region, so the state of "
                    "its default generator at the region's entry is unknown. Touch the device before the first region, "
                    f"for example with {touch}"
                )

    def save_words(self) -> SavedWords:
        """Keep the device words of the streams that have moved, by one node of the graph under capture."""
        # See Note [Inside graph capture]
        return SavedWords(
            [
                (name, handle)
                for name, backend, handle, value in self.streams
                if backend.device_type == "cuda" and not backend.unmoved(value, backend.position(handle))
            ]
        )

    def read_back(self) -> Snapshot:
        """Return the snapshot of a captured forward as one of eager values, of the latest replay."""
        twin = copy.copy(self)
        twin.captured, twin.words = False, None
        twin.streams = list(self.streams)
        words = self.words.read_back() if self.words is not None else {}
        ends = list(self.ends) if self.ends is not None else None
        for i, (name, backend, handle, value) in enumerate(self.streams):
            if backend.device_type != "cuda":
                continue
            saved = words.get(id(handle))
            if saved is None:  # the region did not use it: it stays where it is
                twin.streams[i] = name, backend, handle, backend.take(handle)
                if ends is not None:
                    ends[i] = backend.position(handle)
            else:
                twin.streams[i] = name, backend, handle, (saved.seed, saved.offset + value[1])
                if ends is not None:
                    ends[i] += saved.offset
        twin.ends = ends
        return twin

    @staticmethod
    def rewind_within(streams: Sequence[Stream]) -> None:
        """Write values as ``rewind`` does, of CUDA streams only where they stood within the graph."""
        for _, backend, handle, value in reversed(streams):
            if backend.device_type == "cuda":
                # The seed is in the device words; the host may have another one by now, and may not change it.
                set_host_offset(handle, value[1])
            else:
                backend.put(handle, value)

    def rewound(self) -> Rewound:
        """Return a context in which all covered streams stand where they stood at the region's entry."""
        return Rewound(self)


_NO_STATES: dict[str, Tensor] = {}  # never changed


class Rewound(Recording):
    """One recompute: streams rewound on entry, put back on exit, whatever happens in between.

    Attributes
    ----------
    complete : bool
        Set to False by the engine when it stopped the recompute early, after ``may_stop`` allowed it.
    exact : bool
        Whether a recompute that ran to its end used forward's streams only, and left all where forward did.
    reached, strayed : sequence
        Where the snapshot's streams, and the streams that only the recompute touched, stood when it ended.
    """

    # Note [Restore on every exit]
    # Entry stashes the live value of every covered stream before it overwrites any (two handles may share one state).
    # Exit undoes it in this order: streams that only the recompute touched, the covered ones, sets of streams, foreign
    # trackers, and last the binding of the default generators. Each step runs even if another fails, so a recompute
    # that raises leaves no trace, and one that does not leaves every stream where it would stand without it.
    __slots__ = ("_reborn", "_undo", "complete", "exact", "foreign_reached", "reached", "snapshot", "strayed")

    def __init__(self, snapshot: Snapshot) -> None:
        self.streams = []
        self.known = snapshot.known.copy()
        self.births = self.tables = ()
        self.snapshot = snapshot
        self.complete = True
        self.exact = False
        self.reached: list[Any] = []
        self.strayed: list[Any] = []
        self.foreign_reached: dict[str, Tensor] = _NO_STATES
        self._reborn: dict[tuple[int, str], int] | None = None
        self._undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def __enter__(self) -> Rewound:
        snapshot, undo = self.snapshot, self._undo
        now = snapshot.cuda_ready and capture.stream_captures()
        if now is not snapshot.captured:
            snapshot = self._on_the_other_side(now)
        opened = stack.open
        opened.append(self)
        undo.append((opened.remove, (self,)))
        try:
            streams = snapshot.streams
            for i in range(snapshot.bound):
                # See Note [Binding follows the region]
                _, backend, handle, _ = streams[i]
                if handle is CPU.bound:
                    continue
                token = backend.bind(handle)
                if token is not None:
                    undo.append((backend.unbind, (token,)))
            if snapshot.foreign is not None:
                undo.append((snapshot.foreign.restore, (snapshot.foreign.rewind(),)))
            for tracker, states, seeds in snapshot.tables:
                undo.append((_set_table, (tracker, tracker._states, tracker.seeds_)))
                _set_table(tracker, dict(states), set(seeds))
            # See Note [A bound CPU stream lives in the default generator]
            live = moves.retake(streams)
            # See Note [The earliest value wins]
            undo.append((moves.rewind, (live,)))
            if now:
                words = snapshot.words or snapshot.save_words()
                undo.append((words.restore, (words.rewind(),)))
                snapshot.rewind_within(streams)
            else:
                moves.rewind(streams)
        except BaseException:
            self._restore()
            raise
        return self

    def _on_the_other_side(self, captures: bool) -> Snapshot:
        """Return what to rewind to where the forward was captured and this run is not; refuse the reverse."""
        if captures:
            raise UnsupportedCaptureError(
                "the backward of a checkpointed region is being captured into a CUDA graph, and its forward ran "
                "outside of any graph: every replay would recompute with the random numbers of that one forward. "
                "Capture the forward too (torch.cuda.make_graphed_callables does), or run this backward eagerly"
            )
        self.snapshot = self.snapshot.read_back()
        return self.snapshot

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            ends = self.snapshot.ends
            if kind is None and ends is not None:
                snapshot = self.snapshot
                if self.complete:
                    self.reached = moves.positions(snapshot.streams)
                    if snapshot.foreign is not None:
                        self.foreign_reached = snapshot.foreign.positions()
                if self.streams:
                    self.strayed = moves.positions(self.streams)
                elif self.complete and not self.foreign_reached:
                    # What nearly every recompute comes to: forward's streams and no other, where forward ended.
                    self.exact = moves.stand_where(snapshot.streams, ends, self.reached)
        finally:
            self._restore()

    def _restore(self) -> None:
        # See Note [Restore on every exit]
        undo = self._undo
        for table in self.tables:
            undo.append((_set_table, table))
        if self.streams:
            undo.append((moves.rewind, (self.streams,)))
        failed: BaseException | None = None
        while undo:
            step, args = undo.pop()
            try:
                step(*args)
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed

    # Note [A stream made inside a region keeps its generator]
    # A recompute that adds a stream gets the generator that forward's add() made, started anew, and exit puts back
    # where it stood. So a region nested in this one, whose own recompute may come later, and the tracker name the same
    # generator.
    def born(self, tracker: StreamTable, name: str) -> list[Generator]:
        """Return the generators that forward's add() made for a stream, in order."""
        return [handle for owner, known, handle in self.snapshot.births if owner is tracker and known == name]

    def reborn(self, tracker: StreamTable, name: str) -> Generator | None:
        """Return forward's generator for a stream that is being added again; None if forward added none."""
        born = self.born(tracker, name)
        if self._reborn is None:
            self._reborn = {}
        used = self._reborn.get((id(tracker), name), 0)
        if used >= len(born):
            return None
        self._reborn[id(tracker), name] = used + 1
        handle = born[used]
        backend = backend_of(handle)
        self._undo.append((backend.put, (handle, backend.take(handle))))
        return handle

    # Note [An early stop is audited]
    # A recompute that stops at the last tensor that backward needs has not made the draws behind it. So each stream
    # must stand where forward ended, or where more draws lead there; otherwise the function goes on to its end, where
    # the audit compares exactly. Of the default CUDA stream forward also noted where it stood at each saved tensor,
    # which takes a third of a microsecond, and the stop compares with that; a CPU stream's state is too large for it.
    def may_stop(self) -> bool:
        """Tell whether the streams stand where forward stood, or may have stood, before its end."""
        ends = self.snapshot.ends
        if ends is None:  # a backward inside the region: forward has not ended
            return True
        self.reached = moves.positions(self.snapshot.streams)
        if self.snapshot.foreign is not None:
            self.foreign_reached = self.snapshot.foreign.positions()
        streams = zip(self.snapshot.streams, self.reached, ends, strict=True)
        if not all(backend.leads_to(reached, end) for (_, backend, _, _), reached, end in streams):
            return False
        foreign = self.snapshot.foreign_ends
        return all(name in foreign and same_value(foreign[name], end) for name, end in self.foreign_reached.items())


def _set_table(tracker: StreamTable, states: dict[str, Generator], seeds: set[int]) -> None:
    tracker._states, tracker.seeds_ = states, seeds
