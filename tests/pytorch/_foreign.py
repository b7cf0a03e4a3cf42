# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Trackers that are not ours, with only ``get_states``, ``set_states`` and ``fork``, as other systems have them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def _default_get(device: str) -> torch.Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def _default_set(device: str, state: torch.Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


class ByteTracker:
    """Streams are byte tensors; a fork swaps values with the default generator and stores the new bytes at its end."""

    def __init__(self, device: str, seeds: dict[str, int]) -> None:
        self.device = device
        self.states: dict[str, torch.Tensor] = {}
        for name, seed in seeds.items():
            self.states[name] = torch.Generator(device).manual_seed(seed).get_state()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states

    @contextlib.contextmanager
    def fork(self, name: str = "a") -> Iterator[None]:
        outer = _default_get(self.device)
        _default_set(self.device, self.states[name])
        try:
            yield
        finally:
            self.states[name] = _default_get(self.device)
            _default_set(self.device, outer)


class GeneratorTracker:
    """Streams are live generators, handed out as they are; a fork moves their values into the default generator."""

    def __init__(self, device: str, seeds: dict[str, int]) -> None:
        self.device = device
        self.states = {name: torch.Generator(device).manual_seed(seed) for name, seed in seeds.items()}

    def get_states(self) -> dict[str, torch.Generator]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Generator]) -> None:
        self.states = states

    @contextlib.contextmanager
    def fork(self, name: str = "a") -> Iterator[None]:
        outer = _default_get(self.device)
        stream = self.states[name]
        _default_set(self.device, stream.get_state())
        try:
            yield
        finally:
            stream.set_state(_default_get(self.device))
            _default_set(self.device, outer)


class PointerTracker(GeneratorTracker):
    """As Transformer Engine's on CUDA: a fork points the default generator at the stream's state."""

    @contextlib.contextmanager
    def fork(self, name: str = "a") -> Iterator[None]:
        torch.cuda.init()
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        outer = default.graphsafe_get_state()
        default.graphsafe_set_state(self.states[name])
        try:
            yield
        finally:
            default.graphsafe_set_state(outer)
