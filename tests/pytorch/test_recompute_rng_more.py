# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""More of section A's kind: programs that move, seed, alias, add or drop streams in and around a region.

Each is run with and without checkpointing and compared in outputs, gradients and the next draw of every stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from _proof import ENGINE_IDS, ENGINES, assert_one_mask, assert_same_tensors, next_draws
from _twins import Bench, compare, drop
from test_recompute_rng import share_default

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)

Body = Callable[[Bench, torch.Tensor], torch.Tensor]


def _region(bench: Bench, body: Body) -> Callable[[torch.Tensor], torch.Tensor]:
    def region(x: torch.Tensor) -> torch.Tensor:
        bench.proof.ran()
        return bench.gate(body(bench, x))

    return region


def _one_region(body: Body) -> Callable[[Bench], torch.Tensor]:
    return lambda bench: bench.checkpoint(_region(bench, body), bench.x)


# ---------------------------------------------------------------- what the region does


def _alias_after_default(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    """The alias is first touched when the state it shares has already moved."""
    h = drop(drop(x))
    with bench.tracker.fork("shared"):
        return drop(h)


def _default_after_alias(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    with bench.tracker.fork("shared"):
        h = drop(x)
    return drop(drop(h))


def _alias_inside_a_stream(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    h = drop(x)
    with bench.tracker.fork("a"), bench.tracker.fork("shared"):
        h = drop(h)
    return drop(h)


@engines
@pytest.mark.parametrize("inside", [None, "a", "shared"], ids=["outside", "inside_a", "inside_alias"])
@pytest.mark.parametrize("body", [_alias_after_default, _default_after_alias, _alias_inside_a_stream])
def test_default_and_its_alias_in_either_order(
    device: str, use_reentrant: bool, body: Body, inside: str | None
) -> None:
    def program(bench: Bench) -> torch.Tensor:
        share_default(bench.tracker, bench.device)
        with contextlib.nullcontext() if inside is None else bench.tracker.fork(inside):
            return bench.checkpoint(_region(bench, body), bench.x)

    compare(program, device, use_reentrant)


def _adds_a_stream(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    if "new" not in bench.tracker.get_states():
        bench.tracker.add("new", 404)
    with bench.tracker.fork("new"):
        return drop(x)


def _adds_unasked(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    """Adds without looking: the recompute must find the tracker as forward found it."""
    bench.tracker.add("new", 404)
    with bench.tracker.fork("new"):
        h = drop(x)
    with bench.tracker.fork("a"):
        return drop(h)


def _resets(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    with bench.tracker.fork("a"):
        h = drop(x)
    bench.tracker.reset()
    for name, seed in {"a": 505, "b": 606, "c": 707}.items():
        bench.tracker.add(name, seed)
    with bench.tracker.fork("a"):
        return drop(h)


def _sets_saved_states(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    saved = bench.tracker.get_states()
    with bench.tracker.fork("a"):
        h = drop(x)
        bench.tracker.set_states(saved)  # the same numbers once more
        h = drop(h)
    return drop(h)


def _sets_bytes(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    state = torch.Generator(bench.device).manual_seed(77).get_state()
    with bench.tracker.fork("b"):
        h = drop(x)
    bench.tracker.set_states(dict.fromkeys(("a", "b", "c"), state))
    with bench.tracker.fork("b"):
        return drop(h)


def _swaps_names(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    with bench.tracker.fork("a"):
        h = drop(x)
    states = dict(bench.tracker.get_states())
    bench.tracker.set_states({**states, "a": states["b"], "b": states["a"]})
    with bench.tracker.fork("a"):
        return drop(h)


def _seeds(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    h = drop(x)
    torch.manual_seed(9)
    return drop(h)


def _seeds_a_bound_stream(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    with bench.tracker.fork("a"):
        h = drop(x)
        torch.manual_seed(9)
        return drop(h)


def _forks_with_torch(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    h = drop(x)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        h = drop(h)
    return drop(h)


def _forks_with_torch_inside_a_stream(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    with bench.tracker.fork("a"):
        h = drop(x)
        with torch.random.fork_rng():
            h = drop(h)
        return drop(h)


def _draws_on_the_cpu_only(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand(x.shape) < 0.5).to(x.device, x.dtype)


def _odd_normals(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    """An odd number of normals leaves the half of a pair in the CPU generator's state."""
    torch.randn((), device=bench.device)
    with bench.tracker.fork("a"):
        keep = torch.randn(x.shape, device=bench.device) < torch.randn((), device=bench.device)
    return x * keep * torch.randn((), device=bench.device).sign()


def _raises_inside_a_fork(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(ZeroDivisionError), bench.tracker.fork("a"):
        torch.rand(3, device=bench.device)
        with bench.tracker.fork("b"):
            raise ZeroDivisionError
    with bench.tracker.fork("b"):
        return drop(drop(x))


def _many_kinds_of_draws(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    with bench.tracker.fork("c"):
        order = torch.randperm(x.numel(), device=bench.device)
        keep = torch.bernoulli(torch.full_like(x.detach(), 0.5))[order]
        noise = torch.empty_like(x.detach()).uniform_(1, 2).round()
    index = torch.multinomial(torch.ones(4, device=bench.device), 1)
    return x * keep * noise * (1 + index)


BODIES = [
    _adds_a_stream,
    _adds_unasked,
    _resets,
    _sets_saved_states,
    _sets_bytes,
    _swaps_names,
    _seeds,
    _seeds_a_bound_stream,
    _forks_with_torch,
    _forks_with_torch_inside_a_stream,
    _draws_on_the_cpu_only,
    _odd_normals,
    _raises_inside_a_fork,
    _many_kinds_of_draws,
]


@engines
@pytest.mark.parametrize("pass_tracker", [True, False], ids=["passed", "not_passed"])
@pytest.mark.parametrize("body", BODIES)
def test_region_that_moves_streams(device: str, use_reentrant: bool, body: Body, pass_tracker: bool) -> None:
    compare(_one_region(body), device, use_reentrant, pass_tracker=pass_tracker)


@engines
@pytest.mark.parametrize("body", [_adds_unasked, _resets, _sets_saved_states, _swaps_names, _seeds_a_bound_stream])
def test_region_that_moves_streams_inside_a_fork_of_one(device: str, use_reentrant: bool, body: Body) -> None:
    def program(bench: Bench) -> torch.Tensor:
        with bench.tracker.fork("a"):
            y = bench.checkpoint(_region(bench, body), bench.x)
            torch.rand(3, device=bench.device)
        return y

    compare(program, device, use_reentrant)


# ---------------------------------------------------------------- what happens around it


@engines
@pytest.mark.parametrize("stream", ["a", "b", None])
def test_backward_inside_a_fork(device: str, use_reentrant: bool, stream: str | None) -> None:
    """Backward called while a stream is bound: the same that the region forks, another one, and none."""

    def run(bench: Bench, program: Callable[[Bench], torch.Tensor], regions: int) -> dict[str, torch.Tensor]:
        y = program(bench)
        bench.forward_done()
        with contextlib.nullcontext() if stream is None else bench.tracker.fork(stream):
            before = torch.rand(3, device=device)
            y.sum().backward()
            after = torch.rand(3, device=device)
        bench.backward_done()
        return bench.outcome([y, before, after])

    def body(bench: Bench, x: torch.Tensor) -> torch.Tensor:
        with bench.tracker.fork("a"):
            h = drop(x)
        return drop(h)

    compare(_one_region(body), device, use_reentrant, run=run)


@engines
def test_exception_inside_a_fork_inside_the_recompute(device: str, use_reentrant: bool) -> None:
    """The recompute dies with two streams bound: everything must stand as if backward had not been called."""
    draws = []
    for engine in (use_reentrant, None):
        bench = Bench(device, engine)

        def body(bench: Bench, x: torch.Tensor) -> torch.Tensor:
            h = drop(x)
            with bench.tracker.fork("a"):
                h = drop(h)
                with bench.tracker.fork("b"):
                    h = drop(h)
                    if bench.proof.runs == 2:
                        raise ZeroDivisionError("in the recompute")
                    return h

        y = bench.checkpoint(_region(bench, body), bench.x)
        if bench.checkpointed:
            bench.forward_done()
            with pytest.raises(ZeroDivisionError, match="in the recompute"):
                y.sum().backward()
            bench.backward_done()
        draws.append(next_draws(device, bench.tracker, bench.names))
    assert_same_tensors(draws[0], draws[1], "draws after the failed recompute")


@engines
def test_draws_of_backward_itself_come_from_the_live_streams(device: str, use_reentrant: bool) -> None:
    """Hooks that draw, inside the region and between two regions, as gradient noise does."""

    def noisy(bench: Bench, h: torch.Tensor, log: list[torch.Tensor]) -> torch.Tensor:
        def hook(grad: torch.Tensor) -> None:
            log.append(torch.rand(3, device=bench.device))
            with bench.tracker.fork("a"):
                log.append(torch.rand(3, device=bench.device))

        if h.requires_grad:
            h.register_hook(hook)
        return h

    def run(bench: Bench, program: Any, regions: int) -> dict[str, torch.Tensor]:
        log: list[torch.Tensor] = []

        def body(bench: Bench, x: torch.Tensor) -> torch.Tensor:
            with bench.tracker.fork("a"):
                h = drop(x)
            return drop(noisy(bench, h, log))

        h = bench.checkpoint(_region(bench, body), bench.x)
        y = bench.checkpoint(_region(bench, body), noisy(bench, h, log))
        bench.forward_done(2)
        y.sum().backward()
        bench.backward_done(4)
        assert len(log) == 6, "a hook was lost or ran twice"
        return bench.outcome([y, *log])

    compare(lambda bench: bench.x, device, use_reentrant, run=run)


@engines
@pytest.mark.parametrize("retained", [2, 3])
def test_repeated_backward_draws_the_same_mask_each_time(device: str, use_reentrant: bool, retained: int) -> None:
    def run(bench: Bench, program: Callable[[Bench], torch.Tensor], regions: int) -> dict[str, torch.Tensor]:
        y = program(bench)
        bench.forward_done()
        for turn in range(retained):
            bench.x.grad = None
            y.sum().backward(retain_graph=turn < retained - 1)
            bench.backward_done(2 + turn)
            assert_one_mask(y, bench.x.grad)
            torch.rand(3, device=device)
        return bench.outcome(y)

    def body(bench: Bench, x: torch.Tensor) -> torch.Tensor:
        with bench.tracker.fork("a"):
            h = drop(x)
        return drop(h)

    compare(_one_region(body), device, use_reentrant, run=run)
