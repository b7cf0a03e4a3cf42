# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Count gradient elements of another mask with two micro-batches whose forwards and backwards are graphs of their own.

    python tests/tools/orders_table.py

Dropout from the default generator, ``torch.utils.checkpoint`` and this package's, in the orders in which a pipeline
schedule replays: each backward right after its forward, or both forwards first. Needs CUDA; before torch 2.14 this
package's native library too (``NVTE_EXT_JIT=1``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from transformer_engine_ext.pytorch import te_checkpoint

SIZE = 4096
TURNS = 4
ORDERS = ("f0 b0 f1 b1", "f0 f1 b1 b0", "f0 f1 b0 b1")


@dataclass
class MicroBatch:
    """Two graphs and the static tensors between them."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    output: Tensor
    gradient: Tensor | None = None


def region(x: Tensor) -> Tensor:
    """Drop half; of ones, the gradient is the mask of the output."""
    return F.dropout(x, 0.5) * 1.0


def captured(engine: Callable[..., Any], use_reentrant: bool) -> list[MicroBatch]:
    """Capture both micro-batches, after a warm-up on a stream of its own."""
    ones = torch.ones(SIZE, device="cuda")
    inputs = [torch.ones(SIZE, device="cuda", requires_grad=True) for _ in range(2)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm = torch.ones(SIZE, device="cuda", requires_grad=True)
        engine(region, warm, use_reentrant=use_reentrant).backward(ones)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    batches = []
    for x in inputs:
        batch = MicroBatch(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), ones)
        with torch.cuda.graph(batch.forward):
            batch.output = engine(region, x, use_reentrant=use_reentrant)
        batches.append(batch)
    for x, batch in reversed(list(zip(inputs, batches, strict=True))):
        with torch.cuda.graph(batch.backward):
            batch.output.backward(ones)
            batch.gradient, x.grad = x.grad, None
    return batches


def wrong(batches: list[MicroBatch], order: str) -> int:
    """Replay in an order, several times; count the elements."""
    found = 0
    for step in TURNS * order.split():
        batch = batches[int(step[1])]
        if step[0] == "f":
            batch.forward.replay()
            continue
        batch.backward.replay()
        torch.cuda.synchronize()
        assert batch.gradient is not None
        found += int(((batch.output != 0) != (batch.gradient != 0)).sum())
    return found


def main() -> None:
    """Print the table."""
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for name, engine in (("torch.utils.checkpoint", checkpoint), ("te_checkpoint", te_checkpoint)):
        for use_reentrant in (True, False):
            for order in ORDERS:
                torch.manual_seed(1)
                count = wrong(captured(engine, use_reentrant), order)
                kind = "reentrant" if use_reentrant else "non-reentrant"
                print(f"{name:24} {kind:14} {order:14} {count:6} of {2 * TURNS * SIZE}")


if __name__ == "__main__":
    main()
