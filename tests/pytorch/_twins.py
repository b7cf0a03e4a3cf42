# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Run one program twice from the same streams, with checkpointing and without, and compare everything.

A program is a function of a :class:`Bench` that returns its outputs; it calls ``bench.checkpoint`` where it wants a
region. :func:`compare` then asserts that outputs, gradients and the next draw of every stream agree bit for bit, that
the gradient belongs to the output's dropout mask, and that a recompute took place at all (:class:`_proof.Proof`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from _proof import Proof, assert_one_mask, assert_same_tensors, next_draws, plain_checkpoint
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

SIZE = 512
SEED = 20260
STREAM_SEEDS = {"a": 101, "b": 202, "c": 303}

Outputs = torch.Tensor | Sequence[torch.Tensor]
Program = Callable[["Bench"], Outputs]


class Bench:
    """Everything one run of a program works with; both twins start from equal benches.

    Attributes
    ----------
    x, w
        Leaves of ones: the input, whose gradient is a mask, and a factor, whose product saves what it multiplies.
    tracker
        Holds the streams ``a``, ``b`` and ``c``.
    also
        Further trackers, all of whose streams must agree between the twins too.
    checkpoint
        ``te_checkpoint`` with one engine chosen, or a plain call.
    skip_streams
        Leave the tracker's own streams out of the comparison.
    checkpointed
        Whether this is the twin with checkpointing.
    """

    def __init__(self, device: str, use_reentrant: bool | None, pass_tracker: bool = True, tracker: Any = None) -> None:
        torch.manual_seed(SEED)
        self.device = device
        self.checkpointed = use_reentrant is not None
        self.proof = Proof()
        self.x = torch.ones(SIZE, device=device, requires_grad=True)
        self.w = torch.ones(SIZE, device=device, requires_grad=True)
        self.leaves = {"x": self.x, "w": self.w}
        if tracker is None:
            tracker = CudaRNGStatesTracker(device=device)
            for name, seed in STREAM_SEEDS.items():
                tracker.add(name, seed)
        self.tracker = tracker
        self.skip_streams = False
        self.also: list[Any] = []
        options = {"get_rng_state_tracker": self.get_tracker} if pass_tracker else {}
        if use_reentrant is None:
            self.checkpoint: Callable[..., Any] = functools.partial(plain_checkpoint, **options)
        else:
            self.checkpoint = functools.partial(te_checkpoint, use_reentrant=use_reentrant, **options)

    @property
    def names(self) -> tuple[str, ...]:
        """The streams that the tracker holds now."""
        return () if self.skip_streams else tuple(self.tracker.get_states())

    def get_tracker(self) -> Any:
        """The callable that users pass as ``get_rng_state_tracker``."""
        return self.tracker

    def gate(self, h: torch.Tensor) -> torch.Tensor:
        """Multiply by ones in a way that saves ``h`` for backward, and watch it."""
        return self.proof.watch(h) * self.w

    def forward_done(self, runs: int = 1) -> None:
        """The proof between forward and backward; nothing for the twin without checkpointing."""
        if self.checkpointed:
            self.proof.after_forward(runs)

    def backward_done(self, runs: int = 2) -> None:
        """The proof after backward; nothing for the twin without checkpointing."""
        if self.checkpointed:
            self.proof.after_backward(runs)

    def outcome(self, outputs: Outputs) -> dict[str, torch.Tensor]:
        """Name every value that must agree between the twins."""
        if isinstance(outputs, torch.Tensor):
            outputs = [outputs]
        named = {f"output {index}": value.detach() for index, value in enumerate(outputs)}
        named |= {f"gradient of {name}": leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}
        draws = next_draws(self.device, self.tracker, self.names)
        for index, tracker in enumerate(self.also):
            also = next_draws(self.device, tracker, tracker.get_states())
            draws |= {f"{name} of further tracker {index}": draw for name, draw in also.items()}
        return named | {f"next {name}": draw for name, draw in draws.items()}


def drop(x: torch.Tensor) -> torch.Tensor:
    """Dropout of one half: zeros and twos out of ones, exact in every float format."""
    return F.dropout(x, 0.5)


def run_forward_backward(bench: Bench, program: Program, regions: int = 1) -> dict[str, torch.Tensor]:
    """Run a program whose outputs still await their one backward."""
    outputs = program(bench)
    bench.forward_done(regions)
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    torch.autograd.backward([t.sum() for t in tensors if t.requires_grad])
    bench.backward_done(2 * regions)
    return bench.outcome(outputs)


def compare(
    program: Program,
    device: str,
    use_reentrant: bool,
    *,
    regions: int = 1,
    mask: bool = True,
    run: Callable[..., dict[str, torch.Tensor]] = run_forward_backward,
    make_tracker: Callable[[str], Any] | None = None,
    pass_tracker: bool = True,
) -> Bench:
    """Assert that a program gives the same with checkpointing as without, and return the checkpointed twin.

    Parameters
    ----------
    program
        Its function calls ``bench.proof.ran()`` once per execution.
    regions
        How many times forward executes the region's function.
    mask
        The program's only output is the product of dropout masks of ``x``: then the gradient must equal it.
    run
        Runs forward and backward of one twin and returns what to compare.
    make_tracker
        Makes the tracker of a device, instead of one with the streams a, b and c.
    """
    outcomes = []
    for engine in (None, use_reentrant):
        tracker = None if make_tracker is None else make_tracker(device)
        bench = Bench(device, engine, pass_tracker, tracker)
        outcomes.append(run(bench, program, regions))
    if mask:
        assert_one_mask(outcomes[1]["output 0"], outcomes[1].get("gradient of x"))
    assert_same_tensors(outcomes[1], outcomes[0], "values")
    return bench
