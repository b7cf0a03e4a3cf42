# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's phase state without Transformer Engine: the predicates, and contexts built by hand."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from _proof import Proof
from _regions import OUTSIDE, Flags, both_engines, flags, grad_of, leaf
from transformer_engine_ext.pytorch import te_checkpoint
from transformer_engine_ext.pytorch.distributed import (
    activation_recompute_forward,
    get_activation_recompute_contexts,
    is_fp8_activation_recompute_enabled,
)

FORWARD = Flags(phase=False, recomputing=False, region=True)
RECOMPUTE = Flags(phase=True, recomputing=True, region=True)


@both_engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_sees_forward_then_recompute(use_reentrant: bool, dtype: torch.dtype) -> None:
    """Megatron's contract for te.checkpoint in any precision, with its way of calling; FP8 is off, so not enabled."""
    seen: list[tuple[Flags, bool]] = []

    class Probe(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proof = Proof()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.proof.ran()
            seen.append((flags(), is_fp8_activation_recompute_enabled()))
            return self.proof.watch(x.exp()).sin()

    probe, x = Probe(), leaf(4).detach().to(dtype).requires_grad_()
    options = {"distribute_saved_activations": False, "get_rng_state_tracker": None, "tp_group": None}
    y = te_checkpoint(probe, x, use_reentrant=use_reentrant, **options)
    probe.proof.after_forward()
    y.sum().backward()
    probe.proof.after_backward()
    assert seen == [(FORWARD, False), (RECOMPUTE, False)]
    assert flags() == OUTSIDE


class _Spy(torch.autograd.Function):
    """The identity; its backward notes the flags."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Flags]) -> torch.Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.seen.append(flags())
        return grad, None


@both_engines
def test_backward_of_the_function_is_not_in_the_recompute_phase(use_reentrant: bool) -> None:
    """As in TE: only the function's second forward is the recompute phase, not the backward that follows it."""
    proof, seen = Proof(), []

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return _Spy.apply(proof.watch(x.exp()).sin(), seen).cos()

    y = te_checkpoint(region, leaf(4), use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert [(state.phase, state.recomputing) for state in seen] == [(False, False)]


def test_contexts_built_apart_from_each_other() -> None:
    """Megatron builds one in its forward and another in its backward; each restores what held when it was entered."""
    forward = activation_recompute_forward(activation_recompute=True, recompute_phase=False)
    with forward:
        assert flags() == FORWARD
    assert flags() == OUTSIDE
    recompute = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
    with recompute:
        assert flags().phase
        with activation_recompute_forward(activation_recompute=True, recompute_phase=False):
            assert not flags().phase
        assert flags().phase, "leaving an inner context reset the outer one"
    assert flags() == OUTSIDE
    with activation_recompute_forward():
        assert not flags().phase
        assert not flags().region
    assert flags() == OUTSIDE


def test_context_is_reusable_nestable_and_a_decorator() -> None:
    context = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
    for _ in range(2):
        with context:
            assert flags().phase
            with context:
                assert flags().phase
            assert flags().phase
        assert flags() == OUTSIDE

    @activation_recompute_forward(activation_recompute=True, recompute_phase=True)
    def decorated() -> Flags:
        return flags()

    assert decorated().phase
    assert flags() == OUTSIDE


def test_context_restores_after_an_exception() -> None:
    with pytest.raises(KeyError), activation_recompute_forward(activation_recompute=True, recompute_phase=True):
        raise KeyError("inside")
    assert flags() == OUTSIDE


def test_one_context_in_two_threads() -> None:
    """A decorated function shares its context between the threads that call it; each gets its own flags back."""
    barrier, results = threading.Barrier(2, timeout=30), {}
    shared = activation_recompute_forward(activation_recompute=True, recompute_phase=False)

    def run(name: str, around: Any) -> None:
        with around:
            before = flags()
            if name == "second":
                barrier.wait()  # enters after the first
            with shared:
                if name == "first":
                    barrier.wait()
                barrier.wait()  # both are inside
                if name == "second":
                    barrier.wait()  # leaves after the first
            results[name] = (before, flags())
            if name == "first":
                barrier.wait()

    recompute = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
    threads = [
        threading.Thread(target=run, args=("first", contextlib.nullcontext())),
        threading.Thread(target=run, args=("second", recompute)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results["first"] == (OUTSIDE, OUTSIDE)
    assert results["second"] == (RECOMPUTE, RECOMPUTE)


class _OwnCheckpoint(torch.autograd.Function):
    """A checkpoint of one's own, as Megatron's CheckpointFunction: the two contexts are made where they are used."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad(), activation_recompute_forward(activation_recompute=True, recompute_phase=False):
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), activation_recompute_forward(activation_recompute=True, recompute_phase=True):
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


@both_engines
@pytest.mark.parametrize("ours_outside", [True, False], ids=["ours outside", "ours inside"])
def test_a_checkpoint_of_the_users_own_nests_with_ours(use_reentrant: bool, ours_outside: bool) -> None:
    seen: list[tuple[str, bool, bool]] = []
    ours_proof = Proof()

    def note(where: str) -> None:
        seen.append((where, flags().phase, flags().region))

    ours = functools.partial(te_checkpoint, use_reentrant=use_reentrant)
    outer, inner = (ours, _OwnCheckpoint.apply) if ours_outside else (_OwnCheckpoint.apply, ours)

    def inner_region(x: torch.Tensor) -> torch.Tensor:
        note("inner")
        if not ours_outside:
            ours_proof.ran()
        return (x if ours_outside else ours_proof.watch(x * 1)).exp().sin()

    def outer_region(x: torch.Tensor) -> torch.Tensor:
        note("outer")
        if ours_outside:
            ours_proof.ran()
        y = inner(inner_region, ours_proof.watch(x.exp()).sin() if ours_outside else x.exp().sin())
        note("after inner")
        return y.cos()

    x = leaf(4)
    y = outer(outer_region, x)
    ours_proof.after_forward()
    y.sum().backward()
    assert ours_proof.runs >= 2
    assert seen == [
        ("outer", False, True),
        ("inner", False, True),
        ("after inner", False, True),
        ("outer", True, True),
        ("inner", False, True),
        ("after inner", True, True),
        ("inner", True, True),
    ]
    assert flags() == OUTSIDE
    assert torch.allclose(grad_of(x), torch.autograd.grad(x.exp().sin().exp().sin().cos().sum(), x)[0])


@both_engines
def test_contexts_as_context_fn_of_our_own_region(use_reentrant: bool) -> None:
    """FSDP users pass them to either function; the flags are then set twice over and must come out the same."""
    proof, seen = Proof(), []

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        seen.append(flags())
        return proof.watch(x.exp()).sin()

    options = {"use_reentrant": use_reentrant, "context_fn": get_activation_recompute_contexts}
    y = te_checkpoint(region, leaf(4), **options)
    assert flags() == OUTSIDE
    proof.after_forward()
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    proof.after_backward(runs=3)
    assert seen == [FORWARD, RECOMPUTE, RECOMPUTE]
    assert flags() == OUTSIDE


def test_contexts_as_context_fn_of_torchs_checkpoint() -> None:
    """Non-reentrant, torch's only engine with context_fn; ``is_recomputing()`` is right there too."""
    proof, seen = Proof(), []

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        seen.append(flags())
        return proof.watch(x.exp()).sin()

    options = {"use_reentrant": False, "context_fn": get_activation_recompute_contexts}
    y = torch.utils.checkpoint.checkpoint(region, leaf(4), **options)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert seen == [FORWARD, RECOMPUTE]
    assert flags() == OUTSIDE
