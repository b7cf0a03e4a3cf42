# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""A job's streams beside forks and second names on CUDA, on devices that are not there; see _fake_graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from _capture import FakeKit
from transformer_engine_ext.pytorch import CudaRNGStatesTracker
from transformer_engine_ext.pytorch.distributed import ParallelRNG, held_streams


@pytest.fixture(params=[True, False], ids=["before 2.14", "since 2.14"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKit]:
    kit = FakeKit(request.param)
    kit.machine.install(monkeypatch)
    monkeypatch.setattr(held_streams, "Generator", kit.machine.kind)
    return kit  # type: ignore[return-value]


def test_second_name_of_the_default_generator_is_no_open_fork(fake: FakeKit) -> None:
    other = CudaRNGStatesTracker(device="cuda")
    other._states = {"second default": fake.default().graphsafe_get_state()}
    rng = ParallelRNG({}, device="cuda")
    rng.seed(5)
    assert fake.default().initial_seed() == 5
    assert set(rng.states()) >= {"default", "model-parallel-rng", "default-cpu"}


def test_forks_of_any_tracker_are_refused_and_named(fake: FakeKit) -> None:
    other = CudaRNGStatesTracker(device="cuda")
    other.add("theirs", 3)
    rng = ParallelRNG({}, device="cuda")
    rng.seed(5)
    with other.fork("theirs"), pytest.raises(RuntimeError, match=r"cannot seed .*fork\('theirs'\) of another tracker"):
        rng.seed(6)
    with rng.tracker.fork(), pytest.raises(RuntimeError, match=r"cannot save .*fork\('model-parallel-rng'\): there"):
        rng.states()
    rng.seed(7)
    assert fake.default().initial_seed() == 7
