# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B6, B7: inputs that need no gradient, autograd switched off, and what the reentrant engine cannot do (B3)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from _proof import Proof, assert_one_mask, differing
from _regions import OUTSIDE, both_engines, flags, grad_of, leaf, moved, stream_values
from transformer_engine_ext.errors import NotDifferentiableError, ReentrantGradError
from transformer_engine_ext.pytorch import te_checkpoint


class _Scale(torch.nn.Module):
    """Multiplies its parameter of ones with a dropout mask: output and parameter gradient both show the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(256))
        self.proof = Proof()

    def forward(self, x: Any = None, **others: Any) -> torch.Tensor:
        self.proof.ran()
        mask = F.dropout(torch.ones(256), 0.5)
        return self.proof.watch(mask) * self.weight


_WITHOUT_GRADIENT = {
    "float input": lambda: ((torch.ones(256),), {}),
    "integer input": lambda: ((torch.arange(256),), {}),
    "no tensor at all": lambda: ((), {}),
    "None and a number": lambda: ((None,), {"scale": 3}),
    "keyword tensor": lambda: ((), {"mask": torch.ones(256)}),
    "nested tensors": lambda: (([torch.ones(2), {"a": torch.ones(3)}],), {}),
}


@both_engines
@pytest.mark.parametrize("arguments", _WITHOUT_GRADIENT.values(), ids=_WITHOUT_GRADIENT)
def test_b6_only_parameters_need_gradients(use_reentrant: bool, arguments: Callable[[], Any]) -> None:
    """Reentrant asked for, the non-reentrant engine takes it: an autograd Function would see nothing to do."""
    args, kwargs = arguments()
    module = _Scale()
    y = te_checkpoint(module, *args, use_reentrant=use_reentrant, **kwargs)
    assert y.requires_grad
    module.proof.after_forward()
    before = stream_values()
    y.sum().backward()
    module.proof.after_backward()
    assert_one_mask(y, module.weight.grad)
    assert moved(before, stream_values()) == []


def test_b6_embedding_of_token_ids_reentrant() -> None:
    proof = Proof()
    table = torch.nn.Embedding(7, 5)
    tokens = torch.tensor([[1, 2, 1], [6, 0, 1]])
    expected = torch.autograd.grad(table(tokens).exp().sin().sum(), table.weight)[0]

    def region(tokens: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(table(tokens).exp()).sin()

    y = te_checkpoint(region, tokens, use_reentrant=True)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert differing(grad_of(table.weight), expected) == 0


_REFUSED = {
    "grad": lambda y, x: torch.autograd.grad(y.sum(), x, retain_graph=True),
    "backward inputs": lambda y, x: y.sum().backward(inputs=[x], retain_graph=True),
}


@pytest.mark.parametrize("differentiate", _REFUSED.values(), ids=_REFUSED)
def test_b3_reentrant_refuses_grad_and_names_the_way_out(differentiate: Callable[..., Any]) -> None:
    proof, x = Proof(), leaf(4)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(x.exp()).sin()

    y = te_checkpoint(region, x, use_reentrant=True)
    proof.after_forward()
    with pytest.raises(ReentrantGradError, match="use_reentrant=False") as caught:
        differentiate(y, x)
    assert isinstance(caught.value, RuntimeError)
    assert proof.runs == 1, "refused, but only after recomputing"
    assert flags() == OUTSIDE
    y.sum().backward()
    proof.after_backward()
    assert differing(grad_of(x), torch.autograd.grad(x.exp().sin().sum(), x)[0]) == 0


def test_b6_reentrant_region_that_detaches_its_output() -> None:
    """Reentrant only: its output is made to require grad, so a gradient arrives that nothing can take."""
    proof, x = Proof(), leaf(4)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(x.detach().exp()).sin()

    y = te_checkpoint(region, x, use_reentrant=True)
    proof.after_forward()
    before = stream_values()
    with pytest.raises(NotDifferentiableError) as caught:
        y.sum().backward()
    assert isinstance(caught.value, RuntimeError)
    proof.after_backward()
    assert moved(before, stream_values()) == []
    assert flags() == OUTSIDE


class _Off:
    """One way of having nothing to differentiate, and the input for it."""

    def __init__(self, context: Callable[[], Any], requires_grad: bool, weight: bool) -> None:
        self.context, self.requires_grad, self.weight = context, requires_grad, weight


_OFF = {
    "no_grad": _Off(torch.no_grad, True, True),
    "inference_mode": _Off(torch.inference_mode, True, True),
    "set_grad_enabled(False)": _Off(lambda: torch.set_grad_enabled(False), True, True),
    "nothing requires grad": _Off(contextlib.nullcontext, False, False),
}


@both_engines
@pytest.mark.parametrize("off", _OFF.values(), ids=_OFF)
def test_b7_nothing_to_differentiate(use_reentrant: bool, off: _Off) -> None:
    """The function runs once, in the forward half of the user's contexts, and nothing is kept: not even the input."""
    entered: list[str] = []

    @contextlib.contextmanager
    def context(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    proof = Proof()
    w = leaf(64, seed=2) if off.weight else leaf(64, seed=2).detach()

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(F.dropout(x, 0.5) * w).exp()

    def run(x: torch.Tensor) -> torch.Tensor:
        return te_checkpoint(
            region, x, use_reentrant=use_reentrant, context_fn=lambda: (context("forward"), context("recompute"))
        )

    start = torch.get_rng_state()
    x = leaf(64).requires_grad_(off.requires_grad)
    hidden = x * 1
    with off.context():
        expected = region(hidden)
        proof.runs = 0
        torch.set_rng_state(start)
        y = run(hidden)
    assert not y.requires_grad
    assert y.is_inference() == expected.is_inference()
    assert differing(y, expected) == 0
    assert entered == ["forward"]
    proof.after_forward()
    alive = weakref.ref(hidden.untyped_storage())
    del hidden
    assert alive() is None, "the region keeps its input although nothing can be differentiated"
    assert flags() == OUTSIDE

    # The same region with something to differentiate does checkpoint.
    entered.clear()
    proof.runs = 0
    x = leaf(64)
    y = run(x)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert entered == ["forward", "recompute"]


@both_engines
def test_b7_autograd_off_in_forward_of_one_region_only(use_reentrant: bool) -> None:
    """A region under no_grad between two others draws from the same stream and disturbs neither."""
    proof, x = Proof(), torch.ones(256, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(F.dropout(torch.ones_like(x), 0.5)) * x

    first = te_checkpoint(region, x, use_reentrant=use_reentrant)
    with torch.no_grad():
        te_checkpoint(region, x, use_reentrant=use_reentrant)
    last = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward(runs=3)
    for y in (last, first):
        x.grad = None
        y.sum().backward()
        assert_one_mask(y, x.grad)
    proof.after_backward(runs=5)


@both_engines
def test_b7_backward_called_with_autograd_off(use_reentrant: bool) -> None:
    """Backward under no_grad is legal; the recompute must switch grad on for itself, and leave it off behind itself."""
    proof, x = Proof(), leaf(4)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(x.exp()).sin()

    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    loss = y.sum()
    with torch.no_grad():
        loss.backward()
        assert not torch.is_grad_enabled()
    proof.after_backward()
    assert differing(grad_of(x), torch.autograd.grad(x.exp().sin().sum(), x)[0]) == 0
