# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's own checkpoint and tracker, before and after ``patch()``; not a line of Megatron is changed.

    python examples/megatron_patch.py

With Transformer Engine's tracker, or with Megatron's graph-safe one, the recompute draws other masks than the forward.
Code that cannot change its imports calls ``transformer_engine_ext.patch()`` once, or runs under
``python -m transformer_engine_ext run pretrain_gpt.py ...``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import transformer_engine_ext

SIZE = 4096


def found(name: str) -> Any:
    """Import a package that may not be here, and say what is in the way."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # not installed, or its native part does not load
        print(f"{name} cannot be imported: {str(error).splitlines()[0]}")
        return None


def mismatches(random: Any) -> int:
    """Return how many elements Megatron's checkpoint recomputes with another mask than its forward."""
    tracker = random.get_cuda_rng_tracker()

    def layer(x: Tensor) -> Tensor:
        with tracker.fork():  # model-parallel-rng
            return F.dropout(x, 0.5)

    x = torch.ones(SIZE, device="cuda", requires_grad=True)
    y = random.checkpoint(layer, False, x)  # False: do not spread the saved input over the ranks
    y.backward(torch.ones_like(y))
    return int((y.detach() != x.grad).sum())  # of ones: the forward's mask against the recompute's


def main() -> int:
    """Return the exit code."""
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here, and Megatron-core and Transformer Engine need one")
        return 0
    if found("transformer_engine.pytorch") is None or found("megatron.core") is None:
        print("skipped: this example shows Megatron-core with Transformer Engine; install both to see it")
        return 0
    from megatron.core.tensor_parallel import random

    # What --te-rng-tracker does; a training script gets there through model_parallel_cuda_manual_seed.
    random.initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)
    random.get_cuda_rng_tracker().add("model-parallel-rng", 1234)

    print(f"as installed: {mismatches(random)} of {SIZE} elements were recomputed with another mask")
    print(transformer_engine_ext.patch())
    after = mismatches(random)
    print(f"after patch(): {after} of {SIZE}")
    transformer_engine_ext.unpatch()
    # A release that fixes it shows 0 both times; then there is nothing to patch.
    return 1 if after else 0


if __name__ == "__main__":
    sys.exit(main())
