# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's names of the distributed package, without a process group."""

from __future__ import annotations

import pytest
import torch

from transformer_engine_ext.pytorch import distributed
from transformer_engine_ext.pytorch.distributed import ParallelRNG


def test_without_process_group() -> None:
    assert distributed.get_distributed_world_size() == 1
    with pytest.raises(RuntimeError, match="not initialized"):
        distributed.get_distributed_rank()


def test_initialize_affine_weight_draws_from_the_model_parallel_stream(device: str) -> None:
    rng = ParallelRNG(None, device=device)
    rng.seed(3)
    weight = torch.nn.Parameter(torch.empty(4, 6, device=device))
    before = rng.states()
    distributed.initialize_affine_weight_gpu(weight, torch.nn.init.normal_, lambda: rng.tracker, partition_dim=1)
    after = rng.states()
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["model-parallel-rng"]
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, 1, 1)
    rng.seed(3)
    with rng.tracker.fork():
        expected = torch.nn.init.normal_(torch.empty(4, 6, device=device))
    assert torch.equal(weight, expected)
    with pytest.raises(RuntimeError, match="already has the tensor-parallel attribute 'tensor_model_parallel'"):
        distributed.initialize_affine_weight_gpu(weight, torch.nn.init.zeros_, lambda: rng.tracker)
    assert torch.equal(weight, expected)
    distributed.initialize_affine_weight_gpu(weight, torch.nn.init.zeros_, None, set_tp_attributes=False)
    assert not weight.any()


# The functions and classes of transformer_engine/pytorch/distributed.py (2.20.2) about streams and checkpoints.
TE_NAMES = [
    "checkpoint",
    "CudaRNGStatesTracker",
    "get_all_rng_states",
    "set_all_rng_states",
    "graph_safe_rng_available",
    "is_graph_safe_rng_state",
    "_get_cuda_rng_state",
    "_set_cuda_rng_state",
    "get_distributed_world_size",
    "get_distributed_rank",
    "initialize_affine_weight_gpu",
    "split_tensor_into_1d_equal_chunks",
    "gather_split_1d_tensor",
    "activation_recompute_forward",
    "is_fp8_activation_recompute_enabled",
    "in_fp8_activation_recompute_phase",
    "get_activation_recompute_contexts",
    "use_reentrant_activation_recompute",
]


@pytest.mark.parametrize("name", TE_NAMES)
def test_te_name_is_offered(name: str) -> None:
    assert callable(getattr(distributed, name))
    assert name in distributed.__all__
