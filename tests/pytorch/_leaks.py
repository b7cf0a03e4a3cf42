# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Process-wide state that regions and forks must put back; conftest.py compares it around every test."""

from __future__ import annotations

import sys
from typing import Any

import torch

#: Predicates of the region that is running, all of them without arguments.
FLAGS = (
    "in_checkpoint_region",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
    "is_recomputing",
    "use_reentrant_activation_recompute",
)


def bindings() -> dict[str, torch.Generator]:
    """Return a handle on the stream that each default generator is bound to."""
    devices = sys.modules.get("transformer_engine_ext.pytorch.rng.devices")  # not loaded: nothing can be bound
    bound = {"cpu": devices.get_backend("cpu").default(0) if devices else torch.default_generator}
    if torch.cuda.is_initialized():
        for index, generator in enumerate(torch.cuda.default_generators):
            bound[f"cuda:{index}"] = generator.graphsafe_get_state()
    return bound


def shares_state(first: torch.Generator, second: torch.Generator) -> bool:
    """Tell whether two handles are handles on one state."""
    if first is second or first.device.type == "cpu":
        return first is second
    before = first.get_state()
    second_before = second.get_state()
    first.manual_seed(first.initial_seed() ^ 1)  # handles on one state move together
    together = torch.equal(first.get_state(), second.get_state())
    first.set_state(before)
    second.set_state(second_before)
    return together and torch.equal(before, second_before)


def flags() -> dict[str, Any]:
    """Return the state of this thread's regions: phase flags, open recordings, saved-tensor hooks, autocast."""
    found: dict[str, Any] = {
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }
    recompute = sys.modules.get("transformer_engine_ext.pytorch.recompute")
    found |= {name: bool(getattr(recompute, name)()) if recompute else None for name in FLAGS}
    recording = sys.modules.get("transformer_engine_ext.pytorch.rng.recording")
    found["open recordings"] = len(recording.stack.open) if recording else 0
    registry = sys.modules.get("transformer_engine_ext.pytorch.rng.registry")
    found["streams given to set_all_rng_states"] = list(registry._extra) if registry else []
    devices = sys.modules.get("transformer_engine_ext.pytorch.rng.devices")
    places = [("cpu", 0)]
    if torch.cuda.is_initialized():
        places += [("cuda", index) for index in range(len(torch.cuda.default_generators))]
    found["open bindings"] = sum(devices.get_backend(kind).depth(index) for kind, index in places) if devices else 0
    return found


def leaks(bound: dict[str, torch.Generator], flagged: dict[str, Any]) -> list[str]:
    """Compare with what `bindings` and `flags` returned before; put bindings back, so that one test fails, not all."""
    found = []
    for device, now in bindings().items():
        before = bound.get(device)
        if before is not None and not shares_state(before, now):
            found.append(f"the default generator of {device} is bound to another stream than before")
            if device == "cpu":
                sys.modules["transformer_engine_ext.pytorch.rng.devices"].get_backend("cpu").bind(before)
            else:
                torch.cuda.default_generators[int(device.partition(":")[2])].graphsafe_set_state(before)
    for name, value in flags().items():
        # None: the module came with this test; then what it says now is compared with what it says at rest.
        before = flagged.get(name)
        expected = before if before is not None else name == "use_reentrant_activation_recompute"
        if value is not None and value != expected:
            found.append(f"{name} is {value}, expected {expected}")
    return found
