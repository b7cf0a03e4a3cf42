# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""FP8 state of a region, on a stand-in that keeps it as Transformer Engine does: its scales, updates and first module.

test_te_fp8.py has the same questions for the real one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from _patched import stand_ins
from _proof import ENGINE_IDS, ENGINES
from transformer_engine_ext import te_checkpoint
from transformer_engine_ext.errors import RecomputeMismatchError
from transformer_engine_ext.integrations.fp8_state import FP8State, Open, open_regions
from transformer_engine_ext.pytorch.distributed import is_fp8_activation_recompute_enabled

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


@pytest.fixture
def te(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with stand_ins(tmp_path, monkeypatch):
        package = importlib.import_module("transformer_engine.pytorch")
        yield package
        state = package.quantization.FP8GlobalStateManager.quantization_state
        assert type(state).__name__ == "FP8GlobalState"
        assert state.autocast_depth == 0
        assert open_regions() == []


def _x() -> torch.Tensor:
    return torch.linspace(0.1, 1, 5, requires_grad=True)


def _scales(module: Any) -> list[float]:
    return [scale for scale, _ in module.used]


@engines
def test_each_micro_batch_gets_its_own_scales(te: Any, use_reentrant: bool) -> None:
    module, quantization = te.quantization.Module(1.0), te.quantization
    outputs = []
    for scale in (2.0, 3.0, 4.0):
        module.scale = scale
        with quantization.autocast():
            outputs.append(te_checkpoint(module, _x(), use_reentrant=use_reentrant))
    module.scale = 99.0
    for output in (outputs[1], outputs[2], outputs[0]):
        output.sum().backward()
    assert _scales(module) == [2.0, 3.0, 4.0, 3.0, 4.0, 2.0]


@engines
def test_scales_survive_a_second_backward_and_a_dropped_region(te: Any, use_reentrant: bool) -> None:
    module, quantization = te.quantization.Module(2.0), te.quantization
    with quantization.autocast():
        kept = te_checkpoint(module, _x(), use_reentrant=use_reentrant)
        module.scale = 3.0
        te_checkpoint(module, _x(), use_reentrant=use_reentrant)  # no backward
        module.scale = 4.0
        last = te_checkpoint(module, _x(), use_reentrant=use_reentrant)
    kept.sum().backward(retain_graph=True)
    kept.sum().backward()
    last.sum().backward()
    assert _scales(module) == [2.0, 3.0, 4.0, 2.0, 2.0, 4.0]


@engines
@pytest.mark.parametrize("inner_reentrant", ENGINES, ids=ENGINE_IDS)
def test_nested_regions_use_the_first_runs_scales(te: Any, use_reentrant: bool, inner_reentrant: bool) -> None:
    module, quantization = te.quantization.Module(1.0), te.quantization

    def outer(x: torch.Tensor) -> torch.Tensor:
        return module(te_checkpoint(module, module(x), use_reentrant=inner_reentrant))

    outputs = []
    for scale in (2.0, 3.0):
        module.scale = scale
        with quantization.autocast():
            outputs.append(te_checkpoint(outer, _x(), use_reentrant=use_reentrant))
    module.scale = 99.0
    runs = len(module.used)
    for output in reversed(outputs):
        output.sum().backward()
    again = _scales(module)[runs:]
    assert again == sorted(again, reverse=True)
    assert set(again) == {2.0, 3.0}
    assert again.count(3.0) == again.count(2.0) >= 4, "all three, and the inner one once more"


def _firsts(te: Any, run: Callable[[Any, Any], torch.Tensor], modules: int) -> tuple[list[Any], list[Any]]:
    """Return which runs with grad were told that they are the first module, and the updates."""
    manager = te.quantization.FP8GlobalStateManager
    manager.reset = None
    manager.quantization_state = te.quantization.FP8GlobalState()
    manager.updates.clear()
    made = [te.quantization.Module(1.0 + i) for i in range(modules)]
    run(made, te.quantization.autocast).sum().backward()
    return [[first for _, first in module.used if first is not None] for module in made], list(manager.updates)


def _two_regions(checkpoint: Callable[..., Any]) -> Callable[[Any, Any], torch.Tensor]:
    def run(modules: Any, autocast: Any) -> torch.Tensor:
        first, second, third, fourth = modules
        with autocast():
            y = checkpoint(lambda x: second(first(x)), _x())
            return checkpoint(lambda x: fourth(third(x)), y)

    return run


def _autocast_inside(checkpoint: Callable[..., Any]) -> Callable[[Any, Any], torch.Tensor]:
    def run(modules: Any, autocast: Any) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            with autocast():
                x = modules[1](modules[0](x))
            with autocast():
                return modules[3](modules[2](x))

        return checkpoint(region, _x())

    return run


def _autocast_in_autocast(checkpoint: Callable[..., Any]) -> Callable[[Any, Any], torch.Tensor]:
    def run(modules: Any, autocast: Any) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            x = modules[0](x)
            with autocast(enabled=False):
                x = modules[1](x)
            return modules[3](modules[2](x))

        with autocast():
            return checkpoint(region, _x())

    return run


@pytest.mark.parametrize("shape", [_two_regions, _autocast_inside, _autocast_in_autocast])
def test_the_backward_update_belongs_to_one_module(te: Any, shape: Callable[..., Any]) -> None:
    """Reentrant: the graph of the recompute is the one that is used, so what counts is what modules hear there."""
    expected, updates = _firsts(te, shape(lambda function, x: function(x)), 4)

    def checkpoint(function: Any, x: torch.Tensor) -> Any:
        return te_checkpoint(function, x, use_reentrant=True)

    assert sum(first for told in expected for first in told) in (1, 2)
    assert _firsts(te, shape(checkpoint), 4) == (expected, updates)


@pytest.mark.parametrize("shape", [_two_regions, _autocast_inside, _autocast_in_autocast])
@engines
def test_scales_are_updated_once(te: Any, shape: Callable[..., Any], use_reentrant: bool) -> None:
    _, expected = _firsts(te, shape(lambda function, x: function(x)), 4)

    def checkpoint(function: Any, x: torch.Tensor) -> Any:
        return te_checkpoint(function, x, use_reentrant=use_reentrant)

    assert expected
    assert _firsts(te, shape(checkpoint), 4)[1] == expected


@engines
def test_the_recompute_finds_the_forwards_autocast(te: Any, use_reentrant: bool) -> None:
    manager, seen = te.quantization.FP8GlobalStateManager, []

    def region(x: torch.Tensor) -> torch.Tensor:
        state = manager.quantization_state
        seen.append((manager.is_fp8_enabled(), state.autocast_depth, is_fp8_activation_recompute_enabled()))
        return x.sin()

    with te.quantization.autocast():
        inside = te_checkpoint(region, _x(), use_reentrant=use_reentrant)
    outside = te_checkpoint(region, _x(), use_reentrant=use_reentrant)
    with te.quantization.autocast():
        outside.sum().backward()
    inside.sum().backward()
    assert seen == [(True, 1, True), (False, 0, False), (False, 0, False), (True, 1, True)]
    assert is_fp8_activation_recompute_enabled() is False


@engines
def test_a_module_that_runs_more_often_in_the_recompute_is_an_error(te: Any, use_reentrant: bool) -> None:
    module, runs = te.quantization.Module(1.0), []

    def region(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return module(module(x)) if len(runs) > 1 else module(x)

    with te.quantization.autocast():
        y = te_checkpoint(region, _x(), use_reentrant=use_reentrant)
    with pytest.raises(RecomputeMismatchError, match="kept 1 of them"):
        y.sum().backward()


def test_without_a_region_the_queue_is_what_it_was(te: Any) -> None:
    """Transformer Engine's own checkpoint, and modules that recompute by themselves, use the queue in order."""
    state = te.quantization.FP8GlobalStateManager.quantization_state
    te_checkpoint(torch.sin, _x()).sum().backward()  # routes the queues
    queue = te.quantization.deque()
    state.fp8_tensors_recompute_buffer.append(queue)
    routed = state.fp8_tensors_recompute_buffer[-1]
    routed.append("a")
    routed.append("b")
    assert [routed.popleft(), routed.popleft()] == ["a", "b"]
    with pytest.raises(IndexError):
        routed.popleft()


def test_the_older_layout(te: Any) -> None:
    """Before Transformer Engine 2.15 the state was attributes of the manager."""

    class Manager:
        FP8_ENABLED = True
        FP8_RECIPE = "recipe"
        IS_FIRST_FP8_MODULE = True
        FP8_AUTOCAST_DEPTH = 1
        global_amax_buffer: dict[str, list[int]] = {"a": [1]}  # noqa: RUF012
        fp8_tensors_recompute_buffer: list[Any] = []  # noqa: RUF012

        @classmethod
        def is_first_fp8_module(cls) -> bool:
            return cls.IS_FIRST_FP8_MODULE

    state = FP8State(Manager)
    assert state.enabled() is True
    region = Open({}, True, True)
    state.enter(region)
    Manager.FP8_ENABLED, Manager.FP8_AUTOCAST_DEPTH, Manager.FP8_RECIPE = False, 0, "other"
    assert Manager.global_amax_buffer == {}
    state.leave(region)
    assert (Manager.FP8_ENABLED, Manager.FP8_AUTOCAST_DEPTH, Manager.FP8_RECIPE) == (True, 1, "recipe")
    assert Manager.global_amax_buffer == {"a": [1]}


@engines
def test_flags_and_the_engine_switch_belong_to_the_region(te: Any, use_reentrant: bool) -> None:
    distributed, mlp, seen = te.distributed, te.layernorm_mlp, []
    asked = mlp.use_reentrant_activation_recompute

    def region(x: torch.Tensor) -> torch.Tensor:
        seen.append(
            (
                distributed._IN_ACTIVATION_RECOMPUTE_REGION,
                distributed.in_fp8_activation_recompute_phase(),
                distributed.use_reentrant_activation_recompute(),
                mlp.use_reentrant_activation_recompute(),
            )
        )
        return x.sin()

    te_checkpoint(region, _x(), use_reentrant=use_reentrant).sum().backward()
    assert seen == [(True, False, use_reentrant, True), (True, True, use_reentrant, True)]
    with pytest.raises(OSError, match="x"):
        te_checkpoint(lambda x: (_ for _ in ()).throw(OSError("x")), _x(), use_reentrant=use_reentrant)
    assert distributed._IN_ACTIVATION_RECOMPUTE_REGION is False
    assert distributed.use_reentrant_activation_recompute() is True
    assert mlp.use_reentrant_activation_recompute is asked


@engines
def test_flags_by_their_names_before_2_19(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_reentrant: bool) -> None:
    with stand_ins(tmp_path, monkeypatch):
        file = tmp_path / "transformer_engine" / "pytorch" / "distributed.py"
        text = file.read_text().replace("_IN_ACTIVATION_RECOMPUTE_REGION", "_FP8_ACTIVATION_RECOMPUTE_ENABLED")
        file.write_text(text.replace("_ACTIVATION_RECOMPUTE_PHASE", "_FP8_ACTIVATION_RECOMPUTE_PHASE"))
        distributed, seen = importlib.import_module("transformer_engine.pytorch").distributed, []

        def region(x: torch.Tensor) -> torch.Tensor:
            seen.append((distributed._FP8_ACTIVATION_RECOMPUTE_ENABLED, distributed._FP8_ACTIVATION_RECOMPUTE_PHASE))
            return x.sin()

        te_checkpoint(region, _x(), use_reentrant=use_reentrant).sum().backward()
        assert seen == [(True, False), (True, True)]
        assert distributed._FP8_ACTIVATION_RECOMPUTE_ENABLED is False
