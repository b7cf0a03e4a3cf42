# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Streams that would draw the same numbers, found over the whole mesh before anything is drawn."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

from transformer_engine_ext.errors import SeedCollisionError, SeedCollisionWarning
from transformer_engine_ext.pytorch.distributed.derivations import SeedTable
from transformer_engine_ext.pytorch.distributed.streams import (
    DATA_PARALLEL_STREAM,
    DEFAULT_STREAM,
    StreamSpec,
)
from transformer_engine_ext.pytorch.distributed.topology import Layout, describe_place

__all__ = ["audit_seeds"]

#: Lines of the warning's table; a linear formula on a large mesh gives thousands.
_MOST_LINES = 12


# Note [Streams that may share a seed]
# Two streams of one rank on one seed draw the same numbers, which is an error, with two exceptions that the systems
# followed here were built with. Megatron starts the default generator and `data-parallel-rng` from one seed: so these
# two may share it, if they are *declared* the same (offset and axes), which is equal on every rank. Any other stream
# declared like the default one was meant to draw numbers of its own; and families that merely meet on some coordinates
# are what this check is for. ColossalAI starts tensor-parallel rank 0 of the first stage on the data seed: with its
# formula, and only the default generator, that is a warning. Two tracked streams never may: the tracker refuses a
# second stream on one seed too. Streams of different ranks on one seed are a warning: each rank's own numbers are
# right, and Megatron's formula has such pairs on large meshes.
def audit_seeds(tables: Mapping[str, SeedTable], layout: Layout, *, bits: int, derivation: str, level: int = 2) -> None:
    """Compare the seeds of all streams on all ranks, without communication.

    Parameters
    ----------
    tables : mapping of str to SeedTable
        Seeds of the whole mesh.
    layout : Layout
        Where ranks stand. What is not known of other ranks (see :meth:`Layout.places`) is checked on them only.
    bits : int
        How many low bits of a seed the device's generator uses: 64 on CUDA (philox), 32 on the CPU (mt19937).
    derivation : str
        The formula.
    level : int
        ``stacklevel`` of the warning.

    Raises
    ------
    SeedCollisionError
        If two streams of one rank share a seed; names both, and the rank by its coordinates.

    Warns
    -----
    SeedCollisionWarning
        On rank 0, if streams of different ranks share a seed; with a table of seeds, streams and coordinates.
    """
    mask = np.uint64((1 << bits) - 1)
    lines = _within_ranks(tables, layout, mask, bits, derivation)
    count, others = _across_ranks(tables, layout, mask, derivation)
    count, lines = count + len(lines), [*lines, *others]
    if lines and layout.rank == 0:
        shown = [f"  {seed:<20} {first:<44} {second}" for seed, first, second in lines]
        more = [f"  ... and {count - len(lines)} more"] if count > len(lines) else []
        table = "\n".join([f"  {'seed':<20} {'one stream':<44} other stream", *shown, *more])
        warnings.warn(
            f"{count} pair(s) of streams that should differ start from one seed and so draw the same numbers "
            f"(derivation={derivation!r}, {layout.describe()}):\n{table}\n"
            "Seeds from derivation='fold_in' never meet; where two streams do, another seed_offset of one helps too",
            SeedCollisionWarning,
            stacklevel=level + 1,
        )


def _within_ranks(
    tables: Mapping[str, SeedTable], layout: Layout, mask: Any, bits: int, derivation: str
) -> list[tuple[int, str, str]]:
    names, places = list(layout.axes), layout.places()
    used = {name: table.over(names, places) & mask for name, table in tables.items()}
    lines = []
    for first, second in combinations(tables.values(), 2):
        one, other = first.spec, second.spec
        meeting = used[one.name] == used[other.name]
        if not meeting.any() or _same_by_declaration(one, other, derivation):
            continue
        row = int(np.argmax(meeting))
        place = dict(zip(names, places[row].tolist(), strict=True))
        if derivation == "colossalai" and (one.is_default or other.is_default):
            where = f"at {describe_place(place)}"
            lines.append((first.at(place), f"{one.name} {where}", f"{other.name} {where}, the same rank"))
            continue
        more = f" (and on {int(meeting.sum()) - 1} more ranks)" if meeting.sum() > 1 else ""
        raise SeedCollisionError(
            f"streams {one.name!r} (seed {first.at(place)}) and {other.name!r} (seed {second.at(place)}) on the rank "
            f"at {describe_place(place)}{more} would draw the same numbers: the device uses the low {bits} bits of a "
            "seed. Expected a seed per stream; nothing was changed. Give one of them another seed_offset, change the "
            "job's seed if that is what wraps around, or use derivation='fold_in'"
        )
    return lines


def _same_by_declaration(one: StreamSpec, other: StreamSpec, derivation: str) -> bool:
    alike = (one.seed_offset, set(one.varies_over)) == (other.seed_offset, set(other.varies_over))
    return derivation != "fold_in" and alike and {one.name, other.name} == {DEFAULT_STREAM, DATA_PARALLEL_STREAM}


def _across_ranks(
    tables: Mapping[str, SeedTable], layout: Layout, mask: Any, derivation: str
) -> tuple[int, list[tuple[int, str, str]]]:
    """Return how many pairs of cells meet, and a line for each of the first."""
    default = next(table.spec for table in tables.values() if table.spec.is_default)
    # A stream that may share the default's seeds has the default's cells: they would all be reported.
    kept = [
        table
        for table in tables.values()
        if table.spec is default or not _same_by_declaration(default, table.spec, derivation)
    ]
    seeds = np.concatenate([table.seeds.ravel() & mask for table in kept])
    stream: Any = np.repeat(np.arange(len(kept)), [table.seeds.size for table in kept])
    cell = np.concatenate([np.arange(table.seeds.size) for table in kept])
    taken = np.concatenate([_where_ranks_stand(table, layout) for table in kept])
    seeds, stream, cell = seeds[taken], stream[taken], cell[taken]
    order = np.argsort(seeds, kind="stable")
    meeting = np.flatnonzero(seeds[order[1:]] == seeds[order[:-1]])
    lines: list[tuple[int, str, str]] = []
    for index in meeting[:_MOST_LINES]:
        (first, one), (second, other) = (
            (kept[stream[entry]], int(cell[entry])) for entry in order[index : index + 2].tolist()
        )
        lines.append((int(first.seeds.flat[one]), _name_cell(first, one), _name_cell(second, other)))
    return len(meeting), lines


def _where_ranks_stand(table: SeedTable, layout: Layout) -> Any:
    """Return per cell of a table whether a rank has it: folded axes multiply to more cells than there are ranks."""
    stands = np.ones(table.seeds.shape, bool)
    if layout.everyone is not None and table.axes:
        stands[:] = False
        stands[tuple(layout.everyone[:, list(layout.axes).index(axis)] for axis in table.axes)] = True
    return stands.ravel()


def _name_cell(table: SeedTable, number: int) -> str:
    position = np.unravel_index(number, table.seeds.shape) if table.axes else ()
    place = dict(zip(table.axes, map(int, position), strict=True))
    return f"{table.spec.name} at {describe_place(place)}" if place else f"{table.spec.name} on every rank"
