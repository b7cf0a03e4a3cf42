# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout in a tensor-parallel block: the ranks draw their own masks where they must, and the same where they must.

    torchrun --nproc_per_node=2 examples/tp_dropout.py

A block in Megatron's way: the hidden layer is split over the ranks, so its dropout must differ from rank to rank (the
tracked stream "model-parallel-rng"); the output is the same tensor on all ranks, so its dropout must be the same on all
(the default generator). The block is checkpointed, and every gradient is compared with the run without checkpointing.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.distributed import ParallelRNG

WIDTH, HIDDEN, ROWS = 32, 64, 16


class CopyToRanks(torch.autograd.Function):
    """The same input on all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' outputs, the same on all."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class Block(torch.nn.Module):
    """A rank's share of two linear layers, with both kinds of dropout; keeps the masks of its last run."""

    def __init__(self, tracker: CudaRNGStatesTracker, ranks: int) -> None:
        super().__init__()
        self.tracker = tracker
        self.first, self.second = torch.nn.Linear(WIDTH, HIDDEN // ranks), torch.nn.Linear(HIDDEN // ranks, WIDTH)
        self.masks: dict[str, Tensor] = {}
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        hidden = self.first(CopyToRanks.apply(x))
        with self.tracker.fork():  # "model-parallel-rng": another seed on every rank
            keep = F.dropout(torch.ones_like(hidden), 0.5)
        out = SumOverRanks.apply(self.second((hidden * keep).relu()))
        keep_out = F.dropout(torch.ones_like(out), 0.5)  # the default generator: one seed for all ranks
        self.masks = {"split": keep, "replicated": keep_out}
        return x + out * keep_out


def train(rank: int, ranks: int, checkpointed: bool) -> dict[str, object]:
    """Train three steps from the same seed; return all that must not depend on checkpointing."""
    rng = ParallelRNG({"tp": dist.group.WORLD}, device="cpu")
    rng.seed(1234)
    block = Block(rng.tracker, ranks)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)  # a generator of its own: the same input on all ranks
    gradients = []
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH, generator=data).requires_grad_()
        y = te_checkpoint(block, x) if checkpointed else block(x)
        optimizer.zero_grad()
        y.square().mean().backward()
        gradients += [x.grad, *(parameter.grad.clone() for parameter in block.parameters())]
        optimizer.step()
    rng.verify()  # the ranks still agree on every stream that they must agree on
    return {"gradients": gradients, "masks": block.masks, "states": rng.states(), "runs": block.runs}


def same_on_all_ranks(tensor: Tensor, ranks: int) -> bool:
    """Tell whether all ranks hold the same values."""
    found = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(found, tensor.contiguous())
    return all(torch.equal(found[0], other) for other in found)


def main() -> int:
    """Return the exit code."""
    if "LOCAL_RANK" not in os.environ:
        print(__doc__.split("\n\n")[1].strip(), "<- start it with this", file=sys.stderr)
        return 2
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if HIDDEN % ranks:
        raise SystemExit(f"the {HIDDEN} hidden units must split over the ranks; got {ranks}")
    plain, checkpointed = (train(rank, ranks, checkpointed) for checkpointed in (False, True))

    pairs = list(zip(plain["gradients"], checkpointed["gradients"], strict=True))
    different = sum(int((a != b).sum()) for a, b in pairs)
    checks = {
        f"{sum(a.numel() for a, _ in pairs)} gradient elements, {different} of them differ": different == 0,
        "every block ran twice per step with checkpointing": (plain["runs"], checkpointed["runs"]) == (3, 6),
        "all streams stand where the run without checkpointing leaves them": all(
            torch.equal(state, checkpointed["states"][name]) for name, state in plain["states"].items()
        ),
        "the mask of the split hidden layer differs between ranks": ranks == 1
        or not same_on_all_ranks(checkpointed["masks"]["split"], ranks),
        "the mask of the replicated output is the same on all ranks": same_on_all_ranks(
            checkpointed["masks"]["replicated"], ranks
        ),
    }
    for text, right in checks.items():
        print(f"rank {rank}: {'ok   ' if right else 'WRONG'}  {text}", flush=True)
    dist.destroy_process_group()
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
