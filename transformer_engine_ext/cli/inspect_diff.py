# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What changed between two saves."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from transformer_engine_ext.cli.inspect_load import Saved
from transformer_engine_ext.cli.inspect_report import name_ranks
from transformer_engine_ext.pytorch.distributed.saved_table import MT19937, PHILOX, engine_of
from transformer_engine_ext.pytorch.rng.state import MT19937State, count_words

__all__ = ["Change", "Difference", "compare"]

# Words that are counted between two CPU states, about 60 ms; and how many different pairs are.
_COUNTED_WORDS, _COUNTED_PAIRS = 1 << 18, 64


@dataclass
class Change:
    """What happened to one stream on some ranks; `ranks` are those of the second save."""

    stream: str
    what: str
    ranks: list[int]


@dataclass
class Difference:
    """All that differs.

    Attributes
    ----------
    facts : dict of str to list
        Per fact about the job (axes, seed, ...) that changed: before and after.
    same_ranks : bool
        Whether both saves are of the same ranks, so that their states could be compared one by one.
    changes : list of Change
        Per stream.
    """

    facts: dict[str, list[Any]] = field(default_factory=dict)
    same_ranks: bool = True
    changes: list[Change] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.facts or self.changes)

    def to_json(self) -> dict[str, Any]:
        """Return JSON types."""
        return asdict(self)


def compare(first: Saved, second: Saved) -> Difference:
    """Return what changed from the first to the second save."""
    result = Difference()
    before, after = (_facts(saved) for saved in (first, second))
    result.facts = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
    axes = [{axis: size for axis, size in saved.header.axes.items() if size > 1} for saved in (first, second)]
    result.same_ranks = axes[0] == axes[1] and len(first.rows) == len(second.rows)
    columns = [{name: index for index, name in enumerate(saved.header.names())} for saved in (first, second)]
    everyone = list(range(len(second.rows)))
    for name in columns[0]:
        if name not in columns[1]:
            result.changes.append(Change(name, "gone", everyone))
    for name, column in columns[1].items():
        if name not in columns[0]:
            result.changes.append(Change(name, "new", everyone))
            continue
        engines = [
            engine_of(saved.header.streams[where[name]]) for saved, where in ((first, columns[0]), (second, columns[1]))
        ]
        if engines[0] != engines[1]:
            result.changes.append(Change(name, f"{engines[0]} -> {engines[1]}", everyone))
        elif result.same_ranks:
            result.changes += _moved(first, second, name, columns[0][name], column)
        else:
            result.changes += _reseeded(first, second, name, columns[0][name], column)
    return result


def _facts(saved: Saved) -> dict[str, Any]:
    header = saved.header
    return {
        "kind": saved.kind,
        "axes": {axis: size for axis, size in header.axes.items() if size > 1},
        "ranks": len(saved.rows),
        "seed": header.seed,
        "derivation": header.derivation,
        "generation": header.generation,
    }


def _moved(first: Saved, second: Saved, name: str, before: int, after: int) -> list[Change]:
    """Compare rank by rank, the ranks found by their coordinates where those tell them apart."""
    places = [_places(saved) for saved in (first, second)]
    found: dict[str, list[int]] = defaultdict(list)
    known: dict[tuple[bytes, bytes], str] = {}
    engine = engine_of(second.header.streams[after])
    for rank, row in enumerate(second.rows):
        former = rank
        if places[0] is not None and places[1] is not None:
            former = places[0].get(_place(second, rank), rank)
        pair = first.rows[former].states[before], row.states[after]
        if pair[0] != pair[1]:
            if pair not in known:
                known[pair] = _movement(engine, *pair, count=len(known) < _COUNTED_PAIRS)
            found[known[pair]].append(rank)
    return [Change(name, what, ranks) for what, ranks in found.items()]


def _place(saved: Saved, rank: int) -> tuple[tuple[str, int], ...]:
    named = zip(saved.header.axes.items(), saved.rows[rank].coordinates, strict=True)
    return tuple(sorted((axis, position) for (axis, size), position in named if size > 1))


def _places(saved: Saved) -> Mapping[tuple[tuple[str, int], ...], int] | None:
    places = {_place(saved, rank): rank for rank in range(len(saved.rows))}
    return places if len(places) == len(saved.rows) else None


def _movement(engine: str, before: bytes, after: bytes, *, count: bool) -> str:
    if engine == PHILOX:
        (seed, offset), (new_seed, new_offset) = (struct.unpack("<QQ", state) for state in (before, after))
        if seed != new_seed:
            return f"seed {seed} -> {new_seed}, offset {offset} -> {new_offset}"
        return f"offset {new_offset - offset:+,d}"
    if engine != MT19937:
        return "another state"
    start, end = MT19937State(before), MT19937State(after)
    if start.seed != end.seed:
        return f"seed {start.seed} -> {end.seed}"
    words = count_words(start, end, limit=_COUNTED_WORDS) if count else None
    return "another position" if words is None else f"{words} word{'s' * (words != 1)} drawn"


def _reseeded(first: Saved, second: Saved, name: str, before: int, after: int) -> list[Change]:
    """Compare without knowing which rank became which: what of the second save's is in the first."""
    former = {row.states[before] for row in first.rows}
    kept = [rank for rank, row in enumerate(second.rows) if row.states[after] in former]
    if len(kept) == len(second.rows):
        return []
    others = [rank for rank in range(len(second.rows)) if rank not in set(kept)]
    kept_text = f"; kept on {name_ranks(kept)}" if kept else ""
    return [Change(name, f"states that no rank had before{kept_text}", others)]
