# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B16: very deep nesting, other threads, copied modules. Autograd moves deep reentrant nestings to other threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from _proof import Proof, assert_one_mask, assert_same_tensors, differing, next_draws
from _regions import OUTSIDE, Flags, both_engines, flags, grad_of, leaf, moved, new_tracker, stream_values
from transformer_engine_ext.pytorch import te_checkpoint

DEPTH = 90  # autograd changes threads at 60


def _plain(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
    return function(*args)


@pytest.mark.parametrize(
    "engine", [lambda d: True, lambda d: False, lambda d: d % 2 == 0], ids=["reentrant", "nonreentrant", "mixed"]
)
def test_b16_ninety_regions_deep(engine: Callable[[int], bool]) -> None:
    """Gradients, streams and flags are those of the flat program, whichever threads did the work."""
    results = []
    for checkpoint in (_plain, te_checkpoint):
        torch.manual_seed(5)
        tracker = new_tracker("a")
        proofs = [Proof() for _ in range(DEPTH)]
        seen: set[tuple[int, Flags]] = set()
        threads: set[int] = set()

        def level(
            depth: int,
            x: torch.Tensor,
            *,
            checkpoint: Any = checkpoint,
            proofs: list[Proof] = proofs,
            seen: set[tuple[int, Flags]] = seen,
            threads: set[int] = threads,
            tracker: Any = tracker,
        ) -> torch.Tensor:
            proofs[depth].ran()
            threads.add(threading.get_ident())
            with tracker.fork("a"):
                x = F.dropout(x, 0.02)
            x = proofs[depth].watch(F.dropout(x, 0.02)).sin()
            if depth + 1 < DEPTH:
                x = checkpoint(level, depth + 1, x, use_reentrant=engine(depth + 1))
            seen.add((depth, flags()))
            return x * 1.01 + x.cos()

        x = leaf(64)
        y = checkpoint(level, 0, x, use_reentrant=engine(0))
        if checkpoint is te_checkpoint:
            for proof in proofs:
                proof.after_forward()
        y.sum().backward()
        if checkpoint is te_checkpoint:
            assert [proof.runs for proof in proofs] == [depth + 2 for depth in range(DEPTH)]
            own = [state for depth, state in seen if depth == DEPTH - 1]
            assert Flags(phase=True, recomputing=True, region=True) in own
            assert all(state.recomputing for depth, state in seen if state.phase)
        assert flags() == OUTSIDE
        results.append({"output": y.detach(), "x": grad_of(x), **next_draws("cpu", tracker, ("a",))})
    assert_same_tensors(results[1], results[0], "tensors")


def _in_thread(run: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the thread did not end within 60 s"
    if errors:
        raise errors[0]


@both_engines
def test_b16_backward_in_another_thread_than_forward(use_reentrant: bool) -> None:
    tracker, proof = new_tracker("a"), Proof()
    seen: list[Flags] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        seen.append(flags())
        with tracker.fork("a"):
            mask = F.dropout(torch.ones_like(x), 0.5)
        return proof.watch(F.dropout(mask, 0.3)) * x

    x = torch.ones(256, requires_grad=True)
    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    before = stream_values(tracker)
    _in_thread(lambda: y.sum().backward())
    proof.after_backward()
    assert_one_mask(y, x.grad)
    assert moved(before, stream_values(tracker)) == []
    assert [state.phase for state in seen] == [False, True]
    assert flags() == OUTSIDE


@both_engines
def test_b16_forward_in_another_thread_than_backward(use_reentrant: bool) -> None:
    tracker, proof = new_tracker("a"), Proof()
    outputs: list[torch.Tensor] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        with tracker.fork("a"):
            return proof.watch(F.dropout(torch.ones_like(x), 0.5)) * x

    x = torch.ones(256, requires_grad=True)
    _in_thread(lambda: outputs.append(te_checkpoint(region, x, use_reentrant=use_reentrant)))
    proof.after_forward()
    outputs[0].sum().backward()
    proof.after_backward()
    assert_one_mask(outputs[0], x.grad)


@both_engines
def test_b16_flags_of_two_threads_do_not_mix(use_reentrant: bool) -> None:
    """While one thread stands inside a recompute, another one runs a region of its own, and one runs none."""
    proof, other = Proof(), Proof()
    seen: dict[str, list[Flags]] = {"no region": [], "other region": [], "self": []}

    def other_region(x: torch.Tensor) -> torch.Tensor:
        other.ran()
        seen["other region"].append(flags())
        return other.watch(x.exp()).sin()

    def in_other_thread() -> None:
        seen["no region"].append(flags())
        x = leaf(4)
        y = te_checkpoint(other_region, x, use_reentrant=use_reentrant)
        seen["no region"].append(flags())
        y.sum().backward()
        seen["no region"].append(flags())

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        _in_thread(in_other_thread)
        seen["self"].append(flags())
        return proof.watch(x.exp()).sin()

    x = leaf(4)
    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    forward, recompute = Flags(False, False, True), Flags(True, True, True)
    assert seen["self"] == [forward, recompute]
    assert seen["other region"] == [forward, recompute] * 2
    assert set(seen["no region"]) == {OUTSIDE}


class _HoldsFork(torch.nn.Module):
    """Keeps the bound method ``tracker.fork`` from construction, as TE's DotProductAttention does."""

    def __init__(self, tracker: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(256))
        self.fork = tracker.fork
        self.proof = Proof()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.proof.ran()
        with self.fork("a"):
            mask = F.dropout(torch.ones_like(x), 0.5)
        return self.proof.watch(mask * x) * self.weight


@both_engines
def test_b16_deep_copy_of_a_module_that_holds_a_fork(use_reentrant: bool) -> None:
    """The copy forks, its recompute draws its forward's numbers, and so does the original's afterwards."""
    tracker = new_tracker("a")
    original = _HoldsFork(tracker)
    copied = copy.deepcopy(original)
    assert copied.weight is not original.weight
    outputs = []
    for module in (copied, original, copied):
        module.proof = Proof()
        x = torch.ones(256, requires_grad=True)
        y = te_checkpoint(module, x, use_reentrant=use_reentrant, get_rng_state_tracker=lambda: tracker)
        module.proof.after_forward()
        y.sum().backward()
        module.proof.after_backward()
        assert_one_mask(y, x.grad)
        outputs.append(y.detach())
    assert differing(outputs[0], outputs[2]) > 0, "the copy's stream did not move on"
