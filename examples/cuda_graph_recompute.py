# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpointed block inside CUDA graphs: every replayed recompute uses the masks of its own replayed forward.

    python examples/cuda_graph_recompute.py

``torch.cuda.make_graphed_callables`` captures the forward and the backward of a block as two graphs. The block drops
out ones, so that both masks show: the forward's in the output, the recompute's in the input's gradient.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import functional as F

from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.distributed import registering_streams

SIZE, REPLAYS = 4096, 5


class Block(torch.nn.Module):
    """Dropout by the default generator, then by a tracked stream, recomputed in backward."""

    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.weight = torch.nn.Parameter(torch.ones(SIZE, device="cuda"))

    def drop(self, x: Tensor) -> Tensor:
        x = F.dropout(x * self.weight, 0.5)
        with self.tracker.fork("model-parallel-rng"):
            return F.dropout(x, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        # make_graphed_callables differentiates with torch.autograd.grad, which only this engine supports.
        return te_checkpoint(self.drop, x, use_reentrant=False)


def main() -> int:
    """Return the exit code."""
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here (torch.cuda.is_available() is False), and CUDA graphs need one")
        return 0
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1234)
    block = Block(tracker)
    # Before torch 2.14 a graph must know tracked streams before its capture; from 2.14 on this does nothing.
    with registering_streams():
        graphed = torch.cuda.make_graphed_callables(block, (torch.ones(SIZE, device="cuda", requires_grad=True),))
    wrong, masks = 0, []
    for replay in range(REPLAYS):
        x = torch.ones(SIZE, device="cuda", requires_grad=True)
        y = graphed(x)
        torch.rand(10, device="cuda")  # other work between the forward and the backward
        y.sum().backward()
        different = int((y != x.grad).sum())
        print(f"replay {replay}: {different} of {SIZE} elements were recomputed with another mask")
        wrong += different
        masks.append(y.detach() != 0)
    repeated = sum(bool(torch.equal(a, b)) for i, a in enumerate(masks) for b in masks[:i])
    print(f"{repeated} of the {REPLAYS} replays drew the mask of another replay")
    return 1 if wrong or repeated else 0


if __name__ == "__main__":
    sys.exit(main())
