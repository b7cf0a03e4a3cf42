# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of messages: what provokes one, and what it must say. Here: streams, regions, the debug mode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from _regions import new_tracker
from transformer_engine_ext import errors
from transformer_engine_ext.pytorch import te_checkpoint
from transformer_engine_ext.pytorch.recompute import debug
from transformer_engine_ext.pytorch.rng.devices import get_backend


@dataclass
class Around:
    """What a case may use."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch


@dataclass
class Case:
    """What provokes a message, of which class, and what its text must say.

    A case is the table's row; ``site`` is the function that warns, for warnings.
    """

    name: str
    kind: type[BaseException]
    provoke: Callable[[Around], object]
    what: str
    where: str
    action: str
    site: str = ""


CASES: list[Case] = []


def case(
    kind: type[BaseException], what: str, where: str, action: str, site: str = ""
) -> Callable[[Callable[[Around], object]], Callable[[Around], object]]:
    """Add a row."""
    if site and not issubclass(kind, Warning):
        raise TypeError(f"a row has three texts; {site!r} would be the function that warns, and {kind} is no warning")

    def add(provoke: Callable[[Around], object]) -> Callable[[Around], object]:
        CASES.append(Case(provoke.__name__, kind, provoke, what, where, action, site))
        return provoke

    return add


def ones(count: int = 8) -> torch.Tensor:
    return torch.ones(count, requires_grad=True)


def second_run_differs(extra: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    runs: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) > 1:
            extra(x)
        return x.exp()

    return block


# ---------------------------------------------------------------- streams of one process


@case(errors.StreamExistsError, "cuda rng state noise already exists", "Streams: 'noise'", "Choose another name")
def name_twice(around: Around) -> None:
    new_tracker("noise").add("noise", 7)


@case(errors.StreamExistsError, "seed 100 already exists", "stream 'other' would draw the same", "Choose another seed")
def seed_twice(around: Around) -> None:
    new_tracker("noise").add("other", 100)


@case(
    errors.UnknownStreamError, "cuda rng state b is not added", "Streams of this tracker: 'a'", "tracker.add('b', seed)"
)
def unknown_stream(around: Around) -> None:
    with new_tracker("a").fork("b"):
        pass


@case(errors.StreamStateTypeError, "a int", "stream 'a'", "expected a torch.Generator or a uint8")
def state_of_no_type(around: Around) -> None:
    new_tracker("a").set_states({"a": 3})


@case(errors.StateFormatError, "bytes", "stream 'a'", "Nothing was changed")
def state_of_no_length(around: Around) -> None:
    new_tracker("a").set_states({"a": torch.zeros(5, dtype=torch.uint8)})


@case(
    errors.UnsupportedDeviceError,
    "device type 'meta' cannot be tracked",
    "backends for cpu, cuda",
    "Keep the stream on",
)
def device_without_streams(around: Around) -> None:
    get_backend("meta")


# ---------------------------------------------------------------- regions


@case(
    errors.RecomputeMismatchError,
    "drew other random numbers than its forward",
    "stream 'default (cpu)': forward drew 0 32-bit words, recompute drew 3 32-bit words",
    "add it with CudaRNGStatesTracker.add",
)
def recompute_draws_more(around: Around) -> None:
    te_checkpoint(second_run_differs(lambda x: torch.rand(3)), ones()).sum().backward()


@case(
    errors.SavedTensorMismatchError,
    "A different number of tensors was saved",
    "during forward: 1\n.*during recomputation: 3",
    "pass debug=True",
)
def recompute_saves_more(around: Around) -> None:
    te_checkpoint(second_run_differs(lambda x: x.cos().cos()), ones(), use_reentrant=False).sum().backward()


@case(errors.ReentrantGradError, "not compatible with .grad()", "a reentrant region", "use_reentrant=False")
def reentrant_and_grad(around: Around) -> None:
    x = ones()
    torch.autograd.grad(te_checkpoint(torch.exp, x).sum(), x)


@case(errors.NotDifferentiableError, "none of output has requires_grad=True", "region's outputs", "check for detach()")
def nothing_to_differentiate(around: Around) -> None:
    te_checkpoint(lambda x: x.detach(), ones()).sum().backward()


@case(errors.CheckpointArgumentError, "determinism_check", "got 'maybe'", "one of 'default', 'none'")
def argument_of_no_value(around: Around) -> None:
    te_checkpoint(torch.exp, ones(), determinism_check="maybe")


@case(errors.CheckpointArgumentError, "debug=True", "context_fn", "pass only one of them")
def arguments_that_exclude_each_other(around: Around) -> None:
    contexts = (contextlib.nullcontext(), contextlib.nullcontext())
    te_checkpoint(torch.exp, ones(), use_reentrant=False, debug=True, context_fn=lambda: contexts)


@case(errors.SuppressedErrorError, "suppressed an exception", "the forward context that context_fn", "re-raise it")
def swallowing_context(around: Around) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError

    contexts = (contextlib.suppress(ValueError), contextlib.nullcontext())
    te_checkpoint(fails, ones(), use_reentrant=False, context_fn=lambda: contexts)


@case(
    errors.DistributedNotInitializedError,
    "needs torch.distributed",
    "distribute_saved_activations=True",
    "call torch.distributed.init_process_group",
)
def no_process_group(around: Around) -> None:
    te_checkpoint(torch.exp, ones(), distribute_saved_activations=True)


# ---------------------------------------------------------------- the debug mode


@case(
    errors.UntrackedGeneratorError,
    "drew from a generator of its own",
    r"\(aten.rand.generator with generator=, seed 5, device cpu\)",
    "tracker.add(name, seed)",
)
def untracked_generator(around: Around) -> None:
    around.monkeypatch.setattr(debug, "ENABLED", True)
    private = torch.Generator().manual_seed(5)
    te_checkpoint(lambda x: x * torch.rand(8, generator=private), ones())


@case(
    errors.ConcurrentDrawError,
    "drew from a default generator",
    r"region of thread \d+ while a region of thread \d+ was open",
    "Run the regions one after the other",
)
def draws_of_two_threads(around: Around) -> None:
    around.monkeypatch.setattr(debug, "ENABLED", True)
    opened, ended = threading.Event(), threading.Event()

    def waits(x: torch.Tensor) -> torch.Tensor:
        opened.set()
        ended.wait(30)
        return x.exp()

    thread = threading.Thread(target=lambda: te_checkpoint(waits, ones()))

    def draws(x: torch.Tensor) -> torch.Tensor:
        thread.start()
        opened.wait(30)
        return torch.nn.functional.dropout(x)

    try:
        te_checkpoint(draws, ones())
    finally:
        ended.set()
        thread.join()
