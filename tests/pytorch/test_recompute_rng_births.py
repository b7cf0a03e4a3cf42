# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Streams and generators that a region makes itself: each execution makes them anew, and they must count as one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from _proof import ENGINE_IDS, ENGINES, assert_one_mask, assert_same_tensors
from _twins import Bench, compare, drop
from transformer_engine_ext.errors import RecomputeMismatchError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)

Body = Callable[[Bench, torch.Tensor], torch.Tensor]


def _one_region(body: Body) -> Callable[[Bench], torch.Tensor]:
    def program(bench: Bench) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            return bench.gate(body(bench, x))

        return bench.checkpoint(region, bench.x)

    return program


def _adopts_a_fresh_generator(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    """Each execution makes the stream anew, from the same seed: another object, the same numbers."""
    fresh = torch.Generator(bench.device).manual_seed(88)
    bench.tracker.set_states({**bench.tracker.get_states(), "fresh": fresh})
    with bench.tracker.fork("fresh"):
        h = drop(x)
    with bench.tracker.fork("a"):
        return drop(h)


def _makes_a_tracker(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    tracker = CudaRNGStatesTracker(device=bench.device)
    tracker.add("own", 88)
    with tracker.fork("own"):
        h = drop(x)
    with bench.tracker.fork("a"):
        return drop(h)


def _makes_a_tracker_of_bytes(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    tracker = CudaRNGStatesTracker(device=bench.device)
    tracker.set_states({"own": torch.Generator(bench.device).manual_seed(88).get_state()})
    with tracker.fork("own"):
        return drop(x)


def _makes_a_tracker_of_generators(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    tracker = CudaRNGStatesTracker(device=bench.device)
    tracker.set_states({"own": torch.Generator(bench.device).manual_seed(88)})
    with tracker.fork("own"):
        return drop(x)


@engines
@pytest.mark.parametrize("body", [_makes_a_tracker, _makes_a_tracker_of_bytes])
def test_streams_made_inside_the_region(device: str, use_reentrant: bool, body: Body) -> None:
    compare(_one_region(body), device, use_reentrant)


def _copies_the_tracker(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    twin = copy.deepcopy(bench.tracker)
    with twin.fork("a"):
        x = drop(x)
    with bench.tracker.fork("a"):
        return drop(x)


@engines
@pytest.mark.parametrize("body", [_adopts_a_fresh_generator, _makes_a_tracker_of_generators, _copies_the_tracker])
def test_generators_made_inside_the_region(device: str, use_reentrant: bool, body: Body) -> None:
    """Forward's generator and the recompute's are two objects with one name, start and end."""
    # See Note [A stream that the region makes has two generators]
    compare(_one_region(body), device, use_reentrant)


@engines
def test_generator_made_inside_that_starts_elsewhere_is_refused(device: str, use_reentrant: bool) -> None:
    seeds = iter([88, 89])

    def body(bench: Bench, x: torch.Tensor) -> torch.Tensor:
        tracker = CudaRNGStatesTracker(device=bench.device)
        tracker.set_states({"own": torch.Generator(bench.device).manual_seed(next(seeds))})
        with tracker.fork("own"):
            return drop(x)

    bench = Bench(device, use_reentrant)
    y = _one_region(body)(bench)
    with pytest.raises(RecomputeMismatchError, match="'own'"):
        y.sum().backward()


@engines
@pytest.mark.parametrize("inner_reentrant", ENGINES, ids=["inner reentrant", "inner nonreentrant"])
@pytest.mark.parametrize("added_in", ["outer", "inner", "both"])
def test_stream_added_in_a_region_and_used_in_a_nested_one(
    device: str, use_reentrant: bool, inner_reentrant: bool, added_in: str
) -> None:
    def program(bench: Bench) -> torch.Tensor:
        def add(name: str) -> None:
            if name not in bench.tracker.get_states():
                bench.tracker.add(name, 7 if name == "new" else 8)

        def inner(h: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            if added_in != "outer":
                add("new")
            with bench.tracker.fork("new"):
                return bench.gate(drop(h))

        def outer(x: torch.Tensor) -> torch.Tensor:
            if added_in == "both":
                add("more")
                with bench.tracker.fork("more"):
                    x = drop(x)
            if added_in == "outer":
                add("new")
                with bench.tracker.fork("new"):
                    x = drop(x)
            if not bench.checkpointed:
                return inner(x)
            y: torch.Tensor = te_checkpoint(inner, x, use_reentrant=inner_reentrant)
            return y

        y: torch.Tensor = bench.checkpoint(outer, bench.x)
        with bench.tracker.fork("new"):
            torch.rand(3, device=bench.device)  # the live stream moves on before backward
        return y

    outcomes = []
    for engine in (None, use_reentrant):
        bench = Bench(device, engine)
        y = program(bench)
        handle = bench.tracker.get_states()["new"]
        y.sum().backward()
        assert bench.tracker.get_states()["new"] is handle
        outcomes.append(bench.outcome(y))
    assert_one_mask(outcomes[1]["output 0"], outcomes[1]["gradient of x"])
    assert_same_tensors(outcomes[1], outcomes[0], "values")


@engines
def test_stream_that_is_added_once_its_fork_has_failed(device: str, use_reentrant: bool) -> None:
    """Asking why the fork failed must not use up forward's generator, which the add() behind it is to get."""

    def run(engine: bool | None) -> dict[str, torch.Tensor]:
        bench = Bench(device, engine)

        def inner(h: torch.Tensor) -> torch.Tensor:
            with bench.tracker.fork("new"):
                return bench.gate(drop(h))

        def outer(x: torch.Tensor) -> torch.Tensor:
            try:
                with bench.tracker.fork("new"):
                    x = drop(x)
            except KeyError:
                bench.tracker.add("new", 7)
            return inner(x) if engine is None else te_checkpoint(inner, x, use_reentrant=False)

        y = bench.checkpoint(outer, bench.x)
        y.sum().backward()
        return bench.outcome(y)

    assert_same_tensors(run(use_reentrant), run(None), "values")
