# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules of nested checkpoints that torch states in ``torch/utils/checkpoint.py`` hold for our engine too.

Each scenario runs under torch's non-reentrant engine and under ours; counts of executions, orders of events and
gradients must be equal. One difference is meant: where no autograd node follows the last saved tensor, our recompute
returns from the function, so plain Python behind it runs again; no scenario counts there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from _proof import Proof
from _regions import grad_of, leaf
from _side_by_side import Checkpoint, outcome, same_as_torch


def test_rule_1_saved_tensors_belong_to_the_innermost_region() -> None:
    """Hooks and regions around an inner one see nothing of its interior: what each packs is its own."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        packed: list[str] = []
        proof, x = Proof(), leaf(5)
        sizes = {5: "outer", 3: "inner"}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel():  # torch before 2.13 also saves an empty tensor of its own
                packed.append(sizes[tensor.shape[0]])
            return tensor

        def inner(a: torch.Tensor) -> torch.Tensor:
            proof.ran()
            return proof.watch(a[:3].exp()).sin().cos()

        def outer(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(inner, x.exp()).sin()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = checkpoint(outer, x)
        proof.after_forward()
        y.sum().backward()
        proof.after_backward(runs=3)
        return {"packed outside": packed, "runs": proof.runs, "grad": grad_of(x)}

    assert same_as_torch(scenario)["packed outside"] == ["outer"], "only the input of the outer region"


def test_rule_1_a_partial_backward_leaves_the_inner_region_alone() -> None:
    """A tensor of the outer region is recomputed by the outer region alone."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        inner_proof, outer_proof, x = Proof(), Proof(), leaf(5)

        def inner(a: torch.Tensor) -> torch.Tensor:
            inner_proof.ran()
            return inner_proof.watch(a.exp()).sin()

        def outer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            outer_proof.ran()
            a = outer_proof.watch(x.exp())
            return a.cos(), checkpoint(inner, a)

        first, second = checkpoint(outer, x)
        outer_proof.after_forward()
        inner_proof.after_forward()
        first.sum().backward(retain_graph=True)
        after_first = (outer_proof.runs, inner_proof.runs)
        second.sum().backward()
        return {"first": after_first, "both": (outer_proof.runs, inner_proof.runs), "grad": grad_of(x)}

    report = same_as_torch(scenario)
    # The outer recompute ends at its last saved tensor, the inner region's input, so before the inner function.
    assert report["first"] == [2, 1]
    assert report["both"] == [3, 2]


def test_rule_2_inputs_of_an_inner_region_are_saved_tensors_of_its_parent() -> None:
    """They are dropped after forward, and to have them back the parent recomputes first."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        events: list[str] = []
        proof, x = Proof(), leaf(5)

        def inner(a: torch.Tensor) -> torch.Tensor:
            events.append("inner")
            return a.exp().sin()

        def outer(x: torch.Tensor) -> torch.Tensor:
            proof.ran()
            events.append("outer")
            return checkpoint(inner, proof.watch(x.exp())) * 1

        y = checkpoint(outer, x)
        proof.after_forward()
        y.sum().backward()
        proof.after_backward()
        return {"events": events, "grad": grad_of(x)}

    # The outer recompute ends once it has the inner region's input (rule 5), so only then the inner one recomputes.
    assert same_as_torch(scenario)["events"] == ["outer", "inner", "outer", "inner"]


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_rule_2_implication_all_regions_around_a_saved_tensor_recompute(depth: int) -> None:
    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        proofs, x = [Proof() for _ in range(depth)], leaf(5)

        def level(n: int, x: torch.Tensor) -> torch.Tensor:
            proofs[n].ran()
            x = proofs[n].watch(x.sin()).exp()
            return (checkpoint(level, n + 1, x) if n + 1 < depth else x).cos()

        y = checkpoint(level, 0, x)
        for proof in proofs:
            proof.after_forward()
        y.sum().backward()
        return {"runs": [proof.runs for proof in proofs], "grad": grad_of(x)}

    assert same_as_torch(scenario)["runs"] == [n + 2 for n in range(depth)]


def test_rule_3_recompute_inside_another_region_is_not_seen_by_it() -> None:
    """While region B runs forward, a backward through region A recomputes A as if B were not there."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        proofs = {"a": Proof(), "b": Proof()}
        x, z = leaf(5), leaf(5, seed=2)

        def a(x: torch.Tensor) -> torch.Tensor:
            proofs["a"].ran()
            return proofs["a"].watch(x.exp()).sin().cos()

        def b(z: torch.Tensor) -> torch.Tensor:
            proofs["b"].ran()
            (grad,) = torch.autograd.grad(ya.sum(), x, retain_graph=True)
            return proofs["b"].watch(z.exp()).sin() * grad

        ya = checkpoint(a, x)
        proofs["a"].after_forward()
        yb = checkpoint(b, z)
        assert proofs["b"].survivors() == []
        yb.sum().backward()
        assert proofs["b"].runs == 2
        return {"runs": [proof.runs for proof in proofs.values()], "grad": grad_of(z)}

    assert same_as_torch(scenario)["runs"] == [3, 2]


def test_rule_3_regions_met_in_a_recompute_are_respected() -> None:
    """In the outer recompute the inner region is a region again: its interior is not kept there either."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        kept: list[int] = []
        proof, x = Proof(), leaf(5)

        def inner(a: torch.Tensor) -> torch.Tensor:
            proof.ran()
            return proof.watch(a.exp()).sin()

        def outer(x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(inner, x.exp())
            kept.append(len(proof.survivors()))
            return y.cos()

        y = checkpoint(outer, x)
        proof.after_forward()
        y.sum().backward()
        proof.after_backward(runs=3)
        return {"kept": kept, "grad": grad_of(x)}

    assert same_as_torch(scenario)["kept"] == [0, 0]


class _Spy(torch.autograd.Function):
    """The identity; its backward tells when it runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tell: Any) -> torch.Tensor:
        ctx.tell = tell
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.tell()
        return grad, None


@pytest.mark.parametrize("retain_graph", [False, True])
def test_rule_4_recomputed_tensors_go_as_they_are_unpacked(retain_graph: bool) -> None:
    """Even with retain_graph: counted between the nodes of one backward, and after it."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        alive: list[int] = []
        proof, x = Proof(), leaf(5)

        def tell() -> None:
            alive.append(len(proof.survivors()))

        def region(x: torch.Tensor) -> torch.Tensor:
            proof.ran()
            for _ in range(4):
                x = _Spy.apply(proof.watch(x.exp()), tell).sin()
            return x

        y = checkpoint(region, x)
        proof.after_forward()
        y.sum().backward(retain_graph=retain_graph)
        proof.after_backward()
        tell()
        return {"alive": alive, "grad": grad_of(x)}

    assert same_as_torch(scenario)["alive"] == [4, 3, 2, 1, 0]


def test_rule_4_each_backward_recomputes_for_itself() -> None:
    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        counts: list[int] = []
        proof, x = Proof(), leaf(5)

        def region(x: torch.Tensor) -> torch.Tensor:
            proof.ran()
            return proof.watch(x.exp()).sin()

        y = checkpoint(region, x)
        proof.after_forward()
        for _ in range(3):
            y.sum().backward(retain_graph=True)
            counts.append(proof.runs)
        return {"counts": counts, "grad": grad_of(x)}

    assert same_as_torch(scenario)["counts"] == [2, 3, 4]


def test_rule_5_stops_once_all_known_tensors_are_back() -> None:
    """Also in nested regions, each at its own last saved tensor."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        steps: list[str] = []
        proof, x = Proof(), leaf(5)

        def inner(x: torch.Tensor) -> torch.Tensor:
            x = proof.watch(x.exp()).sin() + 1
            steps.append("inner tail")
            return x * 2

        def outer(x: torch.Tensor) -> torch.Tensor:
            proof.ran()
            x = checkpoint(inner, x.exp())
            steps.append("between")
            x = x.sin() + 1
            steps.append("outer tail")
            return x * 2

        y = checkpoint(outer, x)
        proof.after_forward()
        steps.clear()
        y.sum().backward()
        proof.after_backward()
        return {"steps": steps, "grad": grad_of(x)}

    assert same_as_torch(scenario)["steps"] == ["inner tail", "between"]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("retain_graph", [True, False])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_rule_6_backward_inside_a_region(early_stop: bool, retain_graph: bool, twice: bool) -> None:
    """The two examples of torch's note, and what follows when one goes on to use the graph that was walked."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        proof, x = Proof(), leaf(5)

        def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            proof.ran()
            y = proof.watch(x.sin())
            z = y.cos()
            (gx,) = torch.autograd.grad(z.sum(), x, retain_graph=retain_graph or twice)
            if twice:
                (again,) = torch.autograd.grad(z.sum(), x, retain_graph=retain_graph)
                gx = gx + again
            return x.cos() * gx, (z if retain_graph else x * 2)

        def run() -> Any:
            first, second = checkpoint(region, x, early_stop=early_stop)
            assert proof.survivors() == []
            (first.sum() + second.sum()).backward()
            return first.detach(), grad_of(x)

        return {"result": outcome(run), "runs": proof.runs}

    report = same_as_torch(scenario)
    assert report["runs"] >= 3


def test_rule_6_backward_call_inside_a_region_accumulates() -> None:
    """``.backward()`` inside fills ``.grad`` of a parameter in forward, and again in every recompute."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        proof, x, w = Proof(), leaf(5), leaf(5, seed=2)

        def region(x: torch.Tensor) -> torch.Tensor:
            proof.ran()
            (proof.watch(w.exp()).sin()).sum().backward()
            return x.exp().sin()

        y = checkpoint(region, x)
        proof.after_forward(runs=proof.runs)
        y.sum().backward()
        return {"runs": proof.runs, "w": grad_of(w), "x": grad_of(x)}

    assert same_as_torch(scenario)["runs"] >= 2
