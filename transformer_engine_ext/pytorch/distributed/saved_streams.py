# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Saving and loading the streams of all ranks: who sends what to whom, and what must hold before anything changes."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_engine_ext.errors import LayoutMismatchError, StateFormatError
from transformer_engine_ext.pytorch.distributed import rng_file
from transformer_engine_ext.pytorch.distributed.agreement import (
    agree,
    describe_error,
    raise_relayed,
    rebuild_error,
)
from transformer_engine_ext.pytorch.distributed.atomic_write import write_atomically
from transformer_engine_ext.pytorch.distributed.collectives import ControlGroup
from transformer_engine_ext.pytorch.distributed.host_states import HOST_STREAMS, fresh_host_state
from transformer_engine_ext.pytorch.distributed.resharding import (
    FreshState,
    LoadReport,
    changed_axes,
    changed_streams,
    reshard,
)
from transformer_engine_ext.pytorch.distributed.saved_table import MT19937, Header, Row, bytes_of, digest_of, state_of
from transformer_engine_ext.pytorch.distributed.sources import SavedSource, open_saved
from transformer_engine_ext.pytorch.distributed.topology import Layout, axes_in_order, describe_axes

__all__ = ["fresh_state", "load_streams", "save_streams"]

#: What a rank has: the header as it is here, and its own streams.
Snapshot = Callable[[], tuple[Header, Mapping[str, Tensor]]]


def fresh_state(engine: str, seed: int) -> bytes:
    """Return the state of a stream that starts from a seed, for a kind of state that is not philox."""
    if engine in HOST_STREAMS.values():
        return fresh_host_state(engine, seed)
    if engine != MT19937:
        raise StateFormatError(f"no streams of kind {engine!r} can be made by this release")
    return bytes_of(torch.Generator().manual_seed(seed).get_state())


# Note [A row per rank]
# Each rank sends a digest of what it believes the job to be, its coordinates and its states: a number of bytes that
# does not depend on how many ranks there are. What the digests stand for is only sent where they differ. A rank that
# cannot read its streams sends why, instead of leaving the others waiting.
def save_streams(path: Any, control: ControlGroup, layout: Layout, snapshot: Snapshot) -> None:
    """Gather all ranks' states on rank 0 and write them there; every rank raises if that fails anywhere."""
    what = f"saving the streams to {path}"
    problem: Exception | None = None
    belief = ""
    # See Note [A row per rank]
    try:
        os.fspath(path)
        header, states = snapshot()
        belief = _belief(path, header)
        payload = b"S" + _pack(belief, layout, header, states)
    except Exception as error:
        problem, payload = error, b"E" + describe_error(error)
    payloads = control.gather(payload, what)
    outcome: dict[str, Any] = {}
    if payloads is not None and problem is None:
        outcome = _examine(payloads)
        if not outcome:
            try:
                rows = _unpack(payloads, header)
                # See Note [A save never damages the former file]
                write_atomically(path, rng_file.encode(header, rows))
            except Exception as error:
                problem = error
    if problem is not None and control.rank == 0:
        outcome = {"rank": 0, "error": describe_error(problem).decode()}
    outcome = json.loads(control.broadcast(json.dumps(outcome).encode(), what))
    if "differs" in outcome:
        problem = _difference(control, belief, outcome["differs"], what)
        raise_relayed(control, problem if control.rank == 0 else None, 0, what)
    if problem is not None:
        raise problem
    if outcome:
        raise rebuild_error(outcome["error"].encode(), outcome["rank"], what)


def _belief(path: Any, header: Header) -> str:
    """Return what all ranks must have in common, as text."""
    # As text, since folders of the same name may be mounted elsewhere on another node: only rank 0 writes.
    named = os.path.normpath(os.fsdecode(path))
    return json.dumps({"path": named, **_declarations(header), "seed": header.seed, "generation": header.generation})


def _declarations(header: Header) -> dict[str, Any]:
    axes = {axis: header.axes[axis] for axis in axes_in_order(header.axes)}
    return {"axes": axes, "streams": header.streams, "derivation": header.derivation}


def _pack(belief: str, layout: Layout, header: Header, states: Mapping[str, Tensor]) -> bytes:
    parts = [bytes_of(states[name]) for name in header.names()]
    numbers = [*(layout.coordinates[axis] for axis in axes_in_order(header.axes)), *map(len, parts)]
    return b"".join([digest_of(belief).encode(), np.array(numbers, "<i8").tobytes(), *parts])


def _examine(payloads: Sequence[bytes]) -> dict[str, Any]:
    for rank, payload in enumerate(payloads):
        if payload[:1] == b"E":
            return {"rank": rank, "error": payload[1:].decode()}
    for rank, payload in enumerate(payloads):
        if payload[1:17] != payloads[0][1:17]:
            return {"differs": rank}
    return {}


def _unpack(payloads: list[bytes], header: Header) -> list[Row]:
    rows = []
    axes = len(header.axes)
    columns = [axes_in_order(header.axes).index(axis) for axis in header.axes]
    start = 17 + 8 * (axes + len(header.streams))
    pool: dict[bytes, bytes] = {}  # See Note [Equal states are stored once]
    for rank, payload in enumerate(payloads):
        numbers = np.frombuffer(payload[17:start], "<i8").tolist()
        states, end = [], start
        for size in numbers[axes:]:
            state = payload[end : end + size]
            states.append(pool.setdefault(state, state))
            end += size
        rows.append(Row(tuple(numbers[column] for column in columns), tuple(states)))
        payloads[rank] = b""
    return rows


def _difference(control: ControlGroup, belief: str, rank: int, what: str) -> Exception:
    """Return the error that rank 0 and another one differ; complete on rank 0 only."""
    theirs = json.loads(control.relay(belief.encode(), rank, what))
    mine = json.loads(belief) if belief else {}
    fields = [name for name in mine if mine[name] != theirs.get(name)]
    texts = [f"{name}: rank 0 has {mine[name]}, rank {rank} has {theirs.get(name)}" for name in fields]
    return LayoutMismatchError(
        f"the ranks do not save the same things; {'; '.join(texts)}. Nothing was written; build ParallelRNG with the "
        "same axes, streams and device type on every rank, seed or load on all of them, and give all one path"
    )


# Note [Check everything, agree, then change]
# Loading goes through phases: every rank reads the header and checks it; the ranks tell each other whether that went
# well and that it is one and the same table (its checksum covers all rows); every rank works out its own states and
# checks them; they agree again; and only then does any of them write into a generator. So a failed load leaves no rank
# changed, and no rank trains on while another one stopped.
def load_streams(
    path: Any,
    control: ControlGroup,
    layout: Layout,
    running: Callable[[], Header],
    check: Callable[[Mapping[str, Tensor]], None],
    fresh: FreshState,
    choose: Callable[[], tuple[str, str]],
) -> tuple[Header, dict[str, Tensor], LoadReport]:
    """Return the file's header, this rank's states and what was done, once every rank has them; write nothing."""
    what = f"loading the streams from {path}"
    problem: Exception | None = None
    identity = b""
    try:
        policies = choose()
        here = running()
        source = open_saved(path)
        saved = source.header
        moved = _check_header(path, saved, here, *policies)
        identity = json.dumps([saved.identity, policies, _declarations(here)]).encode()
    except Exception as error:
        problem = error
    first = control.broadcast(identity, what)
    if problem is None and first and first != identity:
        problem = _other_load(path, json.loads(first), json.loads(identity), control.rank)
    agree(control, problem, what)
    places = _all_places(control, layout, here, what) if moved else []
    try:
        if moved or changed_streams(saved, here):
            row = None if moved else _find_row(path, source, layout)
            places = places or [layout.coordinates]
            data, report = reshard(saved, source.rows(), here, places, control.rank if moved else 0, fresh, row=row)
        else:
            found = source.row(_find_row(path, source, layout))
            data = dict(zip(saved.names(), found.states, strict=True))
            report = LoadReport(streams=dict.fromkeys(data, "kept"), generation=saved.generation)
        states = {name: state_of(state) for name, state in data.items()}
        check(states)
    except Exception as error:
        problem = error
    agree(control, problem, what)
    if report.drifted and control.rank == 0:
        warnings.warn(
            f"{path}: {', '.join(report.drifted)} stood at different positions on ranks that hold one and the same "
            "stream now, so no position could be kept; the job goes on with numbers that none of them had drawn. If "
            "they were meant to move in lockstep, verify() before saving finds the rank that did not",
            stacklevel=3,
        )
    return saved, states, report


def _check_header(path: Any, saved: Header, running: Header, on_layout_change: str, on_stream_change: str) -> bool:
    """Return whether the layout is another one; raise if the policies do not allow what differs."""
    moved = bool(changed_axes(saved, running)) or saved.world_size != running.world_size
    if moved and on_layout_change == "error":
        raise LayoutMismatchError(
            f"{path} was saved by another layout: saved {describe_axes(saved.axes, saved.world_size)}, running "
            f"{describe_axes(running.axes, running.world_size)}. Nothing was loaded; resume on the layout that saved "
            "it, pass on_layout_change='rederive' to go on with streams derived from it, or call seed()"
        )
    if saved.derivation != running.derivation:
        raise LayoutMismatchError(
            f"{path} was saved with derivation={saved.derivation!r}, and this job has {running.derivation!r}. Nothing "
            "was loaded; build ParallelRNG with the derivation that was saved"
        )
    changes = changed_streams(saved, running)
    if changes and on_stream_change == "error":
        listed = "; ".join(f"{name!r}: {change}" for name, change in changes.items())
        raise LayoutMismatchError(
            f"{path} holds other streams than this job has. Saved {saved.names()}, running {running.names()}. "
            f"{listed}. Nothing was loaded; declare the streams as they were saved, or pass "
            "on_stream_change='rederive' to drop those that are gone and to derive those that are new"
        )
    return moved


def _other_load(path: Any, first: list[Any], mine: list[Any], rank: int) -> Exception:
    if first[0] != mine[0]:
        return LayoutMismatchError(
            f"{path} is another file on rank {rank} than on rank 0 (checksums {mine[0]} and {first[0]}). Nothing was "
            "loaded; give all ranks one file, on a file system that all of them see"
        )
    return LayoutMismatchError(
        f"rank {rank} does not load the same way as rank 0: rank 0 has {first[1:]}, rank {rank} has {mine[1:]} "
        "(policies, declarations). Nothing was loaded; build and load alike on every rank"
    )


def _all_places(control: ControlGroup, layout: Layout, running: Header, what: str) -> list[dict[str, int]]:
    """Return the coordinates of every rank, on every rank."""
    axes = axes_in_order(running.axes)
    mine = np.array([layout.coordinates[axis] for axis in axes], "<i4").tobytes()
    gathered = control.gather(mine, what)
    table = control.broadcast(b"".join(gathered) if gathered is not None else b"", what)
    rows = np.frombuffer(table, "<i4").reshape(control.world_size, len(axes)).tolist()
    return [dict(zip(axes, row, strict=True)) for row in rows]


def _find_row(path: Any, source: SavedSource, layout: Layout) -> int:
    """Return the rank that saved from where this rank stands now; ranks may have been numbered in another order."""
    saved = source.header
    here = tuple(layout.coordinates.get(axis, 0) for axis in saved.axes)
    table = source.coordinates()
    if table[layout.rank] == here:
        return layout.rank  # also where several ranks stand at one place, since the axes do not name them all
    matches = [rank for rank, place in enumerate(table) if place == here]
    if len(matches) != 1:
        former = dict(zip(saved.axes, table[layout.rank], strict=True))
        raise LayoutMismatchError(
            f"{path}: rank {layout.rank} stands at {layout.coordinates}, from where {len(matches)} ranks saved; the "
            f"rank of that number saved from {former}. Nothing was loaded; place the ranks as in the job that saved"
        )
    return matches[0]
