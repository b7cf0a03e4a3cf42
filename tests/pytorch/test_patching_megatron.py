# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What patch() does to Megatron-core, on a small package with its names; test_mcore.py asks the real one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from _patched import stand_ins
from transformer_engine_ext import patch, patched, unpatch
from transformer_engine_ext.errors import UnsupportedCaptureError
from transformer_engine_ext.integrations import megatron_guards, megatron_states

TE = "transformer_engine.pytorch"
RANDOM = "megatron.core.tensor_parallel.random"
CONFIG = "megatron.core.transformer.transformer_config"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with stand_ins(tmp_path, monkeypatch):
        yield tmp_path


def load(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize("readable", [True, False])
def test_guards_are_lifted_only_where_it_is_exact(
    folder: Path, readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(CONFIG).TransformerConfig
    graphed = functools.partial(config, "selective", "local", attention_dropout=0.1)
    with pytest.raises(AssertionError, match="attention dropout is not supported"):
        graphed()
    patch()
    monkeypatch.setattr(megatron_guards, "native_status", lambda: (readable, "no library"))
    if not readable:
        with pytest.raises(AssertionError, match="not with this installation: no library"):
            graphed()
        return
    made = graphed(moe_input_jitter_eps=0.01)
    assert (type(made.attention_dropout), made.attention_dropout, made.moe_input_jitter_eps) == (float, 0.1, 0.01)
    with pytest.raises(AssertionError, match="Batch invariant"):
        graphed(batch_invariant_mode=True)
    unpatch()
    with pytest.raises(AssertionError, match="attention dropout is not supported"):
        graphed()


def test_local_graphs_get_the_non_reentrant_engine(folder: Path) -> None:
    patch()
    te, random, graphs = load(TE), load(RANDOM), load("megatron.core.transformer.cuda_graphs")
    for state in ("capturing", "warmup"):
        graphs.STATE[state] = True
        for checkpoint in (te.checkpoint, lambda region, x: random.checkpoint(region, False, x)):
            x = torch.ones(64, requires_grad=True)
            y = checkpoint(lambda z: F.dropout(z.exp(), 0.5), x)
            (grad,) = torch.autograd.grad(y.sum(), x)  # a reentrant region refuses this
            assert torch.equal(grad, y.detach())
        graphs.STATE[state] = False


def test_megatrons_flag_is_put_back(folder: Path) -> None:
    patch()
    random = load(RANDOM)
    seen = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(random.IS_CHECKPOINTING)
        return x.sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        y = random.checkpoint(inner, False, x)
        seen.append(random.IS_CHECKPOINTING)
        return y.cos()

    x = torch.ones(4, requires_grad=True)
    random.checkpoint(outer, False, x).sum().backward()
    assert seen == [True] * len(seen)
    assert len(seen) >= 5
    assert random.IS_CHECKPOINTING is False


def test_megatrons_own_recompute_with_a_discarded_output(folder: Path) -> None:
    random = load(RANDOM)

    def run() -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
        distributed, phases = load(f"{TE}.distributed"), []
        tracker = random.get_cuda_rng_tracker()

        def region(x: torch.Tensor) -> torch.Tensor:
            phases.append(distributed.in_fp8_activation_recompute_phase())
            with tracker.fork():
                x = F.dropout(x, 0.5)
            return F.dropout(x, 0.25)

        made = random.CheckpointWithoutOutput()
        first = made.checkpoint(region, torch.ones(512))
        torch.rand(3)
        before = torch.get_rng_state()
        made._recompute(None)
        assert torch.equal(torch.get_rng_state(), before)
        return first, made.outputs, phases

    first, again, _ = run()
    assert not torch.equal(first, again)
    with patched():
        first, again, phases = run()
        assert torch.equal(first, again)
        assert phases == [False, True]


def test_megatrons_helpers_outside_of_a_fork(folder: Path) -> None:
    patch()
    random = load(RANDOM)
    tracker = random.get_cuda_rng_tracker()

    def draw() -> torch.Tensor:
        with tracker.fork():
            forked = torch.rand(3)
        return torch.cat([forked, torch.rand(3)])

    saved = random._get_all_rng_states()
    first = draw()
    random._set_all_rng_states(*saved)
    assert torch.equal(draw(), first)
    before = draw()
    random._set_all_rng_states(*saved)
    draw()
    with random._fork_rng():
        draw()
    assert torch.equal(draw(), before)


def test_megatrons_own_tracker_saves_values(folder: Path) -> None:
    patch()
    tracker = load(RANDOM).CudaRNGStatesTracker()
    tracker.states_ = {"a": torch.Generator().manual_seed(4)}
    saved = tracker.get_states()
    first = torch.rand(3, generator=tracker.states_["a"])
    tracker.set_states(saved)
    assert torch.equal(torch.rand(3, generator=tracker.states_["a"]), first)
    given = {"a": torch.zeros(4, dtype=torch.uint8)}
    tracker.set_states(given)
    tracker.states_["b"] = 1
    assert list(given) == ["a"], "the caller's dict is not written to"
    assert tracker.get_states()["a"] is given["a"]


def test_states_set_under_capture_need_a_fork(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch()
    random = load(RANDOM)
    saved = random._get_all_rng_states()
    monkeypatch.setattr(megatron_states, "capturing", lambda: True)
    with pytest.raises(UnsupportedCaptureError, match="with _fork_rng"):
        random._set_all_rng_states(*saved)


def test_a_megatron_that_saves_something_else_is_left_alone(folder: Path) -> None:
    random = load(RANDOM)
    random._set_all_rng_states = lambda cpu, cuda, states, kind: None
    reasons = {skipped.target.rpartition(".")[2]: skipped.reason for skipped in patch().skipped}
    assert set(reasons) == {"_get_all_rng_states", "_set_all_rng_states", "_fork_rng"}
    unpatch()
    del random._set_all_rng_states
    assert "no such helper" in patch().skipped[0].reason
