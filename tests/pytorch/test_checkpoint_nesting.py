# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B2: regions inside regions, in all combinations of the engines, with the flags read at every point."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from _proof import ENGINE_IDS, ENGINES, Proof, assert_same_tensors, differing, next_draws
from _regions import OUTSIDE, Flags, both_engines, flags, grad_of, leaf, moved, new_tracker, stream_values
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.distributed import use_reentrant_activation_recompute

outer_engine = pytest.mark.parametrize("outer", ENGINES, ids=[f"outer_{name}" for name in ENGINE_IDS])
inner_engine = pytest.mark.parametrize("inner", ENGINES, ids=[f"inner_{name}" for name in ENGINE_IDS])

FORWARD = Flags(phase=False, recomputing=False, region=True)
RECOMPUTE = Flags(phase=True, recomputing=True, region=True)
FORWARD_IN_RECOMPUTE = Flags(phase=False, recomputing=True, region=True)


@outer_engine
@inner_engine
def test_b2_flags_at_every_point(outer: bool, inner: bool) -> None:
    """The inner function runs in the outer's forward, again in the outer's recompute, and in its own recompute."""
    log: list[tuple[str, Flags]] = []
    proofs = {"outer": Proof(), "inner": Proof()}

    def note(where: str) -> None:
        log.append((where, flags()))

    def inner_region(x: torch.Tensor) -> torch.Tensor:
        proofs["inner"].ran()
        note("inner starts")
        interior = proofs["inner"].watch(x.exp())
        note("inner ends")
        return interior.sin()

    def outer_region(x: torch.Tensor) -> torch.Tensor:
        proofs["outer"].ran()
        note("outer starts")
        interior = proofs["outer"].watch(x.exp()).cos()
        note("outer before inner")
        y = te_checkpoint(inner_region, interior, use_reentrant=inner)
        note("outer after inner")
        return y.sin()

    x = leaf(8)
    expected = torch.autograd.grad(x.exp().cos().exp().sin().sin().sum(), x)[0]
    note("before")
    y = te_checkpoint(outer_region, x, use_reentrant=outer)
    note("between")
    proofs["outer"].after_forward()
    proofs["inner"].after_forward()
    y.sum().backward()
    note("after")

    assert log == [
        ("before", OUTSIDE),
        ("outer starts", FORWARD),
        ("outer before inner", FORWARD),
        ("inner starts", FORWARD),
        ("inner ends", FORWARD),
        ("outer after inner", FORWARD),
        ("between", OUTSIDE),
        ("outer starts", RECOMPUTE),
        ("outer before inner", RECOMPUTE),
        ("inner starts", FORWARD_IN_RECOMPUTE),
        ("inner ends", FORWARD_IN_RECOMPUTE),
        ("outer after inner", RECOMPUTE),
        ("inner starts", RECOMPUTE),
        ("inner ends", RECOMPUTE),
        ("after", OUTSIDE),
    ]
    proofs["outer"].after_backward(runs=2)
    proofs["inner"].after_backward(runs=3)
    assert differing(grad_of(x), expected) == 0


@outer_engine
@inner_engine
def test_b2_the_engine_that_te_modules_ask_for_is_the_innermost(outer: bool, inner: bool) -> None:
    """``use_reentrant_activation_recompute()`` answers for the innermost region, in forward and in recompute."""
    before = use_reentrant_activation_recompute()
    seen: dict[str, list[bool]] = {"outer": [], "inner": [], "outer after inner": []}
    proof = Proof()

    def inner_region(x: torch.Tensor) -> torch.Tensor:
        seen["inner"].append(use_reentrant_activation_recompute())
        return proof.watch(x.exp()).sin()

    def outer_region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        seen["outer"].append(use_reentrant_activation_recompute())
        y = te_checkpoint(inner_region, x.sin(), use_reentrant=inner)
        seen["outer after inner"].append(use_reentrant_activation_recompute())
        return y.cos()

    y = te_checkpoint(outer_region, leaf(4), use_reentrant=outer)
    assert use_reentrant_activation_recompute() == before
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert use_reentrant_activation_recompute() == before
    assert seen == {"outer": [outer] * 2, "inner": [inner] * 3, "outer after inner": [outer] * 2}


def _nested_program(
    checkpoint: Callable[..., torch.Tensor], proof: Proof, tracker: CudaRNGStatesTracker, inner: bool
) -> Callable[..., torch.Tensor]:
    """Two regions side by side in an outer one, with draws from three streams before, between, inside and after."""

    def inner_region(x: torch.Tensor, w: torch.Tensor, stream: str) -> torch.Tensor:
        with tracker.fork(stream):
            x = F.dropout(x, 0.4)
        return proof.watch(F.dropout(x * w, 0.3).exp()).sin()

    def outer_region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        proof.ran()
        x = F.dropout(x, 0.2)
        x = checkpoint(inner_region, x, w, "a", use_reentrant=inner)
        with tracker.fork("a"):
            x = proof.watch(F.dropout(x, 0.3)).cos()
            x = checkpoint(inner_region, x, w, "b", use_reentrant=inner)
        return F.dropout(x, 0.2) * w

    return outer_region


@outer_engine
@inner_engine
def test_b2_gradients_and_streams_equal_the_run_without_checkpoints(outer: bool, inner: bool) -> None:
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        tracker, proof = new_tracker("a", "b"), Proof()
        checkpoint = te_checkpoint if checkpointed else lambda function, *args, use_reentrant: function(*args)
        region = _nested_program(checkpoint, proof, tracker, inner)
        x, w = leaf(64), leaf(64, seed=2)
        y = checkpoint(region, x, w, use_reentrant=outer)
        if checkpointed:
            proof.after_forward()
        y.sum().backward()
        if checkpointed:
            proof.after_backward()
        grads = {"x": grad_of(x), "w": grad_of(w)}
        results.append({"output": y.detach(), **grads, **next_draws("cpu", tracker, ("a", "b"))})
    assert_same_tensors(results[1], results[0], f"outer {outer}, inner {inner}: tensors")


@outer_engine
@inner_engine
def test_b2_inner_region_is_left_alone_by_a_second_backward(outer: bool, inner: bool) -> None:
    """Both regions recompute once per backward, with the same numbers, also after ``retain_graph``."""
    tracker, proof = new_tracker("a", "b"), Proof()
    x, w = leaf(64), leaf(64, seed=2)
    y = te_checkpoint(_nested_program(te_checkpoint, proof, tracker, inner), x, w, use_reentrant=outer)
    proof.after_forward()
    before = stream_values(tracker)
    y.sum().backward(retain_graph=True)
    first, x.grad = grad_of(x), None
    y.sum().backward()
    proof.after_backward(runs=3)
    assert differing(grad_of(x), first) == 0
    assert moved(before, stream_values(tracker)) == []


@outer_engine
@inner_engine
def test_b2_three_levels_count_their_executions(outer: bool, inner: bool) -> None:
    """A function at depth d runs d + 2 times: once in forward, once per enclosing recompute, once in its own."""
    engines = (outer, inner, outer)
    proofs = [Proof() for _ in engines]

    def level(depth: int, x: torch.Tensor) -> torch.Tensor:
        proofs[depth].ran()
        x = proofs[depth].watch(x.sin()).exp()
        if depth + 1 < len(engines):
            x = te_checkpoint(level, depth + 1, x, use_reentrant=engines[depth + 1])
        return x.cos()

    x = leaf(8)
    expected = torch.autograd.grad(x.sin().exp().sin().exp().sin().exp().cos().cos().cos().sum(), x)[0]
    y = te_checkpoint(level, 0, x, use_reentrant=engines[0])
    for proof in proofs:
        proof.after_forward()
    y.sum().backward()
    assert [proof.runs for proof in proofs] == [2, 3, 4]
    assert differing(grad_of(x), expected) == 0


@both_engines
def test_b2_region_inside_a_region_of_an_unused_branch(use_reentrant: bool) -> None:
    """An inner output that the outer throws away is recomputed by no one, and disturbs no one."""
    proof, unused = Proof(), Proof()

    def outer_region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        te_checkpoint(unused.counting(torch.exp), x, use_reentrant=use_reentrant)
        return proof.watch(F.dropout(x, 0.5)) * x

    x = torch.ones(64, requires_grad=True)
    y = te_checkpoint(outer_region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert unused.runs == 2
    assert differing(grad_of(x), 2 * y.detach()) == 0  # y is mask * x * x


@outer_engine
@inner_engine
def test_b2_backward_of_an_inner_region_inside_the_outer_one(outer: bool, inner: bool) -> None:
    """The outer function runs a backward of its own; the outer recompute may have all it needs in the midst of it."""
    proof = Proof()

    def inner_region(z: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return F.dropout(z).exp()

    def outer_region(x: torch.Tensor, checkpointed: bool = True) -> torch.Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            y = te_checkpoint(inner_region, z, use_reentrant=inner) if checkpointed else inner_region(z)
            y.sum().backward()
        return x.sin() * z.grad

    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        x = leaf(8)
        y = te_checkpoint(outer_region, x, use_reentrant=outer) if checkpointed else outer_region(x, False)
        y.sum().backward()
        results.append((y.detach(), x.grad, torch.rand(4)))
    for plain, found in zip(*results, strict=True):
        assert torch.equal(plain, found)
    # Without checkpoints; then at least forward and recompute, in the outer's forward and in its recompute.
    assert proof.runs >= 1 + 4
