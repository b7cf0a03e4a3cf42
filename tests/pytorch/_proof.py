# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Proof that a test checkpoints at all, and the comparison of a run with its twin that does not.

A ``te_checkpoint`` that simply calls its function gives perfect outputs, gradients and streams, so a test that only
compares these proves nothing. :class:`Proof` adds what such a call cannot give: the function ran again in backward,
and nothing from inside the region survived forward.

Typical use::

    proof = Proof()

    def region(x, w):
        proof.ran()
        return proof.watch(F.dropout(x, 0.5)) * w      # the product saves what is watched

    y = te_checkpoint(region, x, w)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

# The keyword arguments that te_checkpoint keeps for itself; every other one belongs to the function.
CHECKPOINT_OPTIONS = (
    "use_reentrant",
    "distribute_saved_activations",
    "get_rng_state_tracker",
    "get_cuda_rng_tracker",
    "tp_group",
    "context_fn",
    "determinism_check",
    "debug",
    "preserve_rng_state",
    "early_stop",
)

# The two engines, for ``@pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)``.
ENGINES = (True, False)
ENGINE_IDS = ("reentrant", "nonreentrant")


def plain_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` and keep everything: the run without checkpointing, behind te_checkpoint's signature."""
    for option in CHECKPOINT_OPTIONS:
        kwargs.pop(option, None)
    return function(*args, **kwargs)


class Counted:
    """A function, or a module that need not be seen as one, with the number of its executions in ``runs``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.function(*args, **kwargs)


# Note [Where the death of memory cannot be seen]
# Under NVIDIA's compute-sanitizer the storage of a CUDA tensor that nobody holds any more is not seen to die, whichever
# engine runs, torch's own checkpoint included. There a survivor says nothing. So whoever finds one on CUDA asks, once
# per process, whether a plain tensor's storage dies; where not even that does, survivors on CUDA do not count, and
# conftest.py tells so at the end of the run.
def storage_dies(device: str = "cuda") -> bool:
    """Tell whether the memory of a tensor that nobody holds is seen to be free."""
    tensor = torch.ones(64, device=device).sin()
    storage = weakref.ref(tensor.untyped_storage())
    del tensor
    return storage() is None


@functools.cache
def deaths_are_seen() -> bool:
    """Return what `storage_dies` told this process about CUDA."""
    return storage_dies()


#: Executions whose survivors on CUDA did not count, by what `watch` says of them; conftest.py empties it.
uncounted: list[str] = []


class _Watched(NamedTuple):
    where: str
    storage: weakref.ref[torch.UntypedStorage]
    on_cuda: bool


class Proof:
    """Counts the executions of one function and watches tensors made inside it.

    Tensors are watched through a weak reference to their *storage*: autograd often saves another tensor object on the
    same memory (the result of an ``exp``, say), so a dead tensor object proves nothing while a dead storage proves
    that the memory is free. Only watch what a plain call would keep for backward (an operand of a product, the result
    of ``sin``): :meth:`after_forward` can fail for nothing else.
    """

    def __init__(self) -> None:
        self.runs = 0
        self._watched: list[_Watched] = []

    def ran(self) -> None:
        """Count one execution; call it first thing in the region's function."""
        self.runs += 1

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember a tensor that is interior to the region and hand it on."""
        line = sys._getframe(1).f_lineno  # not kept in a variable: a frame that holds itself would hold the tensor
        where = f"execution {self.runs}, watched at line {line}, shape {tuple(tensor.shape)}"
        self._watched.append(_Watched(where, weakref.ref(tensor.untyped_storage()), tensor.is_cuda))
        return tensor

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` wrapped so that each execution counts."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.ran()
            return function(*args, **kwargs)

        return counted

    def survivors(self) -> list[str]:
        """Describe the watched tensors whose memory is still held, without the help of the garbage collector."""
        alive = [watched for watched in self._watched if watched.storage() is not None]
        # See Note [Where the death of memory cannot be seen]
        if any(watched.on_cuda for watched in alive) and not deaths_are_seen():
            uncounted.extend(watched.where for watched in alive if watched.on_cuda)
            alive = [watched for watched in alive if not watched.on_cuda]
        return [watched.where for watched in alive]

    def after_forward(self, runs: int = 1) -> None:
        """Assert that forward ran ``runs`` times and that nothing that was watched in it is still alive."""
        assert self.runs == runs, f"forward ran the function {self.runs} times, expected {runs}"
        assert self._watched, "the region watched nothing, so this test cannot show that activations were dropped"
        alive = self.survivors()
        assert not alive, f"{len(alive)} of {len(self._watched)} interior activations survived forward: {alive}"

    def after_backward(self, runs: int = 2) -> None:
        """Assert that forward and backward together ran the function ``runs`` times."""
        assert self.runs == runs, f"forward and backward ran the function {self.runs} times, expected {runs}"


def differing(left: torch.Tensor, right: torch.Tensor) -> int:
    """Return how many elements of two tensors of one shape differ in their bits' meaning (NaN equals NaN)."""
    assert left.shape == right.shape, f"shapes differ: {tuple(left.shape)} and {tuple(right.shape)}"
    return int((~torch.isclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)).sum())


def assert_one_mask(output: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Assert that the gradient of an input of ones is the dropout mask that made the output, element by element.

    The mask must hold zeros and others, else the comparison shows nothing.
    """
    assert gradient is not None, "backward left no gradient"
    dropped = int((output == 0).sum())
    assert 0 < dropped < output.numel(), f"{dropped} of {output.numel()} elements dropped: nothing to compare"
    wrong = differing(output.detach(), gradient)
    assert wrong == 0, f"{wrong} of {output.numel()} gradient elements belong to another mask than the output"


def next_draws(device: torch.device | str, tracker: Any = None, names: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Draw from all default generators and from the named streams: two runs agree only if every stream stands alike.

    Both a uniform and a normal draw are taken, since mt19937 keeps half a pair of normals aside.
    """

    def draw(where: torch.device | str) -> torch.Tensor:
        return torch.cat([torch.randn(5, device=where), torch.rand(16, device=where)]).cpu()

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    draws = {f"default {where}": draw(where) for where in devices}
    for name in names:
        with tracker.fork(name):
            draws[name] = draw(device)
    return draws


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    """Assert that two dictionaries hold the same names and bit for bit the same tensors, naming what does not."""
    assert actual.keys() == expected.keys(), f"{what}: {sorted(actual)} instead of {sorted(expected)}"
    wrong = {name: differing(actual[name], expected[name]) for name in expected}
    report = {name: f"{count} of {expected[name].numel()}" for name, count in wrong.items() if count}
    assert not report, f"{what} that differ from the run without checkpointing: {report}"
