# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""How many graph nodes a region's random numbers cost, counted on real captures and on those of absent devices."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import pytest
import torch

from _capture import CudaKit, Kit, Rig, Split, cuda_kit, kit
from _fake_graphs import FakeGraph
from _helpers import requires_cuda
from _noted import note
from _regions import both_engines

__all__ = ["cuda_kit", "kit"]

#: CUgraphNodeType, of cuda.h.
_TYPES = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty", 10: "alloc", 11: "free"}

each_count = pytest.mark.parametrize("streams", [1, 3, 32, 64])


def _nodes(graph: Any) -> Counter[str]:
    """Count the nodes of a graph that was captured with ``keep_graph=True``, by type."""
    driver = ctypes.CDLL("libcuda.so.1")
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(raw, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count)) == 0
    types: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        types[_TYPES.get(kind.value, f"type {kind.value}")] += 1
    return types


class KeepingKit(CudaKit):
    """Keeps graphs open to inspection."""

    def graph(self, register: bool = True, **options: Any) -> Any:
        return super().graph(register, keep_graph=True, **options)


def _rows(streams: int) -> tuple[str, ...]:
    return ("default", *(f"stream {number}" for number in range(1, streams)))


@requires_cuda
@both_engines
@each_count
def test_nodes_do_not_grow_with_the_streams(cuda_kit: CudaKit, streams: int, use_reentrant: bool) -> None:
    """At most 1 more in forward and 3 in backward for up to 32 streams, against the same region without rewinding."""
    counts = {}
    for preserve in (True, False):
        rig = Rig(KeepingKit(), use_reentrant, _rows(streams), preserve_rng_state=preserve)
        split = Split(rig, micro_batches=1, around=False)
        counts[preserve] = [_nodes(split.legs[0].fwd), _nodes(split.legs[0].bwd)]
        if preserve:
            split.run("f0 b0").assert_exact(f"{streams} streams")
    forward, backward = (ours - plain for ours, plain in zip(counts[True], counts[False], strict=True))
    note(streams=streams, more_in_forward=dict(forward), more_in_backward=dict(backward))
    calls = -(-streams // 32)  # torch moves the words of 32 streams in one kernel
    assert forward.total() <= calls, f"{dict(forward)} more nodes in forward"
    assert backward.total() <= 3 * calls, f"{dict(backward)} more nodes in backward"


@requires_cuda
@both_engines
def test_nodes_of_a_region_without_draws(cuda_kit: CudaKit, use_reentrant: bool) -> None:
    """Streams that a region leaves alone cost no node at all."""

    def program(rig: Rig, x: torch.Tensor) -> torch.Tensor:
        def function(x: torch.Tensor) -> torch.Tensor:
            rig.proof.ran()
            return rig.proof.watch(x.sin()) * rig.w

        return rig.checkpoint(function, x)

    counts = {}
    for preserve in (True, False):
        rig = Rig(KeepingKit(), use_reentrant, preserve_rng_state=preserve)
        leg = Split(rig, program, 1, around=False).legs[0]
        counts[preserve] = _nodes(leg.fwd), _nodes(leg.bwd)
    assert counts[True] == counts[False]


@both_engines
@each_count
def test_nodes_by_operator(kit: Kit, streams: int, use_reentrant: bool) -> None:
    """On absent devices: one call saves, one stashes, two overwrite, whatever the number of streams."""
    if kit.real:
        pytest.skip("counted by the driver in the other tests")
    leg = Split(Rig(kit, use_reentrant, _rows(streams)), micro_batches=1, around=False).legs[0]
    forward, backward = leg.fwd, leg.bwd
    assert isinstance(forward, FakeGraph)
    assert (forward.count("_foreach_add"), forward.count("_foreach_copy_")) == (1, 0)
    assert (backward.count("_foreach_add"), backward.count("_foreach_copy_")) == (1, 2)
    for graph in (forward, backward):
        for function, args, _, _ in graph.nodes:
            if "_foreach" in str(function):
                addresses = [word.data_ptr() for word in args[0]]
                assert len(set(addresses)) == len(addresses) == 2 * streams


@both_engines
def test_nodes_write_aliased_words_once(kit: Kit, use_reentrant: bool) -> None:
    """Two writes to one word in one node would race; and all words are stashed before any is overwritten."""
    if kit.real:
        pytest.skip("reads the nodes of captures on absent devices")
    rig = Rig(kit, use_reentrant, ("default", "a"))
    states = dict(rig.tracker.get_states())
    states |= {"second a": states["a"].graphsafe_get_state(), "second default": kit.default().graphsafe_get_state()}
    rig.tracker.states_ = states
    rig.rows = ("second a", "a", "second default", "default", "a")
    x, forward, backward = rig.input(), kit.graph(), kit.graph()
    with kit.capturing(forward):
        y = rig.checkpoint(rig.body, x)
    with kit.capturing(backward):
        y.backward(kit.ones(len(rig.rows), kit.size))
    written = []
    for graph in (forward, backward):
        for function, args, _, _ in graph.nodes:
            if "_foreach" in str(function):
                addresses = {word.data_ptr() for word in args[0]}
                assert len(addresses) == len(args[0]) == 4, "a word twice in one node"
                written.append((str(function).split(".")[1], frozenset(addresses)))
    save, stash, rewind, restore = written
    assert [name for name, _ in written] == ["_foreach_add", "_foreach_add", "_foreach_copy_", "_foreach_copy_"]
    assert stash[1] == rewind[1] == restore[1]
    if kit.registers:  # one pair of words for all graphs
        assert save[1] == stash[1]
    else:
        assert not save[1] & stash[1]
