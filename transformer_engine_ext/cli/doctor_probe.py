# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The doctor's live probe: does a recompute draw its forward's numbers? Counted, per engine, stream and way of running.

A region that drops out ones shows both masks: the forward's in its output, the recompute's in the input's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from transformer_engine_ext.cli.demo_contrast import live_handle_checkpoint
from transformer_engine_ext.integrations.probing import Subject
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.rng import register_streams

__all__ = ["MODES", "STREAMS", "Row", "contrast", "own_subject", "probe", "probe_one"]

#: Elements of a probe, and replays of a captured one.
ELEMENTS, REPLAYS = 4096, 3

STREAMS = ("default", "tracked", "shared with the default", "default, then tracked")
MODES = ("eager", "one graph", "two graphs")


@dataclass
class Row:
    """One probe.

    Attributes
    ----------
    subject, state : str
        Whose checkpoint; ``"unpatched"``, ``"patched"``, or ``"-"`` where that makes no difference.
    engine, stream, mode : str
        What was run.
    mismatches : int or None
        Elements whose gradient belongs to another mask, of ``of``; None if it could not be run.
    streams_right : bool
        Whether the streams then stand where a run without checkpointing leaves them.
    error : str
        Why it could not be run.
    masks : tuple of torch.Tensor or None
        The last forward's and recompute's mask.
    """

    subject: str
    state: str
    engine: str
    stream: str
    mode: str
    mismatches: int | None = None
    of: int = 0
    streams_right: bool = True
    error: str = ""
    masks: tuple[Tensor, Tensor] | None = None

    @property
    def exact(self) -> bool:
        """Whether nothing differs."""
        return self.mismatches == 0 and self.streams_right


def own_subject(device: str) -> Subject:
    """Return this package's checkpoint and tracker."""

    def checkpoint(region: Any, x: Tensor, reentrant: bool, tracker: Any) -> Tensor:
        result: Tensor = te_checkpoint(region, x, use_reentrant=reentrant)
        return result

    return Subject("transformer_engine_ext", checkpoint, lambda: CudaRNGStatesTracker(device))


def contrast(device: str) -> Subject:
    """Return a checkpoint that is wrong in Transformer Engine 2.20.2's way: if it passes, the probe sees nothing."""

    def checkpoint(region: Any, x: Tensor, reentrant: bool, tracker: Any) -> Tensor:
        return live_handle_checkpoint(region, tracker, x)

    return Subject("contrast: live handles", checkpoint, lambda: CudaRNGStatesTracker(device), (True,))


def probe(subjects: list[Subject], state: str, device: str) -> Iterator[Row]:
    """Yield a row for every engine, stream and mode of each subject."""
    for subject in subjects:
        for reentrant in subject.engines:
            for stream in STREAMS:
                if stream.startswith("shared") and not subject.shares:
                    continue
                for mode in MODES if device == "cuda" and subject.captures else MODES[:1]:
                    yield probe_one(subject, state, reentrant, stream, mode, device)


def probe_one(subject: Subject, state: str, reentrant: bool, stream: str, mode: str, device: str) -> Row:
    """Run one probe; an error becomes the row's text."""
    engine = "reentrant" if reentrant else "non-reentrant"
    row = Row(subject.name, state, engine, stream, mode)
    try:
        expected = _draws_after(subject, None, reentrant, stream, device)
        tracker = _filled(subject, device)
        if mode == "eager":
            _, y, grad = _eager(subject, tracker, reentrant, stream, device)
            row.mismatches, row.of = int((y != grad).sum()), ELEMENTS
            row.streams_right = torch.equal(_draws(tracker, device), expected)
        else:
            row.mismatches, y, grad = _captured(subject, tracker, reentrant, stream, mode == "one graph")
            row.of = ELEMENTS * REPLAYS
        row.masks = (y != 0).cpu(), (grad != 0).cpu()
    except Exception as error:
        text = str(error).strip().splitlines()
        row.error = f"{type(error).__name__}: {text[0] if text else 'no text'}"
    return row


def _region(tracker: Any, stream: str) -> Callable[[Tensor], Tensor]:
    def region(x: Tensor) -> Tensor:
        if stream.startswith("default"):
            x = F.dropout(x, 0.5)
        if stream == "default":
            return x
        with tracker.fork("shared" if stream.startswith("shared") else "model-parallel-rng"):
            return F.dropout(x, 0.25)

    return region


def _filled(subject: Subject, device: str) -> Any:
    torch.manual_seed(7)
    tracker = subject.new_tracker()
    tracker.add("model-parallel-rng", 1234)
    if subject.shares:
        default = torch.default_generator
        if device == "cuda":
            default = torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_get_state()
        tracker.set_states({**dict(tracker.get_states()), "shared": default})
    return tracker


def _eager(subject: Subject, tracker: Any, reentrant: bool, stream: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.ones(ELEMENTS, device=device, requires_grad=True)
    y = subject.checkpoint(_region(tracker, stream), x, reentrant, tracker)
    torch.rand(5, device=device)  # other work between forward and backward
    y.backward(torch.ones_like(y))
    if x.grad is None:
        raise RuntimeError("no gradient arrived at the region's input")
    return x, y.detach(), x.grad


def _draws(tracker: Any, device: str) -> Tensor:
    drawn = [torch.rand(8, device=device)]
    with tracker.fork("model-parallel-rng"):
        drawn.append(torch.rand(8, device=device))
    return torch.cat(drawn)


def _draws_after(subject: Subject, _: None, reentrant: bool, stream: str, device: str) -> Tensor:
    """Return what the streams give after the same work without checkpointing."""
    tracker = _filled(subject, device)
    plain = Subject(subject.name, lambda region, x, *_: region(x), subject.new_tracker)
    _eager(plain, tracker, reentrant, stream, device)
    return _draws(tracker, device)


def _captured(subject: Subject, tracker: Any, reentrant: bool, stream: str, whole: bool) -> tuple[int, Tensor, Tensor]:
    region, side = _region(tracker, stream), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            x = torch.ones(ELEMENTS, device="cuda", requires_grad=True)
            subject.checkpoint(region, x, reentrant, tracker).backward(torch.ones_like(x))
    torch.cuda.current_stream().wait_stream(side)
    x = torch.ones(ELEMENTS, device="cuda", requires_grad=True)
    ones = torch.ones_like(x)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    register_streams(forward, tracker)
    register_streams(backward, tracker)
    with torch.cuda.graph(forward):
        y = subject.checkpoint(region, x, reentrant, tracker)
        if whole:
            y.backward(ones)
    with nullcontext() if whole else torch.cuda.graph(backward, pool=forward.pool()):
        if not whole:
            y.backward(ones)
    torch.cuda.synchronize()
    mismatches = 0
    for _ in range(REPLAYS):
        forward.replay()
        if not whole:
            torch.rand(5, device="cuda")
            backward.replay()
        torch.cuda.synchronize()
        if x.grad is None:
            raise RuntimeError("no gradient arrived at the region's input")
        mismatches += int((y.detach() != x.grad).sum())
    if x.grad is None:
        raise RuntimeError("no gradient arrived at the region's input")
    return mismatches, y.detach().clone(), x.grad.clone()
