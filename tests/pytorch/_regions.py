# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of section B share: the engines, the state of the streams, and the phase flags."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch

from _proof import ENGINE_IDS, ENGINES
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, in_checkpoint_region, is_recomputing
from transformer_engine_ext.pytorch.distributed import (
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)

#: Run a test under each engine.
both_engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


class Flags(NamedTuple):
    """What code can ask about the region it runs in."""

    phase: bool
    recomputing: bool
    region: bool


#: The flags outside any region.
OUTSIDE = Flags(phase=False, recomputing=False, region=False)


def flags() -> Flags:
    """Read the three flags at this point of the program."""
    return Flags(in_fp8_activation_recompute_phase(), is_recomputing(), in_checkpoint_region())


def new_tracker(*names: str, device: str | None = "cpu", seed: int = 100) -> CudaRNGStatesTracker:
    """Make a tracker that holds the named streams, each on a seed of its own."""
    tracker = CudaRNGStatesTracker(device)
    for offset, name in enumerate(names):
        tracker.add(name, seed + offset)
    return tracker


def stream_values(tracker: CudaRNGStatesTracker | None = None) -> dict[str, bytes]:
    """Return the value of the default generators and of every stream of `tracker`, as bytes."""
    values = {"default cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        values["default cuda"] = torch.cuda.get_rng_state()
    for name, stream in (tracker.states_ if tracker is not None else {}).items():
        values[name] = stream.get_state()
    return {name: value.numpy().tobytes() for name, value in values.items()}


def moved(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Name the streams whose value changed, appeared or went, for a readable assertion: ``moved(a, b) == []``."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


class Footprint:
    """All state that a failing region might leave changed; taken before, compared after."""

    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        self._tracker = tracker
        self._values = stream_values(tracker)
        self._handles = {name: id(stream) for name, stream in tracker.states_.items()}
        self._seeds = set(tracker.seeds_)
        self._flags = (flags(), is_fp8_activation_recompute_enabled())
        self._default = id(torch.default_generator)

    def assert_unchanged(self, *, but: tuple[str, ...] = ()) -> None:
        """Assert that nothing differs, values of the streams named in `but` excepted."""
        changed = [name for name in moved(self._values, stream_values(self._tracker)) if name not in but]
        assert changed == [], f"streams left changed: {changed}"
        handles = {name: id(stream) for name, stream in self._tracker.states_.items()}
        assert handles == self._handles, "the tracker holds other generators than before"
        assert self._tracker.seeds_ == self._seeds
        assert (flags(), is_fp8_activation_recompute_enabled()) == self._flags
        assert id(torch.default_generator) == self._default


def leaf(*shape: int, device: str = "cpu", seed: int = 1) -> torch.Tensor:
    """Make a leaf that requires grad, with the same numbers each time, without touching a default generator."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.rand(shape, generator=generator).add_(0.5).to(device).requires_grad_()


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the gradient that backward must have left on a leaf."""
    assert tensor.grad is not None, "backward left no gradient"
    return tensor.grad


def keep_pytest_off_torchs_operator_log() -> None:
    """Call in a fixture of tests with ``debug=True``: torch logs operators with arguments that are not for ``%``.

    torch keeps its logger from propagating, whereupon pytest attaches its capturing handler to that logger itself and
    fails on formatting. It does so before each phase of a test, and only to loggers that do not propagate.
    """
    logging.getLogger("LoggingTensor").propagate = True
