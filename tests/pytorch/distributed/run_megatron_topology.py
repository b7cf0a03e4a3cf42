# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_megatron_core_seeds.py: the layout that the real megatron-core sets up, on four ranks."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from _helpers import PASS_TOKEN
from transformer_engine_ext.errors import SeedCollisionWarning
from transformer_engine_ext.pytorch.distributed import ParallelRNG, from_megatron


def main() -> None:
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    for sizes in (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {"tensor_model_parallel_size": 1, "context_parallel_size": 2, "expert_model_parallel_size": 4},
    ):
        parallel_state.initialize_model_parallel(**sizes)
        rng = ParallelRNG(from_megatron(), device="cpu")
        assert rng.layout.coordinates == {
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "dp": parallel_state.get_data_parallel_rank(),
            "cp": parallel_state.get_context_parallel_rank(),
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "ep": parallel_state.get_expert_model_parallel_rank(),
            "etp": parallel_state.get_expert_tensor_parallel_rank(),
        }
        found: list[object] = [None] * 4
        dist.all_gather_object(found, list(rng.layout.coordinates.values()))
        assert rng.layout.everyone is not None
        assert rng.layout.everyone.tolist() == found
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("default", SeedCollisionWarning)
            rng.seed(1)
        rng.verify()
        parallel_state.destroy_model_parallel()
    print(PASS_TOKEN, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
