# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""FP8 with the real Transformer Engine: a recompute changes neither gradients nor the FP8 state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from _helpers import requires_cuda
from _proof import ENGINE_IDS, ENGINES
from _te import load, their_warnings
from transformer_engine_ext import te_checkpoint

pytestmark = [requires_cuda, their_warnings]
engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)
WIDTH = 128

Checkpoint = Callable[..., torch.Tensor]


def _recipe(name: str) -> Any:
    recipe = load("transformer_engine.common.recipe")
    if name == "delayed":
        return recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max")
    return {"current": recipe.Float8CurrentScaling, "block": recipe.Float8BlockScaling}[name]()


recipes = pytest.mark.parametrize("recipe", ["delayed", "current", "block"])


@pytest.fixture(autouse=True)
def fp8_left_as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(os.environ, "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    load("transformer_engine.pytorch")
    manager = load("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    manager.reset()
    yield
    state = manager.quantization_state
    assert type(state).__name__ == "FP8GlobalState"
    assert state.autocast_depth == 0
    manager.reset()


def _blocks(count: int = 2) -> torch.nn.ModuleList:
    te = load("transformer_engine.pytorch")
    torch.manual_seed(3)
    options = {"params_dtype": torch.bfloat16}
    blocks = [
        torch.nn.Sequential(
            te.LayerNormLinear(WIDTH, WIDTH, **options),
            te.Linear(WIDTH, WIDTH, **options),
            torch.nn.Dropout(0.1),
            te.LayerNormMLP(WIDTH, 2 * WIDTH, **options),
        )
        for _ in range(count)
    ]
    return torch.nn.ModuleList(blocks).cuda()


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All scales and amax histories."""
    found = {}
    for name, module in model.named_modules():
        meta = getattr(module, "fp8_meta", {})
        for key in ("scaling_fwd", "scaling_bwd"):
            for kind in ("scale", "amax_history"):
                value = getattr(meta.get(key), kind, None)
                if isinstance(value, torch.Tensor):
                    found[f"{name}.{key}.{kind}"] = value.clone()
    return found


def _compare(run: Callable[[torch.nn.Module, Checkpoint], None], use_reentrant: bool, delayed: bool) -> None:
    seen = []
    manager = load("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    for checkpointed in (False, True):
        manager.reset()
        model = _blocks()
        with torch.no_grad():  # building and the first call draw random numbers
            model[0](torch.ones(32, WIDTH, device="cuda", dtype=torch.bfloat16))
        torch.manual_seed(9)
        calls = []

        def region(function: Callable[..., Any], *args: Any, on: bool = checkpointed, log: list[int] = calls) -> Any:
            def counted(*inner: Any) -> Any:
                log.append(1)
                return function(*inner)

            return te_checkpoint(counted, *args, use_reentrant=use_reentrant) if on else counted(*args)

        run(model, region)
        seen.append(({name: p.grad.clone() for name, p in model.named_parameters()}, _state(model), len(calls)))
    (grads, state, once), (grads_again, state_again, twice) = seen
    assert twice > once, "nothing was recomputed"
    assert bool(state) is delayed
    different = [name for name in state if not torch.equal(state[name], state_again[name])]
    assert different == [], "FP8 state"
    different = [name for name in grads if not torch.equal(grads[name], grads_again[name])]
    assert different == [], "gradients"


def _inputs(count: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(4)
    return [
        (torch.randn(32, WIDTH, device="cuda", generator=generator) * (3 + 5 * i)).bfloat16().requires_grad_()
        for i in range(count)
    ]


def _autocast(recipe: Any) -> contextlib.AbstractContextManager[Any]:
    return load("transformer_engine.pytorch").autocast(enabled=True, recipe=recipe)


def _step(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.01)


@engines
@recipes
@pytest.mark.parametrize("order", ["reverse", "same"])
def test_two_micro_batches(recipe: str, order: str, use_reentrant: bool) -> None:
    made = _recipe(recipe)

    def run(model: torch.nn.Module, region: Checkpoint) -> None:
        for _ in range(3):
            outputs = []
            for x in _inputs(2):
                with _autocast(made):
                    for block in model:
                        x = region(block, x)
                outputs.append(x)
            for output in reversed(outputs) if order == "reverse" else outputs:
                output.float().pow(2).mean().backward()
            _step(model)

    _compare(run, use_reentrant, recipe == "delayed")


@engines
@recipes
def test_nested_regions(recipe: str, use_reentrant: bool) -> None:
    made = _recipe(recipe)

    def run(model: torch.nn.Module, region: Checkpoint) -> None:
        def outer(x: torch.Tensor) -> torch.Tensor:
            return region(model[1], region(model[0], x))

        for _ in range(3):
            outputs = []
            for x in _inputs(2):
                with _autocast(made):
                    outputs.append(region(outer, x))
            for output in reversed(outputs):
                output.float().pow(2).mean().backward()
            _step(model)

    _compare(run, use_reentrant, recipe == "delayed")


@engines
@recipes
def test_eval_between_train_steps(recipe: str, use_reentrant: bool) -> None:
    made = _recipe(recipe)

    def run(model: torch.nn.Module, region: Checkpoint) -> None:
        for _ in range(3):
            (x,) = _inputs(1)
            with _autocast(made):
                y = region(model[1], region(model[0], x))
            model.eval()
            with torch.no_grad(), _autocast(made):
                region(model[0], x * 50)
            model.train()
            y.float().pow(2).mean().backward()
            _step(model)

    _compare(run, use_reentrant, recipe == "delayed")


@engines
@recipes
def test_an_autocast_opened_inside_the_region(recipe: str, use_reentrant: bool) -> None:
    made = _recipe(recipe)

    def run(model: torch.nn.Module, region: Checkpoint) -> None:
        def inner(x: torch.Tensor) -> torch.Tensor:
            with _autocast(made):
                x = model[0](x)
            return model[1](x)

        for _ in range(3):
            outputs = [region(inner, x) for x in _inputs(2)]
            for output in reversed(outputs):
                output.float().pow(2).mean().backward()
            _step(model)

    _compare(run, use_reentrant, recipe == "delayed")


@engines
def test_b14_the_engine_outlives_no_region(use_reentrant: bool) -> None:
    te = load("transformer_engine.pytorch")
    distributed = load("transformer_engine.pytorch.distributed")
    mlp = te.LayerNormMLP(WIDTH, WIDTH, params_dtype=torch.bfloat16).cuda()
    fused = mlp.bias_gelu_nvfusion
    assert fused, "this build has no fused bias-GELU to lose"
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mlp(x).sum().backward()
    expected, x.grad = x.grad, None
    asked = []

    def region(inner: torch.Tensor) -> torch.Tensor:
        asked.append(distributed.use_reentrant_activation_recompute())
        return mlp(inner)

    te_checkpoint(region, x, use_reentrant=use_reentrant).sum().backward()
    assert asked == [use_reentrant, use_reentrant]
    assert mlp.bias_gelu_nvfusion is fused
    assert distributed.use_reentrant_activation_recompute() is True
    assert torch.equal(x.grad, expected)
