# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B8: a recompute runs under the autocast settings of its forward, whatever is in force where backward is called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F

from _helpers import requires_cuda
from _proof import Proof, assert_one_mask, differing
from _regions import both_engines, grad_of, leaf
from transformer_engine_ext.pytorch import te_checkpoint

LOW = torch.bfloat16


class Settings(NamedTuple):
    """Autocast as it is inside a region, and what it made of a product."""

    enabled: bool
    dtype: torch.dtype
    cache: bool
    product: torch.dtype


def _settings(device: str, product: torch.Tensor) -> Settings:
    return Settings(
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
        product.dtype,
    )


class _Region:
    """A product, an activation and a product with one weight; remembers the settings of each execution."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.proof = Proof()
        self.seen: list[Settings] = []

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        self.proof.ran()
        hidden = x @ w
        self.seen.append(_settings(self.device, hidden))
        return self.proof.watch(torch.sigmoid(hidden)) @ w


_FORWARD: dict[str, Callable[[str], Any]] = {
    "on": lambda device: torch.autocast(device, dtype=LOW),
    "off": lambda device: contextlib.nullcontext(),
    "switched off inside on": lambda device: torch.autocast(device, enabled=False),
    "without weight cache": lambda device: torch.autocast(device, dtype=LOW, cache_enabled=False),
    "float16": lambda device: torch.autocast(device, dtype=torch.float16),
}
_BACKWARD: dict[str, Callable[[str], Any]] = {
    "off": lambda device: contextlib.nullcontext(),
    "on": lambda device: torch.autocast(device, dtype=LOW),
    "float16 without cache": lambda device: torch.autocast(device, dtype=torch.float16, cache_enabled=False),
}


@both_engines
@pytest.mark.parametrize("forward", _FORWARD.values(), ids=[f"forward {name}" for name in _FORWARD])
@pytest.mark.parametrize("backward", _BACKWARD.values(), ids=[f"backward {name}" for name in _BACKWARD])
def test_b8_recompute_under_the_forwards_settings(
    use_reentrant: bool, forward: Callable[[str], Any], backward: Callable[[str], Any], device: str
) -> None:
    """Two settings that differ in every respect; afterwards the caller's are in force again."""
    gradients = []
    for checkpointed in (False, True):
        x, w = leaf(8, 8, device=device), leaf(8, 8, device=device, seed=2)
        region = _Region(device)
        with forward(device):
            wanted = _settings(device, x @ w)
            y = te_checkpoint(region, x, w, use_reentrant=use_reentrant) if checkpointed else region(x, w)
            loss = y.float().sum()
        if checkpointed:
            region.proof.after_forward()
        with backward(device):
            before = _settings(device, torch.empty(0))
            loss.backward()
            assert _settings(device, torch.empty(0)) == before
        gradients.append((y.detach(), grad_of(x), grad_of(w)))
    region.proof.after_backward()
    assert region.seen[1] == wanted
    # A reentrant forward makes no graph, so whether it keeps the casts that it makes is the engine's own business.
    assert region.seen[0]._replace(cache=wanted.cache) == wanted
    assert [differing(ours, theirs) for theirs, ours in zip(*gradients, strict=True)] == [0, 0, 0]


@requires_cuda
@both_engines
def test_b8_both_devices_keep_their_own_settings(use_reentrant: bool) -> None:
    """CPU autocast and CUDA autocast are independent switches, and both belong to the region."""
    regions = [_Region("cpu"), _Region("cuda")]

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return regions[0](x, w).cuda().float() + regions[1](x.cuda(), w.cuda()).float()

    x, w = leaf(8, 8), leaf(8, 8, seed=2)
    torch.cuda.init()  # a region may not be the first to touch CUDA
    with torch.autocast("cpu", dtype=LOW), torch.autocast("cuda", dtype=torch.float16):
        y = te_checkpoint(region, x, w, use_reentrant=use_reentrant)
    for half in regions:
        half.proof.after_forward()
    y.sum().backward()
    for half, dtype in zip(regions, (LOW, torch.float16), strict=True):
        half.proof.after_backward()
        assert half.seen[0].product is half.seen[1].product is dtype
        assert half.seen[1].enabled
        assert half.seen[1].dtype is dtype


@both_engines
def test_b8_autocast_opened_inside_the_region(use_reentrant: bool, device: str) -> None:
    proof, seen = Proof(), []

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        proof.ran()
        with torch.autocast(device, dtype=LOW):
            hidden = x @ w
            with torch.autocast(device, enabled=False):
                exact = x @ w
        last = proof.watch(hidden.float().exp()) * exact
        seen.append((hidden.dtype, exact.dtype, (last @ w).dtype, torch.is_autocast_enabled(device)))
        return last @ w

    gradients = []
    for checkpointed in (False, True):
        proof = Proof()
        x, w = leaf(8, 8, device=device), leaf(8, 8, device=device, seed=2)
        y = te_checkpoint(region, x, w, use_reentrant=use_reentrant) if checkpointed else region(x, w)
        if checkpointed:
            proof.after_forward()
        y.sum().backward()
        gradients.append((grad_of(x), grad_of(w)))
    proof.after_backward()
    assert set(seen) == {(LOW, torch.float32, torch.float32, False)}
    assert [differing(ours, theirs) for theirs, ours in zip(*gradients, strict=True)] == [0, 0]


def _outside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


_ORDERS = {
    "region first": ("region", "outside"),
    "outside first": ("outside", "region"),
    "region twice": ("region", "region", "outside"),
    "outside on both sides": ("outside", "region", "outside"),
}


@both_engines
@pytest.mark.parametrize("order", _ORDERS.values(), ids=_ORDERS)
@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("as_argument", [False, True], ids=["weight from closure", "weight as argument"])
def test_b8_weight_reused_inside_one_autocast_scope(
    use_reentrant: bool, order: tuple[str, ...], backward_inside: bool, as_argument: bool, device: str
) -> None:
    """Autocast keeps the cast weight for the whole scope, with or without the graph it was cast in.

    A reentrant forward runs under no_grad, and a cast that was kept there has no way back to the weight; a recompute
    inside the scope would find the cast that belongs to the forward's graph. All uses must give their full gradient.
    """
    results = []
    for checkpointed in (False, True):
        x, w = leaf(8, 8, device=device), leaf(8, 8, device=device, seed=2)
        region = _Region(device)
        function: Callable[..., torch.Tensor] = region if as_argument else lambda x, w=w, region=region: region(x, w)
        arguments = (w,) if as_argument else ()
        with contextlib.ExitStack() as scope:
            scope.enter_context(torch.autocast(device, dtype=LOW))
            hidden = x
            for step in order:
                if step == "outside":
                    hidden = _outside(hidden, w)
                elif checkpointed:
                    hidden = te_checkpoint(function, hidden, *arguments, use_reentrant=use_reentrant)
                else:
                    hidden = function(hidden, *arguments)
                hidden = hidden * 0.1
            loss = hidden.float().sum()
            if not backward_inside:
                scope.close()
            if checkpointed:
                region.proof.after_forward(runs=order.count("region"))
            loss.backward()
        results.append((hidden.detach(), grad_of(x), grad_of(w)))
    region.proof.after_backward(runs=2 * order.count("region"))
    assert all(seen.product is LOW for seen in region.seen)
    # Gradients of one weight are added up in another order, in float32: a lost use would be off by tens of percent.
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3), (ours - theirs).abs().max()


@both_engines
def test_b8_weight_cache_survives_a_region(use_reentrant: bool, device: str) -> None:
    """Code after the region in the same scope still gets gradients to the weight it shares with code before it."""
    w = leaf(8, 8, device=device, seed=2)
    x = leaf(8, 8, device=device)
    region = _Region(device)
    with torch.autocast(device, dtype=LOW):
        before = x @ w
        y = te_checkpoint(region, x, w, use_reentrant=use_reentrant)
        region.proof.after_forward()
        y.float().sum().backward()  # inside the scope, between two other uses
        w.grad = None
        after = x @ w
    (after.float().sum() + before.float().sum()).backward()
    region.proof.after_backward()
    expected = leaf(8, 8, device=device, seed=2)
    with torch.autocast(device, dtype=LOW):
        (2 * (x.detach() @ expected).float().sum()).backward()
    assert torch.allclose(grad_of(w), grad_of(expected), rtol=1e-2)


@both_engines
def test_b8_dropout_mask_under_autocast(use_reentrant: bool, device: str) -> None:
    proof, x = Proof(), torch.ones(64, 64, device=device, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(F.dropout(torch.ones_like(x), 0.5)) * x

    with torch.autocast(device, dtype=LOW):
        y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.float().sum().backward()
    proof.after_backward()
    assert_one_mask(y, x.grad)
