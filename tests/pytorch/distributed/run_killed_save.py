# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_save_load_ranks.py: one rank of two is killed in the middle of a save. Started without torchrun."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from _helpers import PASS_TOKEN
from transformer_engine_ext.errors import PeerFailureError
from transformer_engine_ext.pytorch.distributed import ParallelRNG, atomic_write


def kill(*arguments: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, rank, victim = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{victim}", rank=rank, world_size=2)
    rng = ParallelRNG({"tp": dist.group.WORLD}, device="cpu", timeout=timedelta(seconds=20))
    rng.seed(1)
    path = folder / "streams"
    dist.barrier()
    rng.save(path)
    before = path.read_bytes()
    torch.rand(3)
    dist.barrier()
    killed: int
    owner: Any
    if victim == "while-reading":
        killed, owner, name = 1, rng._held, "read"
    else:
        killed, owner, name = 0, atomic_write.os, "replace"
    if rank == killed:
        setattr(owner, name, kill)
    with pytest.raises(PeerFailureError) as caught:
        rng.save(path)
    for text in ("saving the streams", f"rank {rank} of 2", f"Rank {killed} died or did not answer"):
        assert text in str(caught.value), str(caught.value)
    assert path.read_bytes() == before
    print(PASS_TOKEN, flush=True)
    os._exit(0)  # past a process group whose peer is gone


if __name__ == "__main__":
    main()
