# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What verify() concludes from the reports of all ranks, beside a comparison of every pair of ranks."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_engine_ext.errors import StreamMismatchError
from transformer_engine_ext.pytorch.distributed import ParallelRNG
from transformer_engine_ext.pytorch.distributed.fingerprints import (
    UNKNOWN,
    Reports,
    Standing,
    agreement_word,
    differ,
    lockstep_word,
    pack_report,
    standing_of,
)
from transformer_engine_ext.pytorch.distributed.mismatches import find_faults, render
from transformer_engine_ext.pytorch.distributed.topology import Layout, axes_in_order, resolve_topology
from transformer_engine_ext.pytorch.distributed.verify import judge
from transformer_engine_ext.pytorch.rng import PhiloxState

AXES = ("pp", "dp", "tp")
Job = tuple[list[Layout], list[dict[str, Any]], list[dict[str, Standing]], "tuple[str, ...] | None"]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw a mesh, declarations, and where each rank's streams stand: mostly as declared."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in draw(st.permutations(AXES))[: draw(st.integers(1, 3))]}
    layouts = [Layout.of_product(sizes, rank) for rank in range(math.prod(sizes.values()))]
    streams = []
    for name in ("default", "other")[: draw(st.integers(1, 2))]:
        varied = draw(st.lists(st.sampled_from(AXES), unique=True))
        free = [axis for axis in AXES if axis not in varied]
        lockstep = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        streams.append({"name": name, "varies_over": varied, "lockstep_over": lockstep})
    standings = []
    for layout in layouts:
        here = {}
        for number, stream in enumerate(streams):
            place = [layout.coordinates.get(axis, 0) for axis in stream["varies_over"]]
            seed = 100 * number + sum(3**index * position for index, position in enumerate(place))
            here[stream["name"]] = Standing(seed, 5)
        standings.append(here)
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(streams))["name"]
        standings[draw(st.integers(0, len(layouts) - 1))][name] = Standing(
            draw(st.integers(0, 9)), draw(st.integers(5, 6))
        )
    axes = draw(st.none() | st.lists(st.sampled_from(AXES), unique=True).map(tuple))
    return layouts, streams, standings, axes


def pairs(job: Job) -> Iterator[tuple[str, str, str, int, int]]:
    """Yield kind, stream, axis and ranks of every pair that does not stand as declared."""
    layouts, streams, standings, axes = job
    names = list(layouts[0].axes)
    chosen = [axis for axis in names if axes is None or axis in axes]
    for (one, here), (other, there) in itertools.combinations(list(enumerate(standings)), 2):
        differing = [axis for axis in names if layouts[one].coordinates[axis] != layouts[other].coordinates[axis]]
        for stream in streams:
            name, mine, theirs = stream["name"], here[stream["name"]], there[stream["name"]]
            varied = [axis for axis in differing if axis in stream["varies_over"]]
            if set(differing) <= set(chosen):
                if not varied and mine.seed != theirs.seed:
                    yield "seed", name, "", one, other
                if len(varied) == 1 and mine.seed == theirs.seed:
                    yield "repeat", name, varied[0], one, other
            along = len(differing) == 1 and differing[0] in chosen and differing[0] in stream["lockstep_over"]
            if along and mine.seed == theirs.seed and mine.digest != theirs.digest:
                yield "position", name, differing[0], one, other


def reports_of(job: Job) -> list[bytes]:
    layouts, streams, standings, _ = job
    axes = layouts[0].axes
    belief = json.dumps({"axes": {axis: axes[axis] for axis in axes_in_order(axes)}, "streams": streams})
    return [pack_report(belief, *reported) for reported in zip(layouts, standings, strict=True)]


@given(jobs())
@settings(max_examples=100, deadline=None)
def test_faults_are_those_of_all_pairs(job: Job) -> None:
    _, streams, _, axes = job
    expected = set(pairs(job))
    reports = Reports.unpack(reports_of(job))
    faults = find_faults(reports, streams, axes)
    assert {(fault.kind, fault.stream, fault.axis) for fault in faults} == {pair[:3] for pair in expected}
    for kind, stream, axis, one, other in expected:
        (fault,) = [
            fault
            for fault in faults
            if (fault.kind, fault.stream, fault.axis) == (kind, stream, axis) and {one, other} <= set(fault.group)
        ]
        assert {one, other} & set(fault.ranks)
        assert fault.source in fault.group
    verdict = json.loads(judge(reports_of(job), streams, axes))
    assert bool(verdict["text"]) == bool(faults) == bool(verdict["faults"])
    if faults:
        text = render(reports, streams, faults)
        assert all(fault.stream in text for fault in faults[:8])


@given(jobs())
@settings(max_examples=100, deadline=None)
def test_the_sum_sees_every_position(job: Job) -> None:
    layouts, streams, standings, axes = job
    lockstep = {stream["name"]: stream["lockstep_over"] for stream in streams}
    total = sum(lockstep_word(here, lockstep, layout, axes) for layout, here in zip(layouts, standings, strict=True))
    wrong = any(
        here[name].digest != standings[peer][name].digest
        for layout, here in zip(layouts, standings, strict=True)
        for name, along in lockstep.items()
        for axis in along
        if axis in layout.peers and (axes is None or axis in axes)
        for peer in layout.peers[axis]
    )
    assert differ(total) == wrong


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=9))
def test_the_sum_sees_every_belief(beliefs: list[str]) -> None:
    total = sum(agreement_word(belief, rank, len(beliefs)) for rank, belief in enumerate(beliefs))
    assert differ(total) == (len(set(beliefs)) > 1)


def test_where_a_state_stands() -> None:
    philox = standing_of(PhiloxState(7, 64).to_tensor())
    assert (philox.seed, philox.drawn) == (7, 64)
    assert philox.digest != standing_of(PhiloxState(7, 68).to_tensor()).digest
    generator = torch.Generator().manual_seed(2**40 + 1)
    torch.rand(700, generator=generator)
    assert standing_of(generator.get_state()).drawn == UNKNOWN
    counted = standing_of(generator.get_state(), count=True)
    assert (counted.seed, counted.drawn) == (2**40 + 1, 700)
    generator.set_state(torch.Generator().manual_seed(3).get_state())
    torch.rand(1 << 19, generator=generator)
    assert standing_of(generator.get_state(), count=True).drawn == UNKNOWN  # too many to count
    assert standing_of(torch.zeros(2512, dtype=torch.uint8)).seed == UNKNOWN


def test_a_table_of_many_ranks_and_streams_is_cut() -> None:
    layouts = [Layout.of_product({"dp": 64, "tp": 8}, rank) for rank in range(512)]
    streams = [{"name": "default", "varies_over": [], "lockstep_over": ["tp"]}]
    standings = [{"default": Standing(2**63 + 5, rank)} for rank in range(512)]
    job: Job = (layouts, streams, standings, None)
    verdict = json.loads(judge(reports_of(job), streams, None))
    assert len(verdict["faults"]) == 64
    lines = verdict["text"].splitlines()
    assert "  - ... and 56 more" in lines
    assert any(str(2**63 + 5) in line for line in lines)  # a seed that needs all 64 bits
    assert lines[-1].endswith("more ranks are not shown)")
    assert len(lines) < 50


def test_one_process(device: str) -> None:
    rng = ParallelRNG(None, device=device)
    with pytest.raises(LookupError, match="no stream 'data-parallel-rng' to verify"):
        rng.verify()
    rng.seed(1)
    assert rng.verify() == ()
    assert rng.verify(axes=("tp",), repair="broadcast") == ()
    with pytest.raises(ValueError, match="repair='gather' is not available; this release accepts 'broadcast'"):
        rng.verify(repair="gather")
    assert issubclass(StreamMismatchError, RuntimeError)


def test_every_counts_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = ParallelRNG(None, device="cpu")
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(rng, "verify", lambda **options: calls.append(options))
    first, second = rng.every(2, axes=("tp",)), rng.every(3, repair="broadcast")
    for step in range(6):
        assert first("optimizer", (), kwargs={}) is None
        second()
        assert len(calls) == (step + 1) // 2 + (step + 1) // 3
    assert calls[0] == {"axes": ("tp",), "repair": None}
    assert calls[1] == {"axes": None, "repair": "broadcast"}
    with pytest.raises(ValueError, match="axes names 'x'"):
        rng.every(2, axes=("x",))


def test_the_layout_of_one_process() -> None:
    layout = resolve_topology(None)
    assert (layout.axes, layout.peers, layout.everyone) == ({}, {}, None)
    assert layout.places().shape == (1, 0)
    assert Layout.of_product({"dp": 2, "tp": 3}, 4).peers == {"dp": (1, 4), "tp": (3, 4, 5)}
    assert Layout.of_product({"dp": 2, "tp": 3}, 4).coordinates == {"dp": 1, "tp": 1}
    assert Layout({"dp": 2, "tp": 2}, {"dp": 0, "tp": 0}, 0, 4).places().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert Layout({"dp": 2, "tp": 2}, {"dp": 1, "tp": 0}, 2, 3).places().tolist() == [[1, 0]]
