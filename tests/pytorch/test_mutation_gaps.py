# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Lines that other tests run without noticing what they do; ``tests/tools/mutation_check.py`` found them."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from _foreign import ByteTracker
from _regions import both_engines, leaf, new_tracker, stream_values
from transformer_engine_ext.errors import RecomputeMismatchError, SavedTensorMismatchError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, is_recomputing, te_checkpoint
from transformer_engine_ext.pytorch.rng import get_all_rng_states
from transformer_engine_ext.pytorch.rng.recording import Recording, note_birth


@both_engines
def test_a9_stream_that_only_the_recompute_uses_is_named(use_reentrant: bool) -> None:
    tracker = new_tracker("a", "b")
    before = stream_values(tracker)

    def region(x: torch.Tensor) -> torch.Tensor:
        if is_recomputing():
            with tracker.fork("b"):
                torch.rand(5)
        return x.sin()

    y = te_checkpoint(region, leaf(3), use_reentrant=use_reentrant)
    with pytest.raises(RecomputeMismatchError, match=r"stream 'b': forward did not use it, recompute drew 5 32-bit"):
        y.sum().backward()
    assert stream_values(tracker) == before


@both_engines
def test_a9_foreign_stream_that_ends_elsewhere_is_named(use_reentrant: bool) -> None:
    tracker = ByteTracker("cpu", {"a": 1, "b": 2})

    def region(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork("a"):
            torch.rand(5 + is_recomputing())
        return x.sin()

    y = te_checkpoint(region, leaf(3), use_reentrant=use_reentrant, get_rng_state_tracker=lambda: tracker)
    after = {name: state.clone() for name, state in tracker.states.items()}
    with pytest.raises(RecomputeMismatchError, match=r"stream 'a' \(tracker of another library\)") as caught:
        y.sum().backward()
    assert "stream 'b'" not in str(caught.value)
    assert all(torch.equal(tracker.states[name], after[name]) for name in after)


@both_engines
def test_stream_that_only_the_recompute_adds_is_gone_afterwards(use_reentrant: bool) -> None:
    tracker = new_tracker("a")

    def region(x: torch.Tensor) -> torch.Tensor:
        if is_recomputing():
            tracker.add("late", 55)
        return x.sin()

    y = te_checkpoint(region, leaf(3), use_reentrant=use_reentrant)
    y.sum().backward()
    assert list(tracker.get_states()) == ["a"]
    assert 55 not in tracker.seeds_
    tracker.add("late", 55)


def test_stream_made_in_a_region_keeps_its_id() -> None:
    """An id that is known needs no noting, so it must not become that of a generator that does."""
    recording = Recording()
    recording.open()
    try:
        handle = torch.Generator()
        note_birth(handle)
        known = id(handle)
        del handle
        later = [torch.Generator() for _ in range(50)]
        assert known not in map(id, later)
    finally:
        recording.close()


def test_copied_states_are_what_the_dict_holds_now() -> None:
    tracker = new_tracker("a", "b", "c")
    states = tracker.get_states()
    del states["b"]
    assert list(states.copy()) == ["a", "c"]
    assert list(copy.copy(states)) == ["a", "c"]
    tracker.set_states(states.copy())
    assert list(tracker.get_states()) == ["a", "c"]


def test_deepcopied_tracker_is_independent_of_the_original() -> None:
    tracker = new_tracker("a", "b")
    with tracker.fork("b"):
        torch.rand(7)
    before = stream_values(tracker)
    twin, again = copy.deepcopy((tracker, tracker))
    assert twin is again
    assert stream_values(twin) == before
    with twin.fork("a"):
        torch.rand(3)
    twin.add("c", 900)
    assert stream_values(tracker) == before
    assert 900 not in tracker.seeds_
    assert twin.seeds_ == tracker.seeds_ | {900}


def test_c4_later_tracker_gets_the_qualified_key_whichever_is_filled_first() -> None:
    first, second = CudaRNGStatesTracker("cpu"), CudaRNGStatesTracker("cpu")
    second.add("twice", 71)
    first.add("twice", 72)
    states = get_all_rng_states()
    names = {id(handle): name for name, handle in states.items()}
    assert names[id(first.get_states()["twice"])] == "twice"
    assert names[id(second.get_states()["twice"])].startswith("twice@")


@both_engines
def test_b8_function_that_raises_leaves_autocasts_cache_as_it_was(use_reentrant: bool) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("in forward")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = torch.is_autocast_cache_enabled()
        assert before
        with pytest.raises(ValueError, match="in forward"):
            te_checkpoint(region, leaf(3), use_reentrant=use_reentrant)
        assert torch.is_autocast_cache_enabled() == before


@pytest.mark.parametrize("kind", ["another number", "another shape"])
def test_b4_failed_recompute_keeps_no_activation(kind: str) -> None:
    """The graph outlives a failed backward; what the recompute had saved by then must not."""
    saved: list[weakref.ref[Any]] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        if is_recomputing():
            saved.append(weakref.ref(h.untyped_storage()))
        h = h.cos() if kind == "another number" else h
        if is_recomputing():
            return h if kind == "another number" else (h[:1] * h[:1]).expand(3)
        return F.softmax(h, 0) * h

    y = te_checkpoint(region, leaf(3), use_reentrant=False, early_stop=False)
    with pytest.raises(SavedTensorMismatchError):
        y.sum().backward(retain_graph=True)
    gc.collect()
    assert saved
    assert [reference() for reference in saved] == [None]
