# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The proofs that other tests lean on must themselves fail where they should."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F

import _proof
from _helpers import requires_cuda
from _proof import Proof, assert_one_mask, assert_same_tensors, differing, next_draws, plain_checkpoint


def _region(proof: Proof, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    proof.ran()
    return proof.watch(F.dropout(x, 0.5)) * w


@pytest.fixture
def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.ones(64, requires_grad=True), torch.ones(64, requires_grad=True)


def test_plain_call_fails_both_proofs(leaves: tuple[torch.Tensor, torch.Tensor]) -> None:
    proof = Proof()
    y = plain_checkpoint(_region, proof, *leaves, use_reentrant=False)
    with pytest.raises(AssertionError, match="1 of 1 interior activations survived forward"):
        proof.after_forward()
    y.sum().backward()
    with pytest.raises(AssertionError, match="ran the function 1 times, expected 2"):
        proof.after_backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_real_checkpoint_passes_both_proofs(leaves: tuple[torch.Tensor, torch.Tensor], use_reentrant: bool) -> None:
    proof = Proof()
    y = torch.utils.checkpoint.checkpoint(_region, proof, *leaves, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert_one_mask(y, leaves[0].grad)


def test_watch_sees_memory_held_under_another_tensor() -> None:
    proof = Proof()
    x = torch.ones(8, requires_grad=True)

    def region() -> torch.Tensor:
        proof.ran()
        return proof.watch(x.exp()).sum()  # exp saves its result as another tensor on the same memory

    y = region()
    assert len(proof.survivors()) == 1
    del y
    assert proof.survivors() == []


def test_the_probe_of_deaths() -> None:
    assert _proof.storage_dies("cpu")


@requires_cuda
def test_the_probe_of_deaths_on_cuda() -> None:
    """Nothing to prove where it is False, but then it must be so for every engine."""
    x = torch.ones(8, device="cuda", requires_grad=True)
    proof = Proof()
    y = torch.utils.checkpoint.checkpoint(lambda v: proof.watch(v.sin()) * v, x, use_reentrant=False)
    died = proof._watched[0].storage() is None
    y.sum().backward()
    assert _proof.storage_dies() == died


@pytest.mark.parametrize("seen", [True, False])
def test_survivors_on_cuda_count_where_deaths_are_seen(
    leaves: tuple[torch.Tensor, torch.Tensor], seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # See Note [Where the death of memory cannot be seen]
    probes: list[None] = []

    def probe() -> bool:
        probes.append(None)
        return seen

    monkeypatch.setattr(_proof, "storage_dies", probe)
    monkeypatch.setattr(_proof, "uncounted", told := [])
    _proof.deaths_are_seen.cache_clear()
    try:
        proof = Proof()
        y = plain_checkpoint(_region, proof, *leaves)
        with pytest.raises(AssertionError, match="survived forward"):
            proof.after_forward()
        assert probes == [], "survivors on the CPU need no probe"
        proof._watched = [watched._replace(on_cuda=True) for watched in proof._watched]
        for _ in range(2):
            if seen:
                with pytest.raises(AssertionError, match="1 of 1 interior activations survived forward"):
                    proof.after_forward()
            else:
                proof.after_forward()
        assert len(told) == (0 if seen else 2)
        assert len(probes) == 1, "once per process"
        with pytest.raises(AssertionError, match="ran the function 1 times, expected 2"):
            proof.after_backward()  # in either case
        proof.watch(leaves[0])
        with pytest.raises(AssertionError, match="survived forward"):
            proof.after_forward()
        del y
        told.clear()
        proof._watched.pop()
        proof.after_forward()
        assert told == [], "what has died needs no excuse"
    finally:
        _proof.deaths_are_seen.cache_clear()


def test_watching_nothing_is_an_error() -> None:
    proof = Proof()
    proof.ran()
    with pytest.raises(AssertionError, match="watched nothing"):
        proof.after_forward()


def test_another_mask_is_counted(leaves: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, _ = leaves
    first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert differing(first, second) > 0
    with pytest.raises(AssertionError, match="of 64 gradient elements belong to another mask"):
        assert_one_mask(first, second.detach())
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_one_mask(x.detach(), x.detach())


def test_next_draws_tell_positions_apart() -> None:
    torch.manual_seed(1)
    here = next_draws("cpu")
    torch.manual_seed(1)
    assert_same_tensors(next_draws("cpu"), here, "draws")
    torch.manual_seed(1)
    torch.rand(())
    with pytest.raises(AssertionError, match="draws that differ"):
        assert_same_tensors(next_draws("cpu"), here, "draws")
