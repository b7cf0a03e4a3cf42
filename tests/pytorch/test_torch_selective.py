# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``torch.utils.checkpoint.create_selective_checkpoint_contexts`` on our engine as on torch's, side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from _proof import Proof
from _regions import grad_of, leaf
from _side_by_side import Checkpoint, outcome, same_as_torch

aten = torch.ops.aten


def _selective(
    checkpoint: Checkpoint, ops: Any, use: Callable[[torch.Tensor, Proof], Any], **options: Any
) -> dict[str, Any]:
    proof, x = Proof(), leaf(4, 4)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return (proof.watch((x @ x).sin()) @ x).cos() * 2  # a node behind the last saved tensor: both stop early

    def run() -> Any:
        context_fn = functools.partial(create_selective_checkpoint_contexts, ops, **options)
        y = checkpoint(region, x, context_fn=context_fn)
        proof.after_forward()
        use(y, proof)
        return grad_of(x)

    return {"result": outcome(run), "runs": proof.runs}


def test_selective_one_backward() -> None:
    report = same_as_torch(lambda c: _selective(c, [aten.mm.default], lambda y, _: y.sum().backward()))
    assert report["runs"] == 2
    x = leaf(4, 4)
    expected = torch.autograd.grad((((x @ x).sin() @ x).cos() * 2).sum(), x)[0]
    assert torch.allclose(torch.tensor(report["result"]), expected)


def test_selective_second_backward_is_an_error() -> None:
    """What was saved is given out once: torch's RuntimeError, and not a gradient of something else."""

    def twice(y: torch.Tensor, proof: Proof) -> None:
        y.sum().backward(retain_graph=True)
        proof.after_backward()
        y.sum().backward()

    assert same_as_torch(lambda c: _selective(c, [aten.mm.default], twice))["result"] == "RuntimeError"


@pytest.mark.parametrize("allowed", [False, True])
def test_selective_mutation_of_a_saved_result(allowed: bool) -> None:
    """A saved result that is edited in place is an error unless it is allowed."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        proof, x = Proof(), leaf(4, 4)

        def region(x: torch.Tensor) -> torch.Tensor:
            proof.ran()
            y = (x @ x).sin_()  # edits what mm's policy keeps
            return proof.watch(y.exp()) @ x

        def run() -> Any:
            contexts = functools.partial(
                create_selective_checkpoint_contexts, [aten.mm.default], allow_cache_entry_mutation=allowed
            )
            y = checkpoint(region, x, context_fn=contexts)
            proof.after_forward()
            y.sum().backward()
            return "no error"

        return {"result": outcome(run), "runs": proof.runs}

    report = same_as_torch(scenario)
    assert report["runs"] == 2
    assert report["result"] == ("no error" if allowed else "RuntimeError")


def test_selective_policy_is_asked_as_torch_asks_it() -> None:
    """In forward only since torch 2.13, before in the recompute too."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        asked: list[tuple[str, bool]] = []

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            asked.append((str(op), context.is_recompute))
            return False

        report = _selective(checkpoint, policy, lambda y, _: y.sum().backward())
        return {**report, "asked": [question for question in asked if "detach" not in question[0]]}

    report = same_as_torch(scenario)
    assert report["runs"] == 2
    assert len(report["asked"]) >= 4


def test_selective_in_nested_regions() -> None:
    """A selective region inside a plain one, and the reverse: operators count and gradients are torch's."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        reports = []
        for outer_selects in (False, True):
            proof, x = Proof(), leaf(4, 4)
            contexts = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])

            def inner(x: torch.Tensor, proof: Proof = proof) -> torch.Tensor:
                proof.ran()
                return proof.watch((x @ x).sin()).cos()

            def outer(x: torch.Tensor, inner: Any = inner, options: Any = None) -> torch.Tensor:
                return checkpoint(inner, x.exp(), **(options or {})).sin()

            selects = {"context_fn": contexts}
            if outer_selects:
                y = checkpoint(outer, x, **selects)
            else:
                y = checkpoint(functools.partial(outer, options=selects), x)
            proof.after_forward()
            result = outcome(lambda y=y, x=x: (y.sum().backward(), grad_of(x))[1])
            reports.append((result, proof.runs))
        return {"reports": reports}

    report = same_as_torch(scenario)
    assert [runs >= 2 for _, runs in report["reports"]] == [True, True]
