# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The functions of the native library and those of Python do the same to CUDA streams, also under graph capture."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Generator

from _helpers import requires_cuda
from _moves import using
from _program_check import Package, check
from _program_strategies import numbered_program
from transformer_engine_ext.pytorch.rng import moves
from transformer_engine_ext.pytorch.rng.devices import get_backend
from transformer_engine_ext.pytorch.rng.recording import Recording

pytestmark = requires_cuda

PYTHON = moves._HERE
CUDA = get_backend("cuda")

# See Note [Torch asks the driver for every number]: only the first stream of a set is read by torch's own methods.
#: Seed and offset; offsets count in fours.
VALUES = [(0, 0), (1, 4), (2**63, 2**32 + 4), (2**64 - 1, 2**40), (2**64 - 1, 2**32 - 4), (5, 2**62)]


def new_stream(seed: int = 3) -> Generator:
    torch.cuda.init()
    return CUDA.new_stream(seed, torch.cuda.current_device())


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("value", VALUES)
def test_values(native_moves: ModuleType, value: tuple[int, int]) -> None:
    handle, streams = new_stream(), []
    CUDA.put(handle, value)
    streams = [("x", CUDA, handle, None)]
    for functions in (PYTHON, vars(native_moves)):
        assert functions["take"](CUDA, handle) == value
        assert functions["positions"](streams) == [value[1]]
        assert functions["retake"](streams) == [("x", CUDA, handle, value)]
        assert functions["stand_where"](streams, [value[1]], functions["positions"](streams))
        assert not functions["stand_where"](streams, [value[1]], [value[1] + 4])
    assert native_moves.mark(handle)[1] == value[1]
    recording = Recording()
    assert native_moves.touch([recording], "x", handle) is True
    assert (recording.streams, recording.known) == ([("x", CUDA, handle, value)], {id(handle)})


def test_sets_of_streams(native_moves: ModuleType) -> None:
    """Each stream of a set by itself, also those that the library reads without torch's methods."""
    for functions in (PYTHON, vars(native_moves)):
        handles = [new_stream(seed) for seed in range(len(VALUES))]
        streams = [
            (str(seed), CUDA, handle, value) for seed, (handle, value) in enumerate(zip(handles, VALUES, strict=True))
        ]
        functions["rewind"](streams)
        assert [CUDA.take(handle) for handle in handles] == VALUES
        assert functions["retake"](streams) == streams
        assert functions["positions"](streams) == [offset for _, offset in VALUES]
        for handle in handles[1:]:
            torch.rand(3, generator=handle, device="cuda")
        assert [entry[3] for entry in functions["retake"](streams)] == [CUDA.take(handle) for handle in handles]
        assert not functions["stand_where"](streams, [offset for _, offset in VALUES], functions["positions"](streams))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("before", [(9, 8), (2**64 - 1, 0)])
def test_rewind(native_moves: ModuleType, value: tuple[int, int], before: tuple[int, int]) -> None:
    states, drawn = [], []
    for functions in (PYTHON, vars(native_moves)):
        handle = new_stream()
        CUDA.put(handle, before)
        functions["rewind"]([("x", CUDA, handle, value)])
        states.append(handle.get_state())
        assert CUDA.take(handle) == value
        drawn.append(torch.rand(5, generator=handle, device="cuda"))
    assert torch.equal(*states)
    assert torch.equal(*drawn)


def test_earliest_value_wins_for_two_handles_on_one_state(native_moves: ModuleType) -> None:
    # See Note [The earliest value wins]
    for functions in (PYTHON, vars(native_moves)):
        handle = new_stream()
        alias = handle.graphsafe_get_state()
        functions["rewind"]([("first", CUDA, handle, (7, 4)), ("second", CUDA, alias, (9, 8))])
        assert functions["take"](CUDA, alias) == functions["take"](CUDA, handle) == (7, 4)


def test_bound_streams(native_moves: ModuleType) -> None:
    handle, index = new_stream(), torch.cuda.current_device()
    token = CUDA.bind(handle)
    try:
        torch.rand(3, device="cuda")
        for bound in (handle, CUDA.default(index)):
            taken = native_moves.take(CUDA, bound)
            assert taken == PYTHON["take"](CUDA, bound)
            assert taken[1] > 0
        native_moves.rewind([("x", CUDA, handle, (5, 8))])
        assert CUDA.take(CUDA.default(index)) == (5, 8)
    finally:
        CUDA.unbind(token)
    assert native_moves.take(CUDA, handle) == (5, 8)
    assert native_moves.take(CUDA, CUDA.default(index)) == CUDA.take(CUDA.default(index)) != (5, 8)


@pytest.mark.parametrize("value", [("x", 4), (1, "x"), (1,), (2**64, 0), (-1, 0), (1, -4), (1.5, 0), (3, 2**64)])
def test_wrong_values_change_nothing(native_moves: ModuleType, value: tuple[Any, ...]) -> None:
    handle = new_stream()
    CUDA.put(handle, (7, 8))
    with pytest.raises((TypeError, ValueError, OverflowError, IndexError, RuntimeError)):
        native_moves.rewind([("x", CUDA, handle, value)])
    assert CUDA.take(handle) == (7, 8)


def test_under_graph_capture(native_moves: ModuleType) -> None:
    """What torch refuses during a capture is left to the backend, to the same end as from Python."""
    graph, handle = torch.cuda.CUDAGraph(), new_stream()
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    graph.register_generator_state(handle)
    torch.rand(4, device="cuda")
    found: list[tuple[str, Any, Any]] = []
    recording = Recording()
    with torch.cuda.graph(graph):
        torch.rand(4, device="cuda")
        refused = outcome(handle.get_offset) is RuntimeError
        for generator in (handle, default):
            streams = [("x", CUDA, generator, None)]
            for name, args in {"take": (CUDA, generator), "positions": (streams,), "retake": (streams,)}.items():
                found.append((name, outcome(getattr(native_moves, name), *args), outcome(PYTHON[name], *args)))
            found.append(("mark", outcome(lambda g: native_moves.mark(g)[1], generator), outcome(generator.get_offset)))
        touched = native_moves.touch([recording], "x", handle)
        torch.rand(4, device="cuda", generator=handle)
    assert [(name, native) for name, native, _ in found] == [(name, python) for name, _, python in found]
    if refused:
        assert touched is False
        assert (recording.streams, recording.known) == ([], set())


@pytest.mark.parametrize("forward", ["native", "python"])
@pytest.mark.parametrize("backward", ["native", "python"])
def test_programs(native_library: ModuleType, forward: str, backward: str) -> None:
    """See test_fuzz_programs.py."""
    kinds = {"native": native_library, "python": None}

    class Halves(Package):
        def checkpoint(self, *args: Any) -> torch.Tensor:
            with using(kinds[forward]):
                return super().checkpoint(*args)

    with using(kinds[backward]):
        for number in range(50):
            check(numbered_program(number), "cuda", Halves())
