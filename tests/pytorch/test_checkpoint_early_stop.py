# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B11: work after the last saved tensor is not done again. B12: selective checkpointing, random operators included.

Early stop belongs to the non-reentrant engine in torch's semantics; the reentrant one always recomputes everything,
which is tested beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from _proof import Proof, assert_same_tensors, differing, next_draws
from _regions import OUTSIDE, both_engines, flags, grad_of, leaf, moved, new_tracker, stream_values
from transformer_engine_ext.errors import RecomputeMismatchError
from transformer_engine_ext.pytorch import te_checkpoint

aten = torch.ops.aten


class _Tail:
    """A saving part, and a tail of nodes that save nothing but draw from two streams."""

    def __init__(self, tracker: Any) -> None:
        self.proof, self.tracker, self.tails = Proof(), tracker, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.proof.ran()
        y = self.proof.watch(F.dropout(x, 0.5)).sin()  # the last saved tensor
        y = y + torch.rand(y.shape)  # an autograd node that saves nothing
        self.tails += 1
        with self.tracker.fork("a"):
            return y * 2 + torch.rand(y.shape)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant stops", "reentrant does not"])
def test_b11_tail_is_not_recomputed_and_streams_end_right(use_reentrant: bool) -> None:
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(4)
        tracker, x = new_tracker("a"), leaf(64)
        region = _Tail(tracker)
        y = te_checkpoint(region, x, use_reentrant=use_reentrant) if checkpointed else region(x)
        if checkpointed:
            region.proof.after_forward()
        torch.rand(3)
        y.sum().backward()
        results.append({"output": y.detach(), "x": grad_of(x), **next_draws("cpu", tracker, ("a",))})
    region.proof.after_backward()
    assert region.tails == (2 if use_reentrant else 1)
    assert_same_tensors(results[1], results[0], "tensors")


def test_b11_stops_as_torch_does_in_the_middle() -> None:
    """Non-reentrant. A partial backward stops where torch stops: the count of steps is the same for each output."""
    counts = []
    for checkpoint in (torch.utils.checkpoint.checkpoint, te_checkpoint):
        proof, steps, x = Proof(), [], leaf(4)

        def region(x: torch.Tensor, proof: Proof = proof, steps: list[int] = steps) -> torch.Tensor:
            proof.ran()
            for step in range(4):
                x = proof.watch(x.sin()).exp()
                x = x + 1
                steps.append(step)
            return x * 2

        y = checkpoint(region, x, use_reentrant=False)
        proof.after_forward()
        steps.clear()
        y.sum().backward()
        proof.after_backward()
        counts.append(list(steps))
    assert counts[1] == counts[0] == [0, 1, 2]


@pytest.mark.parametrize("how", ["early_stop=False", "set_checkpoint_early_stop(False)"])
def test_b11_switched_off_the_tail_runs_again(how: str) -> None:
    """Non-reentrant. By the keyword, or by torch's context manager, which needs to be active in forward only."""
    region, x = _Tail(new_tracker("a")), leaf(64)
    if how == "early_stop=False":
        y = te_checkpoint(region, x, use_reentrant=False, early_stop=False)
    else:
        with set_checkpoint_early_stop(False):
            y = te_checkpoint(region, x, use_reentrant=False)
    region.proof.after_forward()
    before = stream_values(region.tracker)
    y.sum().backward()
    region.proof.after_backward()
    assert region.tails == 2
    assert moved(before, stream_values(region.tracker)) == []


@pytest.mark.parametrize("enable", [True, False])
def test_b11_torchs_context_manager_wins_over_the_keyword(enable: bool) -> None:
    region = _Tail(new_tracker("a"))
    with set_checkpoint_early_stop(enable):
        y = te_checkpoint(region, leaf(64), use_reentrant=False, early_stop=not enable)
    region.proof.after_forward()
    y.sum().backward()
    region.proof.after_backward()
    assert region.tails == (1 if enable else 2)


@both_engines
def test_b11_stopped_recompute_leaves_forks_and_flags(use_reentrant: bool) -> None:
    """The recompute may stop inside two forks: both are left, and the default generator is its own again."""
    tracker, proof, x = new_tracker("a", "b"), Proof(), torch.ones(64, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        with tracker.fork("a"):
            mask = F.dropout(torch.ones_like(x), 0.5)
            with tracker.fork("b"):
                y = proof.watch(F.dropout(mask, 0.2)) * x  # the last saved tensors
                y = y + torch.rand_like(x)
            y = y + torch.rand_like(x)
        return y * 1 + 0.5

    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    before = stream_values(tracker)
    y.sum().backward()
    proof.after_backward()
    assert moved(before, stream_values(tracker)) == []
    assert flags() == OUTSIDE
    twin = new_tracker("a", "b")
    with twin.fork("a"):
        mask = F.dropout(torch.ones(64), 0.5)
    with twin.fork("b"):
        mask = F.dropout(mask, 0.2)
    assert differing(grad_of(x), mask) == 0


def _policy(*saved: Any) -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


class _TwoDraws:
    """One draw with ``rand_like``, one with ``randn_like``, in either order, and a product that is recomputed."""

    def __init__(self, order: str) -> None:
        self.proof, self.order = Proof(), order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.proof.ran()
        draws: dict[str, torch.Tensor] = {}
        for name in self.order.split():
            draws[name] = torch.rand_like(x) if name == "rand" else torch.randn_like(x)
        return self.proof.watch((x * draws["rand"]).exp()).sin() * draws["randn"]


@both_engines
def test_b12_saved_draw_after_the_recomputed_one(use_reentrant: bool) -> None:
    """``randn`` is recomputed, ``rand`` saved and not drawn again: exact, and the streams end as without checkpoint."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(6)
        region, x = _TwoDraws("randn rand"), leaf(64)
        context_fn = _policy(aten.rand_like.default)
        y = te_checkpoint(region, x, use_reentrant=use_reentrant, context_fn=context_fn) if checkpointed else region(x)
        if checkpointed:
            region.proof.after_forward()
        y.sum().backward()
        results.append({"output": y.detach(), "x": grad_of(x), **next_draws("cpu")})
    region.proof.after_backward()
    assert_same_tensors(results[1], results[0], "tensors")


@both_engines
def test_b12_saved_draw_before_the_recomputed_one_is_never_silently_wrong(use_reentrant: bool) -> None:
    """torch recomputes ``randn`` from where the skipped ``rand`` should have been, and says nothing.

    Here the gradient is right or the audit names the stream; which of both is the engine's choice.
    """
    region, x = _TwoDraws("rand randn"), leaf(64)
    torch.manual_seed(6)
    region(x).sum().backward()
    expected, x.grad, region.proof = grad_of(x), None, Proof()

    torch.manual_seed(6)
    torch_x = leaf(64)
    context_fn = _policy(aten.rand_like.default)
    torch.utils.checkpoint.checkpoint(region, torch_x, use_reentrant=False, context_fn=context_fn).sum().backward()
    assert differing(grad_of(torch_x), expected) > 0, "torch became exact here: compare with it instead"

    torch.manual_seed(6)
    region.proof = Proof()
    y = te_checkpoint(region, x, use_reentrant=use_reentrant, context_fn=context_fn)
    region.proof.after_forward()
    before = stream_values()
    error: RecomputeMismatchError | None = None
    try:
        y.sum().backward()
    except RecomputeMismatchError as caught:
        error = caught
    if error is None:
        assert differing(grad_of(x), expected) == 0
    else:
        assert "default" in str(error)
    region.proof.after_backward()
    assert moved(before, stream_values()) == []


@both_engines
@pytest.mark.parametrize("saved", [True, False], ids=["exp saved", "exp recomputed"])
def test_b12_saved_operators_do_not_run_again(use_reentrant: bool, saved: bool) -> None:
    """What the policy saves is kept from forward and not computed again; what it does not, is dropped."""
    executed: list[str] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            executed.append(str(func))
            return func(*args, **(kwargs or {}))

    kept, dropped = Proof(), Proof()

    def region(x: torch.Tensor) -> torch.Tensor:
        kept.ran()
        dropped.ran()
        return dropped.watch(kept.watch(x.exp()).sin()).cos()

    x = leaf(8)
    context_fn = _policy(*([aten.exp.default] if saved else []))
    with Count():
        y = te_checkpoint(region, x, use_reentrant=use_reentrant, context_fn=context_fn)
    dropped.after_forward()
    assert bool(kept.survivors()) == saved
    assert executed.count("aten.exp.default") == 1
    executed.clear()
    with Count():
        y.sum().backward()
    dropped.after_backward()
    assert executed.count("aten.exp.default") == (0 if saved else 1)
    assert executed.count("aten.sin.default") >= 1
    assert torch.allclose(grad_of(x), torch.autograd.grad(x.exp().sin().cos().sum(), x)[0])


@both_engines
def test_b12_a_list_of_operators_is_a_policy_too(use_reentrant: bool) -> None:
    proof, x, w = Proof(), leaf(4, 4), leaf(4, 4, seed=2)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch((x @ w).sin()) @ w

    expected = torch.autograd.grad(region(x).sum(), (x, w))
    proof = Proof()
    context_fn = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])
    y = te_checkpoint(region, x, use_reentrant=use_reentrant, context_fn=context_fn)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert [differing(grad_of(t), g) for t, g in zip((x, w), expected, strict=True)] == [0, 0]
