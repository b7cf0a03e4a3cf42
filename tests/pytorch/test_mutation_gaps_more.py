# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""More lines that other tests run without noticing what they do; ``tests/tools/mutation_check.py`` found them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional as F

from _capture import FakeKit, Kit, Rig, kit
from _proof import Counted
from _regions import both_engines, leaf, new_tracker
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.rng import native, register_streams, registration
from transformer_engine_ext.pytorch.rng.devices import get_backend

__all__ = ["kit"]


def test_a9_generator_made_inside_a_region_that_stops_early_is_no_fault() -> None:
    """Non-reentrant. See Note [A stream that the region makes has two generators]."""

    def region(x: torch.Tensor) -> torch.Tensor:
        tracker = CudaRNGStatesTracker(device="cpu")
        tracker.set_states({"own": torch.Generator().manual_seed(5)})
        with tracker.fork("own"):
            y = F.dropout(x, 0.5)
        return y.sin() + 1  # a node behind the last saved tensor, so that the recompute is stopped

    x, counted = leaf(64), Counted(region)
    y = te_checkpoint(counted, x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y.detach() == 1)
    assert counted.runs == 2


def test_overlapping_forks_leave_no_binding_behind(device: str) -> None:
    tracker = CudaRNGStatesTracker(device=device)
    tracker.add("a", 1)
    tracker.add("b", 2)
    backend = get_backend(device)
    first, second = tracker.fork("a"), tracker.fork("b")
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    assert backend.bound_stream(0) is tracker.get_states()["b"]
    first.__exit__(None, None, None)
    assert backend.bound_stream(0) is tracker.get_states()["b"]
    second.__exit__(None, None, None)
    assert backend.bound_stream(0) is None
    with tracker.fork("b"):
        assert backend.bound_stream(0) is tracker.get_states()["b"]
    assert backend.bound_stream(0) is None
    if device == "cpu":
        assert not backend._open


@both_engines
def test_regions_on_cuda_and_registrations_give_a_library_its_last_chance(
    kit: object, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the environment asks to build must be built before a capture begins."""
    if not isinstance(kit, FakeKit):
        pytest.skip("counted on absent devices")
    calls: list[str] = []
    monkeypatch.setattr(native, "_warm", False)
    monkeypatch.setattr(native, "warm_up", lambda: calls.append("region"))
    monkeypatch.setattr(registration, "warm_up", lambda: calls.append("registration"))
    rig = Rig(kit, use_reentrant)
    calls.clear()
    rig.checkpoint(rig.body, rig.input())
    assert calls == ["region"]
    calls.clear()
    register_streams(kit.graph(register=False))
    assert calls == (["registration"] if kit.registers else [])


@both_engines
def test_c3_stream_born_of_bytes_inside_a_region_is_used_by_name_later(use_reentrant: bool) -> None:
    tracker = new_tracker("a")
    state = torch.Generator().manual_seed(77).get_state()

    def region(x: torch.Tensor) -> torch.Tensor:
        tracker.set_states({**tracker.get_states(), "late": state})
        with tracker.fork("late"):
            return F.dropout(x, 0.5).sin()

    x = leaf(64)
    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    with tracker.fork("late"):
        torch.rand(3)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y.detach() == 0)
    with tracker.fork("late"):
        after = torch.rand(4)
    expected = torch.Generator()
    expected.set_state(state)
    torch.empty(64).bernoulli_(0.5, generator=expected)
    torch.rand(3, generator=expected)
    assert torch.equal(after, torch.rand(4, generator=expected))


@both_engines
def test_e2_numbers_that_the_host_draws_in_a_captured_region_are_drawn_again(kit: Kit, use_reentrant: bool) -> None:
    rig = Rig(kit, use_reentrant)
    drawn: list[float] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(1).item())
        return rig.body(x)

    torch.default_generator.manual_seed(6)
    x, forward, backward = rig.input(), kit.graph(), kit.graph()
    with kit.capturing(forward):
        y = rig.checkpoint(function, x)
    between = torch.rand(1).item()
    with kit.capturing(backward):
        y.backward(kit.ones(len(rig.rows), kit.size))
    after = torch.rand(1).item()
    assert drawn[0] == drawn[1]
    torch.default_generator.manual_seed(6)
    assert [drawn[0], between, after] == [torch.rand(1).item() for _ in range(3)]
