# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What ``te-ext doctor`` probes of the installed packages: their checkpoint functions, as a script would call them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine_ext.integrations.versions import installed_version, try_import

__all__ = ["Subject", "import_states", "installed_subjects"]

Region = Callable[[torch.Tensor], torch.Tensor]

_MODULES = {
    "transformer-engine": "transformer_engine.pytorch",
    "megatron-core": "megatron.core.tensor_parallel.random",
}


@dataclass(frozen=True)
class Subject:
    """One checkpoint function with one kind of tracker.

    Attributes
    ----------
    name : str
        Of both.
    checkpoint : callable
        ``checkpoint(region, x, reentrant, tracker)``.
    new_tracker : callable
        Returns a tracker without streams.
    engines : tuple of bool
        Which values of ``use_reentrant`` it has.
    shares, captures : bool
        Whether its streams can share a state, and whether they can be used inside a CUDA graph.
    """

    name: str
    checkpoint: Callable[[Region, torch.Tensor, bool, Any], torch.Tensor]
    new_tracker: Callable[[], Any]
    engines: tuple[bool, ...] = (True, False)
    shares: bool = True
    captures: bool = True


def import_states() -> dict[str, dict[str, str | None]]:
    """Return, for each package, its version, and why it cannot be imported (None: it can, or is not installed)."""
    states: dict[str, dict[str, str | None]] = {}
    for package, module in _MODULES.items():
        version = installed_version(package)
        reason: str | None = None
        if version is not None or module.partition(".")[0] in sys.modules:
            found, text = try_import(module)
            reason = None if found is not None else text
        states[package] = {"version": version, "reason": reason}
    return states


def installed_subjects() -> tuple[list[Subject], dict[str, str]]:
    """Return what can be probed, and for each package that cannot, why."""
    subjects: list[Subject] = []
    reasons: dict[str, str] = {}
    for package, module in _MODULES.items():
        found, reason = try_import(module)
        if found is None:
            reasons[package] = reason if installed_version(package) is not None else "not installed"
        elif package == "transformer-engine":
            subjects.append(_transformer_engine(found))
        else:
            subjects += _megatron(found)
    return subjects, reasons


def _transformer_engine(te: Any) -> Subject:
    def checkpoint(region: Region, x: torch.Tensor, reentrant: bool, tracker: Any) -> torch.Tensor:
        result: torch.Tensor = te.checkpoint(region, x, use_reentrant=reentrant, get_rng_state_tracker=lambda: tracker)
        return result

    return Subject("transformer_engine", checkpoint, te.CudaRNGStatesTracker)


def _megatron(random: Any) -> list[Subject]:
    kinds: list[tuple[str, dict[str, bool], bool]] = [
        ("own tracker, graph-safe", {"use_cudagraphable_rng": True}, True),
        ("own tracker, bytes", {}, False),
    ]
    if getattr(random, "HAVE_TE", False):
        kinds.insert(0, ("TE tracker", {"use_te_rng_tracker": True}, True))

    def checkpoint(region: Region, x: torch.Tensor, reentrant: bool, tracker: Any) -> torch.Tensor:
        result: torch.Tensor = random.checkpoint(region, False, x)
        return result

    def maker(options: dict[str, bool]) -> Callable[[], Any]:
        def new_tracker() -> Any:
            random.initialize_rng_tracker(force_reset=True, **options)
            tracker = random.get_cuda_rng_tracker()
            tracker.reset()
            return tracker

        return new_tracker

    return [
        Subject(f"megatron ({name})", checkpoint, maker(options), (True,), graphs, graphs)
        for name, options, graphs in kinds
    ]
