# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""torch's own switches and tools for non-reentrant checkpoints work on our engine as on torch's.

``set_checkpoint_early_stop``, ``set_checkpoint_debug_enabled``, ``GraphExecGroup``, overlapping and partial backwards,
and regions of both engines inside each other.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointError,
    create_selective_checkpoint_contexts,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

from _proof import Proof, differing
from _regions import both_engines, grad_of, keep_pytest_off_torchs_operator_log, leaf
from _side_by_side import Checkpoint, ours, outcome, same_as_torch, theirs
from transformer_engine_ext.pytorch import te_checkpoint

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _operator_log() -> None:
    keep_pytest_off_torchs_operator_log()


@pytest.mark.parametrize("settings", [(True,), (False,), (False, True), (True, False), (False, None), (None,)])
@pytest.mark.parametrize("argument", [True, False])
def test_early_stop_switch(settings: tuple[bool | None, ...], argument: bool) -> None:
    """The innermost setting in force at forward decides; None leaves it to the argument; backward needs none."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        tails: list[int] = []
        proof, x = Proof(), leaf(5)

        def region(x: torch.Tensor) -> torch.Tensor:
            proof.ran()
            x = proof.watch(x.exp()).sin() + 1
            tails.append(1)
            return x * 2

        def run(settings: tuple[bool | None, ...]) -> torch.Tensor:
            if not settings:
                return checkpoint(region, x, early_stop=argument)
            with set_checkpoint_early_stop(settings[0]):  # type: ignore[arg-type]
                return run(settings[1:])

        y = run(settings)
        proof.after_forward()
        y.sum().backward()
        proof.after_backward()
        return {"tails": len(tails), "grad": grad_of(x)}

    decides = argument if settings[-1] is None else settings[-1]
    assert same_as_torch(scenario)["tails"] == (1 if decides else 2)


def _mismatch(checkpoint: Checkpoint, **options: Any) -> str:
    """Return the text of the error of a region that saves less in recompute."""
    proof = Proof()

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        x = proof.watch(x.exp()).sin()
        return (x.tanh() if proof.runs == 1 else x * 3).sum().cos()

    y = checkpoint(region, leaf(5), **options)
    proof.after_forward()
    with pytest.raises(CheckpointError) as caught:
        y.backward()
    proof.after_backward()
    return str(caught.value)


@pytest.mark.parametrize(("setting", "argument"), [(True, False), (False, True), (None, True), (None, False)])
def test_debug_switch(setting: bool | None, argument: bool) -> None:
    """The switch wins over the argument, None leaves it; with it the operators are listed, without they are not."""
    with set_checkpoint_debug_enabled(setting):
        texts = [_mismatch(checkpoint, debug=argument) for checkpoint in (theirs, ours)]
    listed = argument if setting is None else setting
    assert [("aten.tanh" in text, "aten.mul" in text) for text in texts] == [(listed, listed)] * 2


def test_debug_refuses_contexts_of_the_user() -> None:
    """torch logs operators through the contexts, so both at once is a ValueError; nothing has run then."""
    for checkpoint in (theirs, ours):
        proof = Proof()
        contexts = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])
        with pytest.raises(ValueError, match="context_fn"):
            checkpoint(proof.counting(torch.exp), leaf(3), debug=True, context_fn=contexts)
        assert proof.runs == 0
    assert "aten.tanh" in _mismatch(ours, debug=True)


def test_forward_context_that_swallows_the_error_is_reported() -> None:
    """As torch since 2.13 (before, its hooks stayed on): there is no result to return, so it is a RuntimeError."""

    class Swallow:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> bool:
            return True

    def region(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("in forward")

    with pytest.raises(RuntimeError, match="suppressed"):
        ours(region, leaf(3), context_fn=lambda: (Swallow(), Swallow()))
    assert "aten.tanh" in _mismatch(ours, debug=True)


@both_engines
def test_device_context_of_forward_holds_in_recompute(use_reentrant: bool) -> None:
    """``with torch.device(...)`` around forward: factories of the recompute make their tensors on that device too.

    torch does so since 2.13, in its non-reentrant engine.
    """
    devices: list[str] = []
    proof, x = Proof(), leaf(5)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        devices.append(torch.zeros(1).device.type)
        return proof.watch(x.exp()).sin()

    with torch.device("meta"):
        y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert devices == ["meta", "meta"]
    assert differing(grad_of(x), torch.autograd.grad(x.exp().sin().sum(), x)[0]) == 0


def test_overlapping_backwards_recompute_each_for_itself() -> None:
    """A gradient hook differentiates the same region again, while the backward around it stands half-way in it."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        proof, x = Proof(), leaf(5)
        inside: list[torch.Tensor] = []

        def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            proof.ran()
            hidden = proof.watch(x.exp())
            if proof.runs == 1:
                # Fires behind sin, whose tensor is unpacked by then, and before exp, whose tensor is not.
                hidden.register_hook(differentiate_second)
            return hidden.sin(), hidden.cos()

        def differentiate_second(_grad: torch.Tensor) -> None:
            if not inside:  # the hook fires in the backward that it starts, too
                inside.append(torch.zeros(5))
                inside.extend(torch.autograd.grad(second_sum, x, retain_graph=True))

        first, second = checkpoint(region, x)
        second_sum = second.sum()
        proof.after_forward()
        first.sum().backward(retain_graph=True)
        return {"runs": proof.runs, "inside": inside[1], "grad": grad_of(x)}

    report = same_as_torch(scenario)
    assert report["runs"] == 3
    x = leaf(5)
    assert torch.allclose(torch.tensor(report["inside"]), torch.autograd.grad(x.exp().cos().sum(), x)[0])


def test_saved_tensor_read_outside_backward() -> None:
    """``grad_fn._saved_self`` and the like recompute, once per reading."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        proof, x = Proof(), leaf(5)

        def region(x: torch.Tensor) -> torch.Tensor:
            proof.ran()
            return proof.watch(x.exp()).sin()

        y = checkpoint(region, x)
        proof.after_forward()
        values = [y.grad_fn._saved_self.detach().clone() for _ in range(2)]
        runs = proof.runs
        y.sum().backward()
        return {"values": values, "runs": (runs, proof.runs), "grad": grad_of(x)}

    assert same_as_torch(scenario)["runs"] == [3, 4]


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "GraphExecGroup"), reason="torch has no GraphExecGroup yet")
def test_graph_exec_group_shares_one_recompute() -> None:
    """Backwards under one group recompute once, as long as they do not need the same tensor."""

    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        proof, x, w = Proof(), leaf(5), leaf(5, seed=2)

        def region(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            proof.ran()
            return proof.watch(x.exp()).sin(), proof.watch(w.exp()).sin()

        first, second = checkpoint(region, x, w)
        proof.after_forward()
        with torch.utils.checkpoint.GraphExecGroup():
            first.sum().backward()
            second.sum().backward()
        return {"runs": proof.runs, "x": grad_of(x), "w": grad_of(w)}

    assert same_as_torch(scenario)["runs"] == 2


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "GraphExecGroup"), reason="torch has no GraphExecGroup yet")
def test_graph_exec_group_refuses_overlapping_backwards() -> None:
    def scenario(checkpoint: Checkpoint) -> dict[str, Any]:
        proof, x = Proof(), leaf(5)

        def region(x: torch.Tensor) -> torch.Tensor:
            proof.ran()
            return proof.watch(x.exp()).sin()

        y = checkpoint(region, x)
        proof.after_forward()

        def run() -> None:
            with torch.utils.checkpoint.GraphExecGroup():
                y.sum().backward(retain_graph=True)
                y.sum().backward()

        return {"result": outcome(run), "runs": proof.runs}

    report = same_as_torch(scenario)
    assert report == {"result": "CheckpointError", "runs": 2}


_ENGINES: dict[str, Checkpoint] = {
    "torch nonreentrant": theirs,
    "torch reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "ours nonreentrant": ours,
    "ours reentrant": functools.partial(te_checkpoint, use_reentrant=True),
}


_PAIRS = [(o, i) for o in _ENGINES for i in _ENGINES if "ours" in o + i]


@pytest.mark.parametrize(("outer", "inner"), _PAIRS, ids=[f"{inner} in {outer}" for outer, inner in _PAIRS])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # torch's reentrant, in no_grad
def test_our_regions_and_torchs_nest_in_each_other(outer: str, inner: str) -> None:
    """A library inside may use the other function: counts are those of the rules, the masks are one."""
    proofs, x = [Proof(), Proof()], torch.ones(64, requires_grad=True)

    def inner_region(x: torch.Tensor) -> torch.Tensor:
        proofs[1].ran()
        return proofs[1].watch(F.dropout(x, 0.5)).exp()

    def outer_region(x: torch.Tensor) -> torch.Tensor:
        proofs[0].ran()
        x = proofs[0].watch(F.dropout(x, 0.5)).sin()
        return _ENGINES[inner](inner_region, x).cos()

    torch.manual_seed(0)
    expected = torch.autograd.grad(F.dropout(F.dropout(x, 0.5).sin(), 0.5).exp().cos().sum(), x)[0]
    torch.manual_seed(0)
    y = _ENGINES[outer](outer_region, x)
    for proof in proofs:
        proof.after_forward()
    y.sum().backward()
    assert [proof.runs for proof in proofs] == [2, 3]
    assert differing(grad_of(x), expected) == 0
