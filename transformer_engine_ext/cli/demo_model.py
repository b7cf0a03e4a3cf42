# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""A small GPT with Megatron's tensor parallelism, written out.

Each block's first linear layers are split by columns (heads, hidden units), its second ones by rows, so a block needs
one all-reduce after attention and one after the MLP. Dropout appears in both of its places: inside the split part,
where every rank must drop *other* elements (its own stream, under ``tracker.fork()``), and on replicated activations,
where all ranks must drop the *same* ones (the default generator).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from transformer_engine_ext.cli.demo_config import ModelSize
from transformer_engine_ext.pytorch.distributed.groups import initialize_affine_weight_gpu
from transformer_engine_ext.pytorch.rng import CudaRNGStatesTracker

__all__ = ["GPT", "ExecutionCounter"]


@dataclass
class ExecutionCounter:
    """How often blocks ran in the forward pass, and again in backward.

    It does not ask the checkpointing library: the training loop says when backward begins and ends.
    """

    forward: int = 0
    backward: int = 0
    in_backward: bool = False

    def note(self) -> None:
        """Count one execution of a block."""
        if self.in_backward:
            self.backward += 1
        else:
            self.forward += 1


def _copy_to_ranks(x: Tensor) -> Tensor:
    copied: Tensor = _CopyToRanks.apply(x)  # type: ignore[no-untyped-call]
    return copied


def _sum_over_ranks(x: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(x)  # type: ignore[no-untyped-call]
    return total


class _CopyToRanks(torch.autograd.Function):
    """Identity; the gradient is the sum over ranks, since every rank used the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; every rank gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _split_weight(
    rows: int, columns: int, dim: int, tracker: CudaRNGStatesTracker, device: torch.device
) -> nn.Parameter:
    """Return this rank's slice of a weight that is split along `dim`, drawn from the model-parallel stream."""
    weight = nn.Parameter(torch.empty(rows, columns, device=device))
    initialize_affine_weight_gpu(weight, lambda w: nn.init.normal_(w, std=0.05), lambda: tracker, partition_dim=dim)
    return weight


class _Attention(nn.Module):
    def __init__(self, size: ModelSize, ranks: int, tracker: CudaRNGStatesTracker, device: torch.device) -> None:
        super().__init__()
        self.heads, self.dropout, self.tracker = size.heads // ranks, size.dropout, tracker
        share = size.hidden // ranks
        self.qkv = _split_weight(3 * share, size.hidden, 0, tracker, device)
        self.out = _split_weight(size.hidden, share, 1, tracker, device)
        self.bias = nn.Parameter(torch.zeros(size.hidden, device=device))

    def forward(self, x: Tensor) -> Tensor:  # x: (B, T, H)
        batch, length, _ = x.shape
        qkv = F.linear(_copy_to_ranks(x), self.qkv)  # (B, T, 3 H/ranks)
        q, k, v = qkv.view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)  # each (B, heads, T, d)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        with self.tracker.fork():  # heads differ between ranks, and so must their masks
            weights = F.dropout(weights, self.dropout)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, -1)  # (B, T, H/ranks)
        return _sum_over_ranks(F.linear(mixed, self.out)) + self.bias


class _MLP(nn.Module):
    def __init__(self, size: ModelSize, ranks: int, tracker: CudaRNGStatesTracker, device: torch.device) -> None:
        super().__init__()
        self.dropout, self.tracker = size.dropout, tracker
        share = 4 * size.hidden // ranks
        self.up = _split_weight(share, size.hidden, 0, tracker, device)
        self.down = _split_weight(size.hidden, share, 1, tracker, device)
        self.bias = nn.Parameter(torch.zeros(size.hidden, device=device))

    def forward(self, x: Tensor) -> Tensor:  # x: (B, T, H)
        inner = F.gelu(F.linear(_copy_to_ranks(x), self.up))  # (B, T, 4 H/ranks)
        with self.tracker.fork():
            inner = F.dropout(inner, self.dropout)
        return _sum_over_ranks(F.linear(inner, self.down)) + self.bias


class _Block(nn.Module):
    def __init__(
        self,
        size: ModelSize,
        ranks: int,
        tracker: CudaRNGStatesTracker,
        device: torch.device,
        counter: ExecutionCounter,
    ) -> None:
        super().__init__()
        self.dropout, self.counter = size.dropout, counter
        self.norm1 = nn.LayerNorm(size.hidden, device=device)
        self.attention = _Attention(size, ranks, tracker, device)
        self.norm2 = nn.LayerNorm(size.hidden, device=device)
        self.mlp = _MLP(size, ranks, tracker, device)

    def forward(self, x: Tensor) -> Tensor:  # x: (B, T, H), equal on all ranks
        self.counter.note()
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout)  # replicated: the default generator
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout)


class GPT(nn.Module):
    """The model; one rank's part of it.

    Parameters
    ----------
    size : ModelSize
        ``heads`` must be a multiple of `ranks`.
    vocabulary : int
        Number of characters.
    ranks : int
        Tensor-parallel size, that is, the size of the default process group.
    tracker : CudaRNGStatesTracker
        Holds ``"model-parallel-rng"``.
    device : torch.device
        Where the parameters live.
    run_block : callable
        Called as ``run_block(block, x)``: where checkpointing comes in.
    """

    def __init__(
        self,
        size: ModelSize,
        vocabulary: int,
        ranks: int,
        tracker: CudaRNGStatesTracker,
        device: torch.device,
        run_block: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.dropout, self.run_block, self.counter = size.dropout, run_block, ExecutionCounter()
        self.characters = nn.Embedding(vocabulary, size.hidden, device=device)
        self.positions = nn.Embedding(size.length, size.hidden, device=device)
        self.blocks = nn.ModuleList(_Block(size, ranks, tracker, device, self.counter) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden, device=device)
        self.head = nn.Linear(size.hidden, vocabulary, bias=False, device=device)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar that is equal on all ranks; both arguments are ``int64 [B, T]``."""
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(self.characters(tokens) + positions, self.dropout)
        for block in self.blocks:
            x = self.run_block(block, x)
        logits = self.head(self.norm(x))  # (B, T, vocabulary)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
