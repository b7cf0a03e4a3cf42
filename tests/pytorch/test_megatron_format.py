# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's rng_state: read and written, live and from checkpoints on disk, without running what those name."""

from __future__ import annotations

import contextlib
import io
import os
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from _helpers import requires_cuda, requires_cuda_devices
from transformer_engine_ext.errors import LayoutMismatchError, StateFormatError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker
from transformer_engine_ext.pytorch.distributed import (
    ParallelRNG,
    StreamSpec,
    megatron_streams,
    read_megatron_rng_state,
)
from transformer_engine_ext.pytorch.distributed.megatron_format import parse_state

KEYS = ["random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states"]


@pytest.fixture(autouse=True)
def host_generators() -> Iterator[None]:
    python, host = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(host)


def seeded(device: str) -> ParallelRNG:
    rng = ParallelRNG(None, device=device)
    rng.seed(1234)
    return rng


def draw(rng: ParallelRNG, device: str) -> dict[str, Any]:
    drawn: dict[str, Any] = {"cpu": torch.rand(5), "default": torch.rand(5, device=device)}
    for name in rng.tracker.states_:
        with rng.tracker.fork(name):
            drawn[name] = torch.rand(700, device=device)
    return {**drawn, "python": random.random(), "numpy": np.random.rand()}


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    assert first.keys() == second.keys()
    return all(
        torch.equal(value, second[name]) if isinstance(value, Tensor) else value == second[name]
        for name, value in first.items()
    )


def as_megatron_saves(rng: ParallelRNG, device: str, *, generators: bool) -> list[dict[str, Any]]:
    """What Megatron's get_rng_state would make of this process, written with torch's names alone."""
    states = rng.tracker.states_
    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state() if device == "cuda" else None,
            "rng_tracker_states": dict(states) if generators else {name: g.get_state() for name, g in states.items()},
        }
    ]


@pytest.mark.parametrize("generators", [False, True])
def test_d6_to_here_in_the_middle_of_a_run(device: str, generators: bool) -> None:
    there = seeded(device)
    draw(there, device)
    saved = as_megatron_saves(there, device, generators=generators)
    if generators:  # a checkpoint holds them as they were; live ones would move on
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=False)
    expected = draw(there, device)
    here = seeded(device)
    handles = dict(here.tracker.states_)
    report = here.load_megatron_rng_state(saved)
    assert set(report.streams.values()) == {"kept"}
    assert all(here.tracker.states_[name] is handle for name, handle in handles.items())
    assert equal(draw(here, device), expected)


@pytest.mark.parametrize("generators", [False, True])
def test_d6_and_back(device: str, generators: bool) -> None:
    rng = seeded(device)
    draw(rng, device)
    saved = rng.megatron_rng_state(generators=generators)
    expected = draw(rng, device)
    (element,) = saved
    assert list(element) == KEYS
    # As Megatron's load does it, with torch's names alone.
    random.setstate(element["random_rng_state"])
    np.random.set_state(element["np_rng_state"])
    torch.set_rng_state(element["torch_rng_state"])
    if device == "cuda":
        torch.cuda.set_rng_state(element["cuda_rng_state"])
    tracker = CudaRNGStatesTracker(device)
    tracker.set_states(element["rng_tracker_states"])
    kinds = {type(state) for state in element["rng_tracker_states"].values()}
    assert kinds == {torch.Generator if generators else Tensor}
    theirs = ParallelRNG(None, tracker=tracker, device=device)
    assert equal(draw(theirs, device), expected)


@pytest.mark.parametrize("policy", ["error", "rederive"])
def test_generators_of_the_host_that_are_streams(policy: str) -> None:
    rng = ParallelRNG(None, include=("python", "numpy"), device="cpu")
    rng.seed(1234)
    np.random.standard_normal(), random.gauss(0, 1)  # a second normal is kept
    state = rng.megatron_rng_state()
    expected = [(random.gauss(0, 1), np.random.standard_normal(), torch.rand(1).item()) for _ in range(3)]
    rng.seed(1234)
    report = rng.load_megatron_rng_state(state, policy)
    assert {report.streams[name] for name in ("python-random", "numpy-random", "default")} == {"kept"}
    assert [(random.gauss(0, 1), np.random.standard_normal(), torch.rand(1).item()) for _ in range(3)] == expected
    only = ParallelRNG(None, include=("numpy",), device="cpu")
    only.seed(1234)
    only.load_megatron_rng_state(state)
    assert random.gauss(0, 1) == expected[0][0]  # restored though it is no stream of that job


def test_a_live_tracker_that_carries_values() -> None:
    rng = seeded("cpu")
    saved = as_megatron_saves(rng, "cpu", generators=False)
    saved[0]["rng_tracker_states"] = rng.tracker.get_states()
    expected = draw(rng, "cpu")
    rng.load_megatron_rng_state(saved)
    assert equal(draw(rng, "cpu"), expected)


def test_one_dictionary_per_data_parallel_rank() -> None:
    rng = seeded("cpu")
    first = rng.megatron_rng_state()
    torch.rand(3)
    second = rng.megatron_rng_state()
    both = first + second
    assert parse_state(both, 1).cpu == parse_state(second).cpu != parse_state(both, 0).cpu
    with pytest.raises(StateFormatError, match=r"states of 2 data-parallel ranks, and this is rank 2"):
        parse_state(both, 2)


MISFITS = {
    "nothing": (None, "got NoneType"),
    "empty": ([], "got NoneType"),
    "other keys": ([{"model": 1}], r"got \['model'\]"),
    "python": ([{"random_rng_state": (3, (1, 2), None)}], "random_rng_state is no state of Python's random"),
    "numpy": ([{"np_rng_state": ("MT19937", [1, 2], 0, 0, 0.0)}], "np_rng_state is no state of numpy.random"),
    "state": ([{"torch_rng_state": torch.zeros(7, dtype=torch.uint8)}], "got 7"),
    "cast": ([{"torch_rng_state": torch.zeros(5056)}], "float32"),
    "tracker": ([{"rng_tracker_states": [1]}], "rng_tracker_states is a list"),
    "stream": ([{"rng_tracker_states": {"model-parallel-rng": "x"}}], "expected an array, got str"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_d8_what_is_no_rng_state_changes_nothing(name: str) -> None:
    wrong, text = MISFITS[name]
    rng = seeded("cpu")
    if wrong and set(wrong[0]) <= set(KEYS):
        wrong = [{**rng.megatron_rng_state()[0], **wrong[0]}]
    random.seed(5)
    before, host = rng.states(), random.getstate()
    with pytest.raises(StateFormatError, match=text):
        rng.load_megatron_rng_state(wrong)
    assert equal(rng.states(), before)
    assert random.getstate() == host


def test_a_checkpoint_from_before_a_stream_existed() -> None:
    streams = (*megatron_streams(), StreamSpec("mtp-hsm-rng", ("dp",), seed_offset=77_777))
    saved = seeded("cpu").megatron_rng_state()
    saved[0]["rng_tracker_states"].pop("expert-parallel-rng")
    saved[0]["rng_tracker_states"]["old-rng"] = torch.Generator().manual_seed(5).get_state()
    rng = ParallelRNG(None, streams, device="cpu")
    rng.seed(1234)
    before = rng.states()
    with pytest.raises(LayoutMismatchError) as caught:
        rng.load_megatron_rng_state(saved)
    for text in (
        "'old-rng': only in the file",
        "'expert-parallel-rng': not in the file",
        "on_stream_change='rederive'",
    ):
        assert text in str(caught.value)
    assert equal(rng.states(), before)
    report = rng.load_megatron_rng_state(saved, on_stream_change="rederive")
    assert report.dropped == ("old-rng",)
    assert [name for name, what in report.streams.items() if what == "added"] == ["expert-parallel-rng", "mtp-hsm-rng"]
    fresh = ParallelRNG(None, streams, device="cpu")
    with pytest.raises(LayoutMismatchError, match="has to be derived anew"):
        fresh.load_megatron_rng_state(saved, on_stream_change="rederive")


def test_streams_of_another_rank_are_noticed() -> None:
    # See Note [Megatron saves some streams of another rank]
    saved = seeded("cpu").megatron_rng_state()
    other = torch.Generator().manual_seed(1234 + 1024 + 100)  # expert rank 1's
    saved[0]["rng_tracker_states"]["expert-parallel-rng"] = other.get_state()
    rng = seeded("cpu")
    with pytest.raises(LayoutMismatchError, match=r"'expert-parallel-rng': started from seed 2358, but from 2258 at"):
        rng.load_megatron_rng_state(saved)
    report = rng.load_megatron_rng_state(saved, on_stream_change="rederive")
    assert [name for name, what in report.streams.items() if what != "kept"] == ["expert-parallel-rng"]
    assert rng.states()["expert-parallel-rng"].tolist() != other.get_state().tolist()


@requires_cuda
def test_streams_of_another_rank_go_on_at_its_offset() -> None:
    rng = seeded("cuda")
    saved = rng.megatron_rng_state()
    state = torch.frombuffer(bytearray(struct.pack("<QQ", 1234 + 1024 + 100, 64)), dtype=torch.uint8)
    saved[0]["rng_tracker_states"]["expert-parallel-rng"] = state
    rng.load_megatron_rng_state(saved, on_stream_change="rederive")
    assert struct.unpack("<QQ", bytes(rng.states()["expert-parallel-rng"].tolist())) == (2258, 64)


class GeneratorOfDevice3:
    """Pickles as a torch.Generator of the fourth GPU does."""

    def __init__(self, seed: int, offset: int) -> None:
        self.values = (seed, offset)

    def __reduce__(self) -> Any:
        state = torch.frombuffer(bytearray(struct.pack("<QQ", *self.values)), dtype=torch.uint8)
        return torch._C.Generator, (torch.device("cuda", 3),), (*self.values, state)


def philox_element(tracked: dict[str, Any]) -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.frombuffer(bytearray(struct.pack("<QQ", 1234, 8)), dtype=torch.uint8),
        "rng_tracker_states": tracked,
    }


STREAM_SEEDS = {"data-parallel-rng": 1234, "model-parallel-rng": 3952, "expert-parallel-rng": 2258}


def write_checkpoint(path: Path, rng_state: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    model = {"weight": torch.ones(1000), "args": Path("settings")}
    torch.save({"model": model, "iteration": 7, "rng_state": rng_state}, path)


def test_d6_d7_generators_of_a_device_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "model_optim_rng.pt"
    write_checkpoint(path, [philox_element({n: GeneratorOfDevice3(s, 64) for n, s in STREAM_SEEDS.items()})])
    ((element,),) = read_megatron_rng_state(path).values()
    assert list(element) == KEYS
    for name, seed in STREAM_SEEDS.items():
        assert struct.unpack("<QQ", bytes(element["rng_tracker_states"][name].tolist())) == (seed, 64)
    assert element["random_rng_state"] == random.getstate()
    assert element["np_rng_state"][1].tolist() == np.random.get_state()[1].tolist()
    assert torch.equal(element["torch_rng_state"], torch.get_rng_state())


@requires_cuda
def test_d6_generators_saved_on_device_3_loaded_on_device_0(tmp_path: Path) -> None:
    path = tmp_path / "model_optim_rng.pt"
    write_checkpoint(path, [philox_element({n: GeneratorOfDevice3(s, 64) for n, s in STREAM_SEEDS.items()})])
    rng = ParallelRNG(None, device="cuda:0")
    rng.seed(1234)
    (saved,) = read_megatron_rng_state(path).values()
    rng.load_megatron_rng_state(saved)
    for name, seed in STREAM_SEEDS.items():
        assert struct.unpack("<QQ", bytes(rng.states()[name].tolist())) == (seed, 64)


@requires_cuda_devices(2)
def test_d6_live_generators_of_another_device() -> None:
    saved = ParallelRNG(None, device="cuda:1")
    saved.seed(1234)
    element = saved.megatron_rng_state(generators=True)
    rng = ParallelRNG(None, device="cuda:0")
    rng.seed(1)
    rng.seed(1234)
    rng.load_megatron_rng_state(element)
    assert all(rng.tracker.states_[name].device == torch.device("cuda", 0) for name in STREAM_SEEDS)


def test_folders_of_the_torch_format(tmp_path: Path) -> None:
    rng = seeded("cpu")
    for tp in range(2):
        torch.rand(1)
        write_checkpoint(
            tmp_path / "iter_0000012" / f"mp_rank_{tp:02d}_001" / "model_optim_rng.pt", rng.megatron_rng_state()
        )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    for path in (tmp_path, tmp_path / "iter_0000012"):
        found = read_megatron_rng_state(path)
        assert list(found) == ["pp 1, tp 0", "pp 1, tp 1"]
        assert torch.equal(found["pp 1, tp 1"][0]["torch_rng_state"], torch.get_rng_state())
        assert not torch.equal(found["pp 1, tp 0"][0]["torch_rng_state"], torch.get_rng_state())


class AsItIs(dcp.DefaultSavePlanner):
    """Writes bytes as they are, as Megatron's planner does; torch's would pickle them once more."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)


@pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint's own, about the missing process group
def test_folders_of_the_torch_dist_format(tmp_path: Path) -> None:
    rng = seeded("cpu")
    items: dict[str, Any] = {"weight": torch.ones(5)}
    expected = []
    for tp in range(2):
        torch.rand(1)
        expected.append(rng.states()["default"])
        data = io.BytesIO()
        torch.save([rng.megatron_rng_state(generators=True)], data)
        items[f"rng_state/shard_0.{tp}_1.2"] = data
    dcp.save(items, checkpoint_id=tmp_path / "iter_0000003", planner=AsItIs(), no_dist=True)
    found = read_megatron_rng_state(tmp_path / "iter_0000003")
    assert list(found) == ["pp 0, tp 0", "pp 0, tp 1"]
    assert [rank[0]["torch_rng_state"].tolist() for rank in found.values()] == [state.tolist() for state in expected]
    rng.load_megatron_rng_state(found["pp 0, tp 0"])
    assert torch.equal(rng.states()["default"], expected[0])


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)

    def __init__(self, target: Path) -> None:
        self.target = target


def test_d7_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    saved = seeded("cpu").megatron_rng_state()
    path = tmp_path / "model_optim_rng.pt"
    torch.save({"rng_state": saved, "model": Harmful(target)}, path)
    assert list(read_megatron_rng_state(path)) == ["the only place"]
    saved[0]["rng_tracker_states"]["model-parallel-rng"] = Harmful(target)
    torch.save({"rng_state": saved}, path)
    with pytest.raises(StateFormatError, match=r"expected an array, got (posix|nt)\.system"):
        read_megatron_rng_state(path)
    assert not target.exists()
    assert "megatron" not in sys.modules


@settings(max_examples=100, deadline=None)
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_is_always_the_same_error(
    flips: list[tuple[float, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    saved = io.BytesIO()
    torch.save({"rng_state": seeded("cpu").megatron_rng_state(generators=True)}, saved)
    data = bytearray(saved.getvalue())
    for place, value in flips:
        data[int(place * len(data))] = value
    path = tmp_path_factory.mktemp("damaged") / "file.pt"
    path.write_bytes(data)
    with contextlib.suppress(StateFormatError, OSError):
        read_megatron_rng_state(path)


def test_foreign_and_damaged_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"model": 1}, path)
    with pytest.raises(StateFormatError, match=r"no Megatron checkpoint with 'rng_state' in it; it holds \['model'\]"):
        read_megatron_rng_state(path)
    torch.save([1], path, _use_new_zipfile_serialization=False)
    with pytest.raises(StateFormatError, match=r"not written by torch\.save of torch 1\.6"):
        read_megatron_rng_state(path)
    write_checkpoint(path, seeded("cpu").megatron_rng_state())
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(StateFormatError, match=r"file\.pt: not written by torch\.save"):
        read_megatron_rng_state(path)
    with pytest.raises(StateFormatError, match=r"neither 'mp_rank_\.\.' folders nor '\.metadata'"):
        read_megatron_rng_state(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_megatron_rng_state(tmp_path / "missing")
    (tmp_path / ".metadata").write_bytes(b"junk")
    with pytest.raises(StateFormatError, match="cannot be read as a pickle"):
        read_megatron_rng_state(tmp_path)
