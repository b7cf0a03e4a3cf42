# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""ParallelRNG in one process: seeding in place, dictionaries, and files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_engine_ext.errors import (
    LayoutMismatchError,
    SeedCollisionError,
    StateFormatError,
    StreamStateTypeError,
    UnknownStreamError,
)
from transformer_engine_ext.pytorch import CudaRNGStatesTracker
from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec, megatron_streams

NAMES = ["default", "data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"]


def draw(rng: ParallelRNG, device: str) -> dict[str, Tensor]:
    """Draw from every stream, and from the CPU's default generator, which on CUDA is one more."""
    drawn = {"cpu": torch.rand(5), "default": torch.rand(5, device=device)}
    for name in rng.tracker.states_:
        with rng.tracker.fork(name):
            drawn[name] = torch.rand(700, device=device)  # more than one block of the twister
    return drawn


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def seeded(device: str, seed: int = 7) -> ParallelRNG:
    rng = ParallelRNG(None, device=device)
    rng.seed(seed)
    return rng


def test_seed_starts_the_streams_that_megatron_would(device: str) -> None:
    rng = seeded(device, 1234)
    assert [rng.tracker.states_[name].initial_seed() for name in NAMES[1:]] == [1234, 3952, 2258]
    assert rng.tracker.seeds_ == {1234, 3952, 2258}
    assert torch.initial_seed() == 1234
    torch.manual_seed(1234)
    expected = torch.rand(5, device=device)
    rng.seed(1234)
    assert torch.equal(torch.rand(5, device=device), expected)
    with rng.tracker.fork():
        actual = torch.rand(5, device=device)
    torch.manual_seed(3952)
    assert torch.equal(actual, torch.rand(5, device=device))


def test_second_seed_is_in_place(device: str) -> None:
    rng = seeded(device, 1)
    first = draw(rng, device)
    handles = dict(rng.tracker.states_)
    rng.seed(2)
    assert rng.tracker.states_ == handles
    assert all(rng.tracker.states_[name] is handle for name, handle in handles.items())
    other = draw(rng, device)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    rng.seed(1)
    assert equal(draw(rng, device), first)
    assert rng.tracker.seeds_ == {1, 2719, 1025}


def test_reseeding_may_reuse_a_seed_of_another_stream(device: str) -> None:
    rng = seeded(device, 0)
    rng.seed(2718)  # data-parallel-rng gets the seed that model-parallel-rng had
    assert rng.tracker.seeds_ == {2718, 5436, 3742}


def test_a_stream_of_the_user_keeps_its_seed(device: str) -> None:
    tracker = CudaRNGStatesTracker(device)
    tracker.add("mine", 2719)
    rng = ParallelRNG(None, tracker=tracker, device=device)
    with pytest.raises(SeedCollisionError, match=r"'model-parallel-rng' would start from seed 2719, .* stream 'mine'"):
        rng.seed(1)
    assert list(tracker.states_) == ["mine"]
    rng.seed(2)
    assert tracker.seeds_ == {2719, 2, 2720, 1026}
    assert rng.tracker is tracker


def test_state_dict_changes_nothing_and_restores(device: str) -> None:
    rng = seeded(device)
    draw(rng, device)
    state = rng.state_dict()
    assert list(state["streams"]) == NAMES + (["default-cpu"] if device == "cuda" else [])
    kept = copy.deepcopy(state)
    again = rng.state_dict()
    assert equal(again["streams"], state["streams"])
    expected = draw(rng, device)
    assert equal(state["streams"], kept["streams"])  # values, not handles that move on
    handles = dict(rng.tracker.states_)
    rng.load_state_dict(state)
    assert all(rng.tracker.states_[name] is handle for name, handle in handles.items())
    assert equal(draw(rng, device), expected)


def test_save_and_load(device: str, tmp_path: Path) -> None:
    rng = seeded(device)
    draw(rng, device)
    path = tmp_path / "streams.safetensors"
    rng.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    expected = draw(rng, device)
    handles = dict(rng.tracker.states_)
    rng.load(path)
    assert all(rng.tracker.states_[name] is handle for name, handle in handles.items())
    assert equal(draw(rng, device), expected)
    fresh = ParallelRNG({}, device=device)  # as in a new process: nothing was seeded
    fresh.load(path, on_layout_change="error")
    assert equal(draw(fresh, device), expected)
    assert fresh.tracker.seeds_ == rng.tracker.seeds_


def test_streams_of_ones_own(device: str, tmp_path: Path) -> None:
    streams = [*megatron_streams(), StreamSpec("noise", ("tp",), seed_offset=99)]
    rng = ParallelRNG(None, streams, device=device)
    rng.seed(1)
    rng.save(tmp_path / "five")
    expected = draw(rng, device)["noise"]
    rng.load(tmp_path / "five")
    assert torch.equal(draw(rng, device)["noise"], expected)
    four = seeded(device)
    before = four.state_dict()["streams"]
    with pytest.raises(LayoutMismatchError) as caught:
        four.load(tmp_path / "five")
    saved, running = str(caught.value).split("running")
    assert "noise" in saved
    assert "noise" not in running
    assert equal(four.state_dict()["streams"], before)


def test_nothing_to_save_before_seed(device: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownStreamError, match=r"no stream 'data-parallel-rng' to save.*Call seed\(\) or load\(\)"):
        ParallelRNG(None, device=device).save(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_refused_inside_a_fork(device: str, tmp_path: Path) -> None:
    rng = seeded(device)
    state = rng.state_dict()
    rng.save(tmp_path / "file")
    with rng.tracker.fork("expert-parallel-rng"):
        for verb, call in {
            "seed": lambda: rng.seed(1),
            "save": lambda: rng.save(tmp_path / "file"),
            "load": lambda: rng.load(tmp_path / "file"),
        }.items():
            with pytest.raises(RuntimeError, match=rf"cannot {verb} .* inside tracker.fork\('expert-parallel-rng'\)"):
                call()
    assert equal(rng.state_dict()["streams"], state["streams"])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"format": "other"}, StateFormatError, "no dictionary of ParallelRNG"),
        ({"version": 0}, StateFormatError, "of version 0, this release reads version 1"),
        ({"axes": {"tp": 2}}, LayoutMismatchError, "taken with axes {'tp': 2}"),
        ({"world_size": 4}, LayoutMismatchError, "world size 4"),
        ({"streams": {}}, LayoutMismatchError, "this job has"),
        ({"default": torch.zeros(16, dtype=torch.uint8)}, LayoutMismatchError, "saved on a cuda generator"),
        ({"default": torch.zeros(7, dtype=torch.uint8)}, StateFormatError, "got 7"),
        ({"default": torch.zeros(5056)}, StateFormatError, "float32"),
        ({"default": torch.full((5056,), 255, dtype=torch.uint8)}, StateFormatError, "is none"),
        ({"default": b"bytes"}, StreamStateTypeError, "is a bytes"),
    ],
)
def test_d8_wrong_dictionaries_change_nothing(change: dict[str, Any], error: type[Exception], text: str) -> None:
    rng = seeded("cpu")
    state = rng.state_dict()
    if "default" in change:
        state["streams"] = {**state["streams"], **change}
    else:
        state.update(change)
    before = rng.state_dict()["streams"]
    with pytest.raises(error, match=text):
        rng.load_state_dict(state)
    assert equal(rng.state_dict()["streams"], before)


def test_a_dictionary_that_lacks_a_key_is_refused() -> None:
    with pytest.raises(StateFormatError, match="no dictionary"):
        seeded("cpu").load_state_dict({"streams": {}})


def test_load_refuses_a_policy_that_is_not_there_yet(tmp_path: Path) -> None:
    rng = seeded("cpu")
    rng.save(tmp_path / "file")
    with pytest.raises(ValueError, match="on_layout_change='rederive' is not available"):
        rng.load(tmp_path / "file", on_layout_change="rederive")
