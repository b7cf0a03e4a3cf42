# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""ParallelRNG in one process: seeding in place, dictionaries, and files."""

from __future__ import annotations

import copy
import json
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


def entry_of(state_dict: dict[str, Any]) -> dict[str, Any]:
    (entry,) = state_dict.values()
    return entry  # type: ignore[no-any-return]


def test_state_dict_changes_nothing_and_restores(device: str) -> None:
    rng = seeded(device)
    draw(rng, device)
    state = rng.state_dict()
    streams = entry_of(state)["streams"]
    assert list(streams) == NAMES + (["default-cpu"] if device == "cuda" else [])
    kept = copy.deepcopy(streams)
    assert equal(entry_of(rng.state_dict())["streams"], streams)
    assert equal(rng.states(), streams)
    expected = draw(rng, device)
    assert equal(streams, kept)  # values, not handles that move on
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
    before = four.states()
    with pytest.raises(
        LayoutMismatchError, match=r"Saved \['default', .*'noise'.*\], .*'noise': only in the file\. Nothing"
    ):
        four.load(tmp_path / "five")
    assert equal(four.states(), before)


def test_nothing_to_save_before_seed(device: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownStreamError, match=r"no stream 'data-parallel-rng' to save.*Call seed\(\) or load\(\)"):
        ParallelRNG(None, device=device).save(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_refused_inside_a_fork(device: str, tmp_path: Path) -> None:
    rng = seeded(device)
    states = rng.states()
    rng.save(tmp_path / "file")
    with rng.tracker.fork("expert-parallel-rng"):
        for verb, call in {
            "seed": lambda: rng.seed(1),
            "save": lambda: rng.save(tmp_path / "file"),
            "load": lambda: rng.load(tmp_path / "file"),
        }.items():
            with pytest.raises(RuntimeError, match=rf"cannot {verb} .* inside tracker.fork\('expert-parallel-rng'\)"):
                call()
    assert equal(rng.states(), states)


DAMAGES = {
    "other format": ({"format": "other"}, StateFormatError, "of format 'other'"),
    "older version": ({"version": 0}, StateFormatError, "in version 0, this release reads .* in version 1"),
    "no checksum": ({"checksum": None}, StateFormatError, "do not match their checksum"),
    "other axes": ({"axes": {"tp": 2}, "coordinates": [0]}, StateFormatError, "do not match their checksum"),
    "other world": ({"world_size": 4}, LayoutMismatchError, "rank 0 of 4 with axes"),
    "other derivation": ({"derivation": "fold_in"}, LayoutMismatchError, "derivation 'fold_in'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_d8_wrong_descriptions_change_nothing(name: str) -> None:
    change, error, text = DAMAGES[name]
    rng = seeded("cpu")
    state = rng.state_dict()
    entry = entry_of(state)
    description = json.loads(entry["description"])
    for key, value in change.items():
        target = description["header"] if key in description["header"] else description
        target[key] = value
    entry["description"] = json.dumps(description)
    before = rng.states()
    with pytest.raises(error, match=text):
        rng.load_state_dict(state)
    assert equal(rng.states(), before)


STATES = {
    "cut": (torch.zeros(7, dtype=torch.uint8), StateFormatError, "do not match their checksum"),
    "bytes": (b"bytes", StreamStateTypeError, "is a bytes, expected a uint8 tensor"),
    "bool": (torch.zeros(5056, dtype=torch.bool), StateFormatError, r"cast to torch.bool and cannot be read back"),
    "half integers": (torch.full((5056,), 0.5), StateFormatError, r"cast to torch.float32 and cannot be read back"),
}


@pytest.mark.parametrize("name", STATES)
def test_d8_wrong_states_change_nothing(name: str) -> None:
    replacement, error, text = STATES[name]
    rng = seeded("cpu")
    state = rng.state_dict()
    entry_of(state)["streams"]["default"] = replacement
    before = rng.states()
    with pytest.raises(error, match=text):
        rng.load_state_dict(state)
    assert equal(rng.states(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_d8_states_that_a_loader_cast_or_moved_still_load(device: str, dtype: torch.dtype) -> None:
    rng = seeded(device)
    draw(rng, device)
    state = rng.state_dict()
    streams = entry_of(state)["streams"]
    streams.update({name: value.to(device, dtype) for name, value in streams.items()})
    expected = draw(rng, device)
    rng.load_state_dict(state)
    assert equal(draw(rng, device), expected)


@pytest.mark.parametrize("wrong", [None, [], {}, {"streams": {}}, {"model": torch.ones(3)}, "text"])
def test_what_is_no_dictionary_of_ours_is_refused(wrong: Any) -> None:
    with pytest.raises(StateFormatError, match="Nothing was changed"):
        seeded("cpu").load_state_dict(wrong)


def test_load_refuses_a_policy_that_does_not_exist(tmp_path: Path) -> None:
    rng = seeded("cpu")
    rng.save(tmp_path / "file")
    for argument in ("on_layout_change", "on_stream_change"):
        with pytest.raises(ValueError, match=f"{argument}='guess' is not available; .* 'error', 'rederive'"):
            rng.load(tmp_path / "file", **{argument: "guess"})
