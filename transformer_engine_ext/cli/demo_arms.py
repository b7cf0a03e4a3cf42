# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's training runs ("arms") on one rank, and the bit-for-bit comparison with the first of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_engine_ext.cli.demo_config import CONTRAST, REFERENCE, ModelSize
from transformer_engine_ext.cli.demo_contrast import live_handle_checkpoint
from transformer_engine_ext.cli.demo_model import GPT
from transformer_engine_ext.cli.demo_text import Corpus
from transformer_engine_ext.pytorch.distributed.parallel_rng import ParallelRNG
from transformer_engine_ext.pytorch.recompute import te_checkpoint

__all__ = ["Trace", "Training", "compare"]

_LEARNING_RATE = 3e-3


@dataclass
class Trace:
    """What one arm left behind on this rank.

    Attributes
    ----------
    losses : list of float
        One per step; equal on all ranks.
    gradients : list of torch.Tensor
        Per step all parameters' gradients, ``float32 [parameters]`` on the CPU.
    streams : dict of str to torch.Tensor
        The random-number streams after the last step.
    recomputes : int
        Executions of a block during backward.
    regions : int
        Executions of a block during forward.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    streams: dict[str, Tensor] = field(default_factory=dict)
    recomputes: int = 0
    regions: int = 0


def _engines(rng: ParallelRNG) -> dict[str, Callable[..., Tensor]]:
    def with_engine(use_reentrant: bool) -> Callable[..., Tensor]:
        def run(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            result: Tensor = te_checkpoint(
                block,
                x,
                use_reentrant=use_reentrant,
                get_rng_state_tracker=lambda: rng.tracker,
                tp_group=dist.group.WORLD,
            )
            return result

        return run

    return {
        REFERENCE: lambda block, x: block(x),
        "reentrant": with_engine(True),
        "non-reentrant": with_engine(False),
        CONTRAST: lambda block, x: live_handle_checkpoint(block, rng.tracker, x),
    }


class Training:
    """A model, its optimiser and the job's streams, from one seed.

    Parameters
    ----------
    engine : str
        ``"none"``, ``"reentrant"``, ``"non-reentrant"`` or ``"live handles"``.
    rng : ParallelRNG
        Re-seeded here, so every training starts alike.
    corpus : Corpus
        What to train on.
    size : ModelSize
        How large a model.
    device : torch.device
        Where.
    seed : int
        Seed of the streams and of the order of the data.
    """

    def __init__(
        self, engine: str, rng: ParallelRNG, corpus: Corpus, size: ModelSize, device: torch.device, seed: int
    ) -> None:
        self.rng, self.corpus, self.size, self.device, self.seed = rng, corpus, size, device, seed
        rng.seed(seed)
        ranks = dist.get_world_size()
        self.model = GPT(size, len(corpus.alphabet), ranks, rng.tracker, device, _engines(rng)[engine])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=_LEARNING_RATE)

    def run(self, first: int, last: int, each_step: Callable[[int], Any]) -> Trace:
        """Train for the steps ``first <= step < last``; `each_step` is called before each."""
        trace = Trace()
        counter = self.model.counter
        for step in range(first, last):
            each_step(step)
            tokens, targets = self.corpus.batch(self.size.batch, self.size.length, self.seed + step)
            loss = self.model(tokens.to(self.device), targets.to(self.device))
            counter.in_backward = True
            loss.backward()
            counter.in_backward = False
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            trace.gradients.append(torch.cat([gradient.detach().flatten() for gradient in gradients]).cpu())
            trace.losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        trace.streams = self.rng.states()
        trace.recomputes, trace.regions = counter.backward, counter.forward
        return trace

    def save(self, folder: Path) -> None:
        """Save what a resume needs: this rank's weights and optimiser state, and the streams of all ranks."""
        part = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(part, folder / f"weights-{dist.get_rank()}.pt")
        self.rng.save(folder / "streams.safetensors")

    def load(self, folder: Path) -> None:
        """Load what :meth:`save` wrote."""
        path = folder / f"weights-{dist.get_rank()}.pt"
        part = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(part["model"])
        self.optimizer.load_state_dict(part["optimizer"])
        self.rng.load(folder / "streams.safetensors")


def compare(trace: Trace, reference: Trace, first: int = 0) -> dict[str, Any]:
    """Compare one arm with the reference, bit for bit.

    Parameters
    ----------
    trace : Trace
        The arm.
    reference : Trace
        The arm without checkpointing, over all steps.
    first : int
        The reference's step with which the trace begins.

    Returns
    -------
    dict
        JSON types only: ``losses``, ``max_loss_difference``, ``gradient_elements``, ``mismatching_elements``,
        ``first_mismatching_step`` (None if there is none), ``recomputes``, ``regions``, and ``streams_equal``: whether
        every stream ended where it ended in the reference (None if the arm stops before that).
    """
    steps = range(first, first + len(trace.losses))
    per_step = [
        # As integers: a NaN equals itself then, and 0.0 differs from -0.0.
        int((mine.view(torch.int32) != reference.gradients[step].view(torch.int32)).sum())
        for step, mine in zip(steps, trace.gradients, strict=True)
    ]
    differences = [abs(mine - reference.losses[step]) for step, mine in zip(steps, trace.losses, strict=True)]
    to_the_end = steps.stop == len(reference.losses)
    return {
        "losses": trace.losses,
        # max() would lose a NaN, and a NaN is no agreement.
        "max_loss_difference": math.inf if any(map(math.isnan, differences)) else max(differences),
        "gradient_elements": sum(gradient.numel() for gradient in trace.gradients),
        "mismatching_elements": sum(per_step),
        "first_mismatching_step": next((step for step, count in zip(steps, per_step, strict=True) if count), None),
        "recomputes": trace.recomputes,
        "regions": trace.regions,
        "streams_equal": all(torch.equal(trace.streams[name], reference.streams[name]) for name in reference.streams)
        if to_the_end
        else None,
    }
