# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Captures that may leave CUDA in any state, each run in a process of its own by test_capture_lifetime.py.

    python _odd_captures.py {conditional,conditional-backward,nested} {reentrant,nonreentrant}

Prints ``RIGHT``, ``WRONG`` with the numbers of wrong elements, ``REFUSED`` with the error and those that it covers, or
``ABSENT``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from _capture import CudaKit, Rig
from transformer_engine_ext.pytorch.rng import native

#: Graphs to replay, pairs of an output and an input gradient, and the tensors that the graphs read.
Checked = tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]


@contextlib.contextmanager
def _if(graph: Any, predicate: torch.Tensor) -> Iterator[None]:
    graph.begin_capture_to_if_node(predicate)
    try:
        yield
    finally:
        graph.end_capture_to_conditional_node()


def _conditional(kit: CudaKit, rig: Rig, only_backward: bool) -> Checked:
    x, grad, graph = rig.input(), kit.ones(len(rig.rows), kit.size), kit.graph()
    yes = torch.ones((), dtype=torch.bool, device="cuda")
    with torch.cuda.graph(graph):
        rig.draws()
        with contextlib.nullcontext() if only_backward else _if(graph, yes):
            y = rig.checkpoint(rig.body, x)
            if not only_backward:
                y.backward(grad)
        if only_backward:
            with _if(graph, yes):
                y.backward(grad)
    assert x.grad is not None
    return [graph], [(y.detach(), x.grad)], [x, grad, yes]


def conditional(kit: CudaKit, rig: Rig) -> Checked:
    """Forward and backward in the body of an if node."""
    return _conditional(kit, rig, False)


def conditional_backward(kit: CudaKit, rig: Rig) -> Checked:
    """Only the backward in the body of an if node."""
    return _conditional(kit, rig, True)


def nested(kit: CudaKit, rig: Rig) -> Checked:
    """One region captured whole, on another stream, between forward and backward of a capture that is under way."""
    xs, grad = [rig.input() for _ in range(2)], kit.ones(len(rig.rows), kit.size)
    w = kit.ones(kit.size).requires_grad_()
    outer, inner = kit.graph(), kit.graph()
    outer_stream, inner_stream = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(outer_stream):
        outer.capture_begin(capture_error_mode="relaxed")
        y0 = rig.checkpoint(rig.body, xs[0])
        with torch.cuda.stream(inner_stream):
            inner.capture_begin(capture_error_mode="relaxed")
            y1 = rig.checkpoint(rig.body, xs[1], w)
            y1.backward(grad)
            inner.capture_end()
        y0.backward(grad)
        outer.capture_end()
    assert xs[0].grad is not None
    assert xs[1].grad is not None
    return [outer, inner], [(y0.detach(), xs[0].grad), (y1.detach(), xs[1].grad)], [*xs, grad, w]


SCENARIOS: dict[str, Callable[[CudaKit, Rig], Checked]] = {
    "conditional": conditional,
    "conditional-backward": conditional_backward,
    "nested": nested,
}


def _told(error: BaseException | None) -> str:
    """Return an error with those that it covers: the end of a capture that failed fails too."""
    lines = []
    while error is not None:
        lines.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        error = error.__context__
    return "\n  over ".join(lines)


def main(scenario: str, engine: str) -> str:
    if scenario != "nested" and not hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node"):
        return "ABSENT"
    torch.cuda.init()
    native.prepare()
    kit = CudaKit()
    rig = Rig(kit, engine == "reentrant")
    twin = rig.twin()
    kit.aside(lambda: twin.checkpoint(twin.body, twin.input()).sum().backward())
    try:
        graphs, pairs, _inputs = SCENARIOS[scenario](kit, rig)
        kit.settle()
        wrong = []
        for turn in range(4):
            rig.seed(turn)
            for graph in graphs:
                graph.replay()
            wrong += [int(((y != 0) != (gradient != 0)).sum()) for y, gradient in pairs]
    except RuntimeError as error:
        return f"REFUSED {_told(error)}"
    return "RIGHT" if not any(wrong) else f"WRONG {wrong}"


if __name__ == "__main__":
    print(main(*sys.argv[1:]), flush=True)
    os._exit(0)  # a capture that was refused may leave CUDA in a state in which an orderly exit aborts
