# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_fsdp2_checkpoint.py: ``fully_shard`` over checkpointed blocks, and checkpoints over sharded blocks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_cases
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from _proof import Proof, differing
from _regions import Flags, flags, new_tracker, stream_values
from transformer_engine_ext.pytorch import te_checkpoint
from transformer_engine_ext.pytorch.distributed import get_activation_recompute_contexts

WIDTH, ROWS, LAYERS = 8, 4, 3


class Block(torch.nn.Module):
    """Two products and dropout under two streams. Its proof counts executions and watches the interior."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.proof.ran()
        self.seen.append(flags())
        with self.tracker.fork("a"):
            hidden = F.dropout(self.first(x), 0.3)
        return x + self.second(self.proof.watch(F.dropout(hidden.tanh(), 0.2)))


def blocks_of(model: torch.nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


Wrap = Callable[[torch.nn.Module], None]


def wrap_blocks(model: torch.nn.Module, **options: Any) -> None:
    """Checkpoint every block of the model in place, as FSDP users do."""
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_fn=te_checkpoint, **options)
    apply_activation_checkpointing(model, wrapper, lambda module: isinstance(module, Block))


def train(model: torch.nn.Module, wrap: Wrap | None, shard: Callable[[torch.nn.Module], Any]) -> dict[str, Any]:
    """Shard a copy of the model, train two steps, return losses, full gradients, parameters and streams."""
    model = copy.deepcopy(model)
    tracker = new_tracker("a", seed=60 + dist.get_rank())
    for block in blocks_of(model):
        block.proof, block.tracker, block.seen = Proof(), tracker, []
    if wrap is not None:
        wrap(model)
    shard(model)
    torch.manual_seed(30 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for step in range(2):
        x = torch.rand(ROWS, WIDTH)
        loss = model(x).float().square().mean()
        if wrap is not None:
            for block in blocks_of(model):
                block.proof.after_forward(runs=2 * step + 1)
        optimizer.zero_grad()
        loss.backward()
        if wrap is not None:
            for block in blocks_of(model):
                block.proof.after_backward(runs=2 * step + 2)
                assert [state.phase for state in block.seen] == [False, True] * (step + 1)
        gradients.append([parameter.grad.full_tensor().clone() for parameter in model.parameters()])
        optimizer.step()
        losses.append(loss.item())
    assert flags() == Flags(False, False, False)
    assert torch.isfinite(torch.tensor(losses)).all(), "losses that are no numbers would compare as equal"
    parameters = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
    return {"losses": losses, "gradients": gradients, "parameters": parameters, "streams": stream_values(tracker)}


def compare(wrap: Wrap, shard: Callable[[torch.nn.Module], Any]) -> None:
    torch.manual_seed(2)
    model = torch.nn.Sequential(*[Block() for _ in range(LAYERS)])
    plain, ours = train(model, None, shard), train(model, wrap, shard)
    assert ours["losses"] == plain["losses"]
    for ours_step, plain_step in zip(ours["gradients"], plain["gradients"], strict=True):
        assert [differing(a, b) for a, b in zip(ours_step, plain_step, strict=True)] == [0] * len(plain_step)
    assert [differing(a, b) for a, b in zip(ours["parameters"], plain["parameters"], strict=True)] == [0] * (4 * LAYERS)
    assert ours["streams"] == plain["streams"]


def shard_blocks(model: torch.nn.Module, **options: Any) -> None:
    """Shard each block, wrapped or not, and then the root."""
    for child in model.children():
        fully_shard(child, **options)
    fully_shard(model, **options)


def case_nonreentrant() -> None:
    compare(functools.partial(wrap_blocks, use_reentrant=False), shard_blocks)


def case_reentrant_asked_for() -> None:
    """The first block's input needs no gradient, so it runs non-reentrant; the others run reentrant."""
    compare(functools.partial(wrap_blocks, use_reentrant=True), shard_blocks)


def case_with_te_contexts() -> None:
    compare(
        functools.partial(wrap_blocks, use_reentrant=False, context_fn=get_activation_recompute_contexts), shard_blocks
    )


def case_no_reshard_after_forward() -> None:
    shard = functools.partial(shard_blocks, reshard_after_forward=False)
    compare(functools.partial(wrap_blocks, use_reentrant=False), shard)


def case_mixed_precision() -> None:
    """Parameters are gathered in bfloat16: the recompute computes in it too."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compare(functools.partial(wrap_blocks, use_reentrant=False), functools.partial(shard_blocks, mp_policy=policy))


def case_checkpoint_around_a_sharded_module() -> None:
    """The other order: the region gathers and reshards inside, in forward and again in recompute."""

    def wrap(model: torch.nn.Module) -> None:
        for block in blocks_of(model):
            forward = block.forward
            block.forward = functools.partial(te_checkpoint, forward, use_reentrant=False)  # type: ignore[method-assign]

    compare(wrap, shard_blocks)


def case_several_blocks_in_one_region() -> None:
    """Selective per group of layers: one region around two sharded blocks."""

    class Group(torch.nn.Module):
        def __init__(self, *blocks: torch.nn.Module) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(*blocks)
            self.checkpointed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.checkpointed:
                return te_checkpoint(self.inner, x, use_reentrant=False)
            return self.inner(x)

    def wrap(model: torch.nn.Module) -> None:
        for group in model.children():
            group.checkpointed = True

    def shard(model: torch.nn.Module) -> None:
        for block in blocks_of(model):
            fully_shard(block)
        fully_shard(model)

    torch.manual_seed(2)
    model = torch.nn.Sequential(Group(Block(), Block()), Group(Block(), Block()))
    plain, ours = train(model, None, shard), train(model, wrap, shard)
    assert ours["losses"] == plain["losses"]
    for ours_step, plain_step in zip(ours["gradients"], plain["gradients"], strict=True):
        assert [differing(a, b) for a, b in zip(ours_step, plain_step, strict=True)] == [0] * len(plain_step)
    assert ours["streams"] == plain["streams"]


def case_weights_are_not_kept_whole() -> None:
    """Between forward and backward no gathered weight is alive: the region's frame holds the sharded module only."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(*[Block() for _ in range(LAYERS)])
    for block in blocks_of(model):
        block.proof, block.tracker, block.seen = Proof(), new_tracker("a"), []
    wrap_blocks(model, use_reentrant=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard_blocks(model, mesh=mesh)
    gathered: list[Any] = []
    for block in blocks_of(model):
        block.first.register_forward_hook(lambda module, *_: gathered.append(module.weight.untyped_storage()))
    loss = model(torch.rand(ROWS, WIDTH)).sum()
    for block in blocks_of(model):
        block.proof.after_forward()
    assert len(gathered) == LAYERS
    # FSDP frees a gathered weight by resizing its storage to nothing, whoever holds the tensor; the root's last block
    # is kept for the backward that follows at once.
    assert [storage.size() for storage in gathered[:-1]] == [0] * (LAYERS - 1)
    loss.backward()
    for block in blocks_of(model):
        block.proof.after_backward()


CASES = {
    "fsdp2 nonreentrant": case_nonreentrant,
    "fsdp2 reentrant asked for": case_reentrant_asked_for,
    "fsdp2 with te contexts": case_with_te_contexts,
    "fsdp2 no reshard after forward": case_no_reshard_after_forward,
    "fsdp2 mixed precision": case_mixed_precision,
    "fsdp2 checkpoint around a sharded module": case_checkpoint_around_a_sharded_module,
    "fsdp2 several blocks in one region": case_several_blocks_in_one_region,
    "fsdp2 weights are not kept whole": case_weights_are_not_kept_whole,
}

if __name__ == "__main__":
    run_cases(CASES)
