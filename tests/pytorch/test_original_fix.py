# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The eight behaviours of the fix that this package grew from.

1 to 6: both engines, each with the default generator, a tracked stream and a stream that shares the default's state.
7: live handles stay live, and stand where they should, after backward.
8: a CUDA graph captured before an eager region replays after it as if the region had not been checkpointed.
"""

from __future__ import annotations

import pytest
import torch

from _helpers import requires_cuda
from _proof import ENGINE_IDS, ENGINES, assert_one_mask, assert_same_tensors
from _twins import Bench, compare, drop
from transformer_engine_ext.pytorch import CudaRNGStatesTracker

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


def _default_generator(device: str) -> torch.Generator:
    if device == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _live_handle(device: str) -> torch.Generator:
    """A handle on the default generator's state, as an owner of a shared stream keeps one."""
    default = _default_generator(device)
    return default if device == "cpu" else default.graphsafe_get_state()


# ---------------------------------------------------------------- 1 to 6


@engines
@pytest.mark.parametrize("stream", ["default", "tracked", "shared"])
def test_fix_1_to_6_recompute_draws_what_forward_drew(device: str, use_reentrant: bool, stream: str) -> None:
    def program(bench: Bench) -> torch.Tensor:
        tracker = bench.tracker
        if stream == "shared":
            tracker.set_states({**tracker.get_states(), "shared": _live_handle(bench.device)})

        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            if stream == "default":
                return bench.gate(drop(x))
            with tracker.fork("a" if stream == "tracked" else "shared"):
                return bench.gate(drop(x))

        return bench.checkpoint(region, bench.x)

    compare(program, device, use_reentrant)


# ---------------------------------------------------------------- 7


@engines
def test_fix_7_live_handles_stay_live_after_backward(device: str, use_reentrant: bool) -> None:
    benches = [Bench(device, engine) for engine in (use_reentrant, None)]
    ends = []
    for bench in benches:
        torch.manual_seed(3)
        default = _default_generator(device)
        shared = _live_handle(device)
        stream = bench.tracker.get_states()["a"]

        def region(x: torch.Tensor, bench: Bench = bench) -> torch.Tensor:
            bench.proof.ran()
            with bench.tracker.fork("a"):
                h = drop(x)
            return bench.gate(drop(h))

        y = bench.checkpoint(region, bench.x)
        bench.forward_done()
        y.sum().backward()
        bench.backward_done()
        assert_one_mask(y, bench.x.grad)
        # No object was replaced, and the handles taken before still are the streams.
        assert _default_generator(device) is default
        assert bench.tracker.states_["a"] is stream
        assert bench.tracker.get_states()["a"] is stream
        assert torch.equal(shared.get_state(), default.get_state())
        end = {"default": default.get_state(), "a": stream.get_state()}
        with bench.tracker.fork("a"):
            torch.rand(8, device=device)
        assert not torch.equal(stream.get_state(), end["a"]), "the handle no longer follows its stream"
        torch.rand(8, device=device)
        assert not torch.equal(shared.get_state(), end["default"]), "the shared handle no longer follows the default"
        ends.append(end)
    assert_same_tensors(ends[0], ends[1], "states after backward")


# ---------------------------------------------------------------- 8


def _register(graph: torch.cuda.CUDAGraph, tracker: CudaRNGStatesTracker) -> None:
    """Register streams where that does something: from torch 2.14 on it is deprecated and warns."""
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 14):
        for state in tracker.get_states().values():
            graph.register_generator_state(state)


def _capture(bench: Bench) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture one dropout of the default stream, one of "a" and one of "b" over an input of ones."""
    static = torch.ones(4096, device="cuda")
    bench.leaves["input of the graph"] = static  # a replay reads it, so it must not be freed before

    def body() -> torch.Tensor:
        masks = [drop(static)]
        for name in ("a", "b"):
            with bench.tracker.fork(name):
                masks.append(drop(static))
        return torch.stack(masks)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    _register(graph, bench.tracker)
    with torch.cuda.graph(graph):
        masks = body()
    return graph, masks


def _replayed(use_reentrant: bool | None) -> dict[str, torch.Tensor]:
    """Capture, then: replay, eager region (forward and backward), replay, region, replay, replay."""
    bench = Bench("cuda", use_reentrant)
    graph, masks = _capture(bench)

    def region(x: torch.Tensor) -> torch.Tensor:
        bench.proof.ran()
        h = drop(x)
        with bench.tracker.fork("a"):
            return bench.gate(drop(h))

    values: list[torch.Tensor] = []
    for turn in range(2):
        graph.replay()
        values.append(masks.clone())
        x = torch.ones_like(bench.x, requires_grad=True)
        y = bench.checkpoint(region, x)
        bench.forward_done(2 * turn + 1)
        y.sum().backward()
        bench.backward_done(2 * turn + 2)
        assert_one_mask(y, x.grad)
        assert x.grad is not None
        values += [y.detach(), x.grad]
    for _ in range(2):
        graph.replay()
        values.append(masks.clone())
    return bench.outcome(values)


@requires_cuda
@engines
def test_fix_8_graph_captured_before_a_region_replays_after_it(use_reentrant: bool) -> None:
    actual, expected = _replayed(use_reentrant), _replayed(None)
    assert_same_tensors(actual, expected, "values")
    replays = [value for name, value in actual.items() if name.startswith("output") and value.dim() == 2]
    assert len(replays) == 4
    rows = torch.cat(replays)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows), "two replays, or two streams, drew the same mask"


@requires_cuda
@engines
def test_fix_8_forward_before_a_replay_and_backward_after_it(use_reentrant: bool) -> None:
    """The replay advances the streams between a region's forward and its backward."""

    def run(engine: bool | None) -> dict[str, torch.Tensor]:
        bench = Bench("cuda", engine)
        graph, masks = _capture(bench)

        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            h = drop(x)
            with bench.tracker.fork("a"):
                return bench.gate(drop(h))

        y = bench.checkpoint(region, bench.x)
        bench.forward_done()
        graph.replay()
        first = masks.clone()
        y.sum().backward()
        bench.backward_done()
        assert_one_mask(y, bench.x.grad)
        graph.replay()
        return bench.outcome([y, first, masks.clone()])

    assert_same_tensors(run(use_reentrant), run(None), "values")
