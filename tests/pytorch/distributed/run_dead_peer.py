# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_parallel_rng_ranks.py: rank 1 is gone, or late, when the others save or load."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from _helpers import PASS_TOKEN
from transformer_engine_ext.errors import PeerFailureError
from transformer_engine_ext.pytorch.distributed import ParallelRNG


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="how long rank 1 goes on without taking part")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rng = ParallelRNG({"tp": dist.group.WORLD}, device="cpu", timeout=timedelta(seconds=3))
    rng.seed(1)
    path = arguments.folder / "streams.safetensors"
    dist.barrier()  # the short time-out is not for slow starts
    rng.save(path)
    contents, before = path.read_bytes(), rng.states()
    if rank == 1:
        time.sleep(arguments.seconds)
        # Without any clean-up, as a killed process; but with exit code 0, or torchrun would end the other ranks.
        print(PASS_TOKEN, flush=True)
        os._exit(0)
    # The second time there is no group left from before; making one has to fail as well, and in time.
    for verb, call in {"saving": rng.save, "loading": rng.load}.items():
        started = time.monotonic()
        with pytest.raises(PeerFailureError) as caught:
            call(path)
        assert time.monotonic() - started < 20
        message = str(caught.value)
        for part in (f"{verb} the streams", f"rank {rank} of {dist.get_world_size()}", "Rank 1 died or did not answer"):
            assert part in message, f"{part!r} not in: {message}"
    assert path.read_bytes() == contents
    after = rng.states()
    assert all(bool((after[name] == before[name]).all()) for name in before)
    print(PASS_TOKEN, flush=True)
    os._exit(0)  # past a process group whose peers are gone


if __name__ == "__main__":
    main()
