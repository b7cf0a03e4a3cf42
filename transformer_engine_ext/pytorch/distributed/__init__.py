# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Streams across ranks: declared, seeded, saved and restored."""

from transformer_engine_ext.pytorch.distributed.parallel_rng import ParallelRNG as ParallelRNG
