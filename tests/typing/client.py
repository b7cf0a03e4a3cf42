# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Code of a user who checks with ``mypy --strict`` or with pyright in strict mode; only checked, never run.

Each ``type: ignore`` stands on a line that must be an error: both checkers complain about one that is not needed, and
so find a public name that has lost its types.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import transformer_engine_ext
from transformer_engine_ext import CudaRNGStatesTracker, distributed, patch, patched, te_checkpoint, unpatch
from transformer_engine_ext.errors import RecomputeMismatchError, StreamMismatchError, TEExtError
from transformer_engine_ext.pytorch import checkpoint, in_checkpoint_region, is_recomputing
from transformer_engine_ext.pytorch.distributed import (
    LoadReport,
    ParallelRNG,
    StreamSpec,
    derive_seeds,
    get_all_rng_states,
    megatron_streams,
    register_streams,
    registering_streams,
)
from transformer_engine_ext.testing.guard import RNGGuard

tracker = CudaRNGStatesTracker("cpu")
tracker.add("model-parallel-rng", 1234)
tracker.add("expert-parallel-rng", "1234")  # type: ignore[arg-type]
tracker.reset(1)  # type: ignore[call-arg]
tracker.set_states(tracker.get_states())


def block(x: Tensor) -> Tensor:
    """Draw from a tracked stream, once."""
    if is_recomputing() and not in_checkpoint_region():
        raise RuntimeError
    with tracker.fork():
        return x.exp()


@tracker.fork("model-parallel-rng")
def decorated(x: Tensor, scale: float) -> Tensor:
    """Keep the types of what is decorated."""
    return x * scale


decorated(torch.ones(1), 2.0)
decorated(torch.ones(1), "2")  # type: ignore[arg-type]


def train(rng: ParallelRNG, folder: Path) -> Tensor | None:
    """Use a job's streams."""
    rng.seed(1234)
    rng.seed("1234")  # type: ignore[arg-type]
    try:
        te_checkpoint(block, torch.ones(1), use_reentrant=False, get_rng_state_tracker=lambda: rng.tracker)
        repaired: tuple[str, ...] = rng.verify(axes=("tp",), repair="broadcast")
    except (RecomputeMismatchError, StreamMismatchError) as error:
        raise RuntimeError(str(error)) from error
    except TEExtError:
        return None
    rng.save(folder / "streams.safetensors")
    report: LoadReport = rng.load(folder, on_layout_change="rederive")
    names: list[str] = [*report.streams, *repaired]
    states: dict[str, Tensor] = rng.states()
    return states[names[0]]


te_checkpoint(block, torch.ones(1), use_reentrant="no")  # type: ignore[arg-type]
checkpoint(1)  # type: ignore[arg-type]
distributed.get_all_rng_states(1)  # type: ignore[call-arg]
transformer_engine_ext.te_chekpoint  # type: ignore[attr-defined]  # noqa: B018
version: int = transformer_engine_ext.__version__  # type: ignore[assignment]

jobs = [
    ParallelRNG(None, [StreamSpec("default", ("dp",), lockstep_over=("tp",), is_default=True)], device="cpu"),
    ParallelRNG(None, megatron_streams(), derivation="fold_in"),
]
StreamSpec("default")  # type: ignore[call-arg]
seeds: dict[str, int] = derive_seeds("megatron", megatron_streams(), 1, {"tp": 0}, {"tp": 2}, bits=64)


def capture(graph: torch.cuda.CUDAGraph) -> list[str]:
    """Use what is there for CUDA graphs."""
    register_streams(graph, tracker)
    with registering_streams():
        pass
    return list(get_all_rng_states())


with patched(megatron=False) as report:
    skipped: list[str] = [entry.reason for entry in report.skipped]
patch(te=True, megatron="yes")  # type: ignore[arg-type]
left: list[str] = unpatch()


def test_streams(rng_guard: RNGGuard) -> None:
    """Use the pytest fixture."""
    count: int = rng_guard.recomputes
    assert count == len(rng_guard.problems)
