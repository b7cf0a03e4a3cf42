# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What surrounds a region when it runs: tensors' histories and attributes, kernel switches, other threads, versions."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from _helpers import measured
from _proof import ENGINE_IDS, ENGINES, Proof
from transformer_engine_ext.errors import CheckpointArgumentError, RecomputeMismatchError, StreamExistsError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)

# ---------------------------------------------------------------- arguments


@engines
def test_attributes_of_an_argument_reach_the_recompute_as_forward_found_them(use_reentrant: bool) -> None:
    proof = Proof()

    def region(z: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(z * z.scale).exp()

    x = torch.full((3,), 2.0, requires_grad=True)
    z = x * 1
    z.scale = 0.5
    y = te_checkpoint(region, z, use_reentrant=use_reentrant)
    proof.after_forward()
    del z
    y.sum().backward()
    proof.after_backward()
    assert torch.equal(x.grad, 0.5 * y.detach())


def test_attribute_that_changes_after_forward_does_not_reach_the_recompute() -> None:
    """Non-reentrant."""
    x = torch.full((3,), 2.0, requires_grad=True)
    z = x * 1
    z.scale = 0.5
    y = te_checkpoint(lambda z: (z * z.scale).exp(), z, use_reentrant=False)
    z.scale = 7.0
    y.sum().backward()
    assert torch.equal(x.grad, 0.5 * y.detach())


def test_argument_with_a_history_has_one_in_the_recompute() -> None:
    """Non-reentrant: the reentrant engine cuts histories, as Transformer Engine and torch do."""
    seen: list[tuple[bool, bool]] = []

    def region(leaf: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        seen.append((leaf.is_leaf, made.is_leaf))
        return (leaf * made).exp()

    x = torch.ones(3, requires_grad=True)
    te_checkpoint(region, x, x * 2, use_reentrant=False).sum().backward()
    assert seen == [(True, False)] * 2


@engines
def test_list_that_contains_itself_is_refused(use_reentrant: bool) -> None:
    loop: list[Any] = [torch.ones(2, requires_grad=True)]
    loop.append(loop)
    with pytest.raises(CheckpointArgumentError, match="contains itself"):
        te_checkpoint(lambda items: items[0] * 2, loop, use_reentrant=use_reentrant)


class _Strict(dict[str, Any]):
    def __copy__(self) -> _Strict:
        raise ValueError("no copies")


@engines
def test_object_that_refuses_to_be_copied_is_named(use_reentrant: bool) -> None:
    with pytest.raises(CheckpointArgumentError, match=r"a _Strict with a tensor .* ValueError: no copies"):
        te_checkpoint(lambda d: d["x"] * 2, _Strict(x=torch.ones(2, requires_grad=True)), use_reentrant=use_reentrant)


# ---------------------------------------------------------------- changes in place


def test_change_of_a_saved_tensor_in_place_is_refused_as_without_checkpointing() -> None:
    """Non-reentrant. Saved-tensor hooks switch autograd's own check off, so the engine makes it."""

    def region(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y * x
        y.mul_(2)
        return z.sin() + y

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        region(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*change a clone instead"):
        te_checkpoint(region, x, use_reentrant=False).sum().backward()


def test_nested_region_whose_input_changes_in_place_is_refused() -> None:
    """Non-reentrant. Legal without checkpointing, since exp keeps its result; the recompute needs the input."""

    def outer(x: torch.Tensor) -> torch.Tensor:
        h = x * 1
        for _ in range(2):
            h += te_checkpoint(torch.exp, h, use_reentrant=False)
        return h.sin()

    x = torch.linspace(0.1, 1, 4).requires_grad_()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*change a clone instead"):
        te_checkpoint(outer, x, use_reentrant=False).sum().backward()


# ---------------------------------------------------------------- kernels


def _switches() -> tuple[bool, ...]:
    return (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cudnn.enabled,
    )


@engines
@pytest.mark.parametrize("scope", ["forward", "backward"])
def test_kernel_switches_of_the_forward_hold_in_the_recompute(use_reentrant: bool, scope: str) -> None:
    # See Note [Another kernel draws other numbers]
    seen = []

    def region(x: torch.Tensor) -> torch.Tensor:
        seen.append(_switches())
        return x.sin()

    def narrowed(here: str) -> Any:
        return sdpa_kernel(SDPBackend.MATH) if scope == here else torch.backends.cudnn.flags(enabled=False)

    x, before = torch.ones(3, requires_grad=True), _switches()
    with narrowed("forward"):
        y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    with narrowed("backward"):
        during = _switches()
        y.sum().backward()
        assert _switches() == during
    assert seen[0] == seen[1] != during
    assert _switches() == before


@pytest.mark.requires_cuda
@engines
def test_attention_dropout_with_a_kernel_chosen_around_the_region(use_reentrant: bool) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    gradients = []
    for run in (lambda *a: attend(*a), lambda *a: te_checkpoint(attend, *a, use_reentrant=use_reentrant)):
        torch.cuda.manual_seed(2)
        with sdpa_kernel(SDPBackend.MATH):
            y = run(q, k, v)
        gradients.append(torch.autograd.backward(y.float().square().sum()) or [t.grad for t in (q, k, v)])
        for tensor in (q, k, v):
            tensor.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# ---------------------------------------------------------------- early stop


def _early_stopped(draws: list[int], words_behind: int) -> torch.Tensor:
    """A region that draws, saves, makes a node that saves nothing, and draws again."""

    def region(x: torch.Tensor) -> torch.Tensor:
        torch.rand(draws.pop(0))
        y = x.sin()
        return (y + 1) * 2 + torch.rand(words_behind or 1)[0] * (words_behind > 0)

    torch.manual_seed(3)
    x = torch.ones(4, requires_grad=True)
    te_checkpoint(region, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    return x.grad


def test_a9_recompute_that_draws_too_much_before_its_early_stop_is_named() -> None:
    """Non-reentrant, CPU. See Note [An early stop is audited]."""
    _early_stopped([5, 5], 0)
    _early_stopped([5, 5], 700)
    with pytest.raises(RecomputeMismatchError, match=r"'default \(cpu\)': forward drew 6 .*, recompute drew 8 "):
        _early_stopped([5, 7], 0)


def test_b11_more_numbers_behind_the_last_saved_tensor_than_the_look_ahead() -> None:
    """Non-reentrant, CPU: the function runs to its end instead, and all is compared."""
    _early_stopped([5, 5], 1 << 17)
    with pytest.raises(RecomputeMismatchError, match=r"another sequence|recompute drew"):
        _early_stopped([5, 7], 1 << 17)


# ---------------------------------------------------------------- seeds, threads


@pytest.mark.parametrize(("first", "second"), [(5, 5 + 2**32), (-1, 2**64 - 1), (7, 7 - 2**32)])
def test_c1_seeds_that_start_one_cpu_sequence_are_refused(first: int, second: int) -> None:
    tracker = CudaRNGStatesTracker(device="cpu")
    tracker.add("a", first)
    with pytest.raises(StreamExistsError, match=f"seed {second} already exists as {first}, .* same 32 bits"):
        tracker.add("b", second)
    assert list(tracker.get_states()) == ["a"]
    assert tracker.seeds_ == {first}


@pytest.mark.requires_cuda
def test_c1_cuda_takes_all_64_bits_of_a_seed() -> None:
    tracker = CudaRNGStatesTracker(device="cuda")
    tracker.add("a", 5)
    tracker.add("b", 5 + 2**32)
    tracker.add("c", -1)
    with pytest.raises(StreamExistsError, match="same 64 bits"):
        tracker.add("d", 2**64 - 1)


def test_forks_of_two_threads_that_overlap_leave_the_default_generator_as_it_was(device: str) -> None:
    # See Note [Two threads may fork at once]
    tracker = CudaRNGStatesTracker(device=device)
    for number, name in enumerate("abc"):
        tracker.add(name, number)
    events = [threading.Event() for _ in range(3)]

    def first() -> None:
        with tracker.fork("a"):
            events[0].set()
            events[1].wait(60)
        events[2].set()

    def second() -> None:
        events[0].wait(60)
        with tracker.fork("b"), tracker.fork("c"):
            events[1].set()
            events[2].wait(60)

    torch.manual_seed(9)
    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = {name: state.get_state() for name, state in tracker.get_states().items()}
    drawn = torch.rand(4, device=device)
    torch.manual_seed(9)
    assert torch.equal(drawn, torch.rand(4, device=device))
    assert all(torch.equal(before[name], state.get_state()) for name, state in tracker.get_states().items())


DEBUG_SCRIPT = """
import threading, torch
from transformer_engine_ext.errors import ConcurrentDrawError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

tracker = CudaRNGStatesTracker(device="cpu")
tracker.add("a", 1)
errors = []

def work():
    try:
        with tracker.fork("a"):
            torch.rand(8)
    except ConcurrentDrawError as error:
        errors.append(str(error))

def region(x):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return x.exp()

work()
te_checkpoint(region, torch.ones(8, requires_grad=True), use_reentrant=False)
print(errors)
"""


@pytest.mark.parametrize("debug", [True, False])
def test_fork_in_a_helper_thread_of_a_region_is_named_in_debug_mode(debug: bool) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "NVTE_EXT_DEBUG": str(int(debug))}
    found = subprocess.run(
        [sys.executable, "-c", DEBUG_SCRIPT], env=measured(env), text=True, capture_output=True, timeout=120, check=True
    ).stdout
    assert found.count("forked stream 'a' while a checkpointed region of thread") == int(debug), found
