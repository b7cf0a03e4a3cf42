# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Code of a user who checks with ``mypy --strict``; only checked, never run.

Each ``type: ignore`` stands on a line that must be an error: mypy complains about one that is not needed, and so finds
a public name that has lost its types.
"""

from __future__ import annotations

import torch

import transformer_engine_ext
from transformer_engine_ext import CudaRNGStatesTracker, distributed, te_checkpoint

tracker = CudaRNGStatesTracker("cpu")
tracker.add("model-parallel-rng", 1234)
tracker.add("expert-parallel-rng", "1234")  # type: ignore[arg-type]
tracker.reset(1)  # type: ignore[call-arg]


def block(x: torch.Tensor) -> torch.Tensor:
    """Draw from a tracked stream."""
    with tracker.fork():
        return torch.nn.functional.dropout(x)


te_checkpoint(block, torch.ones(1), use_reentrant=False, get_rng_state_tracker=lambda: tracker)
te_checkpoint(block, torch.ones(1), use_reentrant="no")  # type: ignore[arg-type]
distributed.get_all_rng_states(1)  # type: ignore[call-arg]
transformer_engine_ext.te_chekpoint  # type: ignore[attr-defined]  # noqa: B018
version: int = transformer_engine_ext.__version__  # type: ignore[assignment]
