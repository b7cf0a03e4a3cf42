# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Count outputs of an LSTM with dropout that differ between a region's forward and its recompute, on CUDA.

    python tests/tools/recurrent_table.py

cuDNN keeps the random state of this dropout outside of torch's generators: see docs/limits.md. Both engines of this
package and of ``torch.utils.checkpoint``, four steps each, and this package's with cuDNN switched off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from transformer_engine_ext.errors import RecomputeMismatchError
from transformer_engine_ext.pytorch import te_checkpoint

STEPS = 4


def differing(engine: Callable[..., Any], use_reentrant: bool) -> list[str]:
    """Return, for each step, how many outputs of forward and recompute differ, or the error that refused it."""
    torch.manual_seed(0)
    module = torch.nn.LSTM(64, 64, num_layers=2, dropout=0.5).cuda()
    found = []
    for _ in range(STEPS):
        seen: list[Tensor] = []

        def region(x: Tensor, seen: list[Tensor] = seen) -> Tensor:
            output: Tensor = module(x)[0]
            seen.append(output.detach().clone())
            return output

        x = torch.randn(5, 4, 64, device="cuda", requires_grad=True)
        try:
            engine(region, x, use_reentrant=use_reentrant).sum().backward()
            found.append(f"{int((seen[0] != seen[1]).sum())} of {seen[0].numel()}")
        except RecomputeMismatchError as error:
            found.append(type(error).__name__)
    return found


def main() -> None:
    """Print the table."""
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for name, engine in (("torch.utils.checkpoint", checkpoint), ("te_checkpoint", te_checkpoint)):
        for use_reentrant in (True, False):
            kind = "reentrant" if use_reentrant else "non-reentrant"
            run = functools.partial(differing, engine, use_reentrant)
            print(f"{name:24} {kind:14} {', '.join(run())}")
            if engine is te_checkpoint:
                with torch.backends.cudnn.flags(enabled=False):
                    print(f"{name:24} {kind:14} {', '.join(run())}   without cuDNN")


if __name__ == "__main__":
    main()
