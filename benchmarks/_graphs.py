# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Capture of a stack's step: forward and backward in one CUDA graph, or a pair of graphs for each layer."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator

import torch

from _engines import transformer_engine
from _stack import Stack
from transformer_engine_ext.pytorch.distributed import register_streams, registering_streams

__all__ = ["capture_callables", "capture_step"]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the collector, which could free another graph, out of a capture, and others' warnings off the log."""
    switch = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if switch is not None:
        switch(False)
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.enable()


def _aside(function: Callable[[], object], times: int) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def warm_up(stack: Stack) -> None:
    """Run what must not happen for the first time during a capture."""
    with _quietly():
        _aside(stack.step, 3)


def capture_step(stack: Stack) -> Callable[[], object]:
    """Capture forward and backward in one graph, after ``warm_up``; return its replay."""
    graph = torch.cuda.CUDAGraph()
    with _quietly():
        register_streams(graph, stack.tracker)
        with torch.cuda.graph(graph):
            stack.step()
        torch.cuda.synchronize()
    return graph.replay


def capture_callables(stack: Stack) -> Callable[[], object]:
    """Let Transformer Engine's ``make_graphed_callables`` capture each layer; return the step that replays them."""
    te = transformer_engine()
    samples = [(stack.x.detach().clone().requires_grad_(),) for _ in stack.regions]
    if stack.probes:
        samples = [(*sample, probe) for sample, probe in zip(samples, stack.probes, strict=True)]
    with _quietly(), registering_streams(stack.tracker):
        stack.regions = list(te.make_graphed_callables(tuple(stack.regions), tuple(samples)))
        torch.cuda.synchronize()
    return stack.step
