# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_ddp_checkpoint.py (B10): DistributedDataParallel over checkpointed modules."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_cases
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from _proof import Proof, differing
from _regions import new_tracker, stream_values
from transformer_engine_ext.pytorch import te_checkpoint

WIDTH, ROWS = 8, 4


class Model(torch.nn.Module):
    """Two blocks, checkpointed or not. With `shared` they are one and the same, and a weight is used outside too."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = self.first if shared else torch.nn.Linear(WIDTH, WIDTH)
        self.options: dict[str, Any] | None = None
        self.proof = Proof()

    def block(self, linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        self.proof.ran()
        with self.tracker.fork("a"):
            x = F.dropout(x, 0.3)
        return linear(self.proof.watch(F.dropout(x, 0.2).exp())).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
            if self.options is None:
                return self.block(linear, x)
            return te_checkpoint(self.block, linear, x, **self.options)

        return run(self.second, run(self.first, x)) @ self.first.weight


def train(model: Model, ddp_options: dict[str, Any], options: dict[str, Any] | None, steps: int = 3) -> dict[str, Any]:
    """Train a copy; return its parameters, its losses, and where the streams stand."""
    torch.manual_seed(20 + dist.get_rank())
    model = copy.deepcopy(model)
    model.options, model.proof = options, Proof()
    model.tracker = new_tracker("a", seed=50 + dist.get_rank())
    parallel = DistributedDataParallel(model, **ddp_options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x = torch.rand(ROWS, WIDTH).requires_grad_()  # differs per rank
        loss = parallel(x).square().mean()
        if options is not None:
            model.proof.after_forward(runs=4 * step + 2)
        optimizer.zero_grad()
        loss.backward()
        if options is not None:
            model.proof.after_backward(runs=4 * step + 4)
        optimizer.step()
        losses.append(loss.item())
    return {"parameters": dict(model.named_parameters()), "losses": losses, "streams": stream_values(model.tracker)}


def compare(shared: bool, ddp_options: dict[str, Any], options: dict[str, Any]) -> None:
    """The run with checkpoints equals the one without, and all ranks hold the same parameters in the end."""
    torch.manual_seed(1)
    model = Model(shared)
    plain, ours = train(model, ddp_options, None), train(model, ddp_options, options)
    # One weight's gradients are summed in another order; all else is bit for bit the same.
    assert ours["losses"][0] == plain["losses"][0], (ours["losses"], plain["losses"])
    assert torch.allclose(torch.tensor(ours["losses"]), torch.tensor(plain["losses"]), rtol=1e-5)
    assert ours["streams"] == plain["streams"]
    for name, parameter in ours["parameters"].items():
        expected = plain["parameters"][name]
        assert torch.allclose(parameter, expected, rtol=1e-5, atol=1e-6), name
        gathered = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, parameter.detach())
        assert differing(gathered[0], gathered[1]) == 0, f"{name} differs between the ranks"


def case_shared_nonreentrant() -> None:
    compare(True, {}, {"use_reentrant": False})


def case_shared_nonreentrant_unused() -> None:
    compare(True, {"find_unused_parameters": True}, {"use_reentrant": False})


def case_shared_nonreentrant_static() -> None:
    compare(True, {"static_graph": True}, {"use_reentrant": False})


def case_separate_nonreentrant() -> None:
    compare(False, {}, {"use_reentrant": False})


def case_separate_reentrant_static() -> None:
    compare(False, {"static_graph": True}, {"use_reentrant": True})


def case_shared_reentrant_static() -> None:
    """torch's documented way for reentrant regions that share parameters under DDP."""
    compare(True, {"static_graph": True}, {"use_reentrant": True})


def case_gradient_as_bucket_view() -> None:
    compare(True, {"gradient_as_bucket_view": True}, {"use_reentrant": False})


def case_no_sync() -> None:
    """Accumulation over micro-batches: the first without communication, the second with."""
    results = []
    for options in (None, {"use_reentrant": False}):
        torch.manual_seed(1)
        model = Model(shared=True)
        model.options, model.proof = options, Proof()
        model.tracker = new_tracker("a", seed=50 + dist.get_rank())
        parallel = DistributedDataParallel(model)
        torch.manual_seed(20 + dist.get_rank())
        batches = [torch.rand(ROWS, WIDTH).requires_grad_() for _ in range(2)]
        with parallel.no_sync():
            parallel(batches[0]).sum().backward()
        loss = parallel(batches[1]).sum()
        if options is not None:
            model.proof.after_forward(runs=6)
        loss.backward()
        if options is not None:
            model.proof.after_backward(runs=8)
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    for expected, ours in zip(*results, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)


def case_hooks_around_the_model() -> None:
    """The user's offloading hooks around the whole DDP model: inputs of regions go through them, interiors do not."""
    packed: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.detach().clone()

    results = []
    for options in (None, {"use_reentrant": False}):
        torch.manual_seed(1)
        model = Model(shared=True)
        model.options, model.proof = options, Proof()
        model.tracker = new_tracker("a", seed=50 + dist.get_rank())
        parallel = DistributedDataParallel(model)
        torch.manual_seed(20 + dist.get_rank())
        x = torch.rand(ROWS, WIDTH).requires_grad_()
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = parallel(x).sum()
        count = len(packed)
        if options is not None:
            model.proof.after_forward(runs=2)
            # One input per region and the two operands of the product behind them.
            assert count == 4, packed
        loss.backward()
        if options is not None:
            model.proof.after_backward(runs=4)
            assert len(packed) == count
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    for expected, ours in zip(*results, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)


CASES = {
    "b10 shared parameters, nonreentrant": case_shared_nonreentrant,
    "b10 shared parameters, nonreentrant, find_unused_parameters": case_shared_nonreentrant_unused,
    "b10 shared parameters, nonreentrant, static graph": case_shared_nonreentrant_static,
    "b10 shared parameters, nonreentrant, gradients as bucket views": case_gradient_as_bucket_view,
    "b10 shared parameters, reentrant, static graph": case_shared_reentrant_static,
    "b10 separate parameters, nonreentrant": case_separate_nonreentrant,
    "b10 separate parameters, reentrant, static graph": case_separate_reentrant_static,
    "b10 accumulation without sync": case_no_sync,
    "b10 hooks around the model": case_hooks_around_the_model,
}

if __name__ == "__main__":
    run_cases(CASES)
