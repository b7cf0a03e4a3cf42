# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Use the installed package once, from the folder given: ``python3 check_import.py SITE``; prints OK."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import transformer_engine_ext as te_ext


def main() -> int:
    """Return 0 if a region with a tracked stream is right."""
    here, expected = Path(te_ext.__file__).resolve(), Path(sys.argv[1]).resolve()
    if expected not in here.parents:
        print(f"Error: imported {here}, expected a file below {expected}")
        return 1
    tracker = te_ext.CudaRNGStatesTracker(device="cpu")
    tracker.add("model-parallel-rng", 1234)
    x = torch.ones(64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return torch.nn.functional.dropout(x * x, 0.5)

    out = te_ext.te_checkpoint(function, x, get_rng_state_tracker=lambda: tracker)
    out.sum().backward()
    # Of ones, the output is the forward's mask and half the gradient the recompute's.
    if not torch.equal(x.grad, 2 * out.detach()):
        print("Error: the recompute drew another mask than the forward")
        return 1
    te_ext.distributed.get_all_rng_states()
    print("OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
