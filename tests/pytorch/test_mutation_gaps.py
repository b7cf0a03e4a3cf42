# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Lines that other tests run without noticing what they do; ``tests/tools/mutation_check.py`` found them."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from _foreign import ByteTracker
from _proof import Counted
from _regions import both_engines, leaf, new_tracker, stream_values
from transformer_engine_ext.errors import RecomputeMismatchError, SavedTensorMismatchError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, in_checkpoint_region, is_recomputing, te_checkpoint
from transformer_engine_ext.pytorch.distributed import activation_recompute_forward
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
    opened = recording.open()
    try:
        handle = torch.Generator()
        note_birth(handle)
        known = id(handle)
        del handle
        later = [torch.Generator() for _ in range(50)]
        assert known not in map(id, later)
    finally:
        opened.remove(recording)


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
    def raises_at_first(x: torch.Tensor) -> torch.Tensor:
        if region.runs == 1:
            raise ValueError("in forward")
        return x.sin()

    region = Counted(raises_at_first)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = torch.is_autocast_cache_enabled()
        assert before
        with pytest.raises(ValueError, match="in forward"):
            te_checkpoint(region, leaf(3), use_reentrant=use_reentrant)
        assert torch.is_autocast_cache_enabled() == before
        te_checkpoint(region, leaf(3), use_reentrant=use_reentrant).sum().backward()
        assert torch.is_autocast_cache_enabled() == before
    assert region.runs == 3


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


def test_read_outside_of_backward_that_fails_leaves_no_hooks() -> None:
    """Within a backward autograd puts the hooks back itself; somebody who reads a node has only the engine to do it."""

    def region(x: torch.Tensor) -> torch.Tensor:
        if is_recomputing():
            raise ValueError("in the recompute")
        return x.sin()

    y = te_checkpoint(region, leaf(3), use_reentrant=False)
    node: Any = y.grad_fn
    with pytest.raises(ValueError, match="in the recompute"):
        _ = node._saved_self
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_failed_recompute_is_forgotten_by_what_it_made() -> None:
    """A tensor of the recompute that somebody keeps must not keep the region, also if the recompute raised."""
    kept: list[torch.Tensor] = []

    class Weighty:
        pass

    def region(x: torch.Tensor, held: Any) -> torch.Tensor:
        h = x.sin()
        if is_recomputing():
            kept.append(h)
            raise ValueError("in the recompute")
        return h.cos()

    held = Weighty()
    gone = weakref.ref(held)
    y = te_checkpoint(region, leaf(3), held, use_reentrant=False)
    with pytest.raises(ValueError, match="in the recompute"):
        y.sum().backward()
    del y, held
    assert kept
    assert gone() is None


@both_engines
def test_b2_flags_switched_off_by_hand_inside_a_region(use_reentrant: bool) -> None:
    seen = []

    def region(x: torch.Tensor) -> torch.Tensor:
        with activation_recompute_forward(activation_recompute=False):
            seen.append((in_checkpoint_region(), is_recomputing()))
        seen.append((in_checkpoint_region(), is_recomputing()))
        return x.sin()

    te_checkpoint(region, leaf(3), use_reentrant=use_reentrant).sum().backward()
    assert seen == [(False, False), (True, False), (False, True), (True, True)]


def test_b4_report_lists_the_operators_of_the_last_recompute_only() -> None:
    runs = []

    def region(x: torch.Tensor) -> torch.Tensor:
        runs.append(is_recomputing())
        h = x.sin().exp()
        return h if len(runs) == 3 else h.cos()

    y = te_checkpoint(region, leaf(3), use_reentrant=False, debug=True, early_stop=False)
    y.sum().backward(retain_graph=True)
    with pytest.raises(SavedTensorMismatchError) as caught:
        y.sum().backward()
    assert len(runs) == 3
    # Once for the forward, once for the recompute that failed, and once where the two are compared.
    assert str(caught.value).count("aten.sin.default") == 3


def test_c3_byte_states_belong_to_the_tracker_once_set() -> None:
    """The value of a stream that is parked by a fork is kept as it is, so it must not be the caller's tensor."""
    tracker = new_tracker("a")
    generators = dict(tracker.get_states())
    tracker.set_states({**generators, "the default": torch.default_generator})
    wanted = torch.Generator().manual_seed(77).get_state()
    given = wanted.clone()
    with tracker.fork("a"):
        tracker.set_states({"a": tracker.get_states()["a"].get_state(), "the default": given})
        given.zero_()
    assert torch.equal(torch.get_rng_state(), wanted)


def test_c3_byte_states_may_be_strided() -> None:
    tracker = new_tracker("a")
    wanted = torch.Generator().manual_seed(77).get_state()
    strided = torch.stack([wanted, torch.zeros_like(wanted)], dim=1)[:, 0]
    assert not strided.is_contiguous()
    tracker.set_states({"a": strided})
    assert torch.equal(tracker.get_states()["a"].get_state(), wanted)


def test_b13_graph_of_an_argument_inside_a_dataclass_is_not_kept() -> None:
    """The copy that is kept of a container holds places, not the caller's tensors with all that made them.

    The reentrant engine's node is part of the graph, and keeps its inputs with their history as every node does.
    """

    @dataclasses.dataclass
    class Batch:
        h: torch.Tensor

    def region(batch: Batch) -> torch.Tensor:
        return batch.h.sin()

    batch = Batch(leaf(3) * 1)
    gone = weakref.ref(batch.h)
    y = te_checkpoint(region, batch, use_reentrant=False)
    del batch
    assert gone() is None
    y.sum().backward()
