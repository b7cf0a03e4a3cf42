# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch: FSDP2 (``fully_shard``) over checkpointed blocks with dropout, without Transformer Engine or Megatron.

    torchrun --nproc_per_node=2 examples/pytorch_fsdp2.py

Every rank has data of its own, so every rank's dropout has a stream of its own. The blocks are wrapped with PyTorch's
``checkpoint_wrapper``, once around ``te_checkpoint`` and once around PyTorch's checkpoint, which knows no tracked
streams, and both are compared with the run without checkpointing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec

WIDTH, LAYERS, ROWS, STEPS = 32, 3, 8, 2


class Block(torch.nn.Module):
    """Two linear layers with dropout between them."""

    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.first, self.second = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        with self.tracker.fork("dropout"):
            hidden = F.dropout(self.first(x).relu(), 0.3)
        return x + self.second(hidden)


def train(checkpoint: Callable[..., Any] | None) -> tuple[list[Tensor], int]:
    """Train from the same seed; return this rank's shares of all gradients, and how often a block ran."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    streams = [
        StreamSpec("default", (), is_default=True),  # the same on all ranks: initialises the model
        StreamSpec("dropout", ("dp",)),  # another seed on every data-parallel rank
    ]
    rng = ParallelRNG(mesh, streams, derivation="fold_in", device="cpu")
    rng.seed(1234)
    blocks = [Block(rng.tracker) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*blocks)
    if checkpoint is not None:
        apply_activation_checkpointing(
            model,
            lambda block: checkpoint_wrapper(block, checkpoint_fn=checkpoint, use_reentrant=False),
            lambda module: isinstance(module, Block),
        )
    # Sharding after wrapping: a block's weights are gathered again for its recompute.
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())  # other data on every rank
    gradients = []
    for _ in range(STEPS):
        loss = model(torch.randn(ROWS, WIDTH, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients += [parameter.grad.to_local().clone() for parameter in model.parameters()]
        optimizer.step()
    return gradients, sum(block.runs for block in blocks)


def main() -> int:
    """Return the exit code."""
    if "LOCAL_RANK" not in os.environ:
        print("start it with: torchrun --nproc_per_node=2 examples/pytorch_fsdp2.py", file=sys.stderr)
        return 2
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    expected, runs = train(None)
    wrong = 0
    for name, checkpoint in (("te_checkpoint", te_checkpoint), ("torch.utils.checkpoint", torch_checkpoint)):
        gradients, runs_here = train(checkpoint)
        different = sum(int((a != b).sum()) for a, b in zip(expected, gradients, strict=True))
        total = sum(gradient.numel() for gradient in expected)
        ours = checkpoint is te_checkpoint
        # PyTorch's is the contrast: if it passed too, this comparison would see nothing.
        right = runs_here == 2 * runs and (different == 0 if ours else different > 0)
        note = "" if ours else ", as expected: it rewinds no tracked stream"
        verdict = "ok   " if right else "WRONG"
        print(f"rank {rank}: {verdict}  {name}: {different} of {total} gradient elements differ{note}", flush=True)
        wrong += not right
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
