# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpointed regions: the public call, its two engines, and the phase flags."""

from __future__ import annotations

from transformer_engine_ext.pytorch.recompute.api import te_checkpoint
from transformer_engine_ext.pytorch.recompute.hooks import (
    RegionHook,
    register_hook_source,
    register_region_hook,
    unregister_region_hook,
)
from transformer_engine_ext.pytorch.recompute.phase import (
    activation_recompute_forward,
    get_activation_recompute_contexts,
    in_checkpoint_region,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
    is_recomputing,
    use_reentrant_activation_recompute,
)
from transformer_engine_ext.pytorch.recompute.saved_activations import (
    gather_split_1d_tensor,
    split_tensor_into_1d_equal_chunks,
)

__all__ = [
    "RegionHook",
    "activation_recompute_forward",
    "gather_split_1d_tensor",
    "get_activation_recompute_contexts",
    "in_checkpoint_region",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
    "is_recomputing",
    "register_hook_source",
    "register_region_hook",
    "split_tensor_into_1d_equal_chunks",
    "te_checkpoint",
    "unregister_region_hook",
    "use_reentrant_activation_recompute",
]
