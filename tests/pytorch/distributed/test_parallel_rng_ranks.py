# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""ParallelRNG on several ranks: who gets which numbers, files of all ranks, and ranks that die."""

from __future__ import annotations

from pathlib import Path

import pytest

from _helpers import requires_cuda_devices, run_distributed

BACKENDS = [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=requires_cuda_devices(4))]


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_seeding_saving_and_loading(backend: str, device: str, tmp_path: Path) -> None:
    # d3, d4, d5, d9 and files that only some ranks can read; one launch, since starting ranks takes longest.
    run_distributed("run_parallel_rng.py", 4, "--folder", tmp_path, "--backend", backend, "--device", device)


def test_d11_world_of_another_size(tmp_path: Path) -> None:
    run_distributed("run_regroup.py", 2, "--folder", tmp_path)


@pytest.mark.parametrize(("ranks", "seconds"), [(3, 0), (2, 18)], ids=["dead", "late"])
def test_f2_dead_or_late_rank(ranks: int, seconds: float, tmp_path: Path) -> None:
    run_distributed("run_dead_peer.py", ranks, "--folder", tmp_path, "--seconds", seconds)
