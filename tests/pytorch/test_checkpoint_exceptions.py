# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B1: an exception out of a region, in forward or in recompute, leaves no trace and arrives as it was raised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from _proof import ENGINE_IDS, ENGINES, Proof, differing
from _regions import OUTSIDE, Footprint, both_engines, flags, grad_of, leaf, moved, new_tracker, stream_values
from transformer_engine_ext.pytorch import te_checkpoint


class Boom(Exception):
    """Raised by a region on purpose."""


class BoomBase(BaseException):
    """As KeyboardInterrupt: no ``except Exception`` may hide it, and none may be needed to clean up."""


class Region:
    """Draws from the default stream and from two tracked ones, and raises inside the inner fork when told to."""

    def __init__(self, tracker: Any) -> None:
        self.proof = Proof()
        self.tracker = tracker
        self.error: BaseException | None = None
        self.fail_on = 0  # number of the execution that raises; 0: none

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.proof.ran()
        noise = torch.rand_like(x)
        with self.tracker.fork("a"):
            noise = noise + torch.rand_like(x)
            with self.tracker.fork("b"):
                torch.rand_like(x)
                if self.proof.runs == self.fail_on and self.error is not None:
                    raise self.error
        interior = self.proof.watch((x * noise).exp())
        return (interior * noise).sin()


def _gradient_without_checkpoint() -> tuple[torch.Tensor, dict[str, bytes]]:

    torch.manual_seed(7)
    tracker, x = new_tracker("a", "b"), leaf(16)
    Region(tracker)(x).sum().backward()
    return grad_of(x), stream_values(tracker)


def _assert_still_exact(use_reentrant: bool) -> None:
    """A region run after the failure is exact: what failed left nothing behind that later regions would find."""

    expected, end = _gradient_without_checkpoint()
    torch.manual_seed(7)
    tracker, x = new_tracker("a", "b"), leaf(16)
    region = Region(tracker)
    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    region.proof.after_forward()
    y.sum().backward()
    region.proof.after_backward()
    assert differing(grad_of(x), expected) == 0
    assert moved(end, stream_values(tracker)) == []


@both_engines
@pytest.mark.parametrize("kind", [Boom, BoomBase, StopIteration])  # a generator would turn the last into another error
def test_b1_forward_error_leaves_what_a_plain_call_leaves(use_reentrant: bool, kind: type[BaseException]) -> None:
    """The numbers drawn before the error are gone, as they are without checkpointing; all else is as before."""
    tracker, error = new_tracker("a", "b"), kind("forward")
    start = torch.get_rng_state()
    plain = Region(new_tracker("a", "b"))
    plain.error, plain.fail_on = kind("plain"), 1
    with pytest.raises(kind):
        plain(leaf(16))
    drawn = torch.rand(8)

    torch.set_rng_state(start)
    region = Region(tracker)
    region.error, region.fail_on = error, 1
    footprint = Footprint(tracker)
    with pytest.raises(kind) as caught:
        te_checkpoint(region, leaf(16), use_reentrant=use_reentrant)
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert region.proof.runs == 1
    footprint.assert_unchanged(but=("default cpu", "a", "b"))
    assert differing(torch.rand(8), drawn) == 0, "the default generator is bound to another stream than before"
    for name in ("a", "b"):
        with tracker.fork(name), plain.tracker.fork(name):
            pass
        assert torch.equal(tracker.states_[name].get_state(), plain.tracker.states_[name].get_state()), name
    _assert_still_exact(use_reentrant)


@both_engines
def test_b1_forward_error_before_any_draw_changes_nothing(use_reentrant: bool) -> None:
    tracker = new_tracker("a", "b")
    footprint = Footprint(tracker)

    def region(x: torch.Tensor) -> torch.Tensor:
        raise Boom("at once")

    with pytest.raises(Boom, match="at once"):
        te_checkpoint(region, leaf(4), use_reentrant=use_reentrant)
    footprint.assert_unchanged()
    _assert_still_exact(use_reentrant)


@both_engines
def test_b1_forward_error_inside_an_outer_fork(use_reentrant: bool) -> None:
    """The caller's fork is still in force after the error, and ends where it began."""
    tracker = new_tracker("a", "b", "outer")
    region = Region(tracker)
    region.error, region.fail_on = Boom("forward"), 1
    footprint = Footprint(tracker)
    with tracker.fork("outer"):
        with pytest.raises(Boom):
            te_checkpoint(region, leaf(16), use_reentrant=use_reentrant)
        after = torch.rand(8)
    footprint.assert_unchanged(but=("a", "b", "outer"))
    twin = new_tracker("a", "b", "outer")
    with twin.fork("outer"):
        torch.rand(16)
        assert differing(torch.rand(8), after) == 0
    _assert_still_exact(use_reentrant)


@both_engines
@pytest.mark.parametrize("kind", [Boom, BoomBase, KeyboardInterrupt, StopIteration])
def test_b1_recompute_error_leaves_no_trace(use_reentrant: bool, kind: type[BaseException]) -> None:
    tracker, error = new_tracker("a", "b"), kind("recompute")
    region = Region(tracker)
    region.error, region.fail_on = error, 2
    x = leaf(16)
    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    region.proof.after_forward()
    torch.rand(3)  # the streams stand elsewhere in backward than they stood in forward
    with tracker.fork("b"):
        torch.rand(3)
    footprint = Footprint(tracker)
    with pytest.raises(kind) as caught:
        y.sum().backward()
    assert caught.value is error
    region.proof.after_backward()
    footprint.assert_unchanged()
    assert x.grad is None
    _assert_still_exact(use_reentrant)


@both_engines
def test_b1_recompute_error_inside_an_outer_fork(use_reentrant: bool) -> None:
    """Backward is called inside a fork: the fork's stream stays bound although the recompute broke off."""
    tracker = new_tracker("a", "b", "outer")
    region = Region(tracker)
    region.error, region.fail_on = Boom("recompute"), 2
    y = te_checkpoint(region, leaf(16), use_reentrant=use_reentrant)
    region.proof.after_forward()
    footprint = Footprint(tracker)
    with tracker.fork("outer"):
        with pytest.raises(Boom):
            y.sum().backward()
        drawn = torch.rand(8)
    region.proof.after_backward()
    footprint.assert_unchanged(but=("outer",))
    with new_tracker("a", "b", "outer").fork("outer"):
        assert differing(torch.rand(8), drawn) == 0


@both_engines
def test_b1_failed_recompute_can_be_retried(use_reentrant: bool) -> None:
    """With retain_graph the graph is whole after the failure: the next backward recomputes the forward's numbers."""
    expected, _ = _gradient_without_checkpoint()
    torch.manual_seed(7)
    tracker, x = new_tracker("a", "b"), leaf(16)
    region = Region(tracker)
    region.error, region.fail_on = Boom("recompute"), 2
    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    region.proof.after_forward()
    with pytest.raises(Boom):
        y.sum().backward(retain_graph=True)
    assert x.grad is None
    y.sum().backward()
    region.proof.after_backward(runs=3)
    assert differing(grad_of(x), expected) == 0


@pytest.mark.parametrize("outer", ENGINES, ids=[f"outer_{name}" for name in ENGINE_IDS])
@pytest.mark.parametrize("inner", ENGINES, ids=[f"inner_{name}" for name in ENGINE_IDS])
@pytest.mark.parametrize("fail_on", [2, 3], ids=["in_the_outer_recompute", "in_its_own_recompute"])
def test_b1_error_of_an_inner_region(outer: bool, inner: bool, fail_on: int) -> None:
    """The inner function runs in forward (1), in the outer region's recompute (2) and in its own (3)."""
    tracker = new_tracker("a", "b")
    region = Region(tracker)
    region.error, region.fail_on = Boom("inner"), fail_on
    outer_proof = Proof()

    def outer_region(x: torch.Tensor) -> torch.Tensor:
        outer_proof.ran()
        with tracker.fork("a"):
            hidden = outer_proof.watch(x * torch.rand_like(x))
            return te_checkpoint(region, hidden.sin(), use_reentrant=inner).sin()

    y = te_checkpoint(outer_region, leaf(16), use_reentrant=outer)
    outer_proof.after_forward()
    region.proof.after_forward()
    footprint = Footprint(tracker)
    with pytest.raises(Boom) as caught:
        y.sum().backward()
    assert caught.value is region.error
    assert region.proof.runs == fail_on
    outer_proof.after_backward()
    footprint.assert_unchanged()
    assert flags() == OUTSIDE


@both_engines
@pytest.mark.parametrize("fail_on", [1, 2], ids=["forward", "recompute"])
def test_b1_user_contexts_are_left_with_the_exception(use_reentrant: bool, fail_on: int) -> None:
    seen: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def context(name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            seen.append((name, type(error).__name__))
            raise
        else:
            seen.append((name, "returned"))

    tracker = new_tracker("a", "b")
    region = Region(tracker)
    region.error, region.fail_on = Boom("inside a context"), fail_on

    def run() -> None:
        y = te_checkpoint(
            region, leaf(16), use_reentrant=use_reentrant, context_fn=lambda: (context("forward"), context("recompute"))
        )
        region.proof.after_forward()
        y.sum().backward()

    with pytest.raises(Boom):
        run()
    assert seen == ([("forward", "Boom")] if fail_on == 1 else [("forward", "returned"), ("recompute", "Boom")])
    assert region.proof.runs == fail_on
    assert flags() == OUTSIDE
    _assert_still_exact(use_reentrant)


@both_engines
def test_b1_error_of_the_recompute_context_itself(use_reentrant: bool) -> None:
    """A context of context_fn that fails on entry: the function does not run, and nothing stays rewound."""

    @contextlib.contextmanager
    def failing() -> Iterator[None]:
        raise Boom("no entry")
        yield

    tracker = new_tracker("a", "b")
    region = Region(tracker)
    y = te_checkpoint(
        region, leaf(16), use_reentrant=use_reentrant, context_fn=lambda: (contextlib.nullcontext(), failing())
    )
    region.proof.after_forward()
    footprint = Footprint(tracker)
    with pytest.raises(Boom, match="no entry"):
        y.sum().backward()
    footprint.assert_unchanged()
    assert region.proof.runs == 1
    _assert_still_exact(use_reentrant)


def test_b1_gradient_hook_that_raises_in_the_inner_backward() -> None:
    """Reentrant only: there the recomputed graph is run backward by the engine itself, hooks of the region included."""
    tracker = new_tracker("a", "b")
    region = Region(tracker)

    def hook(gradient: torch.Tensor) -> None:
        raise Boom("hook")

    def hooked(x: torch.Tensor) -> torch.Tensor:
        y = region(x)
        if y.requires_grad:
            y.register_hook(hook)
        return y

    y = te_checkpoint(hooked, leaf(16), use_reentrant=True)
    region.proof.after_forward()
    footprint = Footprint(tracker)
    with pytest.raises(Boom, match="hook"):
        y.sum().backward()
    region.proof.after_backward()
    footprint.assert_unchanged()
    _assert_still_exact(True)
