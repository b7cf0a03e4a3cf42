# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B4: a recompute that saves other tensors than its forward did is an error, as in ``torch.utils.checkpoint``.

The check belongs to the non-reentrant engine in torch's semantics (the reentrant one saves nothing in forward, so it
has nothing to compare); the reentrant engine takes the same keywords and ignores them, which is tested too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointError

from _proof import Proof, differing
from _regions import OUTSIDE, flags, grad_of, keep_pytest_off_torchs_operator_log, leaf, moved, stream_values
from transformer_engine_ext.errors import SavedTensorMismatchError
from transformer_engine_ext.pytorch import te_checkpoint

Region = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _operator_log() -> None:
    keep_pytest_off_torchs_operator_log()


def _differs(proof: Proof, forward: Region, recompute: Region) -> Region:
    """Make a region that computes one thing in forward and another in recompute, between two steps in common."""

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        x = proof.watch(x.exp()).sin()
        x = forward(x) if proof.runs == 1 else recompute(x)
        return x.sum().cos().exp()

    return region


def _fewer(x: torch.Tensor) -> torch.Tensor:
    return x * 2  # saves nothing


def _saves_one(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def _saves_two(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos()


def _other_shape(x: torch.Tensor) -> torch.Tensor:
    return x[:-1].sin()


def _other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.double().sin().float()


_MISMATCHES = {
    "fewer": (_saves_one, _fewer),
    "other shape": (_saves_one, _other_shape),
    "other dtype": (_saves_one, _other_dtype),
}


@pytest.mark.parametrize(("forward", "recompute"), _MISMATCHES.values(), ids=_MISMATCHES)
@pytest.mark.parametrize("early_stop", [True, False], ids=["early_stop", "full"])
def test_b4_mismatch_is_torchs_error(forward: Region, recompute: Region, early_stop: bool) -> None:
    for checkpoint in (torch.utils.checkpoint.checkpoint, te_checkpoint):
        proof, x = Proof(), leaf(6)
        y = checkpoint(_differs(proof, forward, recompute), x, use_reentrant=False, early_stop=early_stop)
        proof.after_forward()
        before = stream_values()
        with pytest.raises(CheckpointError) as caught:
            y.backward()
        if checkpoint is te_checkpoint:
            assert isinstance(caught.value, SavedTensorMismatchError)
        proof.after_backward()
        assert x.grad is None
        assert moved(before, stream_values()) == []
        assert flags() == OUTSIDE


@pytest.mark.parametrize("determinism_check", ["default", "none"])
def test_b4_more_saved_tensors_in_a_full_recompute(determinism_check: str) -> None:
    """Without early stop the surplus is always seen, and like torch also with the check of metadata off."""
    for checkpoint in (torch.utils.checkpoint.checkpoint, te_checkpoint):
        proof, x = Proof(), leaf(6)
        region = _differs(proof, _saves_one, _saves_two)
        options = {"use_reentrant": False, "early_stop": False, "determinism_check": determinism_check}
        y = checkpoint(region, x, **options)
        proof.after_forward()
        with pytest.raises(CheckpointError):
            y.backward()
        proof.after_backward()
        assert x.grad is None


def test_b4_more_saved_tensors_shift_the_others_under_early_stop() -> None:
    """With early stop the recompute ends before the surplus at the end, but what it shifted has other shapes."""
    for checkpoint in (torch.utils.checkpoint.checkpoint, te_checkpoint):
        proof, x = Proof(), leaf(6)
        y = checkpoint(_differs(proof, _saves_one, _saves_two), x, use_reentrant=False)
        proof.after_forward()
        with pytest.raises(CheckpointError):
            y.backward()
        proof.after_backward()


def test_b4_message_says_both_sides() -> None:
    """Count: both numbers. Metadata: position, both shapes and dtypes. Each time what to do next."""
    proof = Proof()
    y = te_checkpoint(_differs(proof, _saves_one, _fewer), leaf(6), use_reentrant=False)
    proof.after_forward()
    with pytest.raises(SavedTensorMismatchError) as caught:
        y.backward()
    proof.after_backward()
    text = str(caught.value)
    assert "debug=True" in text
    # exp saves its result, sin and sin and cos their input, exp its result; the recompute leaves out one sin.
    assert re.search(r"\b5\b", text)
    assert re.search(r"\b4\b", text)

    proof = Proof()
    y = te_checkpoint(_differs(proof, _saves_one, _other_shape), leaf(6), use_reentrant=False)
    proof.after_forward()
    with pytest.raises(SavedTensorMismatchError) as caught:
        y.backward()
    proof.after_backward()
    text = str(caught.value)
    assert "debug=True" in text
    for part in (r"position 2\b", r"\b6\b", r"\b5\b", "torch.float32", "cpu"):
        assert re.search(part, text), f"{part} is missing in {text}"


def test_b4_determinism_check_none_turns_it_off() -> None:
    """As torch: the recompute's tensors are taken as they are, and the gradient is theirs."""
    forward, recompute = _MISMATCHES["other dtype"]
    gradients = []
    for checkpoint in (torch.utils.checkpoint.checkpoint, te_checkpoint):
        proof, x = Proof(), leaf(6)
        region = _differs(proof, forward, recompute)
        y = checkpoint(region, x, use_reentrant=False, determinism_check="none")
        proof.after_forward()
        y.backward()
        proof.after_backward()
        gradients.append(grad_of(x))
    assert differing(gradients[1], gradients[0]) == 0


def test_b4_count_mismatch_stays_an_error_with_the_check_off() -> None:
    """As torch: "none" leaves out the comparison of metadata; a tensor that was not recomputed cannot be handed out."""
    for checkpoint in (torch.utils.checkpoint.checkpoint, te_checkpoint):
        proof = Proof()
        region = _differs(proof, _saves_one, _fewer)
        y = checkpoint(region, leaf(6), use_reentrant=False, determinism_check="none")
        proof.after_forward()
        with pytest.raises(CheckpointError):
            y.backward()
        proof.after_backward()


def test_b4_debug_lists_the_operators_of_both_runs() -> None:
    proof = Proof()
    y = te_checkpoint(_differs(proof, torch.tanh, torch.sigmoid), leaf(6).double(), use_reentrant=False, debug=True)
    proof.after_forward()
    y.backward()  # tanh and sigmoid save alike: nothing to report
    proof.after_backward()

    proof = Proof()
    y = te_checkpoint(_differs(proof, torch.tanh, _fewer), leaf(6), use_reentrant=False, debug=True)
    proof.after_forward()
    with pytest.raises(CheckpointError) as caught:
        y.backward()
    proof.after_backward()
    text = str(caught.value)
    assert "aten.tanh" in text, "the operator that only forward ran is not listed"
    assert "aten.mul" in text, "the operator that only the recompute ran is not listed"


def test_b4_matching_recompute_is_silent() -> None:
    """The other side of the check: what matches passes, with warnings being errors."""
    proof, x = Proof(), leaf(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = te_checkpoint(_differs(proof, _saves_two, _saves_two), x, use_reentrant=False, debug=True)
        proof.after_forward()
        y.backward()
    proof.after_backward()
    assert differing(grad_of(x), torch.autograd.grad(x.exp().sin().sin().cos().sum().cos().exp(), x)[0]) == 0


def test_b4_unknown_determinism_check_is_refused_before_anything_runs() -> None:
    proof = Proof()
    with pytest.raises(ValueError, match="determinism_check"):
        te_checkpoint(_differs(proof, _saves_one, _saves_one), leaf(6), use_reentrant=False, determinism_check="strict")
    assert proof.runs == 0
    y = te_checkpoint(_differs(proof, _saves_one, _saves_one), leaf(6), use_reentrant=False)
    proof.after_forward()
    y.backward()
    proof.after_backward()


@pytest.mark.parametrize("determinism_check", ["default", "none"])
@pytest.mark.parametrize("debug", [False, True])
def test_b4_reentrant_takes_and_ignores_the_check(determinism_check: str, debug: bool) -> None:
    """Transformer Engine accepts both keywords in either mode; a reentrant recompute that saves otherwise is taken."""
    proof, x = Proof(), leaf(6)
    region = _differs(proof, _saves_one, lambda x: x.sin() * 1)
    y = te_checkpoint(region, x, use_reentrant=True, determinism_check=determinism_check, debug=debug)
    proof.after_forward()
    y.backward()
    proof.after_backward()
    assert differing(grad_of(x), torch.autograd.grad(x.exp().sin().sin().sum().cos().exp(), x)[0]) == 0
