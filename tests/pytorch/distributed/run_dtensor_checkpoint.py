# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_dtensor_checkpoint.py (F1): random operators of DTensor inside regions.

On CUDA, DTensor moves the default generator's offset before and after each of its random operators, so that shards
draw their own part of one global mask; on the CPU each rank draws from its own generator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from _ranks import run_cases
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from _proof import Proof, differing, next_draws
from _regions import new_tracker
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
ROWS, COLUMNS = 16, 8

Region = Callable[[DTensor, Proof, CudaRNGStatesTracker], DTensor]


def ones(placement: Placement) -> DTensor:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    return distribute_tensor(torch.ones(ROWS, COLUMNS, device=DEVICE), mesh, [placement]).requires_grad_()


def dropout(x: DTensor, proof: Proof, tracker: CudaRNGStatesTracker) -> DTensor:
    proof.ran()
    mask = F.dropout(torch.ones_like(x), 0.5)
    proof.watch(mask.to_local())
    return mask * x


def dropout_among_others(x: DTensor, proof: Proof, tracker: CudaRNGStatesTracker) -> DTensor:
    """DTensor's draws between draws of plain tensors, under the default generator and under a tracked stream."""
    proof.ran()
    torch.rand(3, device=DEVICE)
    mask = F.dropout(torch.ones_like(x), 0.5)
    with tracker.fork("a"):
        torch.rand(3, device=DEVICE)
        mask = F.dropout(mask, 0.3)
        torch.rand(5, device=DEVICE)
    mask = F.dropout(mask, 0.1)
    proof.watch(mask.to_local())
    return mask * x


def compare(region: Region, placement: Placement, use_reentrant: bool, seed: int) -> None:
    """Output, gradient and all streams are those of the run without checkpointing; the gradient is the mask itself."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(seed)
        tracker, proof, x = new_tracker("a", device=DEVICE, seed=seed + 10), Proof(), ones(placement)
        if checkpointed:
            y = te_checkpoint(region, x, proof, tracker, use_reentrant=use_reentrant)
            proof.after_forward()
        else:
            y = region(x, proof, tracker)
        torch.rand(2, device=DEVICE)  # the streams go on between forward and backward
        y.sum().backward()
        if checkpointed:
            proof.after_backward()
        output, gradient = y.to_local().detach(), x.grad.to_local()
        dropped = int((output == 0).sum())
        assert 0 < dropped < output.numel()
        assert differing(output, gradient) == 0, "the gradient belongs to another mask than the output"
        results.append((output, gradient, next_draws(DEVICE, tracker, ("a",))))
    (plain, plain_grad, plain_draws), (ours, our_grad, our_draws) = results
    assert differing(ours, plain) == 0
    assert differing(our_grad, plain_grad) == 0
    wrong = [name for name in plain_draws if differing(our_draws[name], plain_draws[name])]
    assert wrong == [], f"streams that end elsewhere: {wrong}"


def each(region: Region, placement: Placement, same_seed: bool) -> None:
    for use_reentrant in (True, False):
        compare(region, placement, use_reentrant, 7 if same_seed else 7 + dist.get_rank())


def case_sharded() -> None:
    each(dropout, Shard(0), same_seed=True)


def case_sharded_columns() -> None:
    each(dropout, Shard(1), same_seed=True)


def case_replicated() -> None:
    each(dropout, Replicate(), same_seed=True)


def case_among_others() -> None:
    each(dropout_among_others, Shard(0), same_seed=True)


def case_nested() -> None:
    for outer in (True, False):
        for inner in (True, False):

            def region(x: DTensor, proof: Proof, tracker: CudaRNGStatesTracker, inner: bool = inner) -> DTensor:
                proof.ran()
                hidden = F.dropout(torch.ones_like(x), 0.2) * x
                proof.watch(hidden.to_local())
                once = Proof()
                return te_checkpoint(dropout, hidden, once, tracker, use_reentrant=inner) * 1

            compare(region, Shard(0), outer, seed=7)


def whole_of(x: DTensor) -> torch.Tensor:
    """Put row shards together on the CPU: gloo's functional collectives on CUDA end the process (torch 2.11)."""
    local = x.to_local().cpu()
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return torch.cat(gathered)


def case_shards_tile_one_mask() -> None:
    """What the region drew on all ranks together is what DTensor draws without it; and the halves are not alike."""
    torch.manual_seed(7)
    tracker, proof, x = new_tracker("a", device=DEVICE), Proof(), ones(Shard(0))
    y = te_checkpoint(dropout, x, proof, tracker, use_reentrant=False)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    whole, gradient = whole_of(y.detach()), whole_of(x.grad)
    assert differing(whole, gradient) == 0
    if DEVICE != "cpu":
        assert differing(whole[: ROWS // 2], whole[ROWS // 2 :]) > 0


CASES = {
    "f1 dropout of shards": case_sharded,
    "f1 dropout of column shards": case_sharded_columns,
    "f1 dropout of a replica": case_replicated,
    "f1 between other draws and in a fork": case_among_others,
    "f1 nested regions": case_nested,
    "f1 shards tile one mask": case_shards_tile_one_mask,
}

if __name__ == "__main__":
    run_cases(CASES)
