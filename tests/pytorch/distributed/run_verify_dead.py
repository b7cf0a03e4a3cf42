# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_verify_ranks.py: rank 2 of 4 is gone when the others verify, one of which has no message for it."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from _helpers import PASS_TOKEN
from transformer_engine_ext.errors import PeerFailureError
from transformer_engine_ext.pytorch.distributed import ParallelRNG

#: So long that no rank may get there: the connections that break tell all of them.
TIMEOUT = 40.0
#: What the roll call of the survivors takes, and a busy machine.
ALLOWANCE = 17.0


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rng = ParallelRNG({"tp": dist.group.WORLD}, device="cpu", timeout=TIMEOUT)
    rng.seed(1)
    rng.verify()
    dist.barrier()
    if rank == 2:
        # Without any clean-up, as a killed process; but with exit code 0, or torchrun would end the other ranks.
        print(PASS_TOKEN, flush=True)
        os._exit(0)
    started = time.monotonic()
    with pytest.raises(PeerFailureError) as caught:
        rng.verify()
    took = time.monotonic() - started
    assert took < ALLOWANCE, took
    for part in ("verifying the streams", f"rank {rank} of 4", "Rank 2 died or did not answer"):
        assert part in str(caught.value), f"{part!r} not in: {caught.value}"
    print(f"rank {rank} knew after {took:.1f} s", PASS_TOKEN, flush=True)
    os._exit(0)  # past a process group whose peers are gone


if __name__ == "__main__":
    main()
