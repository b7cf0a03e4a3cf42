# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The functions of the native library and those of Python do the same to streams of the CPU, also mixed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from _moves import use, using
from transformer_engine_ext.pytorch.rng import moves
from transformer_engine_ext.pytorch.rng.cpu_backend import same_value
from transformer_engine_ext.pytorch.rng.devices import CPU
from transformer_engine_ext.pytorch.rng.recording import Recording

#: What was drawn from a stream before: also a half pair of normals that waits, of either type or of both.
HISTORIES: dict[str, Callable[[Generator], object]] = {
    "new": lambda g: None,
    "one word": lambda g: torch.rand(1, generator=g),
    "last word of a block": lambda g: torch.rand(624, generator=g),
    "into the next block": lambda g: torch.rand(1000, generator=g),
    "half a pair of floats": lambda g: torch.randn(3, generator=g),
    "half a pair of doubles": lambda g: torch.randn(5, generator=g, dtype=torch.float64),
    "half a pair of both": lambda g: (torch.randn(1, generator=g), torch.randn(1, generator=g, dtype=torch.float64)),
    "whole pairs": lambda g: torch.randn(4, generator=g),
    "largest seed": lambda g: g.manual_seed(2**64 - 1),
    "negative seed": lambda g: g.manual_seed(-7),
    "seeded, then half a pair": lambda g: torch.randn(3, generator=g.manual_seed(2**40)),
}
histories = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)

PYTHON = moves._HERE


def stream_of(history: Callable[[Generator], object], seed: int = 5) -> Generator:
    handle = Generator().manual_seed(seed)
    history(handle)
    return handle


def draws(handle: Generator) -> list[Any]:
    """Draw so that both halves of normals, and words, show where the stream stands."""
    kinds = (torch.float32, torch.float64)
    found = [torch.randn(count, generator=handle, dtype=kind).tolist() for kind in kinds for count in (1, 2)]
    return [*found, torch.rand(700, generator=handle).tolist()]


def bytes_of(value: Tensor | bytes) -> bytes:
    """Return a taken value as the bytes of ``get_state``, whoever took it."""
    if isinstance(value, Tensor):
        return value.numpy().tobytes()
    generator = Generator()
    assert moves.unpack_cpu is not None
    moves.unpack_cpu(generator, value)
    return generator.get_state().numpy().tobytes()


def state(handle: Generator) -> bytes:
    return handle.get_state().numpy().tobytes()


@pytest.fixture
def library(native_moves: ModuleType) -> ModuleType:
    """The native library, in use."""
    return native_moves


@histories
@pytest.mark.parametrize("which", ["a stream", "the default generator"])
def test_values(library: ModuleType, history: Callable[[Generator], object], which: str) -> None:
    """take, positions and retake give the same stream as Python's, move nothing, and differ when it has moved."""
    handle = stream_of(history) if which == "a stream" else torch.default_generator
    history(handle)
    before = state(handle)
    streams = [("x", CPU, handle, None)]
    (name, backend, same, retaken), *rest = library.retake(streams)
    assert (name, backend, same, rest) == ("x", CPU, handle, [])
    for value in (library.take(CPU, handle), library.positions(streams)[0], retaken):
        assert isinstance(value, bytes)
        assert bytes_of(value) == bytes_of(PYTHON["take"](CPU, handle)) == before
        assert value == library.take(CPU, handle)
    assert streams == [("x", CPU, handle, None)]
    assert state(handle) == before
    taken = library.take(CPU, handle)
    torch.randn(1, generator=handle)
    assert library.take(CPU, handle) != taken


@histories
@pytest.mark.parametrize("taker", ["native", "python"])
@pytest.mark.parametrize("putter", ["native", "python"])
@pytest.mark.parametrize("in_use", ["native", "python"])
def test_what_one_took_the_other_puts(
    native_library: ModuleType, history: Callable[[Generator], object], taker: str, putter: str, in_use: str
) -> None:
    with using(native_library):  # in use once, as in a program that goes back to Python
        functions: dict[str, Any] = {"native": vars(native_library), "python": PYTHON}
    with using(native_library if in_use == "native" else None):
        handle = stream_of(history)
        before, value = state(handle), functions[taker]["take"](CPU, handle)
        expected = draws(handle)
        for target in (handle, stream_of(HISTORIES["half a pair of both"], 77)):
            functions[putter]["rewind"]([("x", CPU, target, value)])
            assert state(target) == before
            assert draws(target) == expected


@histories
def test_mixed_values_compare_as_the_streams_do(library: ModuleType, history: Callable[[Generator], object]) -> None:
    first, twin, other = stream_of(history), stream_of(history), stream_of(history)
    torch.rand(3, generator=other)
    takers = (library.take, PYTHON["take"])
    for one, two in itertools.product(takers, takers):
        here, there, further = one(CPU, first), two(CPU, twin), two(CPU, other)
        for compare in (same_value, CPU.same, CPU.equal, CPU.unmoved):
            assert compare(here, there)
            assert not compare(here, further)
            assert not compare(further, here)
        assert CPU.leads_to(here, there)
        assert CPU.leads_to(here, further)
        assert CPU.distance(here, there) == "0 32-bit words"
        assert CPU.distance(here, further) == "3 32-bit words"
        for stand_where in (library.stand_where, PYTHON["stand_where"]):
            streams = [("x", CPU, first, None), ("y", CPU, other, None)]
            assert stand_where(streams, [here, further], [there, further]) is True
            assert stand_where(streams, [here, further], [further, further]) is False
            assert stand_where(streams, [here, here], [there, further]) is False
            assert stand_where([], [], []) is True


def test_mixed_values_that_no_draws_connect(library: ModuleType) -> None:
    first, further = stream_of(HISTORIES["new"]), stream_of(HISTORIES["one word"])
    for one, two in [(library.take, PYTHON["take"]), (PYTHON["take"], library.take)]:
        assert not CPU.leads_to(one(CPU, further), two(CPU, first))
        assert CPU.distance(one(CPU, further), two(CPU, first)).startswith("another sequence")


def test_half_a_pair_alone_tells_streams_apart(library: ModuleType) -> None:
    """Two draws of one normal use as many words as one of two, of which none waits."""
    # See Note [A CPU stream is taken as its twister]
    waiting, done = stream_of(HISTORIES["new"]), stream_of(HISTORIES["new"])
    torch.randn(1, generator=waiting)
    torch.randn(2, generator=done)
    assert not CPU.same(library.take(CPU, waiting), library.take(CPU, done))
    assert library.take(CPU, waiting) != library.take(CPU, done)


@pytest.fixture
def bound(native_moves: ModuleType) -> Iterator[tuple[Generator, Generator]]:
    """A stream that is bound and has moved, and one that is not."""
    first, second = stream_of(HISTORIES["one word"], 1), stream_of(HISTORIES["half a pair of floats"], 2)
    token = CPU.bind(first)
    torch.randn(3)
    yield first, second
    CPU.unbind(token)


def test_bound_streams_are_left_to_the_backend(library: ModuleType, bound: tuple[Generator, Generator]) -> None:
    """The handle of a bound stream is stale, and the default generator holds another stream's value."""
    handles = [*bound, torch.default_generator]
    assert state(bound[0]) != bytes_of(CPU.read(bound[0])), "it must be stale, to show anything"
    streams = [(str(number), CPU, handle, CPU.read(handle)) for number, handle in enumerate(handles)]
    expected = [bytes_of(CPU.read(handle)) for handle in handles]
    assert len(set(expected)) == 3
    assert [bytes_of(library.take(CPU, handle)) for handle in handles] == expected
    assert [bytes_of(value) for value in library.positions(streams)] == expected
    assert [bytes_of(entry[3]) for entry in library.retake(streams)] == expected
    recording = Recording()
    for handle in handles:
        assert library.touch([recording], "x", handle) is False
        assert recording.streams == []
        assert recording.known == set()
    torch.rand(5)
    assert not library.stand_where(streams, library.positions(streams), [entry[3] for entry in streams])
    library.rewind(streams)
    assert library.stand_where(streams, library.positions(streams), [entry[3] for entry in streams])
    assert [bytes_of(CPU.read(handle)) for handle in handles] == expected


def test_taken_before_a_fork_and_put_inside_it(library: ModuleType) -> None:
    stream, default = stream_of(HISTORIES["half a pair of both"]), torch.default_generator
    live = library.retake([("s", CPU, stream, None), ("d", CPU, default, None)])
    before = [state(stream), state(default)]
    token = CPU.bind(stream)
    torch.randn(5)
    library.rewind(live)
    CPU.unbind(token)
    assert [state(stream), state(default)] == before


def test_swap(library: ModuleType) -> None:
    """swap_cpu: the first one's value goes into the second, the third's into the first."""
    first, second, third = (stream_of(history, 3) for history in list(HISTORIES.values())[4:7])
    was, _, incoming = state(first), state(second), state(third)
    assert library.swap_cpu(first, second, third) is None
    assert [state(first), state(second), state(third)] == [incoming, was, incoming]


@pytest.mark.parametrize("in_use", ["native", "python", "either"])
@pytest.mark.parametrize("number", range(8))
def test_any_order_of_forks_moves_and_switches(native_library: ModuleType, in_use: str, number: int) -> None:
    """Nested forks, writes to whatever is bound or parked, values that are kept and put back: as with Python alone."""
    steps = random.Random(number).choices(list(STEPS), list(STEPS.values()), k=300)
    traces = []
    for libraries in ([None], {"native": [native_library], "python": [None]}.get(in_use, [None, native_library])):
        with using(libraries[-1]):
            traces.append(_Bench(random.Random(number), libraries).run(steps))
    assert traces[0] == traces[1]
    assert len(set(map(str, traces[0]))) > 100


#: Each step and how often it comes.
STEPS = {"bind": 4, "unbind": 4, "draw": 4, "take": 2, "put": 2, "write": 1, "default": 1, "unwind": 0.3, "touch": 1}


class _Bench:
    """Three streams and the default one, and random steps; everything that can be seen goes into a trace."""

    def __init__(self, choose: random.Random, libraries: list[Any]) -> None:
        torch.manual_seed(8)
        self.choose, self.libraries = choose, libraries
        self.switch = random.Random(99)
        self.handles = [*(Generator().manual_seed(seed) for seed in (1, 2, 3)), torch.default_generator]
        self.tokens: list[Any] = []
        self.taken: list[list[Any]] = []
        self.trace: list[Any] = []

    def run(self, steps: list[str]) -> list[Any]:
        for step in steps:
            use(self.switch.choice(self.libraries))
            getattr(self, f"_{step}")()
            self.trace.append((step, [self.number(CPU.default())], [bytes_of(CPU.read(h)) for h in self.handles]))
        while self.tokens:
            self._unbind()
        return [*self.trace, [state(handle) for handle in self.handles]]

    def number(self, handle: Generator) -> int:
        return next(number for number, known in enumerate(self.handles) if known is handle)

    def _bind(self) -> None:
        if len(self.tokens) < 4:
            self.tokens.append(CPU.bind(self.choose.choice(self.handles)))

    def _unbind(self) -> None:
        if self.tokens:
            CPU.unbind(self.tokens.pop())

    def _unwind(self) -> None:
        CPU.unwind(0, 0)
        self.tokens.clear()

    def _draw(self) -> None:
        kind = self.choose.choice([torch.float32, torch.float64])
        self.trace.append(torch.randn(self.choose.choice([1, 2, 3, 17]), dtype=kind).tolist())

    def _take(self) -> None:
        chosen = self.choose.sample(self.handles, self.choose.choice([1, 2, 4]))
        entries = [("x", CPU, handle, moves.take(CPU, handle)) for handle in chosen]
        self.taken.append(self.choose.choice([moves.retake, list])(entries))
        self.trace.append([bytes_of(value) for value in moves.positions(entries)])

    def _put(self) -> None:
        if self.taken:
            entries = self.choose.choice(self.taken)
            self.trace.append(moves.stand_where(entries, [entry[3] for entry in entries], moves.positions(entries)))
            moves.rewind(entries)

    def _write(self) -> None:
        CPU.write(self.choose.choice(self.handles), stream_of(HISTORIES["half a pair of both"]).get_state())

    def _default(self) -> None:
        CPU.write(torch.default_generator, stream_of(HISTORIES["one word"]).get_state())

    def _touch(self) -> None:
        handle, recording = self.choose.choice(self.handles), Recording()
        if moves.touch is None or not moves.touch([recording], "x", handle):
            recording.record("x", CPU, handle, moves.take(CPU, handle))
        ((name, backend, noted, value),) = recording.streams
        assert recording.known == {id(handle)}
        self.trace.append((name, backend is CPU, self.number(noted), bytes_of(value)))
