# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The native library, asked for what it does not know: it asks the backend, or refuses; and it keeps nothing."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Generator

from _moves import use
from transformer_engine_ext.pytorch.recompute import ambient
from transformer_engine_ext.pytorch.rng import moves
from transformer_engine_ext.pytorch.rng.devices import CPU, get_backend
from transformer_engine_ext.pytorch.rng.recording import Recording

PYTHON = moves._HERE


@pytest.fixture
def library(native_moves: ModuleType) -> Iterator[ModuleType]:
    """The native library, in use; a test may tell it what it likes about backends, bindings and accelerators."""
    yield native_moves
    use(native_moves)


class Noting:
    """A backend that is none of the package's: notes what it is asked."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def take(self, handle: Any) -> Any:
        self.asked.append(("take", handle))
        return f"value of {handle}"

    def put(self, handle: Any, value: Any) -> None:
        self.asked.append(("put", handle, value))

    def position(self, handle: Any) -> Any:
        self.asked.append(("position", handle))
        return f"position of {handle}"

    def same(self, first: Any, second: Any) -> bool:
        self.asked.append(("same", first, second))
        return bool(first == second)


class Derived(Generator):
    """What a subclass may do is unknown."""


def test_other_backends_are_asked(library: ModuleType) -> None:
    """Whatever the handle is, the same questions in the same order as from Python, and the same answers."""
    handles = ["no generator", Generator(), torch.default_generator, Derived()]
    answers, questions = [], []
    for functions in (PYTHON, vars(library)):
        backend = Noting()
        streams = [(str(number), backend, handle, number) for number, handle in enumerate(handles)]
        answers.append(
            [
                [functions["take"](backend, handle) for handle in handles],
                functions["positions"](streams),
                [entry[3] for entry in functions["retake"](streams)],
                functions["rewind"](streams),
                functions["stand_where"](streams, ["a", "b", "c", "d"], ["a", "b", "x", "d"]),
                functions["stand_where"](streams, list("abcd"), list("abcd")),
            ]
        )
        questions.append(backend.asked)
    assert answers[0] == answers[1]
    assert questions[0] == questions[1]
    assert len(questions[0]) == 4 * 4 + 3 + 4


def test_subclass_of_generator_is_left_to_the_backend(library: ModuleType) -> None:
    handle, recording = Derived().manual_seed(3), Recording()
    assert torch.equal(library.take(CPU, handle), handle.get_state())
    assert torch.equal(library.positions([("x", CPU, handle, None)])[0], handle.get_state())
    value = handle.get_state()
    torch.rand(3, generator=handle)
    library.rewind([("x", CPU, handle, value)])
    assert torch.equal(handle.get_state(), value)
    assert library.touch([recording], "x", handle) is False
    assert (recording.streams, recording.known) == ([], set())


def test_backends_of_other_devices_are_not_taken_for_their_own(library: ModuleType) -> None:
    """A CPU generator that comes with the CUDA backend: the backend makes of it what it makes of it from Python."""
    handle, cuda = Generator().manual_seed(7), get_backend("cuda")
    streams = [("x", cuda, handle, (7, 4))]
    for name, args in {"take": (cuda, handle), "positions": (streams,), "retake": (streams,)}.items():
        assert getattr(library, name)(*args) == PYTHON[name](*args)
    for functions in (PYTHON, vars(library)):
        with pytest.raises(RuntimeError):
            functions["rewind"](streams)


@pytest.mark.parametrize("known", [(), (0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_touch_with_recordings_some_of_which_know_the_stream(library: ModuleType, known: tuple[int, ...]) -> None:
    """The innermost that knows it ends the search: as recording.touch without the library."""
    handle = Generator().manual_seed(3)
    recordings = [Recording() for _ in range(3)]
    for number in known:
        recordings[number].known.add(id(handle))
    assert library.touch(recordings, "x", handle) is True
    innermost = max(known, default=-1)
    for number, recording in enumerate(recordings):
        if number > innermost:
            ((name, backend, noted, value),) = recording.streams
            assert (name, backend, noted) == ("x", CPU, handle)
            assert value == library.take(CPU, handle)
        else:
            assert recording.streams == []
        assert recording.known == ({id(handle)} if number > innermost or number in known else set())
    assert library.touch([], "x", handle) is True


HANDLE = Generator()
ENTRY = ("x", CPU, HANDLE, HANDLE.get_state())

#: For each function: arguments that fit, by which too few and too many are made, and others that do not.
WRONG: dict[str, tuple[tuple[Any, ...], list[tuple[Any, ...]]]] = {
    "take": ((CPU, HANDLE), [(None, HANDLE), (CPU, None), (CPU, "x"), (HANDLE, CPU)]),
    "positions": (([ENTRY],), [(None,), (5,), ([ENTRY[:3]],), ([None],), ([(1, 2, 3, 4)],), ([[*ENTRY]],)]),
    "retake": (([ENTRY],), [(None,), (5,), ([ENTRY[:3]],), ([None],), ([(1, 2, 3, 4)],)]),
    "rewind": (([ENTRY],), [(None,), (5,), ([ENTRY, None],), ([(*ENTRY, 5)],), ([(*ENTRY[:3], None)],)]),
    "stand_where": (
        ([ENTRY], [1], [1]),
        [
            (None, [1], [1]),
            ([ENTRY], 1, [1]),
            ([ENTRY], [1], "1"),
            ([ENTRY], [], [1]),
            ([ENTRY], [1], []),
            ([], [], [1]),
        ],
    ),
    "touch": (([], "x", HANDLE), [(None, "x", HANDLE), ((), "x", HANDLE), ([None], "x", HANDLE)]),
    "swap_cpu": ((HANDLE, HANDLE, HANDLE), [(HANDLE, HANDLE, None), ("x", HANDLE, HANDLE), (CPU, CPU, CPU)]),
    "unpack_cpu": (
        (HANDLE, b""),
        [(HANDLE, b""), (HANDLE, None), (HANDLE, HANDLE.get_state()), (None, bytes(2536)), (HANDLE, bytes(2535))],
    ),
    "mark": ((None,), [(5,), ("x",), (HANDLE,), (SimpleNamespace(get_offset=lambda: "x"),)]),
    "bind_cpu": ((False,), [(torch.ones(2),)]),
    "set_backends": ((CPU, CPU), []),
    "set_accelerator": (("cpu",), [(None,), (5,), ("",), ("nonsense",), (b"cpu",)]),
    "ambient": ((), []),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(library: ModuleType, name: str) -> None:
    """They are an error that Python code may expect, and change nothing."""
    fitting, wrong = WRONG[name]
    handles = (HANDLE, torch.default_generator)
    before = [handle.get_state() for handle in handles], ambient.key(), sys.getrefcount(None)
    for args in (*wrong, (*fitting, None), *([fitting[:-1]] if fitting else []), (None,) * 9):
        with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError)) as caught:
            getattr(library, name)(*args)
        assert str(caught.value)
    with pytest.raises(TypeError):
        getattr(library, name)(*fitting, unknown=1)
    assert all(torch.equal(handle.get_state(), value) for handle, value in zip(handles, before[0], strict=True))
    assert ambient.key() == before[1]
    assert abs(sys.getrefcount(None) - before[2]) < 1000


def test_every_function_is_tested_with_wrong_arguments(library: ModuleType) -> None:
    assert {name for name in dir(library) if not name.startswith("_")} == set(WRONG)


def test_what_fails_half_way_leaves_what_was_done_like_python(library: ModuleType) -> None:
    """rewind writes from the last one on until one fails."""
    for functions in (PYTHON, vars(library)):
        handles = [Generator().manual_seed(seed) for seed in (1, 2)]
        values = [CPU.take(Generator().manual_seed(seed)) for seed in (3, 4)]
        streams = [("a", CPU, handles[0], values[0]), ("b", None, None, None), ("c", CPU, handles[1], values[1])]
        with pytest.raises(AttributeError, match="put"):
            functions["rewind"](streams)
        assert [handle.initial_seed() for handle in handles] == [1, 4]


def repeated(library: ModuleType) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    handle, other, backend = Generator(), Derived(), Noting()
    taken = library.take(CPU, handle)
    streams = [("a", CPU, handle, taken), ("b", CPU, other, other.get_state()), ("c", backend, handle, "value")]
    backend.asked = SimpleNamespace(append=lambda _: None)  # type: ignore[assignment]
    positions = library.positions(streams)
    recording, failing = Recording(), [*streams, ("d", None, handle, taken)]

    def touched(*args: Any) -> Any:
        recording.streams.clear()
        recording.known.clear()
        return library.touch(*args)

    def refused(name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            with pytest.raises((TypeError, AttributeError, RuntimeError, ValueError)):
                getattr(library, name)(*args)

        return call

    return {
        "take": (library.take, (CPU, handle)),
        "take of others": (library.take, (CPU, other)),
        "positions": (library.positions, (streams,)),
        "retake": (library.retake, (streams,)),
        "rewind": (library.rewind, (streams,)),
        "stand_where": (library.stand_where, (streams, positions, positions)),
        "touch": (touched, ([recording], "a name", handle)),
        "touch of others": (touched, ([recording], "a name", other)),
        "swap_cpu": (library.swap_cpu, (handle, other, handle)),
        "unpack_cpu": (library.unpack_cpu, (handle, taken)),
        "mark": (library.mark, (None,)),
        "mark of others": (library.mark, (SimpleNamespace(get_offset=lambda: 1 << 40),)),
        "ambient": (library.ambient, ()),
        "bind_cpu": (library.bind_cpu, (False,)),
        "set_backends": (library.set_backends, (CPU, backend)),
        "set_accelerator": (library.set_accelerator, ("cpu",)),
        "failing take": (refused("take"), (None, handle)),
        "failing positions": (refused("positions"), (failing,)),
        "failing retake": (refused("retake"), (failing,)),
        "failing stand_where": (refused("stand_where"), (failing, [*positions, 1], [*positions, 2.0])),
        "failing touch": (refused("touch"), ([None], "a name", handle)),
        "failing mark": (refused("mark"), (handle,)),
        "failing set_accelerator": (refused("set_accelerator"), ("nonsense",)),
        "failing unpack_cpu": (refused("unpack_cpu"), (handle, b"short")),
    }


def test_nothing_is_kept(library: ModuleType) -> None:
    """10,000 calls of each leave the counts of references, and the memory of Python's objects, as they were."""
    for name, (function, args) in repeated(library).items():
        held = [*args, *(entry for arg in args if isinstance(arg, list) for entry in arg)]
        held += [part for entry in held if isinstance(entry, tuple) for part in entry]
        held += [part for entry in held if isinstance(entry, Recording) for part in (entry.known, entry.streams)]
        for _ in range(100):
            function(*args)
        times = 1000 if name.startswith("failing") else 10_000
        gc.collect()
        counts = [sys.getrefcount(thing) for thing in held]
        tracemalloc.start()
        try:
            function(*args)
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(times):
                function(*args)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        # Immortal ones of newer Pythons do not count; None and the like change with everything.
        off = [
            f"{thing!r}: {now - then:+}"
            for thing, then, now in zip(held, counts, (sys.getrefcount(thing) for thing in held), strict=True)
            if abs(now - then) > times // 10
        ]
        assert off == [], f"{name} keeps or drops references"
        assert grown < times, f"{name} grew by {grown} bytes in {times} calls"


def test_memory_outside_of_python(library: ModuleType) -> None:
    """A leak of one value of a stream, 2.5 KB, per call would be 125 MB."""

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    streams = [(str(number), CPU, Generator(), None) for number in range(5)]
    streams = library.retake(streams)
    for round_ in range(2):
        before = resident()
        for _ in range(5_000 if round_ else 500):
            library.rewind(library.retake(streams))
            library.stand_where(streams, library.positions(streams), library.positions(streams))
            library.ambient()
    assert resident() - before < 20 << 20


def test_threads_at_once(library: ModuleType) -> None:
    """Each thread moves streams of its own; one of them, as Python lets it, other backends."""
    failed: list[BaseException] = []
    barrier = threading.Barrier(3)

    def work(seed: int, backend: Any) -> None:
        handle = Generator().manual_seed(seed)
        expected = torch.rand(3, generator=Generator().manual_seed(seed))
        streams, recording = [("x", backend, handle, library.take(backend, handle))], Recording()
        try:
            barrier.wait(30)
            for _ in range(3000):
                live = library.retake(streams)
                if backend is CPU:
                    assert torch.equal(torch.rand(3, generator=handle), expected)
                    library.rewind(live)
                assert library.stand_where(streams, library.positions(streams), library.positions(live))
                assert library.touch([recording], "x", handle)
                assert library.mark(None)[1] == 0
                assert library.ambient() == library.ambient()
            assert len(recording.streams) == 1
        except BaseException as error:
            failed.append(error)

    others = [(1, CPU), (2, CPU), (3, Noting())]
    threads = [threading.Thread(target=work, args=args) for args in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
