# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B14: nothing outlives a region. B17: regions under torch.compile. B18: code that counts asks ``is_recomputing()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from _helpers import requires_cuda
from _proof import ENGINE_IDS, ENGINES, Proof, assert_one_mask, assert_same_tensors, differing, next_draws
from _regions import OUTSIDE, Flags, both_engines, flags, grad_of, leaf, new_tracker
from transformer_engine_ext.pytorch import in_checkpoint_region, is_recomputing, te_checkpoint
from transformer_engine_ext.pytorch.distributed import use_reentrant_activation_recompute


@both_engines
def test_b14_engine_is_announced_inside_the_region_only(use_reentrant: bool) -> None:
    """TE's LayerNormMLP gives up its fused bias-GELU for good when it once finds the non-reentrant answer."""
    before = use_reentrant_activation_recompute()
    seen: list[bool] = []
    proof = Proof()

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        seen.append(use_reentrant_activation_recompute())
        return proof.watch(x.exp()).sin()

    y = te_checkpoint(region, leaf(4), use_reentrant=use_reentrant)
    assert use_reentrant_activation_recompute() == before
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert use_reentrant_activation_recompute() == before
    assert seen == [use_reentrant] * 2


@both_engines
def test_b14_switches_of_the_process_are_as_before(use_reentrant: bool) -> None:
    """Grad mode, autocast, default dtype and device, saved-tensor hooks: none differs after forward or backward."""

    def switches() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch._C._autograd._top_saved_tensors_default_hooks(False),
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.matmul.allow_tf32,
            flags(),
        )

    proof, before = Proof(), switches()

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(x.exp()).sin()

    y = te_checkpoint(region, leaf(4), use_reentrant=use_reentrant)
    assert switches() == before
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert switches() == before


@requires_cuda
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # TE compiles, and Inductor uses torch.jit
@pytest.mark.parametrize("first", ENGINES, ids=[f"first_{name}" for name in ENGINE_IDS])
def test_b14_te_layernorm_mlp_keeps_its_fused_bias_gelu(first: bool) -> None:
    """A module that ran in a region, and one that did not, take the fused path afterwards as they did before."""
    te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")
    modules = [te.LayerNormMLP(64, 128, bias=True, params_dtype=torch.bfloat16).cuda() for _ in range(2)]
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    modules[0](x).sum().backward()  # construction of kernels, before anything is compared
    before = [module.bias_gelu_nvfusion for module in modules]
    assert before == [True, True], "this build of TE has no fused bias-GELU, so the test shows nothing"
    proof = Proof()
    module = modules[0]
    module.register_forward_pre_hook(lambda *_: proof.ran())
    te_checkpoint(module, x, use_reentrant=first).sum().backward()
    proof.after_backward()
    modules[1](x).sum().backward()
    assert modules[1].bias_gelu_nvfusion
    te_checkpoint(module, x, use_reentrant=True).sum().backward()
    assert [m.bias_gelu_nvfusion for m in modules] == before


def of_torch_itself(test: Callable[..., None]) -> Callable[..., None]:
    """Let pass what torch warns about itself: Dynamo looks at ``.grad`` of all tensors, Inductor uses torch.jit."""
    for text in ("The .grad attribute of a Tensor:UserWarning", "`torch.jit:DeprecationWarning"):
        test = pytest.mark.filterwarnings(f"ignore:{text}")(test)
    return test


def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend)


@of_torch_itself
@both_engines
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b17_region_inside_torch_compile(use_reentrant: bool, backend: str) -> None:
    """A graph break: what is before and after it is compiled, the region runs as it does eagerly; same numbers."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(8)
        tracker, proof = new_tracker("a"), Proof()

        def region(x: torch.Tensor, tracker: Any = tracker, proof: Proof = proof) -> torch.Tensor:
            proof.ran()
            with tracker.fork("a"):
                x = F.dropout(x, 0.5)
            return proof.watch(F.dropout(x, 0.2).exp()).sin()

        def step(x: torch.Tensor, region: Any = region) -> torch.Tensor:
            x = (x * 2).cos()
            x = te_checkpoint(region, x, use_reentrant=use_reentrant)
            return (x + 1).sin()

        x = leaf(64)
        y = (_compiled(step, backend) if compiled else step)(x)
        proof.after_forward()
        y.sum().backward()
        proof.after_backward()
        results.append({"output": y.detach(), "x": grad_of(x), **next_draws("cpu", tracker, ("a",))})
    assert_same_tensors(results[1], results[0], "tensors")


@of_torch_itself
def test_b17_is_a_graph_break_and_nothing_worse() -> None:
    proof = Proof()

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(x.exp()).sin()

    def step(x: torch.Tensor) -> torch.Tensor:
        return te_checkpoint(region, x.cos(), use_reentrant=False) * 2

    torch._dynamo.reset()
    explanation = torch._dynamo.explain(step)(leaf(4))
    assert explanation.graph_break_count >= 1
    assert explanation.graph_count == 2, "code before and after the region is not compiled"
    proof.runs = 0
    y = _compiled(step, "eager")(leaf(4))
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()


@of_torch_itself
@both_engines
def test_b17_compiled_module_inside_a_region(use_reentrant: bool) -> None:
    """The other way round: what the region calls is compiled, random operator included."""
    proof, x = Proof(), torch.ones(256, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.ones_like(x), 0.5) * x

    compiled = _compiled(inner, "aot_eager")

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(compiled(x)) * torch.ones_like(x)

    y = te_checkpoint(region, x * 1, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert_one_mask(y, x.grad)


@of_torch_itself
@both_engines
def test_b17_layer_that_checkpoints_is_compiled_whole(use_reentrant: bool) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.proof = Proof()

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            self.proof.ran()
            return self.second(self.proof.watch(self.first(x).exp())).sin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return te_checkpoint(self.inner, x, use_reentrant=use_reentrant) + x

    block = Block()
    expected = torch.autograd.grad(block.second(block.first(leaf(2, 8)).exp()).sin().sum(), list(block.parameters()))
    y = _compiled(block, "aot_eager")(leaf(2, 8))
    block.proof.after_forward()
    y.sum().backward()
    block.proof.after_backward()
    for parameter, grad in zip(block.parameters(), expected, strict=True):
        assert torch.allclose(grad_of(parameter), grad, rtol=1e-5)


class _CountingNorm(torch.nn.BatchNorm1d):
    """BatchNorm that asks: a recompute runs the same operator, which saves the same, on copies of the statistics."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_recomputing():
            return super().forward(x)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        return F.batch_norm(x, mean, var, self.weight, self.bias, training=True, momentum=0.1, eps=self.eps)


@both_engines
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_b18_statistics_are_taken_once(use_reentrant: bool, nested: bool) -> None:
    """Running mean, variance and batch counter stand where one forward leaves them; the naive norm shows the fault."""
    results: dict[str, dict[str, torch.Tensor]] = {}
    for name, norm_type, checkpointed in [
        ("plain", _CountingNorm, False),
        ("checkpointed", _CountingNorm, True),
        ("naive", torch.nn.BatchNorm1d, True),
    ]:
        proof, norm, counted = Proof(), norm_type(4), [0]

        def region(x: torch.Tensor, proof: Proof = proof, norm: Any = norm, counted: list[int] = counted) -> Any:
            proof.ran()
            counted[0] += not is_recomputing()
            return proof.watch(norm(x).exp()).sin()

        def outer(x: torch.Tensor, region: Any = region) -> torch.Tensor:
            return te_checkpoint(region, x, use_reentrant=use_reentrant).cos()

        x = leaf(16, 4)
        if checkpointed:
            y = te_checkpoint(outer if nested else region, x, use_reentrant=use_reentrant)
            proof.after_forward()
        else:
            y = region(x).cos() if nested else region(x)
        y.sum().backward()
        if checkpointed:
            proof.after_backward(runs=3 if nested else 2)
        assert counted == [1]
        results[name] = {**{k: v.clone() for k, v in norm.state_dict().items()}, "x": grad_of(x)}
    assert_same_tensors(results["checkpointed"], results["plain"], "statistics")
    assert differing(results["naive"]["running_mean"], results["plain"]["running_mean"]) > 0


@both_engines
def test_b18_in_checkpoint_region_tells_forward_from_plain(use_reentrant: bool) -> None:
    """A module that behaves otherwise when checkpointed (skips its own recompute, say) can ask, also with the module
    called outside, in the same process, before and after."""
    seen: list[tuple[bool, bool]] = []
    proof = Proof()

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        seen.append((in_checkpoint_region(), is_recomputing()))
        return proof.watch(x.exp()).sin()

    x = leaf(4)
    region(x)
    proof = Proof()
    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    region(x)
    assert seen == [(False, False), (True, False), (True, True), (False, False)]
    assert flags() == OUTSIDE == Flags(False, False, False)
