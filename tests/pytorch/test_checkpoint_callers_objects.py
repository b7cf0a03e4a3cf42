# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The caller's own objects: never written to, the same in both executions, and nothing hidden in results (B5)."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import torch

from _proof import ENGINE_IDS, ENGINES, Counted, Proof
from transformer_engine_ext.errors import CheckpointArgumentError, StateFormatError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


class Config(MutableMapping[str, Any]):
    """A mapping over a store that its shallow copies share."""

    def __init__(self, **values: Any) -> None:
        self.store = values

    def __getitem__(self, key: str) -> Any:
        return self.store[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.store[key] = value

    def __delitem__(self, key: str) -> None:
        del self.store[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.store)

    def __len__(self) -> int:
        return len(self.store)


@dataclasses.dataclass
class _Planet:
    mass: float


class Planet(_Planet, enum.Enum):
    EARTH = 3.0


@dataclasses.dataclass
class Shared:
    scale: float

    def __copy__(self) -> Shared:
        return self


@engines
@pytest.mark.parametrize("config", [Config(scale=3.0), Planet.EARTH, Shared(3.0)], ids=["mapping", "enum", "singleton"])
def test_b5_objects_without_tensors_are_handed_on_untouched(use_reentrant: bool, config: Any) -> None:
    seen, proof = [], Proof()

    def region(x: torch.Tensor, given: Any) -> torch.Tensor:
        proof.ran()
        seen.append(given)
        scale = given["scale"] if isinstance(given, Config) else getattr(given, "scale", getattr(given, "mass", None))
        return proof.watch(x * scale).sin()

    x = torch.ones(3, requires_grad=True)
    y = te_checkpoint(region, x, config, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert all(given is config for given in seen)
    assert torch.equal(x.grad, 3 * (3 * x.detach()).cos())


@engines
def test_b5_one_tensor_given_three_times_stays_one_object(use_reentrant: bool) -> None:
    proof = Proof()

    def region(a: torch.Tensor, pair: list[torch.Tensor], *, key: torch.Tensor) -> torch.Tensor:
        proof.ran()
        assert a is pair[0]
        assert a is key
        return proof.watch(a * pair[0]) * key

    x = torch.full((3,), 2.0, requires_grad=True)
    for h in (x, x * 1):
        x.grad = None
        proof = Proof()
        y = te_checkpoint(region, h, [h], key=h, use_reentrant=use_reentrant)
        proof.after_forward()
        y.sum().backward()
        proof.after_backward()
        assert torch.equal(x.grad, 3 * x.detach() ** 2)


@engines
@pytest.mark.parametrize("wrap", [lambda v: (v,), lambda v: v, collections.deque], ids=["tuple", "bare", "deque"])
def test_b5_lists_that_the_function_uses_up_are_whole_in_the_recompute(use_reentrant: bool, wrap: Any) -> None:
    def region(x: torch.Tensor, steps: Any) -> torch.Tensor:
        return (x * (steps[0] if isinstance(steps, tuple) else steps).pop()).sin()

    x, counted = torch.ones(3, requires_grad=True), Counted(region)
    te_checkpoint(counted, x, wrap([1.0, 3.0]), use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x.grad, 3 * (3 * x.detach()).cos())
    assert counted.runs == 2


@engines
@pytest.mark.parametrize("make", [iter, lambda v: map(float, v), lambda v: (float(i) for i in v), enumerate])
def test_b5_iterators_are_refused(use_reentrant: bool, make: Any) -> None:
    with pytest.raises(CheckpointArgumentError, match="iterator"):
        te_checkpoint(
            lambda x, i: x * next(i), torch.ones(1, requires_grad=True), make([1.0]), use_reentrant=use_reentrant
        )


class Pair(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("wrap", [lambda v: {v}, lambda v: Pair((v,)), Slotted], ids=["set", "tuple subclass", "slots"])
def test_b5_tensors_in_other_results_are_refused_where_they_would_lose_their_graph(wrap: Any) -> None:
    """Reentrant only; the other engine computes results with their graph."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CheckpointArgumentError, match="use_reentrant=False"):
        te_checkpoint(lambda v: wrap(v * 2), x)


def test_b5_integer_tensors_in_opaque_results_pass() -> None:
    x = torch.ones(2, requires_grad=True)
    region = Counted(lambda v: (v * 2, Slotted(torch.tensor([1]))))
    y, meta = te_checkpoint(region, x)
    y.sum().backward()
    assert meta.value.item() == 1
    assert region.runs == 2


@engines
def test_b8_recompute_uses_the_forwards_default_dtype(use_reentrant: bool) -> None:
    x = torch.ones(4, requires_grad=True)
    region = Counted(lambda v: (v * torch.full((4,), 1 / 3).to(torch.float32)).sin())
    torch.set_default_dtype(torch.float64)
    try:
        y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        y.sum().backward()
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    third = torch.tensor(1 / 3)
    assert torch.equal(x.grad, torch.full((4,), float(third.cos() * third)))
    assert region.runs == 2


def test_c3_damaged_bytes_change_nothing() -> None:
    tracker = CudaRNGStatesTracker(device="cpu")
    tracker.add("a", 1)
    tracker.add("b", 2)
    before = {name: handle.get_state() for name, handle in tracker.states_.items()}
    other = torch.Generator().manual_seed(9).get_state()
    with pytest.raises(StateFormatError, match="'b'"):
        tracker.set_states({"a": other, "b": torch.zeros(5056, dtype=torch.uint8)})
    assert all(torch.equal(handle.get_state(), before[name]) for name, handle in tracker.states_.items())
