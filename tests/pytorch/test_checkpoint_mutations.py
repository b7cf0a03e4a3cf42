# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B3, B5: arguments that change between forward and recompute. The gradient is right or there is an error (rule: no
silent difference), in both engines and wherever the tensor or container sits among the arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from _proof import Proof, differing
from _regions import OUTSIDE, both_engines, flags, grad_of, leaf, moved, stream_values
from transformer_engine_ext.pytorch import te_checkpoint


class _Region:
    """Multiplies two tensors, wherever they come from; saves an interior tensor."""

    def __init__(self) -> None:
        self.proof = Proof()

    def __call__(self, x: torch.Tensor, b: Any) -> torch.Tensor:
        self.proof.ran()
        while not isinstance(b, torch.Tensor):
            b = b["b"] if isinstance(b, dict) else b[0]
        return self.proof.watch((x * b).exp()).sin() * b


_PLACES: dict[str, Callable[[torch.Tensor], Any]] = {
    "positional": lambda b: ((b,), {}),
    "keyword": lambda b: ((), {"b": b}),
    "list": lambda b: (([b],), {}),
    "keyword, nested": lambda b: ((), {"b": {"b": (b,)}}),
}
each_place = pytest.mark.parametrize("place", _PLACES.values(), ids=_PLACES)


@both_engines
@each_place
@pytest.mark.parametrize("requires_grad", [True, False], ids=["with grad", "without grad"])
def test_b3_argument_edited_after_forward_is_an_error(use_reentrant: bool, place: Any, requires_grad: bool) -> None:
    region, x, b = _Region(), leaf(4), leaf(4, seed=2).requires_grad_(requires_grad)
    hidden = b * 1
    args, kwargs = place(hidden)
    y = te_checkpoint(region, x, *args, use_reentrant=use_reentrant, **kwargs)
    region.proof.after_forward()
    before = stream_values()
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert x.grad is None
    assert flags() == OUTSIDE
    assert moved(before, stream_values()) == []


@both_engines
@each_place
def test_b3_leaf_stepped_by_an_optimizer_before_backward_is_an_error(use_reentrant: bool, place: Any) -> None:
    """A delayed backward after ``optimizer.step()`` would recompute with the new weights."""
    region, x, b = _Region(), leaf(4), leaf(4, seed=2)
    args, kwargs = place(b)
    y = te_checkpoint(region, x, *args, use_reentrant=use_reentrant, **kwargs)
    region.proof.after_forward()
    b.grad = torch.ones_like(b)
    torch.optim.SGD([b], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert x.grad is None


@both_engines
@pytest.mark.parametrize("requires_grad", [True, False], ids=["with grad", "without grad"])
def test_b3_function_that_edits_its_argument(use_reentrant: bool, requires_grad: bool) -> None:
    """The recompute would edit it a second time. torch's reentrant engine does so without a word."""
    proof, x, b = Proof(), leaf(4), leaf(4, seed=2).requires_grad_(requires_grad)

    def region(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        proof.ran()
        b.mul_(2)
        return proof.watch((x * b).exp()).sin()

    expected = torch.autograd.grad((x * (2 * b)).exp().sin().sum(), x)[0]
    y = te_checkpoint(region, x, b * 1, use_reentrant=use_reentrant)
    proof.after_forward()
    error: RuntimeError | None = None
    try:
        y.sum().backward()
    except RuntimeError as caught:
        error = caught
    if error is None:
        assert torch.allclose(grad_of(x), expected)
        proof.after_backward()
    else:
        assert "inplace" in str(error)


@both_engines
def test_b5_caller_reuses_its_containers(use_reentrant: bool) -> None:
    """A pipeline fills the same dict and list for the next micro-batch before the backward of this one."""
    region, gradients = _Region(), []
    x = leaf(4)
    batch: dict[str, Any] = {}
    outputs = []
    for seed in (2, 3):
        batch["b"] = [leaf(4, seed=seed).detach()]
        outputs.append(te_checkpoint(region, x, batch, use_reentrant=use_reentrant))
        batch["b"].append("used")
    batch.clear()
    region.proof.after_forward(runs=2)
    for y in outputs:
        x.grad = None
        y.sum().backward()
        gradients.append(grad_of(x))
    region.proof.after_backward(runs=4)
    for seed, gradient in zip((2, 3), gradients, strict=True):
        b = leaf(4, seed=seed).detach()
        assert differing(gradient, torch.autograd.grad(((x * b).exp().sin() * b).sum(), x)[0]) == 0


@both_engines
def test_b5_function_empties_its_containers(use_reentrant: bool) -> None:
    """``pop`` and assignment inside: once in the caller's containers, as in a plain call, and found whole again in the
    recompute. Containers that hold tensors, that is; a list of numbers is state of the function's own, as in torch."""
    proof, x = Proof(), leaf(4)

    def region(batch: dict[str, Any], *, pair: list[Any]) -> torch.Tensor:
        proof.ran()
        batch["seen"] = True
        return proof.watch(batch.pop("x").exp()).sin() * pair.pop() * pair.pop(0)

    batch, pair = {"x": x * 1}, [2.0, "kept", torch.full((4,), 3.0)]
    y = te_checkpoint(region, batch, pair=pair, use_reentrant=use_reentrant)
    assert batch == {"seen": True}
    assert pair == ["kept"]
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert batch == {"seen": True}
    assert pair == ["kept"]
    assert torch.allclose(grad_of(x), torch.autograd.grad((x.exp().sin() * 6.0).sum(), x)[0])


@dataclasses.dataclass(frozen=True, slots=True)
class _Frozen:
    a: torch.Tensor
    scale: float = dataclasses.field(default=3.0, init=False)


@both_engines
def test_b5_frozen_dataclass_with_slots(use_reentrant: bool) -> None:
    proof, x = Proof(), leaf(4)

    def region(batch: _Frozen) -> _Frozen:
        proof.ran()
        assert type(batch) is _Frozen
        return _Frozen(proof.watch(batch.a.exp()).sin() * batch.scale)

    result = te_checkpoint(region, _Frozen(x * 1), use_reentrant=use_reentrant)
    proof.after_forward()
    result.a.sum().backward()
    proof.after_backward()
    assert differing(grad_of(x), torch.autograd.grad((x.exp().sin() * 3.0).sum(), x)[0]) == 0


@both_engines
def test_b5_view_of_an_input_comes_out(use_reentrant: bool) -> None:
    proof, x = Proof(), leaf(6)

    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        proof.ran()
        y = proof.watch(x.exp()).sin()
        return x[:2], x.view(2, 3), y

    head, square, y = te_checkpoint(region, x * 1, use_reentrant=use_reentrant)
    proof.after_forward()
    (head.sum() + 2 * square.sum() + y.sum()).backward()
    proof.after_backward()
    expected = torch.autograd.grad(x.exp().sin().sum(), x)[0] + 2
    expected[:2] += 1
    assert torch.allclose(grad_of(x), expected)


@both_engines
def test_b5_output_edited_in_place_by_the_caller(use_reentrant: bool) -> None:
    """``y.add_()`` on a region's output is an ordinary in-place operation, as on the output of any module."""
    proof, x = Proof(), leaf(4)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(x.exp()).sin() * 2

    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.mul_(3)
    y.sum().backward()
    proof.after_backward()
    assert torch.allclose(grad_of(x), torch.autograd.grad((x.exp().sin() * 6).sum(), x)[0])


@both_engines
def test_preserve_rng_state_off_recomputes_with_fresh_numbers(use_reentrant: bool) -> None:
    """As torch: nothing is rewound, nothing audited; the recompute draws on, and the stream moves on with it."""
    proof, x = Proof(), torch.ones(256, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(F.dropout(torch.ones_like(x), 0.5)) * x

    y = te_checkpoint(region, x, use_reentrant=use_reentrant, preserve_rng_state=False)
    proof.after_forward()
    expected = F.dropout(torch.ones(256), 0.5)  # what the recompute will not draw: the stream stands behind it then
    fresh_state = torch.get_rng_state()
    following = F.dropout(torch.ones(256), 0.5)
    torch.set_rng_state(fresh_state)
    y.sum().backward()
    proof.after_backward()
    assert differing(grad_of(x), following) == 0
    assert differing(grad_of(x), expected) > 0
    assert differing(grad_of(x), y.detach()) > 0


@both_engines
def test_b1_function_that_swallows_everything(use_reentrant: bool) -> None:
    """A bare ``except`` also catches what stops a recompute early: the gradient is right, or an error says so."""
    proof, x = Proof(), leaf(4)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        y = proof.watch(x.exp())
        try:
            y = y.sin().exp()
        except BaseException:
            y = x.cos()
        return (y + 1) * 2

    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    error: RuntimeError | None = None
    try:
        y.sum().backward()
    except RuntimeError as caught:
        error = caught
    proof.after_backward()
    assert flags() == OUTSIDE
    if error is None:
        assert torch.allclose(grad_of(x), torch.autograd.grad((2 * x.exp().sin().exp()).sum(), x)[0])
    else:
        assert isinstance(error, torch.utils.checkpoint.CheckpointError)
