# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""E2 with the kernels that dropout hides in: fused attention, bias-dropout-add, and what Inductor makes of dropout."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from _capture import CudaKit, Rig, cuda_kit
from _helpers import requires_cuda
from _regions import both_engines
from transformer_engine_ext.pytorch import te_checkpoint

__all__ = ["cuda_kit"]

pytestmark = requires_cuda

Function = Callable[[torch.Tensor], torch.Tensor]
#: Returns where an output and an input gradient are not zero, in one shape.
Patterns = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _plainly(y: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y != 0, gradient != 0


def _checkpointed(function: Function, use_reentrant: bool, preserve: bool = True) -> Function:
    return lambda x: te_checkpoint(function, x, use_reentrant=use_reentrant, preserve_rng_state=preserve)


def _warm_up(kit: CudaKit, region: Function, x: torch.Tensor, grad: torch.Tensor) -> None:
    def run() -> None:
        for _ in range(3):
            region(x.detach().clone().requires_grad_()).backward(grad)

    kit.aside(run)


def _wrong(
    rig: Rig,
    region: Function,
    x: torch.Tensor,
    grad: torch.Tensor,
    patterns: Patterns,
) -> tuple[list[int], int]:
    """Capture two micro-batches in split graphs and replay them; return wrong elements by backward, and of how many."""
    kit = rig.kit
    _warm_up(kit, region, x, grad)
    legs = []
    for _ in range(2):
        leaf, forward = x.detach().clone().requires_grad_(), kit.graph()
        with kit.capturing(forward):
            legs.append((leaf, forward, region(leaf)))
    pairs = []
    for leaf, forward, y in legs:
        backward = kit.graph()
        with kit.capturing(backward):
            rig.draws()
            y.backward(grad)
        assert leaf.grad is not None
        pairs.append((forward, backward, y.detach(), leaf.grad))
    rig.seed(9)
    wrong, outputs = [], []
    for turn in range(6):
        kept = {}
        for number in (0, 1):
            pairs[number][0].replay()
            kept[number] = pairs[number][2].clone()
            outputs.append(kept[number].float().cpu().numpy().tobytes())
        for number in (turn % 2, 1 - turn % 2):
            pairs[number][1].replay()
            out, back = patterns(kept[number], pairs[number][3])
            assert 0.2 < float(out.double().mean()) < 0.8, "the output is no dropout of one half"
            wrong.append(int((out != back).sum()))
    assert len(set(outputs)) == len(outputs), "two replays have the same mask"
    return wrong, out.numel()


def _assert_exact(
    kit: CudaKit,
    make: Callable[[Rig], Function],
    x: torch.Tensor,
    grad: torch.Tensor,
    use_reentrant: bool,
    patterns: Patterns = _plainly,
) -> None:
    """Assert exact masks with rewinding, and other masks without: else the pattern would show nothing."""
    rig = Rig(kit, use_reentrant)
    function = make(rig)
    counted = rig.proof.counting(function)
    wrong, size = _wrong(rig, _checkpointed(counted, use_reentrant), x, grad, patterns)
    assert rig.proof.runs == 2 * (3 + 2), "warm-up, captured forwards and backwards, each run twice"
    assert not any(wrong), f"wrong elements of {size}, by backward: {wrong}"
    without, _ = _wrong(rig, _checkpointed(function, use_reentrant, preserve=False), x, grad, patterns)
    assert min(without) > 0.1 * size, f"without rewinding only {without} of {size} differ"


BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


@both_engines
@pytest.mark.parametrize("stream", ["default", "a"])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_e2_scaled_dot_product_attention(
    cuda_kit: CudaKit, backend: SDPBackend, stream: str, use_reentrant: bool
) -> None:
    """Queries of zeros weigh all keys alike, so values of the identity turn the dropped weights into the output."""
    size = 64
    q = torch.zeros(2, 4, size, size, device="cuda", dtype=torch.bfloat16)
    identity = torch.eye(size, device="cuda", dtype=torch.bfloat16).expand(2, 4, size, size).contiguous()

    def make(rig: Rig) -> Function:
        def attention(v: torch.Tensor) -> torch.Tensor:
            with rig.on(stream), sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)

        return attention

    def patterns(y: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return y != 0, gradient.transpose(-1, -2) != 0

    _assert_exact(cuda_kit, make, identity, identity, use_reentrant, patterns)


def _bias_dropout_add(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + F.dropout(x + bias, 0.5)


@both_engines
def test_e2_bias_dropout_add(cuda_kit: CudaKit, use_reentrant: bool) -> None:
    ones = cuda_kit.ones(8, cuda_kit.size)
    bias, residual = cuda_kit.ones(cuda_kit.size), torch.zeros_like(ones)

    def make(rig: Rig) -> Function:
        def function(x: torch.Tensor) -> torch.Tensor:
            with rig.on("b"):
                x = _bias_dropout_add(x, bias, residual)
            return x.square()

        return function

    _assert_exact(cuda_kit, make, ones, ones, use_reentrant)


def _eager_is_exact(region: Function, x: torch.Tensor, grad: torch.Tensor) -> bool:
    leaf = x.detach().clone().requires_grad_()
    y = region(leaf)
    y.backward(grad)
    assert leaf.grad is not None
    return bool(((y != 0) == (leaf.grad != 0)).all())


@both_engines
def test_e2_dropout_compiled_by_inductor(cuda_kit: CudaKit, use_reentrant: bool) -> None:
    """The compiled function draws a seed from the bound stream, and makes its mask of that."""
    ones = cuda_kit.ones(8, cuda_kit.size)
    bias, residual = cuda_kit.ones(cuda_kit.size), torch.zeros_like(ones)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, while it is imported
        compiled = torch.compile(_bias_dropout_add)

    def make(rig: Rig) -> Function:
        def function(x: torch.Tensor) -> torch.Tensor:
            with rig.on("a"):
                return compiled(x, bias, residual)

        return function

    region = functools.partial(te_checkpoint, make(Rig(cuda_kit, use_reentrant)), use_reentrant=use_reentrant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        try:
            _warm_up(cuda_kit, region, ones, ones)
        except Exception as error:  # no compiler on this machine, say: it raises classes of its own
            pytest.skip(f"torch.compile does not work here: {type(error).__name__}: {str(error)[:200]}")
        if not _eager_is_exact(region, ones, ones):
            pytest.skip("what Inductor compiles without grad draws another mask than what it compiles with grad")
        _assert_exact(cuda_kit, make, ones, ones, use_reentrant)
