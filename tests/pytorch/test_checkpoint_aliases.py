# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Results that are views, parameters that change between the passes, and results that need no gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from _proof import ENGINE_IDS, ENGINES, Proof
from _regions import leaf
from transformer_engine_ext.errors import CheckpointArgumentError, NotDifferentiableError, UnknownStreamError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda a: a.view(2, 2),
    "slice": lambda a: a[:2],
    "unsqueeze": lambda a: a.unsqueeze(0),
    "reshape": lambda a: a.reshape(2, 2),
    "expand": lambda a: a.expand(2, 4)[0],
    "chunk": lambda a: a.chunk(2)[0],
}


@engines
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("from_closure", [False, True], ids=["of an argument", "of a closure tensor"])
def test_change_in_place_of_a_result_that_is_a_view(
    use_reentrant: bool, view: Callable[[torch.Tensor], torch.Tensor], from_closure: bool
) -> None:
    """As without checkpointing, or refused; a gradient that ignores the change would be the silent way."""

    def run(engine: bool | None) -> torch.Tensor | None:
        x = torch.full((4,), 2.0, requires_grad=True)
        z = x * 1
        try:
            if engine is None:
                y = view(z)
            elif from_closure:
                y = te_checkpoint(lambda a: view(z), x, use_reentrant=engine)
            else:
                y = te_checkpoint(view, z, use_reentrant=engine)
            y.mul_(3)
            (z * z).sum().backward()
        except RuntimeError as error:
            if "inplace" not in str(error) and "in-place" not in str(error):
                raise
            return None
        return x.grad

    expected, found = run(None), run(use_reentrant)
    assert found is None or (expected is not None and torch.equal(found, expected))


@engines
def test_view_that_nobody_changes_gives_its_gradient(use_reentrant: bool) -> None:
    x, proof = leaf(4), Proof()

    def region(a: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(a.sin()).exp().view(2, 2)

    y = te_checkpoint(region, x * 1, use_reentrant=use_reentrant)
    proof.after_forward()
    (y * y).sum().backward()
    proof.after_backward()
    s = x.detach().sin()
    torch.testing.assert_close(x.grad, 2 * (2 * s).exp() * x.detach().cos())


def test_parameter_that_an_optimizer_changes_before_backward_is_refused() -> None:
    """Non-reentrant. See Note [Parameters must not change in between]."""
    w, x = torch.nn.Parameter(torch.ones(3)), leaf(3)
    optimizer = torch.optim.SGD([w], lr=0.5)

    def step() -> None:
        w.grad = torch.ones(3)
        optimizer.step()

    y = te_checkpoint(lambda a: (a * w).sin(), x, use_reentrant=False)
    step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        y.sum().backward()
    y = te_checkpoint(lambda a: (a * w).sin(), x, use_reentrant=False)
    y.sum().backward()
    step()
    y = te_checkpoint(lambda a: a + w, x, use_reentrant=False)  # needs no value of the parameter
    step()
    y.sum().backward()


@engines
def test_gradient_of_an_outer_weight_when_only_a_detached_result_is_used(use_reentrant: bool) -> None:
    x, w = leaf(3), torch.nn.Parameter(torch.ones(3))
    detached, _ = te_checkpoint(lambda a: (a.detach() * 2, a * a), x, use_reentrant=use_reentrant)
    (detached * w).sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, 2 * x.detach())
    assert x.grad is None or not x.grad.any()


def test_result_without_any_path_to_the_input_is_still_refused() -> None:
    """Reentrant, as in Transformer Engine and torch."""
    y = te_checkpoint(lambda a: a.detach() * 2, leaf(3))
    with pytest.raises(NotDifferentiableError, match="none of output has requires_grad=True"):
        y.sum().backward()


def test_transforms_of_torch_func_are_refused_with_what_to_do() -> None:
    """Reentrant; torch itself refuses the hooks of the other engine."""
    with pytest.raises(CheckpointArgumentError, match="Call the function directly there"):
        torch.func.grad(lambda x: te_checkpoint(torch.exp, x).sum())(torch.ones(3))


@engines
def test_stream_that_code_adds_only_in_its_first_run_is_explained(use_reentrant: bool) -> None:
    trackers: list[CudaRNGStatesTracker] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        if not trackers:
            trackers.append(CudaRNGStatesTracker(device="cpu"))
            trackers[0].add("late", 1)
        with trackers[0].fork("late"):
            return torch.nn.functional.dropout(x, 0.5).sin()

    y = te_checkpoint(region, leaf(8), use_reentrant=use_reentrant)
    with pytest.raises(UnknownStreamError, match=r"forward of this checkpointed region added it.*before the region"):
        y.sum().backward()
    assert list(trackers[0].get_states()) == ["late"]
