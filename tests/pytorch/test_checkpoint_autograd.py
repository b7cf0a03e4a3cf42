# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B3: what a user may do with the graph: several backwards, double backward, ``torch.autograd.grad``, partial use.

torch's own reentrant engine rules out ``.grad()``, ``inputs=`` and double backward, so those run non-reentrant only;
what the reentrant engine says then is tested in test_checkpoint_inputs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F

from _proof import Proof, assert_one_mask, differing
from _regions import both_engines, grad_of, leaf, moved, stream_values
from transformer_engine_ext.pytorch import te_checkpoint

Checkpoint = Callable[..., Any]


def _cube(proof: Proof, x: torch.Tensor) -> torch.Tensor:
    proof.ran()
    return proof.watch(x * x) * x


@both_engines
def test_b3_second_backward_with_retain_graph(use_reentrant: bool) -> None:
    """Each backward recomputes once, with the forward's numbers, and keeps nothing for the next."""
    proof, x = Proof(), torch.ones(256, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(F.dropout(torch.ones_like(x), 0.5)) * x

    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    for backwards in (1, 2, 3):
        x.grad = None
        before = stream_values()
        y.sum().backward(retain_graph=True)
        proof.after_backward(runs=1 + backwards)
        assert proof.survivors() == [], "recomputed tensors outlive the backward that needed them"
        assert_one_mask(y, x.grad)
        assert moved(before, stream_values()) == []


@both_engines
def test_b3_backward_a_second_time_without_retain_graph_is_torchs_error(use_reentrant: bool) -> None:
    proof = Proof()
    y = te_checkpoint(_cube, proof, leaf(4), use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    proof.after_backward()


def test_b3_double_backward() -> None:
    """Non-reentrant only. Values, and the count of executions that torch's engine needs for the same."""
    counts = []
    for checkpoint in (torch.utils.checkpoint.checkpoint, te_checkpoint):
        proof, x = Proof(), leaf(8)
        y = checkpoint(_cube, proof, x, use_reentrant=False)
        proof.after_forward()
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.allclose(first, 3 * x * x)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        assert torch.allclose(second, 6 * x)
        (third,) = torch.autograd.grad(second.sum(), x)
        assert torch.allclose(third, torch.full_like(x, 6.0))
        assert proof.runs >= 2
        counts.append(proof.runs)
    assert counts[1] == counts[0]


def test_b3_double_backward_through_a_random_mask() -> None:
    """Non-reentrant only. Every recompute that the second derivative triggers draws the forward's mask."""
    proof, x = Proof(), torch.ones(256, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(F.dropout(torch.ones_like(x), 0.5) * x) * x

    y = te_checkpoint(region, x, use_reentrant=False)
    proof.after_forward()
    before = stream_values()
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert differing(first.detach(), 2 * y.detach()) == 0
    (second,) = torch.autograd.grad(first.sum(), x)
    assert differing(second, 2 * y.detach()) == 0
    assert proof.runs >= 2
    assert moved(before, stream_values()) == []


def test_b3_gradcheck_and_gradgradcheck() -> None:
    """Non-reentrant only: both use ``torch.autograd.grad``."""
    proof = Proof()
    x, w = leaf(5).double().detach().requires_grad_(), leaf(5, seed=2).double().detach().requires_grad_()

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return torch.tanh(x * w).sin() * w

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return te_checkpoint(region, x, w, use_reentrant=False)

    kept = te_checkpoint(_cube, proof, leaf(4), use_reentrant=False)
    proof.after_forward()
    kept.sum().backward()
    proof.after_backward()
    assert torch.autograd.gradcheck(run, (x, w))
    assert torch.autograd.gradgradcheck(run, (x, w))


def test_b3_autograd_grad() -> None:
    """Non-reentrant only. Some of the inputs, an interior result of the user's as input, and nothing accumulated."""
    proof, x, w = Proof(), leaf(8), leaf(8, seed=2)

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(x * w).sin() * w

    hidden = x * 2
    y = te_checkpoint(region, hidden, w, use_reentrant=False)
    proof.after_forward()
    expected = torch.autograd.grad(((hidden * w).sin() * w).sum(), (hidden, w), retain_graph=True)
    (only_hidden,) = torch.autograd.grad(y.sum(), hidden, retain_graph=True)
    assert differing(only_hidden, expected[0]) == 0
    both = torch.autograd.grad(y.sum(), (hidden, w), retain_graph=True)
    assert [differing(a, b) for a, b in zip(both, expected, strict=True)] == [0, 0]
    y.sum().backward(inputs=[w])
    proof.after_backward(runs=4)
    assert differing(grad_of(w), expected[1]) == 0
    assert x.grad is None


@both_engines
def test_b3_two_outputs_used_one_after_the_other(use_reentrant: bool) -> None:
    """A partial backward recomputes; the next one recomputes again, and the gradients add up."""
    proof, x = Proof(), leaf(8)

    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        proof.ran()
        interior = proof.watch(x.exp())
        return interior.sin(), interior.cos()

    first, second = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    first.sum().backward(retain_graph=True)
    expected = torch.autograd.grad(x.exp().sin().sum(), x)[0]
    assert torch.allclose(grad_of(x), expected)
    second.sum().backward()
    expected = expected + torch.autograd.grad(x.exp().cos().sum(), x)[0]
    assert torch.allclose(grad_of(x), expected)
    proof.after_backward(runs=3)


@both_engines
def test_b3_one_of_two_outputs_is_never_used(use_reentrant: bool) -> None:
    proof, x = Proof(), leaf(8)

    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        proof.ran()
        return proof.watch(x.exp()).sin(), x * 3

    used, unused = te_checkpoint(region, x, use_reentrant=use_reentrant)
    assert unused.requires_grad
    proof.after_forward()
    used.sum().backward()
    proof.after_backward()
    assert differing(grad_of(x), torch.autograd.grad(x.exp().sin().sum(), x)[0]) == 0


class _ReadsTwice(torch.autograd.Function):
    """A square whose backward reads ``ctx.saved_tensors`` twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        return grad * (first + second)


def _outcome(checkpoint: Checkpoint) -> tuple[type[BaseException] | None, torch.Tensor | None, int]:
    proof, x = Proof(), leaf(4)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return _ReadsTwice.apply(proof.watch(x.exp()))

    y = checkpoint(region, x, use_reentrant=False)
    proof.after_forward()
    try:
        y.sum().backward()
    except RuntimeError as error:
        return torch.utils.checkpoint.CheckpointError if _is_checkpoint_error(error) else type(error), None, proof.runs
    return None, x.grad, proof.runs


def _is_checkpoint_error(error: BaseException) -> bool:
    return isinstance(error, torch.utils.checkpoint.CheckpointError)


def test_b3_saved_tensors_read_twice_non_reentrant() -> None:
    """As torch: a recomputed tensor is handed out once, so the second reading is a CheckpointError."""
    theirs, ours = _outcome(torch.utils.checkpoint.checkpoint), _outcome(te_checkpoint)
    assert theirs[0] is torch.utils.checkpoint.CheckpointError, "torch changed; look at the rule again"
    assert ours == theirs


def test_b3_saved_tensors_read_twice_reentrant() -> None:
    """The recomputed graph of the reentrant engine holds real saved tensors, which may be read again."""
    proof, x = Proof(), leaf(4)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return _ReadsTwice.apply(proof.watch(x.exp()))

    y = te_checkpoint(region, x, use_reentrant=True)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert torch.allclose(grad_of(x), torch.autograd.grad((x.exp() ** 2).sum(), x)[0])


@both_engines
def test_b3_input_edited_in_place_after_forward_is_an_error(use_reentrant: bool) -> None:
    """The recompute would see other values than forward did: torch's version check must fire, not a wrong gradient."""
    proof, x = Proof(), leaf(4)
    hidden = x * 1
    y = te_checkpoint(_cube, proof, hidden, use_reentrant=use_reentrant)
    proof.after_forward()
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert x.grad is None


@both_engines
def test_b3_hooks_of_tensors_and_modules_fire_once(use_reentrant: bool) -> None:
    calls: list[str] = []
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
    proof, x = Proof(), leaf(3, 4)
    module[1].register_forward_hook(lambda _m, _i, output: (proof.ran(), proof.watch(output))[1])
    module[0].weight.register_post_accumulate_grad_hook(lambda _p: calls.append("accumulated"))
    module[0].weight.register_hook(lambda _g: calls.append("weight"))
    module.register_full_backward_hook(lambda *_: calls.append("module"))
    x.register_hook(lambda _g: calls.append("input"))
    y = te_checkpoint(module, x, use_reentrant=use_reentrant)
    y.register_hook(lambda _g: calls.append("output"))
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert sorted(calls) == ["accumulated", "input", "module", "output", "weight"]
