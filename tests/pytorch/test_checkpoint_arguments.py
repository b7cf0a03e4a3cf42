# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B5: whatever goes into a region and comes out of it, values and gradients are those of a plain call."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from _proof import Proof, assert_one_mask, differing
from _regions import both_engines, grad_of, leaf
from transformer_engine_ext.pytorch import te_checkpoint


@dataclasses.dataclass
class Batch:
    """A dataclass as models use them: tensors, other dataclasses, and things that are no tensors."""

    hidden: Any
    mask: Any = None
    name: str = "batch"


Pair = collections.namedtuple("Pair", ["left", "right"])


# Ways of handing the tensors a and b to a function, and of finding them again inside.
_ARGUMENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "positional": (lambda a, b: ((a, b), {}), lambda a, b: (a, b)),
    "keywords": (lambda a, b: ((), {"a": a, "b": b}), lambda *, a, b: (a, b)),
    "positional and keyword": (lambda a, b: ((a,), {"b": b}), lambda a, *, b: (a, b)),
    "tuple": (lambda a, b: (((a, b),), {}), lambda pair: pair),
    "list": (lambda a, b: (([a, b],), {}), lambda pair: tuple(pair)),
    "dict": (lambda a, b: (({"a": a, "b": b},), {}), lambda named: (named["a"], named["b"])),
    "nested": (lambda a, b: (([{"x": (a,)}, ("text", [b, None])],), {}), lambda n: (n[0]["x"][0], n[1][1][0])),
    "keyword nested": (lambda a, b: ((), {"n": {"a": [a], "b": (b, 1)}}), lambda *, n: (n["a"][0], n["b"][0])),
    "named tuple": (lambda a, b: ((Pair(a, b),), {}), lambda pair: (pair.left, pair.right)),
    "ordered dict": (
        lambda a, b: ((collections.OrderedDict(a=a, b=b),), {}),
        lambda named: (named["a"], named["b"]),
    ),
    "dataclass": (lambda a, b: ((Batch(a, b),), {}), lambda batch: (batch.hidden, batch.mask)),
    "nested dataclass": (
        lambda a, b: ((), {"batch": Batch([Batch(a)], {"b": b})}),
        lambda *, batch: (batch.hidden[0].hidden, batch.mask["b"]),
    ),
    "among others": (
        lambda a, b: ((None, a, 2, "text", 3.5), {"flag": True, "b": b, "nothing": None, "kind": torch.float32}),
        lambda none, a, two, text, x, *, flag, b, nothing, kind: (a, b),
    ),
    "the same twice": (lambda a, b: ((a, a), {"b": [b, b]}), lambda a, again, *, b: (a * 1 + again, b[0] + b[1])),
}


@both_engines
@pytest.mark.parametrize(("pack", "find"), _ARGUMENTS.values(), ids=_ARGUMENTS)
def test_b5_tensors_anywhere_in_the_arguments(use_reentrant: bool, pack: Any, find: Any) -> None:
    """Leaves and results of earlier operations alike get their gradients, in both engines."""
    proof = Proof()

    def region(*args: Any, **kwargs: Any) -> torch.Tensor:
        proof.ran()
        a, b = find(*args, **kwargs)
        return proof.watch(a.exp()).sin() * b

    a, b, shift = leaf(6), leaf(6, seed=2), leaf(6, seed=3)
    args, kwargs = pack(a, b * shift)
    expected = torch.autograd.grad(region(*args, **kwargs).sum(), (a, b, shift))
    proof = Proof()
    args, kwargs = pack(a, b * shift)
    y = te_checkpoint(region, *args, use_reentrant=use_reentrant, **kwargs)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert [differing(grad_of(leaf), grad) for leaf, grad in zip((a, b, shift), expected, strict=True)] == [0, 0, 0]


@both_engines
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_b5_the_function_gets_equal_arguments_both_times(use_reentrant: bool, nested: bool) -> None:
    """Types, values and structure; tensors that need no gradient keep that; the caller's containers stay untouched."""
    seen: list[tuple[Any, ...]] = []
    proof = Proof()
    plain, counts = torch.arange(3.0), torch.arange(3)

    def region(x: Any, *others: Any, **named: Any) -> torch.Tensor:
        proof.ran()
        tensor = x["x"][0] if nested else x
        seen.append((type(x), tensor.requires_grad, [type(o) for o in others], others, named))
        return proof.watch(tensor.exp()).sin()

    x = leaf(3)
    argument: Any = {"x": [x]} if nested else x
    others = (None, 5, 2.5, "text", plain, counts, b"bytes", torch.float16, len, (), [], {})
    y = te_checkpoint(region, argument, *others, use_reentrant=use_reentrant, flag=None, size=(1, 2), device="cpu")
    proof.after_forward()
    if nested:
        assert argument["x"][0] is x
    y.sum().backward()
    proof.after_backward()
    assert seen[0][2] == seen[1][2] == [type(o) for o in others]
    for kind, _, _, positional, named in seen:
        assert kind is type(argument)
        assert named == {"flag": None, "size": (1, 2), "device": "cpu"}
        assert [o for o in positional if not isinstance(o, torch.Tensor)] == [
            o for o in others if not isinstance(o, torch.Tensor)
        ]
        assert not any(o.requires_grad for o in positional if isinstance(o, torch.Tensor))
        assert torch.equal(positional[4], plain)
        assert torch.equal(positional[5], counts)
    assert seen[1][1], "the recompute got an input that needs no gradient"
    assert differing(grad_of(x), torch.autograd.grad(x.exp().sin().sum(), x)[0]) == 0


_OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tensor": (lambda a, b: a + b, lambda y: [y]),
    "tuple": (lambda a, b: (a, b), list),
    "tuple with others": (lambda a, b: (a, None, 3, "text", b), lambda y: [y[0], y[4]]),
    "list": (lambda a, b: [a, b], list),
    "dict": (lambda a, b: {"a": a, "b": b, "n": 3}, lambda y: [y["a"], y["b"]]),
    "nested": (lambda a, b: [(a, {"b": [b, None]}), 1.5], lambda y: [y[0][0], y[0][1]["b"][0]]),
    "dataclass": (lambda a, b: Batch(a, b, "out"), lambda y: [y.hidden, y.mask]),
    "nested dataclass": (lambda a, b: Batch((a,), Batch({"b": b})), lambda y: [y.hidden[0], y.mask.hidden["b"]]),
    "named tuple": (lambda a, b: Pair(a, [b]), lambda y: [y.left, y.right[0]]),
    "one of two needs no grad": (lambda a, b: (a + b, a.detach()), lambda y: [y[0]]),
    "with counts": (lambda a, b: (a + b, (a > 1).sum()), lambda y: [y[0]]),
}


def _structure(value: Any) -> Any:
    """Describe a result without its tensors, so that two results compare."""
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), [_structure(getattr(value, field.name)) for field in dataclasses.fields(value)])
    if isinstance(value, dict):
        return (type(value), {name: _structure(item) for name, item in value.items()})
    if isinstance(value, (tuple, list)):
        return (type(value), [_structure(item) for item in value])
    return value


@both_engines
@pytest.mark.parametrize(("build", "find"), _OUTPUTS.values(), ids=_OUTPUTS)
def test_b5_any_output(use_reentrant: bool, build: Any, find: Any) -> None:
    proof = Proof()

    def region(x: torch.Tensor) -> Any:
        proof.ran()
        interior = proof.watch(x.exp())
        return build(interior.sin(), interior.cos())

    x = leaf(6)
    plain = region(x)
    expected = torch.autograd.grad(sum((index + 1) * y.sum() for index, y in enumerate(find(plain))), x)[0]
    structure = _structure(plain)
    del plain
    proof = Proof()
    result = te_checkpoint(region, x, use_reentrant=use_reentrant)
    assert _structure(result) == structure
    proof.after_forward()
    sum((index + 1) * y.sum() for index, y in enumerate(find(result))).backward()
    proof.after_backward()
    assert torch.allclose(grad_of(x), expected, rtol=1e-6)


@both_engines
def test_b5_an_input_comes_out_again(use_reentrant: bool) -> None:
    """An input among the outputs, alone and beside a result of it, keeps its gradient exactly once."""
    proof, x = Proof(), leaf(6)

    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        proof.ran()
        return x, proof.watch(x.exp()).sin()

    same, y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    assert differing(same.detach(), x.detach()) == 0
    proof.after_forward()
    (3 * same.sum() + y.sum()).backward()
    proof.after_backward()
    assert torch.allclose(grad_of(x), 3 + torch.autograd.grad(x.exp().sin().sum(), x)[0])


@both_engines
def test_b5_masks_of_a_region_with_nested_inputs(use_reentrant: bool) -> None:
    """The way through containers rewinds the streams as the flat way does."""
    proof, x = Proof(), torch.ones(256, requires_grad=True)

    def region(batch: Batch, *, scale: dict[str, float]) -> Batch:
        proof.ran()
        mask = torch.nn.functional.dropout(torch.ones_like(batch.hidden[0]), 0.5)
        return Batch({"y": proof.watch(mask) * batch.hidden[0] * scale["by"]})

    result = te_checkpoint(region, Batch([x]), scale={"by": 1.0}, use_reentrant=use_reentrant)
    proof.after_forward()
    result.hidden["y"].sum().backward()
    proof.after_backward()
    assert_one_mask(result.hidden["y"], x.grad)
