# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's small RNG helpers and old calling conventions, by their names and rules."""

from __future__ import annotations

import collections
import inspect
from typing import Any

import pytest
import torch

from _proof import Counted
from transformer_engine_ext.errors import CheckpointArgumentError
from transformer_engine_ext.pytorch import distributed, te_checkpoint
from transformer_engine_ext.pytorch.recompute.legacy import take_positional_options


class Stream:
    """Stands for a CUDA default generator: says what was done to it."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []

    def get_state(self) -> str:
        return "bytes"

    def clone_state(self) -> str:
        return "copy"

    def graphsafe_get_state(self) -> str:
        return "handle"

    def set_state(self, state: Any) -> None:
        self.log.append(("set", state))

    def graphsafe_set_state(self, state: Any) -> None:
        self.log.append(("bind", state))


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    streams = [Stream(), Stream()]
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(streams))
    return streams


def test_get_cuda_rng_state_gives_a_handle_a_copy_or_bytes(generators: list[Stream]) -> None:
    assert distributed._get_cuda_rng_state() == "handle"
    assert distributed._get_cuda_rng_state(clone=True) == "copy"
    assert distributed._get_cuda_rng_state(graph_safe=False) == "bytes"
    assert distributed._get_cuda_rng_state(clone=True, graph_safe=False) == "bytes"


@pytest.mark.parametrize(
    ("device", "index"), [(-1, 1), ("cuda", 1), ("cuda:0", 0), (0, 0), (torch.device("cuda", 0), 0)]
)
def test_set_cuda_rng_state_reaches_the_device(generators: list[Stream], device: Any, index: int) -> None:
    distributed._set_cuda_rng_state("value", device, graph_safe=False)
    distributed._set_cuda_rng_state("handle", device)
    assert generators[index].log == [("set", "value"), ("bind", "handle")]
    assert generators[1 - index].log == []


def test_graph_safety_is_that_of_this_torch() -> None:
    assert distributed.is_graph_safe_rng_state(torch.Generator()) == distributed.graph_safe_rng_available()
    assert not distributed.is_graph_safe_rng_state(torch.get_rng_state())


@pytest.mark.parametrize(
    "args",
    [
        (True, "no getter", None, 1),  # a tracker getter can be called
        (False, list, "no group", 1),
        (1, list, None, 1),  # not a bool
        (True, list, None),  # only three
    ],
)
def test_what_is_no_legacy_call_stays_as_it_is(args: tuple[Any, ...]) -> None:
    assert take_positional_options(print, args, {}, 1) == (args, None)


def test_callable_without_a_signature_keeps_its_arguments() -> None:
    args = (True, None, None, 1)
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(max)
    assert take_positional_options(max, args, {}, 1) == (args, None)


def test_b15_two_names_for_one_option_are_refused() -> None:
    with pytest.raises(CheckpointArgumentError, match="get_cuda_rng_tracker"):
        te_checkpoint(torch.sin, torch.ones(1), get_rng_state_tracker=list, get_cuda_rng_tracker=list)


class Opaque:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.hidden = tensor


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: [1, {"deep": (o, o.hidden)}]], ids=["bare", "nested"])
def test_b5_opaque_result_with_a_tensor_is_refused(wrap: Any) -> None:
    """Reentrant only: made without grad, the tensor would come out cut off; the other engine needs no container."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CheckpointArgumentError, match=r"Opaque\.hidden"):
        te_checkpoint(lambda v: wrap(Opaque(v * 2)), x)
    y = te_checkpoint(lambda v: Opaque(v.exp()), x, use_reentrant=False)
    y.hidden.sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_b5_opaque_results_without_tensors_and_modules_pass() -> None:
    x = torch.ones(2, requires_grad=True)
    layer = torch.nn.Linear(1, 1)
    region = Counted(lambda v: (v * 2, layer, Opaque, "name"))
    y, module, kind, name = te_checkpoint(region, x)
    y.sum().backward()
    assert region.runs == 2
    assert (module, kind, name) == (layer, Opaque, "name")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.ChainMap, collections.UserDict])
def test_b5_mappings_are_rebuilt_for_the_recompute(use_reentrant: bool, kind: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    given = kind({"x": x, "n": 3})

    def region(values: Any) -> torch.Tensor:
        assert type(values) is kind
        return (values["x"] * values["n"]).exp()

    counted = Counted(region)
    te_checkpoint(counted, given, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x.grad, (x * 3).exp() * 3)
    assert counted.runs == 2
    assert given["x"] is x
