# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Random-number streams: values, devices, snapshots and the tracker."""

from __future__ import annotations

from transformer_engine_ext.pytorch.rng.accelerate import accelerate
from transformer_engine_ext.pytorch.rng.audit import audit
from transformer_engine_ext.pytorch.rng.registration import register_streams, registering_streams
from transformer_engine_ext.pytorch.rng.registry import (
    get_all_rng_states,
    graph_safe_rng_available,
    is_graph_safe_rng_state,
    set_all_rng_states,
)
from transformer_engine_ext.pytorch.rng.snapshot import Rewound, Snapshot
from transformer_engine_ext.pytorch.rng.state import MT19937State, PhiloxState, decode_state
from transformer_engine_ext.pytorch.rng.tracker import CudaRNGStatesTracker, StreamStates, covers_itself

__all__ = [
    "CudaRNGStatesTracker",
    "MT19937State",
    "PhiloxState",
    "Rewound",
    "Snapshot",
    "StreamStates",
    "accelerate",
    "audit",
    "covers_itself",
    "decode_state",
    "get_all_rng_states",
    "graph_safe_rng_available",
    "is_graph_safe_rng_state",
    "register_streams",
    "registering_streams",
    "set_all_rng_states",
]
