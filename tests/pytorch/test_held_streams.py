# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Which generators ParallelRNG seeds, reads and writes, when it cannot tell, and those of Python and numpy."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_engine_ext.errors import SeedCollisionError, StateFormatError, StreamStateTypeError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker
from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec, megatron_streams
from transformer_engine_ext.pytorch.distributed.host_states import (
    HOST_STATE_BYTES,
    fresh_host_state,
    read_host,
    write_host,
)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def seeded(device: str = "cpu", seed: int = 7, **arguments: object) -> ParallelRNG:
    rng = ParallelRNG(None, device=device, **arguments)  # type: ignore[arg-type]
    rng.seed(seed)
    return rng


def test_seed_after_the_streams_were_replaced(device: str) -> None:
    rng = seeded(device)
    foreign = CudaRNGStatesTracker(device)
    for number, name in enumerate(rng.tracker.states_):
        foreign.add(name, 100 + number)
    rng.tracker.set_states(dict(foreign.states_))
    assert set(rng.tracker.seeds_) == {7, 2725, 1031}  # those of streams that are gone
    rng.seed(7)
    assert all(rng.tracker.states_[name] is handle for name, handle in foreign.states_.items())
    assert [handle.initial_seed() for handle in rng.tracker.states_.values()] == [7, 2725, 1031]
    assert rng.tracker.seeds_ == {7, 2725, 1031}
    rng.tracker.set_states({})
    rng.seed(7)
    assert set(rng.tracker.states_) == {"data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"}


def test_a_stream_of_the_user_is_seen_modulo_what_the_device_uses() -> None:
    tracker = CudaRNGStatesTracker("cpu")
    tracker.add("mine", 2719 + (1 << 32))
    rng = ParallelRNG(None, tracker=tracker, device="cpu")
    with pytest.raises(SeedCollisionError, match="the tracker's stream 'mine' draws already"):
        rng.seed(1)
    assert list(tracker.states_) == ["mine"]


def test_another_trackers_fork_is_open(device: str, tmp_path: Path) -> None:
    rng = seeded(device)
    before = rng.states()
    other = CudaRNGStatesTracker(device)
    other.add("theirs", 5)
    with other.fork("theirs"):
        for verb, call in {
            "seed": lambda: rng.seed(7),
            "save": lambda: rng.save(tmp_path / "file"),
            "verify": rng.verify,
        }.items():
            with pytest.raises(RuntimeError, match=rf"cannot {verb} .*fork\('theirs'\) of another tracker"):
                call()
    after = rng.states()
    assert all(torch.equal(before[name], after[name]) for name in before)
    del other
    gc.collect()
    rng.seed(7)


def test_a_second_name_of_the_default_generator_is_no_fork() -> None:
    other = CudaRNGStatesTracker("cpu")
    other.set_states({"alias": torch.default_generator})
    rng = seeded()
    assert torch.equal(rng.states()["default"], torch.get_rng_state())
    assert list(other.states_) == ["alias"]


def test_the_fork_of_a_tracker_that_is_gone() -> None:
    rng = seeded()
    other = CudaRNGStatesTracker("cpu")
    other.add("theirs", 5)
    fork = other.fork("theirs")
    fork.__enter__()
    try:
        fork._tracker = None  # type: ignore[assignment]
        del other
        gc.collect()
        with pytest.raises(RuntimeError, match="bound to a stream of a tracker that is gone"):
            rng.states()
    finally:
        fork.__exit__(None, None, None)
    rng.states()


@pytest.mark.parametrize("state", [torch.Generator().get_state(), "cuda"], ids=["bytes", "other device"])
def test_streams_that_cannot_be_written(state: object, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = seeded()

    class OnCuda(torch.Generator):
        device = torch.device("cuda", 3)  # type: ignore[assignment]

    rng.tracker.states_["data-parallel-rng"] = OnCuda() if state == "cuda" else state  # type: ignore[assignment]
    text = "holds a generator of cuda:3" if state == "cuda" else "as a Tensor; ParallelRNG writes in place"
    for call in (lambda: rng.seed(7), rng.states):
        with pytest.raises(StreamStateTypeError, match=text):
            call()


@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_host_states(kind: str) -> None:
    draw = {"python": lambda: [random.gauss(0, 1), random.random()], "numpy": lambda: np.random.randn(3).tolist()}[kind]
    for _ in range(2):  # an odd number of normals leaves one in the state
        state = read_host(kind)
        assert (state.dtype, state.numel()) == (torch.uint8, HOST_STATE_BYTES)
        kept, expected = state.clone(), draw()
        assert torch.equal(state, kept)
        write_host(kind, state)
        assert draw() == expected
    before = read_host(kind)
    data = torch.frombuffer(bytearray(fresh_host_state(kind, 11)), dtype=torch.uint8)
    assert torch.equal(read_host(kind), before)
    write_host(kind, data)
    fresh = draw()
    (random.seed if kind == "python" else np.random.seed)(11)
    assert draw() == fresh


def test_python_and_numpy_are_seeded_saved_and_restored(device: str, tmp_path: Path) -> None:
    rng = seeded(device, 5 + (1 << 32), include=("python", "numpy"))
    assert (random.random(), np.random.rand()) == (
        random.Random(5 + (1 << 32)).random(),
        np.random.RandomState(5).rand(),  # numpy takes 32 bits
    )
    names = list(rng.states())
    assert names[-2:] == ["python-random", "numpy-random"]
    np.random.randn()
    state = copy.deepcopy(rng.state_dict())
    rng.save(tmp_path / "file")
    expected = (random.random(), np.random.randn(), torch.rand(1).item())
    rng.load_state_dict(state)
    assert (random.random(), np.random.randn(), torch.rand(1).item()) == expected
    rng.load(tmp_path / "file")
    assert (random.random(), np.random.randn(), torch.rand(1).item()) == expected


def test_host_generators_are_left_alone_unless_asked() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    rng = seeded()
    rng.states()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_damaged_host_state_changes_nothing() -> None:
    rng = seeded(include=["numpy", "python"])
    good = rng.states()
    for name in ("python-random", "numpy-random"):
        for bad in (good[name][:-1], good[name].float(), torch.full_like(good[name], 255)):
            with pytest.raises(StateFormatError, match=f"stream '{name}'"):
                rng._held.write({**good, name: bad})
    torch.rand(3)
    with pytest.raises(StateFormatError):
        rng._held.write({**good, "numpy-random": good["numpy-random"][1:]})
    assert not torch.equal(rng.states()["default"], good["default"])


def test_a_numpy_generator_of_another_kind() -> None:
    rng = seeded(include=["numpy"])
    former = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(StreamStateTypeError, match="numpy's global generator is a PCG64"):
            rng.states()
    finally:
        np.random.set_bit_generator(former)


@pytest.mark.parametrize(
    ("include", "error", "text"),
    [
        ("python", TypeError, r"a sequence such as \('python', 'numpy'\), got 'python'"),
        (["cpu"], ValueError, "include='cpu' is not available; this release accepts 'numpy', 'python'"),
    ],
)
def test_include_refused(include: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ParallelRNG(None, include=include, device="cpu")  # type: ignore[arg-type]


def test_names_of_host_streams_are_taken() -> None:
    with pytest.raises(ValueError, match="'python-random' is taken: it stands for the global generator of python"):
        ParallelRNG(None, [*megatron_streams(), StreamSpec("python-random", (), seed_offset=3)], device="cpu")
