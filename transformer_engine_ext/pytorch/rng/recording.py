# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Recordings: which streams a piece of code uses, each with the value that it had before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import Generator

from transformer_engine_ext.pytorch.rng import moves
from transformer_engine_ext.pytorch.rng.capture import capturing, require_registered
from transformer_engine_ext.pytorch.rng.devices import DeviceBackend, backend_of
from transformer_engine_ext.pytorch.rng.moves import Stream

__all__ = [
    "Recording",
    "Stream",
    "StreamTable",
    "born_in_forward",
    "note_birth",
    "note_table",
    "noted_handles",
    "reborn",
    "stack",
    "touch",
    "watch_forks",
]

# Note [Saved states are values]
# A live handle moves with every draw, also with the draws of the very forward pass it was "saved" for: rewinding to it
# rewinds nothing. So a recording keeps handles and values apart: the handle says which stream, the value (bytes that
# nothing changes in place) says where it stood.


class StreamTable(Protocol):
    """A tracker as a recording sees it: a replaceable set of named streams and seeds."""

    _states: dict[str, Generator]
    seeds_: set[int]


class _Stack(threading.local):
    def __init__(self) -> None:
        self.open: list[Recording] = []


#: Recordings that are open in this thread, outermost first, as ``open``.
stack = _Stack()


class Recording:
    """Streams noted at their first touch, with the value that each had then.

    Attributes
    ----------
    streams : list of Stream
        In the order of first touch.
    known : set of int
        ``id`` of every handle that needs no noting: noted already, or made since.
    births : tuple of tuple
        ``(tracker, name, handle)`` of every stream made since, in order; the tracker is None where none added it.
    tables : tuple of tuple
        ``(tracker, states_, seeds_)`` as they were before the set of streams first changed.
    """

    __slots__ = ("births", "known", "streams", "tables")

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.known: set[int] = set()
        # Most recordings see neither, so these are replaced, not changed.
        self.births: tuple[tuple[StreamTable | None, str, Generator], ...] = ()
        self.tables: tuple[tuple[StreamTable, dict[str, Generator], set[int]], ...] = ()

    def record(self, name: str, backend: DeviceBackend, handle: Generator, value: Any) -> None:
        """Note one stream; the handle is kept alive, so that its ``id`` stays its own."""
        self.known.add(id(handle))
        self.streams.append((name, backend, handle, value))

    def open(self) -> list[Recording]:
        """Receive the touches of this thread from now on, until removed from the list that this returns."""
        opened = stack.open
        opened.append(self)
        return opened

    def born(self, tracker: StreamTable, name: str) -> list[Generator]:
        """Return the generators that the forward of this recompute made for a stream; none if this is a forward."""
        return []

    def reborn(self, tracker: StreamTable, name: str) -> Generator | None:
        """Return the generator to use for a stream that is being added; None for a new one."""
        return None


# Note [First touch]
# A stream of our trackers is noted when it is first forked, not when the region starts: its value then still is its
# value at entry, since only a fork moves it. So a stream that a region leaves alone costs nothing, and no other
# thread's stream is ever rewound. A recording that knows the stream ends the search: whoever noted it there noted it
# in every recording around it too.
def touch(name: str, handle: Generator) -> None:
    """Tell the open recordings of this thread that a stream is about to move.

    Parameters
    ----------
    name : str
        What to call the stream in messages.
    handle : torch.Generator
        The stream.
    """
    recordings = stack.open
    if not recordings:
        if _watcher is not None:
            _watcher(name)
        return
    if moves.touch is not None and moves.touch(recordings, name, handle):
        return
    key = id(handle)
    backend, value = None, None
    for recording in reversed(recordings):
        if key in recording.known:
            return
        if backend is None or value is None:
            backend = backend_of(handle)
            if backend.device_type == "cuda" and capturing():
                require_registered(name, handle)
            value = moves.take(backend, handle)
        recording.record(name, backend, handle, value)


_watcher: Callable[[str], None] | None = None


def watch_forks(watcher: Callable[[str], None] | None) -> None:
    """Have a function called with the name of every stream that is touched in a thread without open recordings."""
    global _watcher
    _watcher = watcher


def noted_handles() -> list[Generator]:
    """Return the streams that the open recordings of this thread have noted, or that were made inside them."""
    noted = [handle for recording in stack.open for _, _, handle, _ in recording.streams]
    return noted + [handle for recording in stack.open for _, _, handle in recording.births]


def note_birth(handle: Generator, name: str = "", tracker: StreamTable | None = None) -> None:
    """Tell the open recordings that a stream was made inside them, so that it has no earlier value to go back to."""
    for recording in stack.open:
        recording.known.add(id(handle))
        # Kept alive: a freed id could become another generator's.
        recording.births = (*recording.births, (tracker, name, handle))


def born_in_forward(tracker: StreamTable, name: str) -> bool:
    """Tell whether an open recompute belongs to a region whose forward added this stream."""
    return any(recording.born(tracker, name) for recording in stack.open)


def reborn(tracker: StreamTable, name: str) -> Generator | None:
    """Return the generator that forward made for a stream which a recompute adds again, or None."""
    # See Note [A stream made inside a region keeps its generator]
    for recording in reversed(stack.open):
        handle = recording.reborn(tracker, name)
        if handle is not None:
            return handle
    return None


def note_table(tracker: StreamTable) -> None:
    """Tell the open recordings that a tracker's set of streams is about to change."""
    for recording in reversed(stack.open):
        if any(known is tracker for known, _, _ in recording.tables):
            return
        recording.tables = (*recording.tables, (tracker, dict(tracker._states), set(tracker.seeds_)))
