# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Mirrors ``transformer_engine.pytorch`` for checkpointing and RNG: replace the package's name in an import."""

from __future__ import annotations

from transformer_engine_ext.pytorch.recompute import (
    in_checkpoint_region as in_checkpoint_region,
)
from transformer_engine_ext.pytorch.recompute import (
    is_recomputing as is_recomputing,
)
from transformer_engine_ext.pytorch.recompute import (
    te_checkpoint as te_checkpoint,
)
from transformer_engine_ext.pytorch.rng import CudaRNGStatesTracker as CudaRNGStatesTracker

checkpoint = te_checkpoint

__all__ = ["CudaRNGStatesTracker", "checkpoint", "in_checkpoint_region", "is_recomputing", "te_checkpoint"]
