# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""E2 with what dropout hides in: fused attention, bias-dropout-add, what Inductor makes of it, selective contexts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from _capture import CudaKit, Rig, cuda_kit
from _helpers import requires_cuda
from _regions import both_engines
from transformer_engine_ext.errors import RecomputeMismatchError, UnsupportedCaptureError
from transformer_engine_ext.pytorch import te_checkpoint

__all__ = ["cuda_kit"]

pytestmark = requires_cuda

Function = Callable[[torch.Tensor], torch.Tensor]
#: Returns where an output and an input gradient are not zero, in one shape.
Patterns = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _plainly(y: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y != 0, gradient != 0


def _checkpointed(function: Function, use_reentrant: bool, preserve: bool = True, **options: Any) -> Function:
    return lambda x: te_checkpoint(function, x, use_reentrant=use_reentrant, preserve_rng_state=preserve, **options)


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
    patterns: Patterns = _plainly,
    halfway: Callable[[], None] | None = None,
) -> tuple[list[int], int]:
    """Capture two micro-batches in split graphs and replay them; return wrong elements by backward, and of how many."""
    kit = rig.kit
    _warm_up(kit, region, x, grad)
    legs = []
    for _ in range(2):
        leaf, forward = x.detach().clone().requires_grad_(), kit.graph()
        with kit.capturing(forward):
            legs.append((leaf, forward, region(leaf)))
    if halfway is not None:
        halfway()
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


def _saving_rand_like() -> Any:
    """Make contexts under which a recompute takes ``rand_like`` from the forward, and draws everything else again."""
    return create_selective_checkpoint_contexts([torch.ops.aten.rand_like.default])


def _draw_that_is_saved_and_one_that_is_not(x: torch.Tensor) -> torch.Tensor:
    saved = torch.rand_like(x)
    return F.dropout(x + 0 * saved, 0.5).square()


@both_engines
@pytest.mark.parametrize("reseeded", [False, True], ids=["", "reseeded between the captures"])
def test_e2_selective_contexts(cuda_kit: CudaKit, use_reentrant: bool, reseeded: bool) -> None:
    """The saved draw still moves its stream in the recompute, so that the next one starts where it did in forward."""
    ones = cuda_kit.ones(8, cuda_kit.size)
    rig = Rig(cuda_kit, use_reentrant)
    region = _checkpointed(_draw_that_is_saved_and_one_that_is_not, use_reentrant, context_fn=_saving_rand_like)
    halfway = (lambda: rig.seed(77)) if reseeded else None
    wrong, size = _wrong(rig, region, ones, ones, halfway=halfway)
    assert not any(wrong), f"wrong elements of {size}, by backward: {wrong}"


@both_engines
@pytest.mark.parametrize("drawn", [False, True], ids=["at the start of a seed", "behind other draws"])
def test_e7_selective_contexts_of_a_captured_forward_in_an_eager_backward(
    cuda_kit: CudaKit, use_reentrant: bool, drawn: bool
) -> None:
    """Right or refused: what was noted during capture counts within the graph."""
    ones = cuda_kit.ones(8, cuda_kit.size)
    rig = Rig(cuda_kit, use_reentrant)
    region = _checkpointed(_draw_that_is_saved_and_one_that_is_not, use_reentrant, context_fn=_saving_rand_like)
    _warm_up(cuda_kit, region, ones, ones)
    x, graph = ones.clone().requires_grad_(), cuda_kit.graph()
    with cuda_kit.capturing(graph):
        y = region(x)
    rig.seed(3)
    if drawn:  # then a position within the graph is not the stream's
        rig.draws()
    graph.replay()
    try:
        y.backward(ones)
    except (RecomputeMismatchError, UnsupportedCaptureError) as error:
        print(f"refused: {error}")
        return
    assert x.grad is not None
    wrong = int(((y != 0) != (x.grad != 0)).sum())
    assert wrong == 0, f"{wrong} of {y.numel()} elements are wrong, without an error"


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
