# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""More of section A's kind: regions beside, inside and after each other, in threads, and without RNG kept."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable

import pytest
import torch

from _helpers import requires_cuda
from _proof import ENGINE_IDS, ENGINES, Proof, assert_one_mask, assert_same_tensors, plain_checkpoint
from _twins import SIZE, Bench, compare, drop
from transformer_engine_ext.pytorch import te_checkpoint

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


def _body(bench: Bench, x: torch.Tensor) -> torch.Tensor:
    bench.proof.ran()
    h = drop(x)
    with bench.tracker.fork("a"):
        h = drop(h)
    return bench.gate(h)


@pytest.mark.parametrize(
    ("outer", "inner"), list(itertools.product(ENGINES, ENGINES)), ids=lambda e: ENGINE_IDS[ENGINES.index(e)]
)
def test_nested_regions_each_draw_their_own_numbers(device: str, outer: bool, inner: bool) -> None:
    """Streams touched in the outer region only, in the inner only, and in both; the inner one runs twice in forward."""

    def run(engine: bool | None) -> dict[str, torch.Tensor]:
        bench = Bench(device, engine)
        inner_proof = Proof()

        def inner_region(x: torch.Tensor) -> torch.Tensor:
            inner_proof.ran()
            with bench.tracker.fork("b"):
                h = drop(x)
            with bench.tracker.fork("a"):
                return inner_proof.watch(drop(h)) * bench.w

        if engine is None:
            inner_call: Callable[..., torch.Tensor] = plain_checkpoint
        else:
            inner_call = functools.partial(te_checkpoint, use_reentrant=inner)

        def outer_region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            with bench.tracker.fork("c"):
                h = drop(x)
                h = inner_call(inner_region, h)
            with bench.tracker.fork("a"):
                return bench.gate(drop(h))

        y = bench.checkpoint(outer_region, bench.x)
        bench.forward_done()
        if bench.checkpointed:
            inner_proof.after_forward()
        y.sum().backward()
        bench.backward_done()
        if bench.checkpointed:
            inner_proof.after_backward(3)  # forward, the outer recompute, its own recompute
        assert_one_mask(y, bench.x.grad)
        return bench.outcome(y)

    assert_same_tensors(run(outer), run(None), "values")


@engines
def test_layers_in_a_row_with_draws_between(device: str, use_reentrant: bool) -> None:
    def program(bench: Bench) -> torch.Tensor:
        h = bench.x
        for _ in range(4):
            h = bench.checkpoint(_body, bench, h)
            with bench.tracker.fork("a"):
                torch.rand(3, device=device)
            torch.rand(5, device=device)
        return h

    # Four times eight halvings would leave hardly an element, so only the twins are compared.
    compare(program, device, use_reentrant, regions=4, mask=False)


@engines
def test_dropped_region_disturbs_no_other(device: str, use_reentrant: bool) -> None:
    def run(engine: bool | None) -> dict[str, torch.Tensor]:
        bench = Bench(device, engine)
        dropped = bench.checkpoint(_body, bench, bench.x)
        y = bench.checkpoint(_body, bench, bench.x)
        bench.forward_done(2)
        del dropped
        y.sum().backward()
        bench.backward_done(3)
        assert_one_mask(y, bench.x.grad)
        return bench.outcome(y)

    assert_same_tensors(run(use_reentrant), run(None), "values")


@engines
def test_only_one_of_two_outputs_is_used(device: str, use_reentrant: bool) -> None:
    def run(engine: bool | None) -> dict[str, torch.Tensor]:
        bench = Bench(device, engine)

        def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            bench.proof.ran()
            with bench.tracker.fork("a"):
                first = bench.gate(drop(x))
            return first, bench.gate(drop(x))

        first, second = bench.checkpoint(region, bench.x)
        bench.forward_done()
        first.sum().backward()
        bench.backward_done()
        assert_one_mask(first, bench.x.grad)
        return bench.outcome([first, second])

    assert_same_tensors(run(use_reentrant), run(None), "values")


@engines
def test_backward_in_another_thread(device: str, use_reentrant: bool) -> None:
    def run(engine: bool | None) -> dict[str, torch.Tensor]:
        bench = Bench(device, engine)
        y = bench.checkpoint(_body, bench, bench.x)
        bench.forward_done()
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
        bench.backward_done()
        assert_one_mask(y, bench.x.grad)
        return bench.outcome(y)

    assert_same_tensors(run(use_reentrant), run(None), "values")


@engines
def test_region_of_another_thread_is_not_recorded(device: str, use_reentrant: bool) -> None:
    """A stream that another thread forks while the region runs must not be rewound by it."""
    bench = Bench(device, use_reentrant)
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        # "b" moves while the region is open in the main thread, which is idle meanwhile: no concurrent draws.
        inside.wait(60)
        with bench.tracker.fork("b"):
            torch.rand(7, device=device)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def region(x: torch.Tensor) -> torch.Tensor:
        bench.proof.ran()
        with bench.tracker.fork("a"):
            h = drop(x)
        inside.set()
        assert done.wait(60)
        return bench.gate(h)

    y = bench.checkpoint(region, bench.x)
    thread.join()
    bench.forward_done()
    y.sum().backward()
    bench.backward_done()
    assert_one_mask(y, bench.x.grad)
    with bench.tracker.fork("b"):
        drawn = torch.rand(5, device=device)
    generator = torch.Generator(device).manual_seed(202)
    torch.rand(7, device=device, generator=generator)
    assert torch.equal(drawn, torch.rand(5, device=device, generator=generator)), "the other thread's draw was undone"


@engines
def test_evaluation_mode_draws_nothing_and_still_recomputes(device: str, use_reentrant: bool) -> None:
    def program(bench: Bench) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            with bench.tracker.fork("a"):
                return bench.gate(torch.nn.functional.dropout(x, 0.5, training=False).clone())

        return bench.checkpoint(region, bench.x)

    compare(program, device, use_reentrant, mask=False)


@engines
def test_preserve_rng_state_off_keeps_nothing(device: str, use_reentrant: bool) -> None:
    """The user says that nothing random matters: as in torch, the recompute then draws on from the live stream."""
    bench = Bench(device, use_reentrant)

    def region(x: torch.Tensor) -> torch.Tensor:
        bench.proof.ran()
        return bench.gate(drop(x))

    y = bench.checkpoint(region, bench.x, preserve_rng_state=False)
    bench.forward_done()
    y.sum().backward()
    bench.backward_done()
    after = torch.rand(5, device=device)
    twin = Bench(device, None)  # seeds as the first bench did
    first, second = drop(twin.x.detach()), drop(twin.x.detach())
    assert torch.equal(y, first)
    assert bench.x.grad is not None
    assert torch.equal(bench.x.grad, second), "the recompute was rewound"
    assert torch.equal(after, torch.rand(5, device=device)), "the default generator was put back"


@requires_cuda
@engines
def test_current_device_generator_is_untouched_by_a_cpu_region(use_reentrant: bool) -> None:
    def program(bench: Bench) -> torch.Tensor:
        torch.rand(3, device="cuda")
        y = bench.checkpoint(_body, bench, bench.x)
        torch.rand(3, device="cuda")
        return y

    compare(program, "cpu", use_reentrant)


@engines
@pytest.mark.parametrize("size", [1, 3, SIZE + 1])
def test_odd_sizes(device: str, use_reentrant: bool, size: int) -> None:
    """Sizes that no vector width divides: the generator still advances by whole calls."""

    def run(engine: bool | None) -> dict[str, torch.Tensor]:
        bench = Bench(device, engine)

        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            with bench.tracker.fork("a"):
                return bench.proof.watch(drop(drop(x))) * x

        x = torch.ones(size, device=device, requires_grad=True)
        y = bench.checkpoint(region, x)
        bench.forward_done()
        y.sum().backward()
        bench.backward_done()
        bench.leaves["x"] = x
        return bench.outcome(y)

    assert_same_tensors(run(use_reentrant), run(None), "values")
