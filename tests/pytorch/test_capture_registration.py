# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""E5, E6 without a GPU: which streams are registered with which graphs, and that nothing is where none is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from _capture import FakeKit
from _fake_graphs import FakeGenerator, FakeGraph
from transformer_engine_ext.pytorch import CudaRNGStatesTracker
from transformer_engine_ext.pytorch.rng import register_streams, registering_streams, set_all_rng_states
from transformer_engine_ext.pytorch.rng.registration import registration_needed


class Graph(FakeGraph):
    """Remembers what was registered, and when its capture began."""

    def __init__(self, kit: FakeKit) -> None:
        super().__init__(kit.machine)
        self.handles: list[FakeGenerator] = []
        self.begun: list[tuple[Any, ...]] = []

    def register_generator_state(self, handle: FakeGenerator) -> None:
        super().register_generator_state(handle)
        if handle.state.machine is self.machine:
            self.handles.append(handle)

    def capture_begin(self, *args: Any, **kwargs: Any) -> str:
        self.begun.append((*args, *kwargs.items()))
        return "begun"


class Derived(Graph):
    """Inherits ``capture_begin``."""


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> FakeKit:
    """A device as before torch 2.14."""
    kit = FakeKit(registers=True)
    kit.machine.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return kit


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> FakeKit:
    """A device as since torch 2.14, where a graph asserts that nobody registers anything."""
    kit = FakeKit(registers=False)
    kit.machine.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return kit


def _tracker(*names: str, device: str = "cuda") -> CudaRNGStatesTracker:
    tracker = CudaRNGStatesTracker(device=device)
    for number, name in enumerate(names):
        tracker.add(name, number)
    return tracker


def test_every_cuda_stream_of_every_tracker_is_registered(early: FakeKit) -> None:
    first, second, host = _tracker("a", "b"), _tracker("a"), _tracker("c", device="cpu")
    foreign = early.default().clone_state()
    set_all_rng_states({"foreign": foreign, "bytes": torch.zeros(16, dtype=torch.uint8)})
    try:
        graph = Graph(early)
        register_streams(graph)  # type: ignore[arg-type]
    finally:
        set_all_rng_states({})
    wanted = [*first.states_.values(), *second.states_.values(), foreign]
    assert {id(handle) for handle in graph.handles} == {id(handle) for handle in wanted}
    assert host.states_


def test_streams_of_one_tracker(early: FakeKit) -> None:
    tracker, _other = _tracker("a", "b"), _tracker("c")
    graph = Graph(early)
    register_streams(graph, tracker)  # type: ignore[arg-type]
    assert graph.handles == list(tracker.states_.values())


def test_registration_is_needed_before_2_14_only(early: FakeKit) -> None:
    assert registration_needed()


def test_nothing_is_registered_since_2_14(late: FakeKit) -> None:
    tracker = _tracker("a")
    graph = Graph(late)
    before = Graph.capture_begin
    assert not registration_needed()
    register_streams(graph)  # type: ignore[arg-type]
    register_streams(graph, tracker)  # type: ignore[arg-type]
    with registering_streams():
        assert Graph.capture_begin is before
        graph.capture_begin()
    assert Graph.capture_begin is before
    assert graph.handles == []


def test_registering_streams_serves_graphs_whose_capture_begins_inside(early: FakeKit) -> None:
    tracker, _other = _tracker("a"), _tracker("c")
    earlier, inside, outside = Graph(early), Graph(early), Graph(early)
    with registering_streams(tracker):
        tracker.add("b", 7)  # asked anew at every capture
        assert earlier.capture_begin() == "begun"
        assert inside.capture_begin((0, 1), capture_error_mode="relaxed") == "begun"
    outside.capture_begin()
    assert earlier.handles == inside.handles == list(tracker.states_.values())
    assert outside.handles == []
    assert inside.begun == [((0, 1), ("capture_error_mode", "relaxed"))]
    assert len(earlier.begun) == len(outside.begun) == 1


@pytest.mark.parametrize("kind", [Graph, Derived])
def test_registering_streams_puts_the_class_back(
    early: FakeKit, kind: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an exception, and when one lies in another; an inherited method is inherited again."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    before = dict(vars(kind))
    tracker = _tracker("a")
    with registering_streams(tracker), registering_streams():
        graph = kind(early)
        graph.capture_begin()
    assert len(graph.begun) == 1
    assert dict(vars(kind)) == before

    def raise_inside() -> None:
        with registering_streams():
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        raise_inside()
    assert dict(vars(kind)) == before
    graph = kind(early)
    graph.capture_begin()
    assert graph.handles == []


def test_torchs_own_class_is_put_back() -> None:
    """Whatever this torch needs, its class is as before."""
    before = dict(vars(torch.cuda.CUDAGraph))
    with registering_streams():
        pass
    assert dict(vars(torch.cuda.CUDAGraph)) == before
