# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B13: what a region keeps, and for how long. On the CPU by weak references, with the garbage collector off; on CUDA
by the peak of allocated memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F

from _helpers import requires_cuda
from _proof import Proof
from _regions import both_engines, leaf, new_tracker
from transformer_engine_ext.pytorch import te_checkpoint


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """What only the garbage collector frees counts as kept: collections are rare when tensors are few and large."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _storage(tensor: torch.Tensor) -> Any:
    return weakref.ref(tensor.untyped_storage())


class _Region:
    """Draws, saves several interior tensors, and holds a weight and a tracker as a module would."""

    def __init__(self) -> None:
        self.proof, self.tracker, self.weight = Proof(), new_tracker("a"), leaf(64, seed=3)

    def __call__(self, x: torch.Tensor, scale: float = 1.0, **named: Any) -> torch.Tensor:
        self.proof.ran()
        with self.tracker.fork("a"):
            hidden = self.proof.watch(F.dropout(x, 0.5)) * self.weight
        hidden = self.proof.watch(hidden.exp())
        return self.proof.watch(hidden.sin()) * self.weight * scale


_CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "flat": lambda region, x, engine: te_checkpoint(region, x, use_reentrant=engine),
    "keyword": lambda region, x, engine: te_checkpoint(lambda *, x: region(x), use_reentrant=engine, x=x),
    "nested": lambda region, x, engine: te_checkpoint(lambda d: region(d["x"][0]), {"x": [x]}, use_reentrant=engine),
    "with contexts": lambda region, x, engine: te_checkpoint(
        region, x, use_reentrant=engine, context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext())
    ),
    "with a foreign tracker": lambda region, x, engine: te_checkpoint(
        region, x, use_reentrant=engine, get_rng_state_tracker=lambda: region.tracker
    ),
    "under autocast": lambda region, x, engine: _under_autocast(region, x, engine),
    "inside a region": lambda region, x, engine: te_checkpoint(
        lambda x: te_checkpoint(region, x, use_reentrant=engine) * 1, x, use_reentrant=engine
    ),
}


def _under_autocast(region: _Region, x: torch.Tensor, engine: bool) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return te_checkpoint(region, x, use_reentrant=engine)


each_call = pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)


@both_engines
@each_call
def test_b13_activations_live_neither_after_forward_nor_after_backward(use_reentrant: bool, call: Any) -> None:
    region, x = _Region(), leaf(64)
    hidden = x * 1
    y = call(region, hidden, use_reentrant)
    region.proof.after_forward()
    loss = y.sum()
    loss.backward()
    assert region.proof.runs >= 2
    assert region.proof.survivors() == [], "recomputed activations outlive backward, though nothing holds the graph"
    refs = {"input": _storage(hidden), "output": _storage(y), "region": weakref.ref(region)}
    del hidden, y, loss, region
    assert {name: ref() for name, ref in refs.items() if ref() is not None} == {}, "a reference cycle keeps these"


@both_engines
@each_call
def test_b13_a_dropped_region_is_freed_at_once(use_reentrant: bool, call: Any) -> None:
    """No backward at all: output, input, function and tracker go with the last reference."""
    region, x = _Region(), leaf(64)
    hidden = x * 1
    y = call(region, hidden, use_reentrant)
    region.proof.after_forward()
    refs = {"input": _storage(hidden), "output": _storage(y), "region": weakref.ref(region)}
    refs["tracker"] = weakref.ref(region.tracker)
    del hidden
    assert refs["input"]() is not None, "the recompute needs the input, so it must still be there"
    del y, region
    assert {name: ref() for name, ref in refs.items() if ref() is not None} == {}


@both_engines
def test_b13_a_graph_kept_by_retain_graph_holds_no_activations(use_reentrant: bool) -> None:
    region, x = _Region(), leaf(64)
    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    region.proof.after_forward()
    for runs in (2, 3):
        y.sum().backward(retain_graph=True)
        region.proof.after_backward(runs)
        assert region.proof.survivors() == []


@both_engines
def test_b13_activations_are_freed_while_backward_proceeds(use_reentrant: bool) -> None:
    """When backward reaches one region, what the region after it recomputed is gone already."""
    regions, alive = [_Region() for _ in range(4)], []
    x = leaf(64)
    hidden: torch.Tensor = x
    for index, region in enumerate(regions):
        hidden.register_hook(lambda _grad, done=regions[index:]: alive.append([len(r.proof.survivors()) for r in done]))
        hidden = te_checkpoint(region, hidden, use_reentrant=use_reentrant)
        region.proof.after_forward()
    hidden.sum().backward()
    for region in regions:
        region.proof.after_backward()
    assert [counts[1:] for counts in alive] == [[0] * (len(counts) - 1) for counts in alive]
    assert regions[0].proof.survivors() == []


@both_engines
def test_b13_an_exception_in_recompute_frees_what_was_recomputed(use_reentrant: bool) -> None:
    """After the exception is gone nothing of the broken recompute is held, by tracebacks of ours least of all."""
    region, x = _Region(), leaf(64)

    def failing(x: torch.Tensor) -> torch.Tensor:
        y = region(x)
        if region.proof.runs == 2:
            raise ValueError("in recompute")
        return y.cos().exp()

    y = te_checkpoint(failing, x, use_reentrant=use_reentrant)
    region.proof.after_forward()
    with pytest.raises(ValueError, match="in recompute"):
        y.sum().backward(retain_graph=True)
    region.proof.after_backward()
    gc.collect()  # the traceback of the caught exception and this frame refer to each other
    assert region.proof.survivors() == []


@both_engines
def test_b13_weights_made_for_the_call_are_not_held(use_reentrant: bool) -> None:
    """A weight that the function looks up when it runs may be exchanged: a gathered FSDP weight, a cast copy."""
    proof, x = Proof(), leaf(64)
    box = {"weight": torch.ones(64)}

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch((x * box["weight"]).exp()).sin() * box["weight"]

    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    first = _storage(box["weight"])
    box["weight"] = torch.ones(64)
    assert first() is None, "the region keeps a weight that only its function looked up"
    y.sum().backward()
    proof.after_backward()


def test_b13_frame_lets_go_after_backward() -> None:
    """Non-reentrant, as torch: with the output still alive, function, inputs and closure tensors are free."""
    held = []
    for checkpoint in (torch.utils.checkpoint.checkpoint, te_checkpoint):
        proof, x, constant = Proof(), leaf(64), torch.ones(64)

        def region(constant: torch.Tensor, x: torch.Tensor, proof: Proof = proof) -> torch.Tensor:
            proof.ran()
            return proof.watch((x * constant).exp()).sin()

        hidden = x * 1
        y = checkpoint(functools.partial(region, constant), hidden, use_reentrant=False)
        proof.after_forward()
        y.sum().backward()
        proof.after_backward()
        refs = [_storage(constant), _storage(hidden)]
        del constant, hidden, region
        gc.collect()  # torch's own engine leaves a cycle or two behind
        held.append([ref() is not None for ref in refs])
        del y
    assert held[1] == held[0] == [False, False]


def _peak(checkpoint: Callable[..., torch.Tensor], layers: int = 8, width: int = 1024, rows: int = 4096) -> int:
    """Peak bytes of one training step over ``layers`` blocks of two products, an activation and a dropout each."""
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(4 * width, width)
        ).cuda()
        for _ in range(layers)
    ]
    x = torch.randn(rows, width, device="cuda")
    for _ in range(2):  # the first step makes the gradients, cuBLAS's workspace and the like
        for block in blocks:
            for parameter in block.parameters():
                parameter.grad = torch.zeros_like(parameter)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        hidden = x.clone().requires_grad_()
        for block in blocks:
            hidden = hidden + checkpoint(block, hidden)
        hidden.sum().backward()
        torch.cuda.synchronize()
        del hidden
    return torch.cuda.max_memory_allocated() - base


@requires_cuda
@both_engines
def test_b13_peak_is_no_higher_than_torchs_reentrant(use_reentrant: bool) -> None:
    """torch's reentrant engine stands for Transformer Engine's, whose structure is the same."""
    proof = Proof()

    def ours(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        return te_checkpoint(proof.counting(block), hidden, use_reentrant=use_reentrant)

    plain = _peak(lambda block, hidden: block(hidden))
    theirs = _peak(lambda block, hidden: torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=True))
    assert theirs < 0.7 * plain, "the model is too small to show anything"
    mine = _peak(ours)
    assert proof.runs == 2 * 2 * 8
    # The states of a few generators are kept per region: far below a megabyte, on a peak of several hundred.
    assert mine <= theirs + 2**20, f"{mine / 2**20:.1f} MiB, torch's reentrant engine {theirs / 2**20:.1f} MiB"


@requires_cuda
@both_engines
def test_b13_nothing_is_left_on_the_device(use_reentrant: bool) -> None:
    """Steps leave no bytes behind: not by cycles, not by caches that grow with the count of regions."""
    block = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(0.5), torch.nn.GELU()).cuda()
    proof = Proof()

    def step() -> int:
        x = torch.randn(256, 256, device="cuda", requires_grad=True)
        y = te_checkpoint(proof.counting(block), x, use_reentrant=use_reentrant)
        te_checkpoint(proof.counting(block), x, use_reentrant=use_reentrant)  # dropped
        y.sum().backward()
        del x, y
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    step()
    sizes = [step() for _ in range(5)]
    assert proof.runs == 6 * 3
    assert len(set(sizes)) == 1, sizes
