# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Save the random-number streams of a job on two tensor-parallel ranks, and go on with another number of ranks.

    torchrun --nproc_per_node=2 examples/resume_resharded.py save streams.safetensors
    torchrun --nproc_per_node=3 examples/resume_resharded.py load streams.safetensors

What a resume must give on another layout: the streams that are the same on all ranks go on exactly where they stood;
those of which every rank has its own get seeds for the new ranks, and draw nothing that was drawn before.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_engine_ext.errors import LayoutMismatchError
from transformer_engine_ext.pytorch.distributed import ParallelRNG

STEPS, NUMBERS = 3, 256


def step(rng: ParallelRNG) -> dict[str, Tensor]:
    """Draw what a training step would: dropout masks of replicated and of split activations."""
    drawn = {"default": torch.rand(NUMBERS)}
    with rng.tracker.fork("model-parallel-rng"):
        drawn["model-parallel-rng"] = torch.rand(NUMBERS)
    return drawn


def everything(drawn: list[Tensor]) -> Tensor:
    """Return what all ranks drew: ``[ranks, numbers]``."""
    mine = torch.cat(drawn)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found)


def history(ranks: int) -> dict[str, Tensor]:
    """Return what a job of two ranks drew, and the step behind its end, from its seeds alone: nothing to pass along."""
    drawn = {name: [] for name in ("default", "model-parallel-rng")}
    for tp in range(ranks):
        # Megatron's formula: every rank has the job's seed, and another one for its own stream.
        for name, seed in (("default", 1234), ("model-parallel-rng", 1234 + 2718 + tp)):
            numbers = torch.Generator().manual_seed(seed)
            drawn[name].append(torch.cat([torch.rand(NUMBERS, generator=numbers) for _ in range(STEPS + 1)]))
    return {name: torch.stack(rows) for name, rows in drawn.items()}


def save(rng: ParallelRNG, path: str) -> dict[str, bool]:
    """Train a little, and save; every rank calls it, one file comes out."""
    rng.seed(1234)
    for _ in range(STEPS):
        step(rng)
    rng.save(path)
    text = f"saved {len(rng.states())} streams of {dist.get_world_size()} ranks"
    return {text: True}


def load(rng: ParallelRNG, path: str) -> dict[str, bool]:
    """Load on whatever layout this is, and compare with what the saving job drew, and would have drawn next."""
    checks = {}
    try:
        rng.load(path)  # the default refuses another layout, and names both
    except LayoutMismatchError as error:
        checks[f"refused without being asked to rederive: {str(error).splitlines()[0]}"] = True
    report = rng.load(path, on_layout_change="rederive")
    rng.verify()
    checks[f"the layout changed: {report.streams}"] = report.layout_changed
    before = history(ranks=2)
    now = {name: everything([numbers]) for name, numbers in step(rng).items()}
    expected = before["default"][0, -NUMBERS:]
    kept = bool((now["default"] == expected).all())
    checks["the default stream goes on exactly where it stood, on every rank"] = kept
    own = now["model-parallel-rng"]
    # 24-bit numbers: by chance about one pair in thousand of these would be equal; a stream that repeats, all of them.
    repeated = int(torch.isin(own, before["model-parallel-rng"][:, :-NUMBERS]).sum())
    fresh = repeated < NUMBERS // 8
    checks[f"of {own.numel()} numbers of the ranks' own streams, {repeated} were drawn before"] = fresh
    pairs = [(a, b) for a in range(len(own)) for b in range(a)]
    checks["no two ranks draw the same"] = all(int((own[a] == own[b]).sum()) < NUMBERS // 8 for a, b in pairs)
    return checks


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("save", "load"))
    parser.add_argument("path")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rng = ParallelRNG({"tp": dist.group.WORLD}, device="cpu")
    checks = (save if arguments.what == "save" else load)(rng, arguments.path)
    for text, right in checks.items():
        if dist.get_rank() == 0 or not right:
            print(f"rank {dist.get_rank()}: {'ok   ' if right else 'WRONG'}  {text}", flush=True)
    dist.destroy_process_group()
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
