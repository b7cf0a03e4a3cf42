# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings and references that a region must leave as they were; ``tests/tools/mutation_check.py`` found the gaps."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from _proof import Counted
from _regions import both_engines, leaf
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint


def _cast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@both_engines
def test_b8_casts_of_a_recompute_are_forgotten_with_it(use_reentrant: bool) -> None:
    """A cast weight that stayed in autocast's cache would outlive the optimizer's step."""
    linear, x = torch.nn.Linear(4, 4), leaf(2, 4)
    region = Counted(linear)
    with _cast():
        y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    y.float().sum().backward()
    assert region.runs == 2
    with torch.no_grad():
        linear.weight.add_(1)
        with _cast():
            found = linear(x)
        expected = F.linear(x.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16())
    assert torch.equal(found, expected)


@both_engines
def test_b8_weight_used_in_a_region_and_behind_it_gets_both_gradients(use_reentrant: bool) -> None:
    # See Note [Casts made without grad stay out of the cache]
    gradients = []
    for run in (lambda f, x: f(x), lambda f, x: te_checkpoint(f, x, use_reentrant=use_reentrant)):
        torch.manual_seed(3)
        linear, x = torch.nn.Linear(4, 4), leaf(2, 4)
        region = Counted(linear)
        with _cast():
            y = run(region, x) + linear(2 * x)
        y.float().sum().backward()
        assert region.runs == 1 + len(gradients)
        assert linear.weight.grad is not None
        gradients.append(linear.weight.grad)
    # The casts are two, so their gradients are rounded apart; a lost one would be a third of the sum or more.
    torch.testing.assert_close(*gradients, atol=0.0, rtol=0.02)


def test_refused_read_of_a_saved_tensor_leaves_grad_mode_alone() -> None:
    """Non-reentrant. The inputs are loaded with grad enabled; what is refused there must put it back."""
    h = leaf(3) * 1
    y = te_checkpoint(lambda h: h.exp().sin(), h, use_reentrant=False)
    with torch.no_grad():
        h.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            _ = y.grad_fn._saved_self
        assert not torch.is_grad_enabled()


class _Pack:
    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_b13_users_pack_hook_is_not_kept_by_a_region() -> None:
    """Non-reentrant. See Note [Hooks that are not the user's]."""
    pack = _Pack()
    gone = weakref.ref(pack)
    x = leaf(3)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = te_checkpoint(lambda: x.exp().sin(), use_reentrant=False)  # an argument would be kept by way of the hooks
    del pack
    gc.collect()
    assert gone() is None
    pack = _Pack()
    gone = weakref.ref(pack)
    kept: list[torch.Tensor] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.exp().sin())  # holds the graph of the recompute, and so the hooks that it was made under
        return kept[-1] * 2

    y = te_checkpoint(region, x, use_reentrant=False, early_stop=False)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y.sum().backward()
    del pack
    gc.collect()
    assert gone() is None
    assert len(kept) == 2


def test_name_added_twice_in_an_outer_region_keeps_both_generators() -> None:
    # See Note [A stream made inside a region keeps its generator]; the outer region is reentrant, the inner one not.

    def run(checkpointed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        tracker = CudaRNGStatesTracker(device="cpu")
        x = leaf(64)

        def inner(h: torch.Tensor) -> torch.Tensor:
            with tracker.fork("n"):
                return F.dropout(h, 0.5).sin()

        def outer(x: torch.Tensor) -> torch.Tensor:
            tracker.reset()
            tracker.add("n", 7)
            with tracker.fork("n"):
                x = F.dropout(x, 0.5)
            tracker.reset()
            tracker.add("n", 8)
            return te_checkpoint(inner, x, use_reentrant=False) if checkpointed else inner(x)

        y = te_checkpoint(outer, x) if checkpointed else outer(x)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected)


def test_function_that_raises_in_a_recompute_leaves_grad_mode_alone() -> None:
    """Non-reentrant, outside of a backward: there autograd puts grad mode back by itself."""
    runs = []

    def region(x: torch.Tensor) -> torch.Tensor:
        runs.append(torch.is_grad_enabled())
        if len(runs) == 2:
            raise ValueError("in the recompute")
        return x.exp().sin()

    y = te_checkpoint(region, leaf(3), use_reentrant=False)
    with torch.no_grad():
        with pytest.raises(ValueError, match="in the recompute"):
            _ = y.grad_fn._saved_self
        assert not torch.is_grad_enabled()
    assert runs == [True, True]


@dataclasses.dataclass
class _Shared:
    scale: torch.Tensor

    def __copy__(self) -> _Shared:
        return self


@both_engines
def test_b5_object_that_cannot_be_copied_keeps_its_tensors_apart_from_the_others(use_reentrant: bool) -> None:
    shared, x, w = _Shared(torch.full((3,), 2.0)), leaf(3), leaf(3, seed=4)
    region = Counted(lambda a, b, c: (a * b.scale * c).sin())
    te_checkpoint(region, x, shared, w, use_reentrant=use_reentrant).sum().backward()
    assert region.runs == 2
    z = (2 * x.detach() * w.detach()).cos() * 2
    torch.testing.assert_close(x.grad, z * w.detach())
    torch.testing.assert_close(w.grad, z * x.detach())


def test_tracker_names_its_streams_when_printed() -> None:
    tracker = CudaRNGStatesTracker(device="cpu")
    tracker.add("a", 5)
    assert "1 streams" in repr(tracker)
    assert "a: mt19937(seed=5" in repr(tracker)
