# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules wrapped by ``torch.distributed.algorithms._checkpoint`` with our function, as TE's FSDP example does."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional as F

from _proof import Proof, assert_one_mask, assert_same_tensors, differing, next_draws
from _regions import Flags, both_engines, flags, grad_of, leaf, new_tracker
from transformer_engine_ext.pytorch import te_checkpoint
from transformer_engine_ext.pytorch.distributed import get_activation_recompute_contexts

FORWARD = Flags(phase=False, recomputing=False, region=True)
RECOMPUTE = Flags(phase=True, recomputing=True, region=True)


class _Block(torch.nn.Module):
    def __init__(self, tracker: Any) -> None:
        super().__init__()
        self.linear, self.tracker, self.proof = torch.nn.Linear(8, 8), tracker, Proof()
        self.seen: list[Flags] = []

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.proof.ran()
        self.seen.append(flags())
        with self.tracker.fork("a"):
            x = F.dropout(x, 0.3)
        return self.linear(self.proof.watch(x.exp())).sin() * scale


@both_engines
def test_checkpoint_wrapper_with_our_function(use_reentrant: bool) -> None:
    """The form that TE's FSDP example uses, with and without the contexts as ``context_fn``."""
    for extra in ({}, {"context_fn": get_activation_recompute_contexts}):
        tracker = new_tracker("a")
        block = _Block(tracker)
        wrapped = checkpoint_wrapper(
            block,
            checkpoint_fn=te_checkpoint,
            use_reentrant=use_reentrant,
            get_rng_state_tracker=lambda tracker=tracker: tracker,
            **extra,
        )
        x = leaf(4, 8)
        y = wrapped(x, scale=2.0)
        block.proof.after_forward()
        y.sum().backward()
        block.proof.after_backward()
        assert block.seen == [FORWARD, RECOMPUTE]
        twin = _Block(new_tracker("a"))
        twin.load_state_dict(block.state_dict())
        other = leaf(4, 8)
        twin(other, scale=2.0).sum().backward()
        assert differing(grad_of(x), grad_of(other)) == 0
        assert differing(grad_of(block.linear.weight), grad_of(twin.linear.weight)) == 0


@both_engines
def test_apply_activation_checkpointing(use_reentrant: bool) -> None:
    """A whole model wrapped in place: names in the state dict stay, gradients and streams are those without."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(9)
        tracker = new_tracker("a")
        blocks = [_Block(tracker) for _ in range(3)]
        model = torch.nn.Sequential(*blocks)
        names = list(model.state_dict())
        if checkpointed:
            apply_activation_checkpointing(
                model,
                checkpoint_wrapper_fn=functools.partial(
                    checkpoint_wrapper,
                    checkpoint_fn=te_checkpoint,
                    use_reentrant=use_reentrant,
                    context_fn=get_activation_recompute_contexts,
                ),
                check_fn=lambda module: isinstance(module, _Block),
            )
            assert list(model.state_dict()) == names
        x = leaf(4, 8)
        y = model(x)
        if checkpointed:
            for block in blocks:
                block.proof.after_forward()
        y.sum().backward()
        if checkpointed:
            for block in blocks:
                block.proof.after_backward()
                assert block.seen == [FORWARD, RECOMPUTE]
        grads = {name: grad_of(p) for name, p in zip(names, model.parameters(), strict=True)}
        results.append({"output": y.detach(), "x": grad_of(x), **grads, **next_draws("cpu", tracker, ("a",))})
    assert_same_tensors(results[1], results[0], "tensors")


def test_masks_under_a_wrapper_around_a_wrapper() -> None:
    """Two wrappers of the same module by mistake: a region in a region, still one mask."""
    proof = Proof()

    class Mask(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            proof.ran()
            return proof.watch(F.dropout(torch.ones_like(x), 0.5)) * x

    wrap = functools.partial(checkpoint_wrapper, checkpoint_fn=te_checkpoint, use_reentrant=False)
    x = torch.ones(64, requires_grad=True)
    y = wrap(wrap(Mask()))(x)
    proof.after_forward()
    y.sum().backward()
    assert proof.runs >= 2
    assert_one_mask(y, x.grad)
