# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Region hooks: other state that takes part in a region, through the registry of ``recompute.hooks``."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from _proof import ENGINE_IDS, ENGINES
from transformer_engine_ext.pytorch import in_checkpoint_region, is_recomputing, te_checkpoint
from transformer_engine_ext.pytorch.recompute import hooks, register_region_hook, unregister_region_hook

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


class Scale:
    """A process-wide number that forward reads and moves on, as FP8 scales do; a recompute must see the old one."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self.value, self.log, self.name = 1, log, name
        self.fail_in: str | None = None

    def _at(self, step: str) -> None:
        self.log.append(self.name + step)
        if self.fail_in == step:
            raise OSError(step)

    def enter_forward(self, memory: dict[str, Any], reentrant: bool) -> tuple[bool, bool]:
        self._at("enter forward")
        memory["value"] = self.value
        return in_checkpoint_region(), reentrant

    def leave_forward(self, memory: dict[str, Any], token: tuple[bool, bool]) -> None:
        assert token[0], "the phase flags were not set yet"
        self._at("leave forward")

    def enter_recompute(self, memory: dict[str, Any], reentrant: bool) -> int:
        assert is_recomputing()
        self._at("enter recompute")
        live, self.value = self.value, memory["value"]
        return live

    def leave_recompute(self, memory: dict[str, Any], token: int) -> None:
        self.value = token
        self._at("leave recompute")


@pytest.fixture
def scales() -> Iterator[list[Scale]]:
    log: list[str] = []
    both = [Scale(log, "first "), Scale(log, "second ")]
    for scale in both:
        register_region_hook(scale)
    register_region_hook(both[0])  # a second time: no effect
    yield both
    for scale in both:
        unregister_region_hook(scale)


def _region(scale: Scale) -> Any:
    def region(x: torch.Tensor) -> torch.Tensor:
        y = x * scale.value
        scale.value += 1
        return y.sin()

    return region


@engines
def test_hooks_see_both_phases_in_order(scales: list[Scale], use_reentrant: bool) -> None:
    first, _ = scales
    x = torch.ones(3, requires_grad=True)
    y = te_checkpoint(_region(first), x, use_reentrant=use_reentrant)
    assert first.log == ["first enter forward", "second enter forward", "second leave forward", "first leave forward"]
    first.log.clear()
    first.value = 40
    y.sum().backward()
    assert first.log == [
        "first enter recompute",
        "second enter recompute",
        "second leave recompute",
        "first leave recompute",
    ]
    assert first.value == 40
    assert torch.equal(x.grad, torch.ones(3).cos()), "the recompute saw another scale than its forward"


@engines
def test_memory_belongs_to_one_region(scales: list[Scale], use_reentrant: bool) -> None:
    """Two micro-batches, backward in reverse order and one of them twice."""
    first, _ = scales
    xs = [torch.ones(3, requires_grad=True) for _ in range(2)]
    ys = [te_checkpoint(_region(first), x, use_reentrant=use_reentrant) for x in xs]
    ys[1].sum().backward(retain_graph=True)
    ys[0].sum().backward()
    xs[1].grad = None
    ys[1].sum().backward()
    for number, x in enumerate(xs, 1):
        scale = torch.full((3,), float(number))
        assert torch.equal(x.grad, scale.cos() * scale)


@engines
def test_hook_that_came_or_went_after_the_forward_does_not_count(scales: list[Scale], use_reentrant: bool) -> None:
    first, second = scales
    x = torch.ones(3, requires_grad=True)
    y = te_checkpoint(_region(first), x, use_reentrant=use_reentrant)
    unregister_region_hook(second)
    late = Scale(first.log, "late ")
    register_region_hook(late)
    try:
        first.log.clear()
        y.sum().backward()
    finally:
        unregister_region_hook(late)
    assert [line for line in first.log if "enter" in line] == ["first enter recompute", "second enter recompute"]


@engines
@pytest.mark.parametrize("step", ["enter forward", "leave forward"])
def test_hook_that_raises_in_forward_leaves_the_others_balanced(
    scales: list[Scale], use_reentrant: bool, step: str
) -> None:
    first, second = scales
    second.fail_in = step
    with pytest.raises(OSError, match=step):
        te_checkpoint(_region(first), torch.ones(3, requires_grad=True), use_reentrant=use_reentrant)
    assert first.log[-1] == "first leave forward"
    assert not in_checkpoint_region()


@engines
@pytest.mark.parametrize("step", ["enter recompute", "leave recompute"])
def test_hook_that_raises_in_the_recompute_leaves_the_others_balanced(
    scales: list[Scale], use_reentrant: bool, step: str
) -> None:
    first, second = scales
    y = te_checkpoint(_region(first), torch.ones(3, requires_grad=True), use_reentrant=use_reentrant)
    second.fail_in = step
    value = first.value
    with pytest.raises(OSError, match=step):
        y.sum().backward()
    assert first.log[-1] == "first leave recompute"
    assert first.value == value
    assert not is_recomputing()


@engines
def test_hooks_are_left_when_the_function_raises(scales: list[Scale], use_reentrant: bool) -> None:
    first, _ = scales

    def region(x: torch.Tensor) -> torch.Tensor:
        if is_recomputing():
            raise ValueError("recompute")
        return x.sin()

    y = te_checkpoint(region, torch.ones(3, requires_grad=True), use_reentrant=use_reentrant)
    with pytest.raises(ValueError, match="recompute"):
        y.sum().backward()
    assert first.log[-1] == "first leave recompute"


def test_sources_are_asked_once_when_their_module_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own sources are imported at the first region, and no library is imported for any of them."""
    imported: list[tuple[str, str]] = []
    loaded: list[str] = []
    monkeypatch.setattr(hooks, "_asked", False)
    monkeypatch.setattr(hooks, "_sources", ())
    monkeypatch.setattr(hooks, "import_module", lambda name, package: imported.append((name, package)))
    monkeypatch.delitem(sys.modules, "some_library.later", raising=False)
    hooks.register_hook_source("some_library.later", lambda: loaded.append("later"))
    for _ in range(2):
        hooks.active_hooks()
    assert imported == [(".integrations", "transformer_engine_ext")]
    assert not loaded
    monkeypatch.setitem(sys.modules, "some_library.later", types.ModuleType("some_library.later"))
    for _ in range(2):
        hooks.active_hooks()
    assert loaded == ["later"]
    assert imported == [(".integrations", "transformer_engine_ext")]
