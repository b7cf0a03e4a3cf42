# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""More of section A's kind: handles that alias or appear inside a region, draws that nothing saves, trackers that write
their states in place, and everything that may sit around a region when it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from _foreign import ByteTracker, GeneratorTracker
from _helpers import requires_cuda
from _proof import ENGINE_IDS, ENGINES, assert_one_mask
from _twins import STREAM_SEEDS, Bench, Program, compare, drop
from transformer_engine_ext.errors import RecomputeMismatchError, UnknownStreamError
from transformer_engine_ext.pytorch import te_checkpoint

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)

Body = Callable[[Bench, torch.Tensor], torch.Tensor]


def _one_region(body: Body) -> Callable[[Bench], torch.Tensor]:
    def program(bench: Bench) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            return bench.gate(body(bench, x))

        return bench.checkpoint(region, bench.x)

    return program


def _exact_or_refused(program: Program, device: str, use_reentrant: bool, stream: str) -> None:
    """Compare, or see the stream named in an error: for identities that only the user could pair up."""
    refused: str | None = None
    try:
        compare(program, device, use_reentrant)
    except RecomputeMismatchError as error:
        refused = str(error)
    assert refused is None or f"'{stream}'" in refused, refused


# ---------------------------------------------------------------- handles


@requires_cuda
@engines
@pytest.mark.parametrize("order", ["a, also", "also, a", "a, b, also", "also, also2"])
def test_two_handles_on_one_cuda_state_in_any_order(use_reentrant: bool, order: str) -> None:
    def program(bench: Bench) -> torch.Tensor:
        states = bench.tracker.get_states()
        aliases = {name: states["a"].graphsafe_get_state() for name in ("also", "also2")}
        bench.tracker.set_states({**states, **aliases})

        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            for name in order.split(", "):
                with bench.tracker.fork(name):
                    x = drop(x)
            return bench.gate(x)

        return bench.checkpoint(region, bench.x)

    compare(program, "cuda", use_reentrant)


def _handle_taken_inside(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    """Draws from a tracked stream through ``generator=`` instead of a fork."""
    stream = bench.tracker.get_states()["a"]
    return x * (torch.rand(x.shape, device=x.device, generator=stream) < 0.5)


def _handle_taken_from_the_attribute(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand(x.shape, device=x.device, generator=bench.tracker.states_["a"]) < 0.5)


@engines
@pytest.mark.parametrize("body", [_handle_taken_inside, _handle_taken_from_the_attribute])
def test_tracked_stream_used_as_generator_argument(device: str, use_reentrant: bool, body: Body) -> None:
    compare(_one_region(body), device, use_reentrant)


# ---------------------------------------------------------------- draws that nothing saves


@engines
@pytest.mark.parametrize("stop", [None, True, False], ids=["stop_default", "stop_early", "stop_late"])
def test_draws_behind_the_last_saved_tensor(device: str, use_reentrant: bool, stop: bool | None) -> None:
    """They may or may not be made again; the streams end where forward left them either way."""

    def program(bench: Bench) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            with bench.tracker.fork("a"):
                y = bench.gate(drop(x))
                torch.rand(3, device=device)
            torch.rand(5, device=device)
            with bench.tracker.fork("c"):
                torch.rand(7, device=device)
            return y + 0.0  # a node that saves nothing

        options = {} if use_reentrant or not bench.checkpointed else {"early_stop": stop}
        return bench.checkpoint(region, bench.x, **options)

    compare(program, device, use_reentrant)


@engines
def test_region_that_swallows_every_exception(device: str, use_reentrant: bool) -> None:
    """An engine that stops the recompute by an exception must not be fooled by a function that catches it."""

    def program(bench: Bench) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            try:
                with bench.tracker.fork("a"):
                    y = bench.gate(drop(x))
            except Exception:
                y = drop(x) * 5
            return y + torch.zeros_like(x)

        return bench.checkpoint(region, bench.x)

    compare(program, device, use_reentrant)


# ---------------------------------------------------------------- trackers of others


class InPlaceByteTracker(ByteTracker):
    """Keeps one tensor per stream for good and writes into it."""

    @contextlib.contextmanager
    def fork(self, name: str = "a") -> Iterator[None]:
        kept = self.states[name]
        with super().fork(name):
            yield
        kept.copy_(self.states[name])
        self.states[name] = kept


@engines
@pytest.mark.parametrize("kind", [ByteTracker, InPlaceByteTracker, GeneratorTracker])
def test_foreign_tracker_and_a_repeated_backward(device: str, use_reentrant: bool, kind: Any) -> None:
    """A tracker that writes into the tensors it was given must not reach the saved values through them."""

    def run(bench: Bench, program: Callable[[Bench], torch.Tensor], regions: int) -> dict[str, torch.Tensor]:
        y = program(bench)
        bench.forward_done()
        for turn in range(3):
            bench.x.grad = None
            y.sum().backward(retain_graph=turn < 2)
            bench.backward_done(2 + turn)
            assert_one_mask(y, bench.x.grad)
            with bench.tracker.fork("a"):
                torch.rand(3, device=device)
        return bench.outcome(y)

    def body(bench: Bench, x: torch.Tensor) -> torch.Tensor:
        with bench.tracker.fork("a"):
            h = drop(x)
        return drop(h)

    compare(_one_region(body), device, use_reentrant, run=run, make_tracker=lambda d: kind(d, STREAM_SEEDS))


class _HoldsNumbers:
    def get_states(self) -> dict[str, Any]:
        return {"noise": 5}

    def set_states(self, states: dict[str, Any]) -> None:
        pass


@engines
@pytest.mark.parametrize(
    ("getter", "named"),
    [(lambda: object(), "object"), (lambda: 5, "int"), (lambda: _HoldsNumbers(), "'noise'"), (5, "int")],
    ids=["no_tracker", "number", "odd_states", "not_callable"],
)
def test_what_is_no_tracker_is_refused_before_the_function_runs(
    device: str, use_reentrant: bool, getter: Any, named: str
) -> None:
    runs = 0

    def region(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return drop(x) * x

    x = torch.ones(8, device=device, requires_grad=True)
    with pytest.raises((TypeError, ValueError), match=named):
        te_checkpoint(region, x, use_reentrant=use_reentrant, get_rng_state_tracker=getter)
    assert runs == 0


# ---------------------------------------------------------------- what sits around the region


def _in_torch_fork(bench: Bench, region: Callable[..., torch.Tensor]) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.rand(3, device=bench.device)
        y: torch.Tensor = bench.checkpoint(region, bench.x)
        torch.rand(3, device=bench.device)
    return y


def _seeded_after(bench: Bench, region: Callable[..., torch.Tensor]) -> torch.Tensor:
    y: torch.Tensor = bench.checkpoint(region, bench.x)
    torch.manual_seed(4)
    return y


def _tracker_set_after(bench: Bench, region: Callable[..., torch.Tensor]) -> torch.Tensor:
    states = bench.tracker.get_states()
    y: torch.Tensor = bench.checkpoint(region, bench.x)
    bench.tracker.set_states(states)
    return y


def _stream_added_after(bench: Bench, region: Callable[..., torch.Tensor]) -> torch.Tensor:
    y: torch.Tensor = bench.checkpoint(region, bench.x)
    bench.tracker.add("later", 909)
    return y


def _decorated(bench: Bench, region: Callable[..., torch.Tensor]) -> torch.Tensor:
    y: torch.Tensor = bench.checkpoint(bench.tracker.fork("b")(region), bench.x)
    return y


@engines
@pytest.mark.parametrize(
    "around",
    [_in_torch_fork, _seeded_after, _tracker_set_after, _stream_added_after, _decorated],
)
def test_streams_moved_around_the_region(device: str, use_reentrant: bool, around: Any) -> None:
    def program(bench: Bench) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            h = drop(x)
            with bench.tracker.fork("a"):
                return bench.gate(drop(h))

        result: torch.Tensor = around(bench, region)
        return result

    compare(program, device, use_reentrant)


@engines
def test_name_that_means_another_stream_when_backward_comes(device: str, use_reentrant: bool) -> None:
    def program(bench: Bench) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            with bench.tracker.fork("a"):
                return bench.gate(drop(x))

        y: torch.Tensor = bench.checkpoint(region, bench.x)
        bench.tracker.reset()
        bench.tracker.add("a", 909)
        return y

    _exact_or_refused(program, device, use_reentrant, "a")


@engines
def test_stream_that_is_gone_when_backward_comes(device: str, use_reentrant: bool) -> None:
    bench = Bench(device, use_reentrant)

    def region(x: torch.Tensor) -> torch.Tensor:
        bench.proof.ran()
        with bench.tracker.fork("a"):
            return bench.gate(drop(x))

    y = bench.checkpoint(region, bench.x)
    bench.forward_done()
    bench.tracker.reset()
    refused: str | None = None
    try:
        y.sum().backward()
    except UnknownStreamError as error:
        refused = str(error)
    bench.backward_done()
    if refused is None:
        assert_one_mask(y, bench.x.grad)
    else:
        assert "tracker.add('a'" in refused
    assert bench.tracker.get_states() == {}, "the recompute brought back streams that the user had dropped"
