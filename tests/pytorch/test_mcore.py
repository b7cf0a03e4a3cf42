# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The real Megatron-core, patched, on a GPU: its recompute helpers and trackers give the forward's numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from _helpers import requires_cuda
from _te import load, their_warnings
from transformer_engine_ext import patched
from transformer_engine_ext.pytorch.rng import register_streams

pytestmark = [requires_cuda, their_warnings]

TRACKERS = {"TE": {"use_te_rng_tracker": True}, "graph-safe": {"use_cudagraphable_rng": True}, "bytes": {}}
SIZE = 4096
trackers = pytest.mark.parametrize("kind", TRACKERS)


@pytest.fixture
def random(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Megatron's module, with a tracker of each kind."""
    load("transformer_engine.pytorch")
    module = load("megatron.core.tensor_parallel.random")
    load("megatron.core.transformer.cuda_graphs")
    load("megatron.core.extensions.transformer_engine")
    # The real one compiles C++ to share storage; the tests below keep the output, so a copy does the same.
    monkeypatch.setattr(module, "_get_share_storage", lambda: lambda output, again: output.data.copy_(again))
    _fill(module, kind)
    yield module
    module.initialize_rng_tracker(force_reset=True)


def _fill(module: Any, kind: str) -> None:
    torch.manual_seed(7)
    module.initialize_rng_tracker(force_reset=True, **TRACKERS[kind])
    tracker = module.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 11)
    tracker.add("expert-parallel-rng", 13)


def _draw(module: Any) -> torch.Tensor:
    tracker = module.get_cuda_rng_tracker()
    drawn = [torch.rand(8, device="cuda")]
    for name in ("model-parallel-rng", "expert-parallel-rng"):
        with tracker.fork(name):
            drawn.append(torch.rand(8, device="cuda"))
    return torch.cat(drawn)


def _drop(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def region(x: torch.Tensor) -> torch.Tensor:
        tracker = module.get_cuda_rng_tracker()
        x = F.dropout(x, 0.5)
        with tracker.fork():
            x = F.dropout(x, 0.25)
            with tracker.fork("expert-parallel-rng"):
                x = F.dropout(x, 0.25)
        return x

    return region


def _ones() -> torch.Tensor:
    return torch.ones(SIZE, device="cuda", requires_grad=True)


def _discarding(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A region whose output is recomputed when the gradient of its consumer arrives."""
    made = module.CheckpointWithoutOutput()
    out = made.checkpoint(_drop(module), x)
    mask = out.detach().clone()
    result = out * 1.0
    result.register_hook(made._recompute)
    return mask, result


@trackers
def test_a_discarded_output_is_recomputed_with_the_same_numbers(random: Any, kind: str) -> None:
    def run() -> tuple[int, torch.Tensor]:
        _fill(random, kind)
        pairs = [(x, *_discarding(random, x)) for x in (_ones(), _ones())]
        wrong = 0
        for x, mask, result in reversed(pairs):
            result.backward(torch.ones_like(result))
            wrong += int((x.grad != mask).sum())
        return wrong, _draw(random)

    def plain() -> torch.Tensor:
        _fill(random, kind)
        for _ in range(2):
            _drop(random)(_ones())
        return _draw(random)

    assert run()[0] == 0 if kind == "bytes" else run()[0] > 1000
    with patched():
        wrong, after = run()
        assert wrong == 0
        assert torch.equal(after, plain())


@trackers
def test_a_region_called_inside_a_fork_of_the_stream_it_forks(random: Any, kind: str) -> None:
    """Sequence parallelism forks around the whole block; the backward runs outside of that fork."""
    with patched():
        x = _ones()
        with random.get_cuda_rng_tracker().fork():
            torch.rand(3, device="cuda")
            y = random.checkpoint(_drop(random), False, x)
            torch.rand(3, device="cuda")
        y.backward(torch.ones_like(y))
        assert torch.equal(x.grad, y.detach())
        after = _draw(random)
        _fill(random, kind)
        with random.get_cuda_rng_tracker().fork():
            torch.rand(3, device="cuda")
            _drop(random)(_ones())
            torch.rand(3, device="cuda")
        assert torch.equal(_draw(random), after)


@trackers
def test_f3_the_rerun_state_machine_restores_trackers(random: Any, kind: str) -> None:
    machine = load("megatron.core.rerun_state_machine").RerunStateMachine(
        state_save_func=lambda: {"states": random.get_cuda_rng_tracker().get_states()},
        state_restore_func=lambda saved: random.get_cuda_rng_tracker().set_states(saved["states"]),
    )
    with patched():
        machine._save_state()
        first = _draw(random)
        for _ in range(2):
            machine._restore_state()
            assert torch.equal(_draw(random), first)


@pytest.mark.parametrize("kind", ["TE", "graph-safe"])
@pytest.mark.parametrize("graphs", [1, 2])
@pytest.mark.parametrize("how", ["checkpoint", "discarding"])
def test_under_capture(random: Any, kind: str, graphs: int, how: str) -> None:
    with patched():

        def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if how == "discarding":
                return _discarding(random, x)
            y = random.checkpoint(_drop(random), False, x)
            return y.detach().clone(), y

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            _, y = forward(_ones())
            y.backward(torch.ones_like(y))
        side.synchronize()
        x, ones = _ones(), torch.ones(SIZE, device="cuda")
        tracker = random.get_cuda_rng_tracker()
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        register_streams(first, tracker)
        register_streams(second, tracker)
        with torch.cuda.graph(first):
            mask, y = forward(x)
            if graphs == 1:
                y.backward(ones)
        with contextlib.nullcontext() if graphs == 1 else torch.cuda.graph(second, pool=first.pool()):
            if graphs == 2:
                y.backward(ones)
        torch.cuda.synchronize()
        seen = []
        for _ in range(3):
            first.replay()
            if graphs == 2:
                torch.rand(3, device="cuda")
                second.replay()
            torch.cuda.synchronize()
            assert torch.equal(x.grad, mask)
            seen.append(mask.clone())
        assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("kind", ["TE"])
def test_local_graphs_differentiate_regions(random: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """te_checkpoint of Megatron's, and its own, under what cuda_graph_impl="local" does: torch.autograd.grad."""
    graphs = load("megatron.core.transformer.cuda_graphs")
    extension = load("megatron.core.extensions.transformer_engine")
    with patched():
        for state in ("_IS_GRAPH_WARMUP", "_IS_GRAPH_CAPTURING"):
            monkeypatch.setattr(graphs, state, True)
            for call in (
                lambda x: random.checkpoint(_drop(random), False, x),
                lambda x: extension.te_checkpoint(_drop(random), False, random.get_cuda_rng_tracker, None, x),
            ):
                x = _ones()
                y = call(x)
                (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
                assert torch.equal(grad, y.detach())
            monkeypatch.setattr(graphs, state, False)
