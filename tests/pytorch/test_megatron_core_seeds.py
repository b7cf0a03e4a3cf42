# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The "megatron" derivation and from_megatron() beside the real megatron-core, where that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
from typing import Any

import pytest
import torch

from _helpers import run_distributed
from transformer_engine_ext.pytorch.distributed import derive_seeds, megatron_streams


def _installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ImportError:
        return False


pytestmark = [
    pytest.mark.skipif(not _installed(), reason="megatron-core is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of megatron-core, about what else is not installed
]

AXES = {"pp": 4, "dp": 4, "tp": 8, "ep": 16, "etp": 4}


class Recorder:
    """Stands for megatron-core's tracker, which needs a GPU."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}

    def reset(self) -> None:
        self.seeds.clear()

    def add(self, name: str, seed: int) -> None:
        self.seeds[name] = seed


def megatron_seeds(monkeypatch: pytest.MonkeyPatch, seed: int, **ranks: int) -> dict[str, int]:
    """Run model_parallel_cuda_manual_seed itself, with the generators replaced by a recorder."""
    module: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    recorder = Recorder()
    monkeypatch.setattr(module, "_CUDA_RNG_STATE_TRACKER", recorder)
    monkeypatch.setattr(module, "initialize_rng_tracker", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda value: recorder.seeds.update(default=value))
    taken = inspect.signature(module.model_parallel_cuda_manual_seed).parameters
    module.model_parallel_cuda_manual_seed(seed, **{name: rank for name, rank in ranks.items() if name in taken})
    return {"default": recorder.seeds.pop("default"), **recorder.seeds}


def test_seeds_are_megatron_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    for seed, pp, tp, ep, etp in itertools.product((0, 1234, 2**31), (0, 3), (0, 5, 7), (0, 2, 15), (0, 3)):
        expected = megatron_seeds(monkeypatch, seed + 100 * pp, tp_rank=tp, ep_rank=ep, etp_rank=etp)
        place = {"pp": pp, "tp": tp, "ep": ep, "etp": etp}
        assert derive_seeds("megatron", megatron_streams(), seed, place, AXES, bits=64) == expected
        compared += 1
    assert compared == 108


def test_topology_is_megatron_cores() -> None:
    run_distributed("run_megatron_topology.py", 4)
