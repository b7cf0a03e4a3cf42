# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Streams across ranks, and the names of ``transformer_engine.pytorch.distributed`` about checkpoints and streams.

Code that imports those from Transformer Engine needs only the package's name replaced. New here: :class:`StreamSpec`
says on which axes of the parallel layout a stream differs, and :class:`ParallelRNG` seeds, verifies, saves and
restores all streams of a job.
"""

from __future__ import annotations

from transformer_engine_ext.pytorch.distributed.derivations import derive_seed, derive_seeds
from transformer_engine_ext.pytorch.distributed.groups import (
    get_distributed_rank,
    get_distributed_world_size,
    initialize_affine_weight_gpu,
)
from transformer_engine_ext.pytorch.distributed.megatron_checkpoint import read_megatron_rng_state
from transformer_engine_ext.pytorch.distributed.parallel_rng import ParallelRNG
from transformer_engine_ext.pytorch.distributed.resharding import LoadReport
from transformer_engine_ext.pytorch.distributed.streams import (
    StreamSpec,
    colossalai_streams,
    deepspeed_streams,
    megatron_streams,
)
from transformer_engine_ext.pytorch.distributed.topology import from_megatron
from transformer_engine_ext.pytorch.recompute import (
    activation_recompute_forward,
    gather_split_1d_tensor,
    get_activation_recompute_contexts,
    in_checkpoint_region,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
    is_recomputing,
    split_tensor_into_1d_equal_chunks,
    te_checkpoint,
    use_reentrant_activation_recompute,
)
from transformer_engine_ext.pytorch.rng import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    graph_safe_rng_available,
    is_graph_safe_rng_state,
    register_streams,
    registering_streams,
    set_all_rng_states,
)
from transformer_engine_ext.pytorch.rng.registry import get_cuda_rng_state as _get_cuda_rng_state
from transformer_engine_ext.pytorch.rng.registry import set_cuda_rng_state as _set_cuda_rng_state

#: Transformer Engine's name.
checkpoint = te_checkpoint

__all__ = [
    "CudaRNGStatesTracker",
    "LoadReport",
    "ParallelRNG",
    "StreamSpec",
    "_get_cuda_rng_state",
    "_set_cuda_rng_state",
    "activation_recompute_forward",
    "checkpoint",
    "colossalai_streams",
    "deepspeed_streams",
    "derive_seed",
    "derive_seeds",
    "from_megatron",
    "gather_split_1d_tensor",
    "get_activation_recompute_contexts",
    "get_all_rng_states",
    "get_distributed_rank",
    "get_distributed_world_size",
    "graph_safe_rng_available",
    "in_checkpoint_region",
    "in_fp8_activation_recompute_phase",
    "initialize_affine_weight_gpu",
    "is_fp8_activation_recompute_enabled",
    "is_graph_safe_rng_state",
    "is_recomputing",
    "megatron_streams",
    "read_megatron_rng_state",
    "register_streams",
    "registering_streams",
    "set_all_rng_states",
    "split_tensor_into_1d_equal_chunks",
    "te_checkpoint",
    "use_reentrant_activation_recompute",
]
