# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What a recompute must put back, and what copies of streams must be: cases that a mutation check found untested."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from _foreign import ByteTracker
from _proof import ENGINE_IDS, ENGINES
from transformer_engine_ext.errors import RecomputeMismatchError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, is_recomputing, te_checkpoint
from transformer_engine_ext.pytorch.distributed import get_all_rng_states

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


def _tracker(device: str, **seeds: int) -> CudaRNGStatesTracker:
    tracker = CudaRNGStatesTracker(device=device)
    for name, seed in seeds.items():
        tracker.add(name, seed)
    return tracker


@engines
def test_a9_foreign_byte_stream_that_only_the_recompute_draws_from(device: str, use_reentrant: bool) -> None:
    foreign = ByteTracker(device, {"a": 7, "b": 8})

    def region(x: torch.Tensor) -> torch.Tensor:
        with foreign.fork("a"):
            x = F.dropout(x, 0.5)
        if is_recomputing():
            with foreign.fork("b"):
                torch.rand(3, device=device)
        return x

    x = torch.ones(64, device=device, requires_grad=True)
    y = te_checkpoint(region, x, use_reentrant=use_reentrant, get_rng_state_tracker=lambda: foreign)
    before = {name: state.clone() for name, state in foreign.get_states().items()}
    with pytest.raises(RecomputeMismatchError, match="'b'"):
        y.sum().backward()
    assert all(torch.equal(state, before[name]) for name, state in foreign.get_states().items())


@engines
@pytest.mark.parametrize("change", ["add", "drop", "reset"])
def test_streams_that_only_the_recompute_changes_are_put_back(device: str, use_reentrant: bool, change: str) -> None:
    """The function adds or drops streams in its second execution only; the tracker must not show it afterwards."""
    tracker = _tracker(device, a=1, b=2)

    def region(x: torch.Tensor) -> torch.Tensor:
        if is_recomputing():
            if change == "add":
                tracker.add("new", 9)
            elif change == "drop":
                tracker.set_states({"a": tracker.get_states()["a"]})
        with tracker.fork("a"):
            x = F.dropout(x, 0.5)
        if is_recomputing() and change == "reset":
            tracker.reset()
        return x

    x = torch.ones(64, device=device, requires_grad=True)
    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    handles, seeds = dict(tracker.states_), set(tracker.seeds_)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad)
    assert dict(tracker.states_) == handles
    assert tracker.seeds_ == seeds


def test_c4_tracker_that_was_only_given_streams_is_known(device: str) -> None:
    tracker = CudaRNGStatesTracker(device=device)
    stream = torch.Generator(device).manual_seed(5)
    tracker.set_states({"only given": stream})
    assert get_all_rng_states()["only given"] is stream


def test_c3_copy_of_edited_states_is_edited_too(device: str) -> None:
    tracker = _tracker(device, a=1, b=2)
    saved = tracker.get_states()
    del saved["b"]
    twin = copy.copy(saved)
    assert set(twin) == {"a"}
    with tracker.fork("a"):
        drawn = torch.rand(4, device=device)
    tracker.set_states(twin)
    assert set(tracker.states_) == {"a"}
    with tracker.fork("a"):
        assert torch.equal(torch.rand(4, device=device), drawn)


def test_deep_copy_of_a_tracker_is_independent(device: str) -> None:
    tracker = _tracker(device, a=1)
    with tracker.fork("a"):
        torch.rand(3, device=device)
    pair = {"tracker": tracker, "fork": tracker.fork}
    twins = copy.deepcopy(pair)
    twin = twins["tracker"]
    assert twins["fork"].__self__ is twin, "one tracker became two"
    assert twin.seeds_ == {1}
    assert twin.states_["a"] is not tracker.states_["a"]
    with twin.fork("a"):
        first = torch.rand(4, device=device)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(4, device=device), first), "the copy does not start where the original stands"
    twin.add("more", 2)
    assert set(tracker.states_) == {"a"}
    assert tracker.seeds_ == {1}


def test_b13_output_that_a_module_keeps_does_not_keep_the_region() -> None:
    """Non-reentrant only: the reentrant engine's recompute leaves no hook in any graph."""

    runs: list[int] = []

    class Keeps(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            self.last = x.sin().exp() + 1
            return self.last

    module = Keeps()
    alive = weakref.ref(module)
    x = torch.ones(4, requires_grad=True)
    te_checkpoint(module, x, use_reentrant=False, early_stop=False).sum().backward()
    del module
    gc.collect()
    assert alive() is None, "the module is held by the graph of its own recompute"
    assert len(runs) == 2
