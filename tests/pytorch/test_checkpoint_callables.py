# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B9: everything that can be called can be checkpointed. B15: the old positional form of Transformer Engine."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from _proof import Proof, differing
from _regions import both_engines, grad_of, leaf, new_tracker
from transformer_engine_ext.pytorch import te_checkpoint
from transformer_engine_ext.pytorch.distributed import checkpoint


def _body(proof: Proof, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    proof.ran()
    return proof.watch(x.exp()).sin() * scale


class _Layer(torch.nn.Module):
    def __init__(self, proof: Proof) -> None:
        super().__init__()
        self.proof = proof
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return _body(self.proof, x * self.weight, scale)

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    @staticmethod
    def static(proof: Proof, x: torch.Tensor) -> torch.Tensor:
        return _body(proof, x)

    @classmethod
    def of_class(cls, proof: Proof, x: torch.Tensor) -> torch.Tensor:
        return _body(proof, x)


class _Callable:
    """An object with ``__call__`` and, unlike functions, neither ``__name__`` nor ``__qualname__``."""

    __slots__ = ("proof",)  # cannot be weakly referenced either

    def __init__(self, proof: Proof) -> None:
        self.proof = proof

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _body(self.proof, x)


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, proof: Proof, x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        y = proof.watch(x.exp())
        ctx.save_for_backward(y)
        return y.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return None, grad * y.cos() * y


def _nested_function(proof: Proof) -> Callable[..., torch.Tensor]:
    def inner(x: torch.Tensor, *rest: Any, scale: float = 1.0, **named: Any) -> torch.Tensor:
        return _body(proof, x, scale)

    return inner


_CALLABLES: dict[str, Callable[[Proof], Callable[..., torch.Tensor]]] = {
    "bound method": lambda proof: _Layer(proof).method,
    "module": _Layer,
    "module's forward": lambda proof: _Layer(proof).forward,
    "partial": lambda proof: functools.partial(_body, proof),
    "partial with keyword": lambda proof: functools.partial(_body, proof, scale=1.0),
    "partial of a partial of a module": lambda proof: functools.partial(functools.partial(_Layer(proof), scale=1.0)),
    "callable object": _Callable,
    "Sequential": lambda proof: torch.nn.Sequential(torch.nn.Identity(), _Layer(proof)),
    "function with defaults": _nested_function,
    "lambda": lambda proof: lambda x: _body(proof, x),
    "static method": lambda proof: functools.partial(_Layer.static, proof),
    "class method": lambda proof: functools.partial(_Layer.of_class, proof),
    "autograd Function's apply": lambda proof: functools.partial(_Exp.apply, proof),
    "decorated": lambda proof: torch.enable_grad()(_nested_function(proof)),
}


@both_engines
@pytest.mark.parametrize("make", _CALLABLES.values(), ids=_CALLABLES)
def test_b9_any_callable(use_reentrant: bool, make: Callable[[Proof], Callable[..., torch.Tensor]]) -> None:
    proof, x = Proof(), leaf(4)
    y = te_checkpoint(make(proof), x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert torch.allclose(grad_of(x), torch.autograd.grad(x.exp().sin().sum(), x)[0])


@both_engines
def test_b9_builtin_function(use_reentrant: bool) -> None:
    """``torch.exp`` has no Python frame. That its region recomputes cannot be counted inside it, but one level up."""
    proof, x = Proof(), leaf(4)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(te_checkpoint(torch.exp, x, use_reentrant=use_reentrant)).sin()

    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert differing(grad_of(x), torch.autograd.grad(x.exp().sin().sum(), x)[0]) == 0


# Every way of writing the old form: (distribute_saved_activations, get_rng_state_tracker, tp_group, *args).
@pytest.fixture
def group() -> Iterator[Any]:
    """One process is a group of its own: enough to be a ProcessGroup."""
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _run_legacy(proof: Proof, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Call the old form; it must warn at this very line, and checkpoint."""
    x = next(a for a in args if isinstance(a, torch.Tensor))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        y = checkpoint(function, *args, **kwargs)
    deprecations = [w for w in caught if issubclass(w.category, DeprecationWarning)]
    assert [(w.filename, w.lineno) for w in deprecations] == [(__file__, line)]
    assert [w for w in caught if w not in deprecations] == []
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert torch.allclose(grad_of(x), torch.autograd.grad(x.exp().sin().sum(), x)[0])


@pytest.mark.parametrize("engine", [{}, {"use_reentrant": False}], ids=["default", "nonreentrant"])
def test_b15_legacy_with_a_tracker(engine: dict[str, bool]) -> None:
    tracker = new_tracker("a")
    proof = Proof()
    _run_legacy(proof, functools.partial(_body, proof), False, lambda: tracker, None, leaf(4), **engine)


def test_b15_legacy_with_a_group_and_keywords(group: Any) -> None:
    tracker = new_tracker("a")
    proof = Proof()
    _run_legacy(proof, functools.partial(_body, proof), False, lambda: tracker, group, leaf(4), scale=1.0)


def test_b15_legacy_none_tracker_with_a_group(group: Any) -> None:
    """``(bool, None, group, x)``: TE hands all four on, but a ProcessGroup cannot be meant for the model."""
    proof = Proof()
    _run_legacy(proof, functools.partial(_body, proof), False, None, group, leaf(4))


def test_b15_legacy_none_none_that_the_function_cannot_take() -> None:
    """``(bool, None, None, x)`` to a function of one or two arguments cannot be the new form."""
    proof = Proof()
    _run_legacy(proof, functools.partial(_body, proof), False, None, None, leaf(4))


def test_b15_legacy_none_arguments_after_the_tensor() -> None:
    """NeMo's calls: a tensor, then masks that are None."""
    proof = Proof()

    def region(x: torch.Tensor, mask: Any, other: Any) -> torch.Tensor:
        assert mask is None
        assert other is None
        return _body(proof, x)

    _run_legacy(proof, region, False, lambda: new_tracker("a"), None, leaf(4), None, None)


def _silent(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return te_checkpoint(function, *args, **kwargs)


@both_engines
def test_b15_none_none_that_the_function_can_take_is_not_legacy(use_reentrant: bool) -> None:
    proof, x, got = Proof(), leaf(4), []

    def region(causal: bool, mask: Any, bias: Any, x: torch.Tensor) -> torch.Tensor:
        got.append((causal, mask, bias))
        return _body(proof, x)

    y = _silent(region, True, None, None, x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert got == [(True, None, None)] * 2


@both_engines
def test_b15_exactly_three_extras_are_not_legacy(use_reentrant: bool) -> None:
    """Transformer Engine's rule asks for more than three, so these go to the function."""
    proof, x, got = Proof(), leaf(4), []

    def region(flag: bool, function: Any, nothing: Any, *, x: torch.Tensor) -> torch.Tensor:
        got.append((flag, function, nothing))
        return _body(proof, x)

    y = _silent(region, True, len, None, x=x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert got == [(True, len, None)] * 2


def test_b15_transformer_engines_misreading_is_kept() -> None:
    """``fn(True, callable, None, x)``: TE takes it for the old form whatever the function is, and so do we.

    ``True`` then asks for distributed saved activations, which without a process group is TE's RuntimeError; with
    ``False`` the function gets the tensor alone.
    """
    proof = Proof()
    taken: list[int] = []

    def region(*args: Any) -> torch.Tensor:
        taken.append(len(args))
        return _body(proof, args[-1])

    _run_legacy(proof, region, False, lambda: new_tracker("a"), None, leaf(4))
    assert taken == [1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(RuntimeError, match=r"(?i)distributed"):
            te_checkpoint(region, True, lambda: new_tracker("a"), None, leaf(4))
    assert taken == [1, 1]


@both_engines
def test_b15_old_keyword_for_the_tracker(use_reentrant: bool) -> None:
    """``get_cuda_rng_tracker=`` of the first releases is the tracker, not an argument of the function."""
    proof, x, tracker = Proof(), leaf(4), new_tracker("a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        y = te_checkpoint(
            functools.partial(_body, proof), x, get_cuda_rng_tracker=lambda: tracker, use_reentrant=use_reentrant
        )
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
