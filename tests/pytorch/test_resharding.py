# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Streams on another layout: what is kept, what is derived anew, and that no number is drawn twice."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_engine_ext.errors import LayoutMismatchError, SeedCollisionError
from transformer_engine_ext.pytorch.distributed import StreamSpec, megatron_streams
from transformer_engine_ext.pytorch.distributed.derivations import derive_table
from transformer_engine_ext.pytorch.distributed.resharding import LoadReport, changed_axes, reshard
from transformer_engine_ext.pytorch.distributed.rng_file import encode, read_header, read_row, read_rows
from transformer_engine_ext.pytorch.distributed.saved_streams import fresh_state
from transformer_engine_ext.pytorch.distributed.saved_table import Header, Row
from transformer_engine_ext.pytorch.rng.state import MT19937State

SPECS = (
    *megatron_streams(),
    StreamSpec("per-replica", ("dp",), seed_offset=7777),
    StreamSpec("per-rank", ("pp", "dp", "tp"), seed_offset=500_000),
)


def describe(specs: Sequence[StreamSpec], device: str) -> tuple[dict[str, object], ...]:
    return tuple(
        {
            "name": spec.name,
            "device": device,
            "varies_over": list(spec.varies_over),
            "lockstep_over": list(spec.lockstep_over),
            "seed_offset": spec.seed_offset,
        }
        for spec in specs
    )


class Job:
    """All ranks of a job, simulated: their places and states."""

    def __init__(self, axes: Mapping[str, int], device: str, derivation: str = "megatron") -> None:
        self.axes, self.device = dict(axes), device
        self.places = [dict(zip(axes, place, strict=True)) for place in product(*map(range, axes.values()))]
        self.header = Header(self.axes, len(self.places), describe(SPECS, device), 50, derivation)
        bits = 64 if device == "cuda" else 32
        self.table = derive_table(derivation, SPECS, 50, self.axes, bits=bits)
        self.states: list[dict[str, bytes]] = []
        self.reports: list[LoadReport] = []

    def start(self) -> Job:
        for place in self.places:
            seeds = {spec.name: self.table[spec.name].at(place) for spec in SPECS}
            if self.device == "cuda":
                self.states.append({name: struct.pack("<QQ", seed, 0) for name, seed in seeds.items()})
            else:
                self.states.append({name: fresh_state("mt19937", seed) for name, seed in seeds.items()})
        return self

    def rows(self) -> list[Row]:
        names = self.header.names()
        return [
            Row(tuple(place.values()), tuple(states[name] for name in names))
            for place, states in zip(self.places, self.states, strict=True)
        ]

    def resume(self, axes: Mapping[str, int]) -> Job:
        new = Job(axes, self.device, self.header.derivation)
        rows, saved = self.rows(), self.header
        for rank in range(len(new.places)):
            states, report = reshard(saved, rows, new.header, new.places, rank, fresh_state)
            new.states.append(states)
            new.reports.append(report)
        assert all(report == new.reports[0] for report in new.reports)
        new.header = replace(new.header, generation=new.reports[0].generation)
        return new


def advance(state: bytes, amount: int) -> bytes:
    if len(state) == 16:
        seed, offset = struct.unpack("<QQ", state)
        return struct.pack("<QQ", seed, offset + 4 * amount)
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    torch.rand(amount, generator=generator)
    return bytes(generator.get_state().tolist())


def seed_of(state: bytes) -> int:
    return int(struct.unpack("<QQ", state)[0]) if len(state) == 16 else MT19937State(state).seed


AXES = st.fixed_dictionaries({name: st.integers(1, 3) for name in ("pp", "dp", "tp")})


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["cuda", "cpu"]), st.sampled_from(["megatron", "fold_in"]), st.data())
def test_d5_no_number_is_drawn_twice_over_any_layouts(device: str, derivation: str, data: st.DataObject) -> None:
    """Random layouts one after the other, with random draws between."""
    job = Job(data.draw(AXES), device, derivation).start()
    drawn: dict[int, int] = defaultdict(int)  # philox: seed to furthest offset
    used: set[int] = set()  # twister: seeds
    for axes in data.draw(st.lists(AXES, min_size=1, max_size=3)):
        amounts = {
            (name, tuple(place[axis] for axis in positions)): data.draw(st.integers(0, 3))
            for name in job.header.names()
            for positions in [data.draw(st.sampled_from([("pp", "dp"), ("pp", "dp", "tp"), ()]))]
            for place in job.places
        }
        positions = {name: len(key) for name, key in amounts}
        for place, states in zip(job.places, job.states, strict=True):
            for name in states:
                key = tuple(place[axis] for axis in ("pp", "dp", "tp")[: positions[name]])
                states[name] = advance(states[name], amounts[name, key])
                used.add(seed_of(states[name]))
                if device == "cuda":
                    seed, offset = struct.unpack("<QQ", states[name])
                    drawn[seed] = max(drawn[seed], offset)
        before, rows = job, job.rows()
        job = before.resume(axes)
        assert job.states == before.resume(axes).states  # deterministic
        changed = changed_axes(before.header, job.header)
        for spec in SPECS:
            column = job.header.names().index(spec.name)
            outcome = job.reports[0].streams[spec.name]
            saved = {row.states[column] for row in rows}
            seeds = defaultdict(set)
            for place, states in zip(job.places, job.states, strict=True):
                state = states[spec.name]
                seeds[tuple(place[axis] for axis in spec.varies_over if axis in place)].add(seed_of(state))
                if outcome == "kept":
                    assert state in saved
                elif device == "cuda":
                    seed, offset = struct.unpack("<QQ", state)
                    assert seed == job.table[spec.name].at(place)
                    assert offset >= drawn[seed]
                else:
                    assert seed_of(state) not in used
            assert all(len(found) == 1 for found in seeds.values())  # alike where it does not vary
            assert len(set().union(*seeds.values())) == len(seeds)  # different where it does
            if changed.intersection(spec.varies_over):
                assert outcome == "rederived"
            elif outcome == "rederived":
                assert spec.name in job.reports[0].drifted


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_d5_what_a_change_of_tp_keeps(device: str) -> None:
    job = Job({"dp": 2, "tp": 2}, device).start()
    for place, states in zip(job.places, job.states, strict=True):
        for name in states:  # as declared: in lockstep over tp, but not over dp
            states[name] = advance(states[name], 1 + place["dp"] + (place["tp"] if name == "per-rank" else 0))
    new = job.resume({"dp": 2, "tp": 4})
    report = new.reports[0]
    assert report.streams == {
        "default": "kept",
        "data-parallel-rng": "kept",
        "model-parallel-rng": "rederived",
        "expert-parallel-rng": "kept",
        "per-replica": "kept",
        "per-rank": "rederived",
    }
    assert (report.layout_changed, report.drifted, report.dropped, report.generation) == (True, (), (), 1)
    for place, states in zip(new.places, new.states, strict=True):
        former = job.states[2 * place["dp"]]
        for name in ("default", "data-parallel-rng", "expert-parallel-rng", "per-replica"):
            assert states[name] == former[name]  # its own data-parallel rank's position
    if device == "cuda":
        for place, states in zip(new.places, new.states, strict=True):
            seed = 50 + 2718 + place["tp"]
            assert struct.unpack("<QQ", states["model-parallel-rng"]) == (seed, 8)
            assert struct.unpack("<QQ", states["per-rank"])[1] == 12
    assert new.resume({"tp": 2, "dp": 2}).reports[0].generation == 2


def test_d5_axes_of_size_one_do_not_count() -> None:
    job = Job({"tp": 2}, "cuda").start()
    new = Job({"dp": 1, "tp": 2, "pp": 1}, "cuda")
    assert changed_axes(job.header, new.header) == set()


def test_d5_an_axis_that_nobody_named() -> None:
    # Two ranks on one place become four on one place: all alike.
    job = Job({"tp": 1}, "cuda").start()
    job.places, job.states = job.places * 2, job.states * 2
    new = Job({"tp": 1}, "cuda")
    new.places = new.places * 4
    new.header = replace(new.header, world_size=4)
    states, report = reshard(job.header, job.rows(), new.header, new.places, 3, fresh_state)
    assert states == job.states[0]
    assert set(report.streams.values()) == {"kept"}
    assert report.generation == 0


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_d5_ranks_that_become_one_and_do_not_agree(device: str) -> None:
    job = Job({"dp": 2}, device).start()
    job.states[1]["default"] = advance(job.states[1]["default"], 7)
    new = job.resume({"dp": 1})
    assert new.reports[0].drifted == ("default",)
    state = new.states[0]["default"]
    if device == "cuda":
        assert struct.unpack("<QQ", state) == (50, 28)
    else:
        assert seed_of(state) != 50


def test_a_stream_on_the_seed_of_another_one_starts_behind_it() -> None:
    # On stage 1, "late" gets the seed that "early" had on stage 0, by Megatron's formula.
    specs = (StreamSpec("default", ("pp",), seed_offset=0, is_default=True),)
    early, late = StreamSpec("early", ("pp",), seed_offset=1100), StreamSpec("late", ("pp",), seed_offset=1000)
    saved = Header({"pp": 1}, 1, describe((*specs, early, late), "cuda"), 50)
    states = tuple(struct.pack("<QQ", seed, offset) for seed, offset in ((50, 0), (1150, 400), (1050, 8)))
    running = replace(saved, axes={"pp": 2}, world_size=2)
    found, _ = reshard(saved, [Row((0,), states)], running, [{"pp": 0}, {"pp": 1}], 1, fresh_state)
    assert struct.unpack("<QQ", found["late"]) == (1150, 400)
    assert struct.unpack("<QQ", found["early"]) == (1250, 400)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_d5_streams_that_came_and_went(device: str) -> None:
    job = Job({"tp": 2}, device).start()
    saved = replace(job.header, streams=job.header.streams[:4])  # from before the last two existed
    rows = [Row(row.coordinates, row.states[:4]) for row in job.rows()]
    running = replace(job.header, streams=job.header.streams[1:])
    states, report = reshard(saved, rows, running, [job.places[1]], 0, fresh_state, row=1)
    assert report.streams["per-replica"] == report.streams["per-rank"] == "added"
    assert report.dropped == ("default",)
    assert all(states[name] == job.states[1][name] for name, what in report.streams.items() if what == "kept")
    if device == "cuda":
        assert states["per-rank"] == struct.pack("<QQ", 50 + 500_000 + 1, 0)
    assert states["per-rank"] != reshard(saved, rows, running, [job.places[0]], 0, fresh_state, row=0)[0]["per-rank"]


def test_a_stream_declared_anew_is_derived_anew() -> None:
    job = Job({"tp": 2}, "cuda").start()
    job.states = [{name: advance(state, 3) for name, state in states.items()} for states in job.states]
    streams = tuple({**s, "varies_over": ["dp", "tp"]} if s["name"] == "per-replica" else s for s in job.header.streams)
    running = replace(job.header, streams=streams)
    states, report = reshard(job.header, job.rows(), running, [job.places[1]], 0, fresh_state, row=1)
    assert report.streams["per-replica"] == "rederived"
    assert states["per-replica"] == struct.pack("<QQ", 50 + 7777 + 1, 12)


def test_nothing_can_be_derived_without_the_seed() -> None:
    job = Job({"tp": 2}, "cuda").start()
    job.header = replace(job.header, seed=None)
    with pytest.raises(LayoutMismatchError, match=r"'model-parallel-rng' has to be derived anew.*was never called"):
        job.resume({"tp": 4})


def test_streams_of_one_rank_that_meet_are_refused() -> None:
    # By Megatron's formula, expert 17 starts from the seed of tensor-parallel rank 6.
    places = [{"ep": ep, "tp": tp} for ep in range(18) for tp in range(7)]
    running = Header({"ep": 18, "tp": 7}, len(places), describe(megatron_streams(), "cuda"), 50)
    saved = replace(running, axes={}, world_size=1)
    rows = [Row((), tuple(struct.pack("<QQ", seed, 0) for seed in (50, 50, 2768, 1074)))]
    with pytest.raises(SeedCollisionError, match=r"'model-parallel-rng' and 'expert-parallel-rng' of rank 125 .* 2774"):
        reshard(saved, rows, running, places, 125, fresh_state)


@settings(max_examples=40, deadline=None)
@given(
    axes=st.dictionaries(st.sampled_from(["pp", "dp", "tp", "ep"]), st.integers(1, 3), max_size=3),
    seed=st.none() | st.integers(0, 2**63 - 1),
    engines=st.lists(st.sampled_from(["philox", "mt19937", "python", "numpy"]), min_size=1, max_size=5),
    data=st.data(),
)
def test_every_table_comes_back_from_its_file(
    axes: dict[str, int],
    seed: int | None,
    engines: list[str],
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sizes = {"philox": 16, "mt19937": 5056, "python": 2512, "numpy": 2520}
    streams = tuple(
        {"name": f"s{i}", "device": "cpu", "engine": engine, "varies_over": [], "lockstep_over": [], "seed_offset": i}
        for i, engine in enumerate(engines)
    )
    ranks = data.draw(st.integers(1, 5))
    pick = data.draw(st.lists(st.integers(0, 255), min_size=ranks * len(engines), max_size=ranks * len(engines)))
    rows = [
        Row(
            tuple(data.draw(st.integers(0, size - 1)) for size in axes.values()),
            tuple(bytes([pick[rank * len(engines) + i]]) * sizes[engine] for i, engine in enumerate(engines)),
        )
        for rank in range(ranks)
    ]
    header = Header(axes, ranks, streams, seed)
    path: Path = tmp_path_factory.mktemp("table") / "file"
    path.write_bytes(encode(header, rows))
    found = read_header(path)
    assert replace(found, checksums=()) == header
    assert read_rows(path, found) == rows
    assert [read_row(path, found, rank) for rank in range(ranks)] == rows
