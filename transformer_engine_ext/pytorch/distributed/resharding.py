# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""From the saved streams of one layout to those of another one; a pure function of the file and the new layout."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformer_engine_ext.errors import LayoutMismatchError, SeedCollisionError
from transformer_engine_ext.pytorch.distributed.derivations import SeedTable, derive_table
from transformer_engine_ext.pytorch.distributed.saved_table import MT19937, PHILOX, Header, Row, engine_of
from transformer_engine_ext.pytorch.distributed.streams import DEFAULT_STREAM, StreamSpec
from transformer_engine_ext.pytorch.rng.state import PHILOX_STATE_BYTES, MT19937State

__all__ = ["LoadReport", "changed_axes", "changed_streams", "reshard"]

#: Makes a state of a kind (``"mt19937"``, ...) that starts from a seed.
FreshState = Callable[[str, int], bytes]


@dataclass(frozen=True)
class LoadReport:
    """What ``ParallelRNG.load`` did.

    Attributes
    ----------
    layout_changed : bool
        Whether the file was of another layout.
    streams : dict of str to str
        Per stream of this job ``"kept"`` (bit for bit as saved), ``"rederived"`` (another seed, past everything that
        was drawn) or ``"added"`` (not in the file; at the start of its seed).
    dropped : tuple of str
        Streams that only the file has.
    drifted : tuple of str
        Streams among ``"rederived"`` that should have been kept, but stood at different places on ranks that are one
        now, or copies of each other.
    generation : int
        How often streams were derived anew since the job was seeded.
    """

    layout_changed: bool = False
    streams: dict[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    drifted: tuple[str, ...] = ()
    generation: int = 0


def changed_axes(saved: Header, running: Header) -> set[str]:
    """Return the axes of another size; an axis that one of the layouts lacks has size 1 there."""
    names = {*saved.axes, *running.axes}
    return {name for name in names if saved.axes.get(name, 1) != running.axes.get(name, 1)}


def _declaration(stream: Mapping[str, Any]) -> tuple[Any, ...]:
    return engine_of(stream), frozenset(stream["varies_over"]), stream.get("seed_offset")


def changed_streams(saved: Header, running: Header) -> dict[str, str]:
    """Return the streams that only one of both has, or that are declared otherwise: name to what differs."""
    before, now = ({stream["name"]: stream for stream in header.streams} for header in (saved, running))
    changes = {name: "only in the file" for name in before if name not in now}
    for name, stream in now.items():
        if name not in before:
            changes[name] = "not in the file"
        elif _declaration(stream) != _declaration(before[name]):
            texts = (_describe(before[name]), _describe(stream))
            changes[name] = f"saved as {texts[0]}, declared as {texts[1]}"
    return changes


def _describe(stream: Mapping[str, Any]) -> str:
    axes = ", ".join(stream["varies_over"]) or "no axis"
    return f"{engine_of(stream)} that varies over {axes} with seed offset {stream.get('seed_offset')}"


# Note [Streams on another layout]
# A stream that varies over no axis of another size is *kept*: each rank takes the state of a rank at the same
# coordinates, on the axes it varies over and, where there is one, on the other axes of the same size too (positions
# may differ along those). All others are *derived anew*. On CUDA a stream gets the derivation's seed for its new
# coordinates and starts at the largest offset that any rank had saved of it, or of another stream on that very seed: a
# philox number is a function of (seed, offset), so none is drawn twice, over any number of such changes. The twister
# has no offsets; a CPU stream gets a seed from a hash of (job's seed, generation, stream, coordinates) that is in use
# nowhere in the file. The generation counts these changes, so that going back and forth between two layouts does not
# come back to seeds that were used before. Where the ranks that a kept stream could come from do not agree (dp ranks
# at different positions become one, say), it is derived anew as well.
def reshard(
    saved: Header,
    rows: Sequence[Row],
    running: Header,
    places: Sequence[Mapping[str, int]],
    rank: int,
    fresh: FreshState,
    *,
    row: int | None = None,
) -> tuple[dict[str, bytes], LoadReport]:
    """Return the states with which one rank goes on, and what was done with each stream.

    Parameters
    ----------
    saved : Header
        Of the file.
    rows : sequence of Row
        All rows of the file.
    running : Header
        Of the job that loads.
    places : sequence of mapping of str to int
        Coordinates of every rank of that job.
    rank : int
        The rank whose states are wanted.
    fresh : callable
        Called with a kind of state other than philox and a seed; returns that state.
    row : int, optional
        The row of `rank`, if both layouts are the same and so only streams were added, removed or declared anew.

    Raises
    ------
    LayoutMismatchError
        If a stream has to be derived, and the file does not say from which seed.
    SeedCollisionError
        If two tracked streams of this rank would draw the same numbers.
    ValueError
        If the derivation has no formula for a stream on the new layout.
    """
    work = _Resharding(saved, rows, running, fresh)
    states: dict[str, bytes] = {}
    outcome: dict[str, str] = {}
    drifted = []
    changes, changed = changed_streams(saved, running), changed_axes(saved, running)
    for stream in running.streams:
        name = stream["name"]
        if name in changes:
            outcome[name] = "added" if name not in work.column else "rederived"
        elif changed.intersection(stream["varies_over"]):
            outcome[name] = "rederived"
        elif row is not None:
            outcome[name], states[name] = "kept", rows[row].states[work.column[name]]
        elif (kept := work.kept(stream, places)) is not None:
            outcome[name], states[name] = "kept", kept[rank]
        else:
            outcome[name] = "rederived"
            drifted.append(name)
    # See Note [Streams on another layout]
    missing = [stream for stream in running.streams if stream["name"] not in states]
    states.update(work.derived(missing, places[rank]))
    _refuse_collisions(states, rank)
    report = LoadReport(
        layout_changed=row is None,
        streams=outcome,
        dropped=tuple(name for name in work.column if name not in outcome),
        drifted=tuple(drifted),
        generation=saved.generation + bool(missing),
    )
    return {name: states[name] for name in outcome}, report


class _Resharding:
    """The saved table, indexed for the questions that come up."""

    def __init__(self, saved: Header, rows: Sequence[Row], running: Header, fresh: FreshState) -> None:
        self.saved, self.rows, self.running, self.fresh = saved, rows, running, fresh
        self.column = {name: index for index, name in enumerate(saved.names())}
        self.axes = list(saved.axes)
        changed = changed_axes(saved, running)
        self.unchanged = [index for index, axis in enumerate(self.axes) if axis not in changed]

    def kept(self, stream: Mapping[str, Any], places: Sequence[Mapping[str, int]]) -> list[bytes] | None:
        """Return the states of a stream at the places; None if saved ranks that it could come from do not agree."""
        column = self.column[stream["name"]]
        varied = [index for index, axis in enumerate(self.axes) if axis in stream["varies_over"]]
        exact = self._states_by(self.unchanged, column)
        loose = self._states_by(varied, column)
        states: list[bytes] = []
        for place in places:
            there = [place.get(axis, 0) for axis in self.axes]
            # Axes folded over the same ranks are no product, so this rank's combination may be a new one.
            candidates = exact.get(tuple(there[index] for index in self.unchanged))
            candidates = candidates or loose.get(tuple(there[index] for index in varied), set())
            if len(candidates) != 1:
                return None
            states.extend(candidates)
        return states

    def _states_by(self, axes: Sequence[int], column: int) -> dict[tuple[int, ...], set[bytes]]:
        found: dict[tuple[int, ...], set[bytes]] = defaultdict(set)
        for row in self.rows:
            found[tuple(row.coordinates[axis] for axis in axes)].add(row.states[column])
        return found

    def derived(self, streams: Sequence[Mapping[str, Any]], place: Mapping[str, int]) -> dict[str, bytes]:
        """Return new states of the streams at one place."""
        if not streams:
            return {}
        seed = self.saved.seed
        if seed is None:
            raise LayoutMismatchError(
                f"stream {streams[0]['name']!r} has to be derived anew, and the file does not say from which seed of "
                "the job: ParallelRNG.seed() was never called before it was saved. Nothing was loaded; resume on the "
                "layout and with the streams that were saved, or call seed()"
            )
        states: dict[str, bytes] = {}
        on_cuda = [stream for stream in self.running.streams if engine_of(stream) == PHILOX]
        if any(engine_of(stream) == PHILOX for stream in streams):
            table = self._table(on_cuda, seed, bits=64)
            furthest = self._furthest()
            for stream in streams:
                if engine_of(stream) == PHILOX:
                    at = table[stream["name"]].at(place)
                    offset = max(self._furthest_of(stream["name"]), furthest.get(at, 0))
                    states[stream["name"]] = struct.pack("<QQ", at, offset)
        others = [stream for stream in streams if engine_of(stream) != PHILOX]
        if not others:
            return states
        table = self._table(others, seed, bits=32, generation=self.saved.generation + 1, taken=self._twister_seeds())
        for stream in others:
            states[stream["name"]] = self.fresh(engine_of(stream), table[stream["name"]].at(place))
        return states

    def _table(self, streams: Sequence[Mapping[str, Any]], seed: int, **options: Any) -> dict[str, SeedTable]:
        specs = [
            StreamSpec(
                stream["name"],
                stream["varies_over"],
                lockstep_over=stream["lockstep_over"],
                seed_offset=stream.get("seed_offset"),
                is_default=stream["name"] == DEFAULT_STREAM,
            )
            for stream in streams
        ]
        return derive_table(self.running.derivation, specs, seed, self.running.axes, **options)

    def _furthest(self) -> dict[int, int]:
        """Return the largest saved offset per seed."""
        found: dict[int, int] = {}
        for column in self.saved.positions(PHILOX):
            for state in {row.states[column] for row in self.rows}:
                seed, offset = struct.unpack("<QQ", state)
                found[seed] = max(offset, found.get(seed, 0))
        return found

    def _furthest_of(self, name: str) -> int:
        column = self.column.get(name)
        if column is None or engine_of(self.saved.streams[column]) != PHILOX:
            return 0
        offsets: list[int] = [struct.unpack("<QQ", row.states[column])[1] for row in self.rows]
        return max(offsets)

    def _twister_seeds(self) -> set[int]:
        columns = self.saved.positions(MT19937)
        states = {row.states[column] for row in self.rows for column in columns}
        return {MT19937State(state).seed for state in states}


def _refuse_collisions(states: Mapping[str, bytes], rank: int) -> None:
    """Refuse two tracked streams on one philox seed; the default generator may share its seed with one of them."""
    seen: dict[int, str] = {}
    for name, state in states.items():
        if name == DEFAULT_STREAM or len(state) != PHILOX_STATE_BYTES:
            continue
        seed = struct.unpack("<QQ", state)[0]
        if (other := seen.setdefault(seed, name)) != name:
            raise SeedCollisionError(
                f"on this layout the streams {other!r} and {name!r} of rank {rank} would both continue on seed {seed} "
                "and draw the same numbers. Nothing was loaded; give one of them another seed_offset, or use "
                "derivation='fold_in'"
            )
