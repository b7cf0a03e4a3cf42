# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Cases C4 and C5, and trackers held in other ways: several at once, subclasses as Megatron-core has them, copies."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from _proof import ENGINE_IDS, ENGINES, Proof, assert_one_mask
from _twins import STREAM_SEEDS, Bench, compare, drop
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.rng import (
    get_all_rng_states,
    graph_safe_rng_available,
    is_graph_safe_rng_state,
    set_all_rng_states,
)

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


def make(device: str, **seeds: int) -> CudaRNGStatesTracker:
    tracker = CudaRNGStatesTracker(device=device)
    for name, seed in seeds.items():
        tracker.add(name, seed)
    return tracker


def listed(*handles: torch.Generator) -> list[bool]:
    """Whether each generator is among all known streams, by identity."""
    known = {id(state) for state in get_all_rng_states().values()}
    return [id(handle) in known for handle in handles]


# ---------------------------------------------------------------- C4


def test_c4_two_trackers_with_one_name(device: str) -> None:
    first, second = make(device, a=1, b=2), make(device, a=3)
    handles = [*first.get_states().values(), *second.get_states().values()]
    assert listed(*handles) == [True] * 3
    names = {id(state): name for name, state in get_all_rng_states().items()}
    assert names[id(handles[0])] != names[id(handles[2])]
    assert "a" in names[id(handles[2])]  # qualified, yet recognisable
    assert get_all_rng_states() == get_all_rng_states()  # the keys do not change from call to call


def test_c4_reset_of_one_tracker_leaves_the_other(device: str) -> None:
    first, second = make(device, a=1), make(device, a=3)
    gone, kept = first.get_states()["a"], second.get_states()["a"]
    first.reset()
    assert listed(gone, kept) == [False, True]
    first.add("a", 1)
    assert listed(first.get_states()["a"], kept) == [True, True]


def test_c4_set_states_replaces_what_is_known(device: str) -> None:
    tracker = make(device, a=1, b=2)
    old = tracker.get_states()
    adopted = torch.Generator(device)
    tracker.set_states({"b": adopted})
    assert listed(old["a"], old["b"], adopted) == [False, False, True]


def test_c4_dead_tracker_vanishes(device: str) -> None:
    tracker = make(device, **{"only here": 1})
    alive = weakref.ref(tracker)
    handle = tracker.get_states()["only here"]
    assert listed(handle) == [True]
    del tracker
    assert alive() is None, "something keeps a tracker alive that nobody holds"
    assert listed(handle) == [False]
    assert not any("only here" in name for name in get_all_rng_states())


@engines
def test_c4_tracker_that_a_region_used_vanishes_too(device: str, use_reentrant: bool) -> None:
    tracker, proof = make(device, a=1), Proof()
    x, w = (torch.ones(64, device=device, requires_grad=True) for _ in range(2))

    def region(x: torch.Tensor, w: torch.Tensor, tracker: CudaRNGStatesTracker) -> torch.Tensor:
        proof.ran()
        with tracker.fork("a"):
            return proof.watch(drop(x)) * w

    def passed(tracker: CudaRNGStatesTracker = tracker) -> CudaRNGStatesTracker:
        return tracker

    y = te_checkpoint(region, x, w, tracker, use_reentrant=use_reentrant, get_rng_state_tracker=passed)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    alive = weakref.ref(tracker)
    del tracker, passed, y
    gc.collect()
    assert alive() is None, "the region keeps its tracker after backward"


@engines
def test_c4_two_trackers_with_one_name_in_one_region(device: str, use_reentrant: bool) -> None:
    def program(bench: Bench) -> torch.Tensor:
        other = make(device, a=909)
        bench.also.append(other)

        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            with bench.tracker.fork("a"):
                h = drop(x)
                with other.fork("a"):
                    h = drop(h)
                h = drop(h)
            return bench.gate(h)

        return bench.checkpoint(region, bench.x)

    compare(program, device, use_reentrant)


def test_c4_set_all_rng_states_makes_others_known(device: str) -> None:
    tracker, foreign = make(device, a=1), torch.Generator(device)
    states = {"foreign": foreign}
    set_all_rng_states(states)
    assert states == {"foreign": foreign}
    assert listed(foreign, tracker.get_states()["a"]) == [True, True]
    set_all_rng_states({})
    assert listed(foreign, tracker.get_states()["a"]) == [False, True]


def test_c4_all_states_is_a_copy(device: str) -> None:
    tracker = make(device, a=1)
    get_all_rng_states().clear()
    assert listed(tracker.get_states()["a"]) == [True]
    assert set(tracker.get_states()) == {"a"}


def test_graph_safe_states_are_generators(device: str) -> None:
    available = graph_safe_rng_available()
    assert available is (torch.version.cuda is not None)
    state = make(device, a=1).get_states()["a"]
    assert is_graph_safe_rng_state(state) is available
    assert is_graph_safe_rng_state(state.get_state()) is False
    assert is_graph_safe_rng_state(None) is False


# ---------------------------------------------------------------- C5


class TrainingTracker(CudaRNGStatesTracker):
    """As Megatron-core's wrapper: ``reset`` runs after the base constructor and makes an attribute of its own."""

    def __init__(self, device: str, is_inference: bool = False) -> None:
        super().__init__(device=device)
        self.is_inference = is_inference
        self.log: list[str] = []
        self.reset()

    def reset(self) -> None:
        self.log.append("reset")  # would fail if the base constructor called it
        super().reset()
        self._is_initialized = False

    def is_initialized(self) -> bool:
        return self._is_initialized

    def set_states(self, states: Any) -> None:
        self.log.append("set_states")
        super().set_states(states)
        self._is_initialized = True

    def add(self, name: str, seed: int) -> None:
        self.log.append(f"add {name}")
        super().add(name, seed)
        self._is_initialized = True

    def fork(self, name: str = "a") -> Any:
        self.log.append(f"fork {name}")
        return super().fork(name)


class InferenceTracker(TrainingTracker):
    """As Megatron-core's for inference: nothing is added, nothing is set, a fork does nothing."""

    def add(self, name: str, seed: int) -> None:
        pass

    def set_states(self, states: Any) -> None:
        pass

    def fork(self, name: str = "a") -> Any:
        return contextlib.nullcontext()


def _training(device: str) -> TrainingTracker:
    tracker = TrainingTracker(device)
    for name, seed in STREAM_SEEDS.items():
        tracker.add(name, seed)
    return tracker


def test_c5_training_subclass_works_as_the_base_class(device: str) -> None:
    tracker = TrainingTracker(device)
    assert not tracker.is_initialized()
    assert tracker.get_states() == {}
    tracker.add("a", 101)
    assert tracker.is_initialized()
    assert listed(tracker.get_states()["a"]) == [True]
    saved = tracker.get_states()
    with tracker.fork():
        first = torch.rand(5, device=device)
    assert torch.equal(first, torch.rand(5, device=device, generator=torch.Generator(device).manual_seed(101)))
    tracker.set_states(saved)
    with tracker.fork():
        assert torch.equal(torch.rand(5, device=device), first)
    with pytest.raises(RuntimeError):
        tracker.add("a", 5)
    tracker.reset()
    assert not tracker.is_initialized()
    assert tracker.seeds_ == set()


@engines
def test_c5_region_with_the_training_subclass(device: str, use_reentrant: bool) -> None:
    def program(bench: Bench) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            with bench.tracker.fork("a"):
                h = drop(x)
            with bench.tracker.fork("b"):
                return bench.gate(drop(h))

        return bench.checkpoint(region, bench.x)

    bench = compare(program, device, use_reentrant, make_tracker=_training)
    assert bench.tracker.log.count("fork a") == 3, "forks of the forward, of the recompute and of the draws after it"


@engines
@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
def test_c5_region_with_the_inference_subclass(device: str, use_reentrant: bool, filled: bool) -> None:
    """Its forks do nothing, so the region draws from the default generator; its streams must not disturb that."""

    def make_tracker(device: str) -> CudaRNGStatesTracker:
        tracker = InferenceTracker(device)
        tracker.add("a", 5)
        if filled:
            CudaRNGStatesTracker.add(tracker, "a", 5)
        return tracker

    def program(bench: Bench) -> torch.Tensor:
        bench.skip_streams = True

        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            with bench.tracker.fork("a"):
                return bench.gate(drop(x))

        return bench.checkpoint(region, bench.x)

    compare(program, device, use_reentrant, make_tracker=make_tracker)


# ---------------------------------------------------------------- held in other ways


class HoldsFork(torch.nn.Module):
    """Keeps the bound method, as Transformer Engine's attention does."""

    def __init__(self, tracker: CudaRNGStatesTracker, proof: Proof) -> None:
        super().__init__()
        self.fork = tracker.fork
        self.count = proof.ran
        self.weight = torch.nn.Parameter(torch.ones(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count()
        with self.fork("a"):
            return drop(x) * self.weight


@engines
def test_deepcopy_of_a_module_that_holds_the_bound_fork(device: str, use_reentrant: bool) -> None:
    tracker = make(device, a=101, b=202)
    module = HoldsFork(tracker, Proof()).to(device)
    with tracker.fork("a"):
        torch.rand(3, device=device)
    before = {name: state.get_state() for name, state in tracker.get_states().items()}
    twin = copy.deepcopy(module)
    for name, state in tracker.get_states().items():
        assert torch.equal(state.get_state(), before[name]), "copying a module moved a stream"
    held: CudaRNGStatesTracker = twin.fork.__self__
    assert set(held.get_states()) == {"a", "b"}
    assert all(listed(*held.get_states().values())), "a stream of the copy would not be registered with CUDA graphs"
    x = torch.ones(512, device=device, requires_grad=True)
    y = te_checkpoint(twin, x, use_reentrant=use_reentrant)
    proof: Proof = twin.count.__self__
    assert proof.runs == 1
    y.sum().backward()
    proof.after_backward()
    assert_one_mask(y, x.grad)
    # The original still works, and draws on from where its tracker stands.
    z = te_checkpoint(module, x, use_reentrant=use_reentrant)
    x.grad = None
    z.sum().backward()
    assert_one_mask(z, x.grad)


def test_one_fork_object_entered_twice_is_right_or_refused(device: str) -> None:
    torch.manual_seed(3)
    tracker = make(device, a=101)
    fork = tracker.fork("a")
    # One object cannot hold two bindings unless it is written to; what must not happen is a binding that stays.
    with contextlib.suppress(RuntimeError, AttributeError), fork, fork:
        pass
    expected = torch.rand(5, device=device, generator=torch.Generator(device).manual_seed(3))
    assert torch.equal(torch.rand(5, device=device), expected), "the default generator stayed bound to the stream"


def test_default_device_is_resolved_when_a_stream_is_added() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert tracker.get_states()["a"].device.type == expected
