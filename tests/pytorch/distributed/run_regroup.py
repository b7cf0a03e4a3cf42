# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_parallel_rng_ranks.py: the process group is ended and initialised anew with another size."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch.distributed as dist

from _helpers import PASS_TOKEN
from transformer_engine_ext.errors import LayoutMismatchError
from transformer_engine_ext.pytorch.distributed import (
    ParallelRNG,
    get_distributed_rank,
    get_distributed_world_size,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    assert get_distributed_world_size() == 1
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert (get_distributed_world_size(), get_distributed_rank()) == (2, rank)
    rng = ParallelRNG({"tp": dist.group.WORLD}, device="cpu")
    rng.seed(1)
    rng.save(folder / "two")
    dist.barrier()
    dist.destroy_process_group()
    assert get_distributed_world_size() == 1

    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{rank}", rank=0, world_size=1)
    assert (get_distributed_world_size(), get_distributed_rank()) == (1, 0)
    with pytest.raises(RuntimeError, match="initialised anew"):
        rng.save(folder / "again")
    alone = ParallelRNG({"tp": dist.group.WORLD}, device="cpu")
    assert alone.layout.coordinates == {"tp": 0}
    with pytest.raises(LayoutMismatchError, match=r"saved tp=2 \(world size 2\), running tp=1 \(world size 1\)"):
        alone.load(folder / "two")
    alone.seed(1)
    alone.save(folder / f"one-{rank}")
    alone.load(folder / f"one-{rank}")
    print(PASS_TOKEN, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
