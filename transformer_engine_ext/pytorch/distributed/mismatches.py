# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the streams of all ranks do not agree as declared, and the table that shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer_engine_ext.pytorch.distributed.fingerprints import UNKNOWN, Reports
from transformer_engine_ext.pytorch.distributed.topology import describe_place

__all__ = ["Fault", "find_faults", "render"]

#: Faults that are described, and ranks that have a line in the table; a large job may have thousands of both.
_MOST_FAULTS = 8
_MOST_RANKS = 32


@dataclass(frozen=True)
class Fault:
    """One thing that does not hold.

    Attributes
    ----------
    kind : str
        ``"position"`` (ranks in lockstep stand at different positions), ``"seed"`` (seeds differ that must be equal)
        or ``"repeat"`` (seeds are equal that must differ).
    stream : str
        The stream.
    axis : str
        The axis along which it does not hold; "" for ``"seed"``.
    ranks : tuple of int
        The ranks that stand out: those outside of the majority, or all of `group` where there is none.
    group : tuple of int
        The ranks that were compared.
    """

    kind: str
    stream: str
    axis: str
    ranks: tuple[int, ...]
    group: tuple[int, ...]

    @property
    def source(self) -> int:
        """The rank whose state the others get in a repair: the first of the majority."""
        rest = [rank for rank in self.group if rank not in set(self.ranks)]
        return min(rest or self.group)


def find_faults(reports: Reports, streams: Sequence[Mapping[str, Any]], axes: Sequence[str] | None) -> list[Fault]:
    """Compare all ranks.

    Parameters
    ----------
    reports : Reports
        Of all ranks.
    streams : sequence of mapping
        Per stream ``name``, ``varies_over`` and ``lockstep_over``.
    axes : sequence of str, optional
        Compare only ranks that differ along these axes; default all.
    """
    chosen = [index for index, axis in enumerate(reports.axes) if axes is None or axis in axes]
    component = _components(reports, chosen) if axes is not None else np.zeros(len(reports.seeds), np.int64)
    faults: list[Fault] = []
    for column, stream in enumerate(streams):
        name, seeds = stream["name"], reports.seeds[:, column]
        varied = [index for index, axis in enumerate(reports.axes) if axis in stream["varies_over"]]
        if (seeds != UNKNOWN).all():
            keys = [component, *(reports.coordinates[:, index] for index in varied)]
            faults += _unequal("seed", name, "", _groups(keys), seeds)
            for index in varied:
                if index in chosen:
                    others = [reports.coordinates[:, other] for other in varied if other != index]
                    keys = [component, *others, seeds]
                    faults += _repeated(name, reports.axes[index], _groups(keys), reports.coordinates[:, index])
        for index in chosen:
            if reports.axes[index] in stream["lockstep_over"]:
                # Only streams on one seed have positions to compare; other seeds are another fault, or meant: on an
                # axis folded over this one.
                groups = _groups([reports.leaders[:, index], seeds])
                faults += _unequal("position", name, reports.axes[index], groups, reports.digests[:, column])
    return faults


def _components(reports: Reports, chosen: Sequence[int]) -> Any:
    """Return per rank the lowest rank that is reached from it along the chosen axes."""
    label = np.arange(len(reports.leaders))
    while True:
        former = label.copy()
        for index in chosen:
            lowest = np.arange(len(label))
            np.minimum.at(lowest, reports.leaders[:, index], label)
            label = np.minimum(label, lowest[reports.leaders[:, index]])
        if np.array_equal(former, label):
            return label


def _groups(keys: Sequence[Any]) -> Any:
    """Return per rank the number of its group: ranks with equal keys."""
    group: Any = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        _, number = np.unique(key, return_inverse=True)
        _, group = np.unique(group * (number.max() + 1) + number, return_inverse=True)
    return group


def _unequal(kind: str, stream: str, axis: str, group: Any, values: Any) -> Iterator[Fault]:
    """Yield the groups that do not have one value."""
    pairs = _groups([group, values])
    _, first = np.unique(pairs, return_index=True)
    owners, counts = np.unique(group[first], return_counts=True)
    for owner in owners[counts > 1].tolist():
        members = np.flatnonzero(group == owner)
        _, number, sizes = np.unique(values[members], return_inverse=True, return_counts=True)
        largest = np.flatnonzero(sizes == sizes.max())
        odd = members if len(largest) > 1 else members[number != largest[0]]
        yield Fault(kind, stream, axis, tuple(odd.tolist()), tuple(members.tolist()))


def _repeated(stream: str, axis: str, group: Any, positions: Any) -> Iterator[Fault]:
    """Yield the groups, of ranks with one seed, that stand at different positions of an axis."""
    pairs = _groups([group, positions])
    _, first = np.unique(pairs, return_index=True)
    owners, counts = np.unique(group[first], return_counts=True)
    for owner in owners[counts > 1].tolist():
        members = tuple(np.flatnonzero(group == owner).tolist())
        yield Fault("repeat", stream, axis, members, members)


def render(reports: Reports, streams: Sequence[Mapping[str, Any]], faults: Sequence[Fault]) -> str:
    """Return the faults as text: a sentence for each, and a table of the streams concerned on the ranks concerned."""
    sentences = [f"  - {_sentence(reports, fault)}" for fault in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        sentences.append(f"  - ... and {len(faults) - _MOST_FAULTS} more")
    odd = {(rank, fault.stream) for fault in faults for rank in fault.ranks}
    ranks = _ranks_to_show(faults, len(reports.seeds))
    names = [stream["name"] for stream in streams if any(fault.stream == stream["name"] for fault in faults)]
    header = ["rank", *reports.axes, *names]
    rows = [
        [str(rank), *map(str, reports.coordinates[rank].tolist())]
        + [_cell(reports, rank, name) + (" *" if (rank, name) in odd else "") for name in names]
        for rank in ranks
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *rows)]
    hidden = len(reports.seeds) - len(ranks)
    more = [f"  ({hidden} more ranks are not shown)"] if hidden else []
    return "\n".join([*sentences, *lines, *more])


def _ranks_to_show(faults: Sequence[Fault], world_size: int) -> list[int]:
    """Return the ranks that stand out, and of each group one to compare with; then others, as far as there is room."""
    wanted: dict[int, None] = {}
    for fault in faults[:_MOST_FAULTS]:
        wanted.update(dict.fromkeys([*fault.ranks[: _MOST_RANKS // 4], fault.source]))
    for fault in faults[:_MOST_FAULTS]:
        wanted.update(dict.fromkeys(fault.group[:_MOST_RANKS]))
    if world_size <= _MOST_RANKS:
        wanted.update(dict.fromkeys(range(world_size)))
    return sorted(list(wanted)[:_MOST_RANKS])


def _sentence(reports: Reports, fault: Fault) -> str:
    ranks, several = _name_ranks(reports, fault.ranks), len(fault.ranks) > 1
    if fault.kind == "repeat":
        return f"{fault.stream}: {ranks} have one seed, and the stream varies over {fault.axis}"
    if fault.kind == "seed":
        if fault.ranks == fault.group:
            return f"{fault.stream}: {ranks} have different seeds, and must have the same"
        verb = "have" if several else "has"
        return f"{fault.stream}: {ranks} {verb} another seed than rank {fault.source}, and must have the same"
    must = f"and must be in lockstep along {fault.axis}"
    if fault.ranks == fault.group:
        column = reports.streams.index(fault.stream)
        drawn = [int(reports.drawn[rank, column]) for rank in fault.ranks[:4]]
        at = f"positions {', '.join(map(str, drawn))}" if UNKNOWN not in drawn else "different positions"
        return f"{fault.stream}: {ranks} stand at {at}, {must}"
    verb = "stand" if several else "stands"
    return f"{fault.stream}: {ranks} {verb} elsewhere than rank {fault.source}, {must}"


def _name_ranks(reports: Reports, ranks: Sequence[int]) -> str:
    named = [
        f"{rank} ({describe_place(dict(zip(reports.axes, reports.coordinates[rank].tolist(), strict=True)))})"
        for rank in ranks[:4]
    ]
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(named)}{more}"


def _cell(reports: Reports, rank: int, name: str) -> str:
    column = reports.streams.index(name)
    seed, digest, drawn = (int(part[rank, column]) for part in (reports.seeds, reports.digests, reports.drawn))
    start = "" if seed == UNKNOWN else f"{seed % (1 << 64)} "
    return f"{start}+{drawn}" if drawn != UNKNOWN else f"{start}#{digest:016x}"
