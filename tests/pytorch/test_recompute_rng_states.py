# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Case A6 and its kind: trackers that hold byte states, mixed states, or are not ours at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from _foreign import ByteTracker, GeneratorTracker, PointerTracker
from _helpers import requires_cuda
from _proof import ENGINE_IDS, ENGINES, assert_one_mask
from _twins import STREAM_SEEDS, Bench, compare, drop
from transformer_engine_ext.pytorch import CudaRNGStatesTracker

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


def _forks(bench: Bench) -> torch.Tensor:
    def region(x: torch.Tensor) -> torch.Tensor:
        bench.proof.ran()
        with bench.tracker.fork("a"):
            h = drop(x)
        h = drop(h)
        with bench.tracker.fork("b"):
            return bench.gate(drop(h))

    return bench.checkpoint(region, bench.x)


def _from_states(device: str, kinds: dict[str, str]) -> CudaRNGStatesTracker:
    tracker = CudaRNGStatesTracker(device=device)
    states: dict[str, Any] = {}
    for name, kind in kinds.items():
        generator = torch.Generator(device).manual_seed(STREAM_SEEDS[name])
        states[name] = generator.get_state() if kind == "bytes" else generator
    tracker.set_states(states)
    return tracker


@engines
@pytest.mark.parametrize(
    "kinds",
    [{"a": "bytes", "b": "bytes"}, {"a": "bytes", "b": "generator"}, {"a": "generator", "b": "bytes"}],
    ids=["bytes", "bytes_first", "generator_first"],
)
def test_a6_byte_and_mixed_states_set_on_our_tracker(device: str, use_reentrant: bool, kinds: dict[str, str]) -> None:
    compare(_forks, device, use_reentrant, make_tracker=lambda device: _from_states(device, kinds))


def _bad_states(device: str) -> dict[str, Any]:
    good = torch.Generator(device).manual_seed(1).get_state()
    return {
        "none": None,
        "number": 7,
        "bytes object": bytes(good.tolist()),
        "list": good.tolist(),
        "floats": good.float(),
        "int64": good.long(),
        "too short": good[:-1].clone(),
        "too long": torch.cat([good, good]),
        "empty": good[:0].clone(),
        "two dimensions": good.reshape(2, -1),
    }


@pytest.mark.parametrize("bad", list(_bad_states("cpu")))
def test_a6_wrong_state_is_refused_when_it_is_set_and_changes_nothing(device: str, bad: str) -> None:
    bench = Bench(device, False)  # the engine does not matter here: the region below only shows that all still works
    tracker, names = bench.tracker, set(bench.names)
    before = {name: state.get_state() for name, state in tracker.get_states().items()}
    handles = {name: id(state) for name, state in tracker.states_.items()}
    # A good state before and after the bad one: neither may have been applied.
    other = torch.Generator(device).manual_seed(5).get_state()
    states = {"a": other, "b": _bad_states(device)[bad], "c": other}
    with pytest.raises((TypeError, ValueError)) as caught:
        tracker.set_states(states)
    assert "'b'" in str(caught.value), f"the message does not name the stream: {caught.value}"
    assert set(tracker.get_states()) == names
    assert {name: id(state) for name, state in tracker.states_.items()} == handles
    for name, state in tracker.get_states().items():
        assert torch.equal(state.get_state(), before[name]), f"stream {name} was changed"
    y = _forks(bench)
    bench.forward_done()
    y.sum().backward()
    bench.backward_done()
    assert_one_mask(y, bench.x.grad)


FOREIGN: dict[str, Callable[[str, dict[str, int]], Any]] = {"bytes": ByteTracker, "generators": GeneratorTracker}


@engines
@pytest.mark.parametrize("kind", FOREIGN)
def test_a6_foreign_tracker_is_rewound(device: str, use_reentrant: bool, kind: str) -> None:
    compare(_forks, device, use_reentrant, make_tracker=lambda device: FOREIGN[kind](device, STREAM_SEEDS))


@requires_cuda
@engines
def test_a6_foreign_tracker_that_points_the_default_generator_is_rewound(use_reentrant: bool) -> None:
    compare(_forks, "cuda", use_reentrant, make_tracker=lambda device: PointerTracker(device, STREAM_SEEDS))


@engines
@pytest.mark.parametrize("kind", FOREIGN)
def test_a6_region_inside_a_foreign_fork(device: str, use_reentrant: bool, kind: str) -> None:
    """The default generator then holds the foreign stream, and the tracker's own entry is stale until the fork ends."""

    def program(bench: Bench) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            h = drop(x)
            with bench.tracker.fork("b"):
                return bench.gate(drop(h))

        with bench.tracker.fork("a"):
            return bench.checkpoint(region, bench.x)

    compare(program, device, use_reentrant, make_tracker=lambda device: FOREIGN[kind](device, STREAM_SEEDS))


@engines
@pytest.mark.parametrize("kind", FOREIGN)
def test_a6_foreign_tracker_in_two_regions_with_draws_between(device: str, use_reentrant: bool, kind: str) -> None:
    def program(bench: Bench) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            with bench.tracker.fork("a"):
                return bench.gate(drop(x))

        h = bench.checkpoint(region, bench.x)
        with bench.tracker.fork("a"):
            torch.rand(5, device=bench.device)
        return bench.checkpoint(region, h)

    compare(program, device, use_reentrant, regions=2, make_tracker=lambda device: FOREIGN[kind](device, STREAM_SEEDS))


@engines
def test_a6_subclass_that_swaps_on_its_own_is_rewound_when_passed(device: str, use_reentrant: bool) -> None:
    """A subclass of ours whose ``fork`` never reaches ours still has ``get_states`` to be saved by."""

    class OwnFork(CudaRNGStatesTracker):
        def fork(self, name: str = "a") -> Any:
            swapper = GeneratorTracker(device, {})
            swapper.states = dict(self.states_)
            return swapper.fork(name)

    def make(device: str) -> CudaRNGStatesTracker:
        tracker = OwnFork(device=device)
        for name, seed in STREAM_SEEDS.items():
            tracker.add(name, seed)
        return tracker

    compare(_forks, device, use_reentrant, make_tracker=make)
