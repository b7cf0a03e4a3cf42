# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What is said about saved streams: where each stands on which ranks, and what does not agree as declared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from transformer_engine_ext.cli.inspect_load import Saved
from transformer_engine_ext.pytorch.distributed.fingerprints import UNKNOWN, Reports, Standing, standing_of
from transformer_engine_ext.pytorch.distributed.held_streams import CPU_DEFAULT_STREAM
from transformer_engine_ext.pytorch.distributed.host_states import HOST_STREAMS
from transformer_engine_ext.pytorch.distributed.mismatches import Fault, find_faults
from transformer_engine_ext.pytorch.distributed.saved_table import MT19937, PHILOX, engine_of, state_of
from transformer_engine_ext.pytorch.distributed.streams import DATA_PARALLEL_STREAM, DEFAULT_STREAM

__all__ = ["Group", "Problem", "Report", "StreamReport", "examine", "name_ranks"]

#: Counting what CPU streams have drawn takes up to 60 ms each; with more different ones than this they are not counted.
_MOST_COUNTED = 64
_TWISTER_MASK = (1 << 32) - 1


@dataclass
class Group:
    """Ranks at one and the same state of a stream.

    Attributes
    ----------
    seed : int or None
        None for a kind of state that does not tell it.
    position : int or None
        CUDA: the offset, in random numbers per thread. CPU: 32-bit words drawn since the seed; None if not counted.
    digest : str
        16 hexadecimal digits that identify the state.
    ranks : list of int
        The ranks.
    marked : bool
        Whether some problem concerns one of them.
    """

    seed: int | None
    position: int | None
    digest: str
    ranks: list[int]
    marked: bool = False


@dataclass
class Problem:
    """Something that is not as declared.

    Attributes
    ----------
    kind : str
        ``"position"``, ``"seed"`` or ``"repeat"``, as in a failed ``ParallelRNG.verify``; ``"collision"`` for two
        streams that draw the same numbers.
    streams : list of str
        One stream, or the two that collide.
    ranks : list of int
        The ranks concerned.
    text : str
        A sentence.
    """

    kind: str
    streams: list[str]
    ranks: list[int]
    text: str


@dataclass
class StreamReport:
    """One stream over all ranks."""

    name: str
    engine: str
    varies_over: list[str] | None
    lockstep_over: list[str] | None
    groups: list[Group] = field(default_factory=list)


@dataclass
class Report:
    """All that is known of one path."""

    path: str
    kind: str
    axes: dict[str, int]
    ranks: int
    seed: int | None
    derivation: str
    generation: int
    streams: list[StreamReport]
    problems: list[Problem]

    def to_json(self) -> dict[str, Any]:
        """Return JSON types."""
        return asdict(self)


def examine(saved: Saved) -> Report:
    """Return what is to be said about a saved table."""
    header = saved.header
    standings = _standings(saved)
    streams = []
    for column, stream in enumerate(header.streams):
        groups: dict[int, Group] = {}
        for rank, row in enumerate(standings):
            standing = row[column]
            group = groups.setdefault(
                standing.digest,
                Group(
                    None if standing.seed == UNKNOWN else standing.seed,
                    None if standing.drawn == UNKNOWN else standing.drawn,
                    f"{standing.digest:016x}",
                    [],
                ),
            )
            group.ranks.append(rank)
        declared = stream.get("declared", True)
        streams.append(
            StreamReport(
                stream["name"],
                engine_of(stream),
                list(stream["varies_over"]) if declared else None,
                list(stream["lockstep_over"]) if declared else None,
                list(groups.values()),
            )
        )
    problems = [*_disagreements(saved, standings), *_collisions(saved, streams)]
    concerned: dict[str, set[int]] = defaultdict(set)
    for problem in problems:
        for name in problem.streams:
            concerned[name].update(problem.ranks)
    for report in streams:
        for group in report.groups:
            group.marked = not concerned[report.name].isdisjoint(group.ranks)
    return Report(
        saved.path,
        saved.kind,
        dict(header.axes),
        len(saved.rows),
        header.seed,
        header.derivation,
        header.generation,
        streams,
        problems,
    )


def _standings(saved: Saved) -> list[list[Standing]]:
    states = {state for row in saved.rows for state in row.states}
    twisters = sum(len(state) > 16 for state in states)
    known = {state: standing_of(state_of(state), count=twisters <= _MOST_COUNTED) for state in states}
    return [[known[state] for state in row.states] for row in saved.rows]


def _disagreements(saved: Saved, standings: Sequence[Sequence[Standing]]) -> list[Problem]:
    header = saved.header
    coordinates = np.array([row.coordinates for row in saved.rows], np.int64).reshape(len(saved.rows), -1)

    def table(part: str) -> Any:
        numbers = [[getattr(standing, part) for standing in row] for row in standings]
        # Seeds from 2**63 on do not fit; as in Reports they are negative.
        return np.array([[n - (1 << 64) if n >= 1 << 63 else n for n in row] for row in numbers], np.int64)

    reports = Reports(
        tuple(header.axes),
        tuple(header.names()),
        coordinates,
        _leaders(coordinates, tuple(header.axes.values())),
        table("seed"),
        table("digest"),
        table("drawn"),
    )
    declared = [
        stream if stream.get("declared", True) else {**stream, "lockstep_over": []} for stream in header.streams
    ]
    problems = []
    for fault in find_faults(reports, declared, None):
        ranks = name_ranks(fault.ranks)
        several = "" if len(fault.ranks) > 1 else "s"
        # Without a majority all are named, since nobody knows which of them is right.
        elsewhere = (
            "at different positions" if fault.ranks == fault.group else f"elsewhere than {name_ranks(_rest(fault))}"
        )
        seeds = "different seeds" if fault.ranks == fault.group else f"another seed than {name_ranks(_rest(fault))}"
        text = {
            "position": f"{ranks} stand{several} {elsewhere}, and must be in lockstep over {fault.axis}",
            "seed": f"{ranks} started from {seeds}, and the stream does not vary between them",
            "repeat": f"{ranks} started from one seed, and the stream varies over {fault.axis}",
        }[fault.kind]
        problems.append(Problem(fault.kind, [fault.stream], list(fault.ranks), f"{fault.stream}: {text}"))
    undeclared = {stream["name"] for stream in header.streams if not stream.get("declared", True)}
    return [problem for problem in problems if problem.streams[0] not in undeclared]


def _rest(fault: Fault) -> list[int]:
    return sorted(set(fault.group) - set(fault.ranks))


def _leaders(coordinates: Any, sizes: tuple[int, ...]) -> Any:
    """Return per rank and axis the first rank of the group along that axis.

    Axes may be folded over the same ranks, so "equal on all other axes" would leave everyone alone. A group along an
    axis is a row of a grid: of some axes, that one among them, whose sizes multiply to the number of ranks.
    """
    ranks, count = coordinates.shape
    leaders = np.tile(np.arange(ranks)[:, None], (1, count))
    for axis in range(count):
        others = [other for other in range(count) if other != axis]
        for size in range(len(others), -1, -1):
            grids = [
                [*chosen] for chosen in combinations(others, size) if _is_grid(coordinates, sizes, [axis, *chosen])
            ]
            if grids:
                _, first, inverse = np.unique(coordinates[:, grids[0]], axis=0, return_index=True, return_inverse=True)
                leaders[:, axis] = first[inverse.reshape(-1)]
                break
    return leaders


def _is_grid(coordinates: Any, sizes: tuple[int, ...], axes: list[int]) -> bool:
    if int(np.prod([sizes[axis] for axis in axes])) != len(coordinates):
        return False
    return len(np.unique(coordinates[:, axes], axis=0)) == len(coordinates)


def _collisions(saved: Saved, streams: Sequence[StreamReport]) -> list[Problem]:
    """Return the pairs of streams that started from one seed on some rank, or on two ranks."""
    by_seed: dict[tuple[str, int], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for report in streams:
        for group in report.groups:
            if group.seed is not None and report.engine in (PHILOX, MT19937):
                used = group.seed if report.engine == PHILOX else group.seed & _TWISTER_MASK
                by_seed[report.engine, used][report.name].update(group.ranks)
    found: dict[tuple[str, str], list[tuple[int, set[int], bool]]] = defaultdict(list)
    for (_, seed), owners in by_seed.items():
        for first, second in combinations(owners, 2):
            if not _same_by_declaration(saved, first, second):
                same_rank = bool(owners[first] & owners[second])
                where = owners[first] & owners[second] if same_rank else owners[first] | owners[second]
                found[first, second].append((seed, where, same_rank))
    problems = []
    for (first, second), meetings in found.items():
        ranks = sorted({rank for _, where, _ in meetings for rank in where})
        how = "on one rank" if any(same for _, _, same in meetings) else "on different ranks"
        seeds = ", ".join(str(seed) for seed, _, _ in meetings[:3]) + (", ..." if len(meetings) > 3 else "")
        text = f"{first} and {second} {how} started from one seed ({seeds}): {name_ranks(ranks)}"
        problems.append(Problem("collision", [first, second], ranks, text))
    return problems


#: Streams that start from the default one's seed by design.
_FOLLOWERS = {DATA_PARALLEL_STREAM, CPU_DEFAULT_STREAM, *HOST_STREAMS}


def _same_by_declaration(saved: Saved, first: str, second: str) -> bool:
    # See Note [Streams that may share a seed]; generators of the host follow the default one by design, too.
    one, other = (next(s for s in saved.header.streams if s["name"] == name) for name in (first, second))
    alike = (one["seed_offset"], set(one["varies_over"])) == (other["seed_offset"], set(other["varies_over"]))
    return alike and DEFAULT_STREAM in (first, second) and not {first, second}.isdisjoint(_FOLLOWERS)


def name_ranks(ranks: Sequence[int], most: int = 6) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0-3, 8``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:most]]
    more = len(ranks) - sum(high - low + 1 for low, high in runs[:most])
    listed = ", ".join(texts) + (f" and {more} more" if more else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
