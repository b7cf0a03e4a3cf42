# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Device backends: how a stream's value is read, written and made the default generator's, per device type.

A *handle* is a ``torch.Generator``. A *value* is what ``Generator.get_state`` returns: a ``uint8`` CPU tensor that
nothing ever changes in place, so one value may be kept by any number of snapshots.
"""

from __future__ import annotations

import ctypes
import operator
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from transformer_engine_ext.errors import UnsupportedDeviceError
from transformer_engine_ext.pytorch.rng.state import MT19937State, PhiloxState, count_words, decode_state, philox_words

__all__ = ["CPUBackend", "CUDABackend", "DeviceBackend", "backend_of", "device_index", "get_backend", "same_value"]


class DeviceBackend(Protocol):
    """What the snapshot and the tracker need to know of one device type."""

    device_type: str

    def default(self, index: int) -> Generator:
        """Return a handle on the stream that the default generator of device ``index`` is bound to now."""

    def read(self, handle: Generator) -> Tensor:
        """Return the stream's value, also while a fork has it bound to the default generator."""

    def write(self, handle: Generator, value: Tensor) -> None:
        """Write a value into the stream in place; the handle stays the same object."""

    # See Note [A recording keeps the cheapest form]
    def take(self, handle: Generator) -> Any:
        """Return the stream's value in the form that is cheapest to take and to put back."""

    def put(self, handle: Generator, taken: Any) -> None:
        """Write what ``take`` returned into the stream in place."""

    def equal(self, first: Any, second: Any) -> bool:
        """Tell whether two taken values are equal."""

    def position(self, handle: Generator) -> Any:
        """Return something cheap that differs whenever the stream has moved."""

    def same(self, first: Any, second: Any) -> bool:
        """Tell whether two positions are equal."""

    def leads_to(self, here: Any, end: Any) -> bool:
        """Tell whether draws, or none, can move a stream from one position to another."""

    def unmoved(self, entry: Any, position: Any) -> bool:
        """Tell whether ``position`` is that of the taken value ``entry``."""

    def distance(self, entry: Any, position: Any) -> str:
        """Describe how far ``position`` lies behind the taken value ``entry``, for messages."""

    def new_stream(self, seed: int, index: int) -> Generator:
        """Return a new stream at the start of ``seed``."""

    def bind(self, handle: Generator) -> Any:
        """Make ``handle`` the default generator's stream; returns the token for ``unbind``, None if it is already."""

    def unbind(self, token: Any) -> None:
        """Bind the stream again that was bound before the matching ``bind``."""

    def bound_stream(self, index: int) -> Generator | None:
        """Return the stream that ``bind`` made the default generator's; None where that has its own."""

    def depth(self, index: int) -> int:
        """Return how many bindings of the default generator are open."""

    def unwind(self, index: int, depth: int, handle: Generator | None = None) -> None:
        """Forget the bindings above ``depth`` and bind ``handle``, or what the lowest of them was made over."""


# Note [A recording keeps the cheapest form]
# Regions take and put back values all the time, files and users do so rarely. The 16 bytes of a CUDA stream's value
# cost a tensor (1.7 us); its seed and offset as two integers cost 0.7 us. So there are two forms: ``read`` and
# ``write`` use the bytes, which are what Transformer Engine, Megatron-core and torch exchange, ``take`` and ``put``
# whatever is cheapest. Only what ``take`` gave may be ``put``.


# PyDLL: letting go of the interpreter's lock costs more than comparing 5 KB.
_compare = ctypes.PyDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def same_value(first: Tensor, second: Tensor) -> bool:
    """Tell whether two state tensors (contiguous, ``uint8``, CPU) hold equal bytes."""
    # torch.equal costs ten times the comparison itself on 5 KB (4.5 to 9 us).
    size = first.numel()
    return size == second.numel() and _compare(first.data_ptr(), second.data_ptr(), size) == 0


def device_index(handle: Generator) -> int:
    """Return the index of a stream's device; 0 for the CPU."""
    device = handle.device
    if device.index is not None:
        return device.index
    # torch.Generator("cuda") names no index: it belongs to the current device.
    return 0 if device.type == "cpu" else torch.cuda.current_device()


# 32-bit words that leads_to() looks ahead, about a millisecond. Where more follow it says no, which is always safe.
_STEPS = 1 << 16


class CPUBackend:
    """CPU streams: mt19937, moved by value.

    CPU generators have no second handle on one state, so binding a stream copies its value into the default
    generator and, when another stream is bound, copies it back.
    """

    # Note [A bound CPU stream lives in the default generator]
    # While a stream is bound, its value advances inside torch.default_generator and the handle's own bytes are stale;
    # the default stream's value is parked meanwhile. Every bind first writes the outgoing stream back, so a fork
    # nested in another fork (of the same stream or not) continues where the outer one stands, and read() and write()
    # look where the value really is. Code that uses a handle directly (generator=handle) inside a fork of the same
    # stream sees the stale bytes; this package never does.
    device_type = "cpu"

    # Note [Two threads may fork at once]
    # Forks of one thread end in the reverse order of their beginning; those of two threads need not. Each binding
    # therefore knows the one under it: one that ends below another hands on what it would have gone back to, so that
    # when all have ended the default generator has its own stream again. (What was drawn meanwhile came from whichever
    # stream was bound: the default generator belongs to the process.)
    def __init__(self) -> None:
        self._open: list[list[Generator]] = []
        self._default = torch.default_generator
        self._bound: Generator = self._default
        self._parked = self._default.get_state()  # of use only while another stream is bound

    def default(self, index: int = 0) -> Generator:
        return self._bound

    def read(self, handle: Generator) -> Tensor:
        if handle is self._bound:
            return self._default.get_state()
        return self._parked if handle is self._default else handle.get_state()

    def write(self, handle: Generator, value: Tensor) -> None:
        if handle is self._bound:
            self._default.set_state(value)
        elif handle is self._default:
            self._parked = value
        else:
            handle.set_state(value)

    take = position = read
    put = write
    same = equal = unmoved = staticmethod(same_value)

    def leads_to(self, here: Tensor, end: Tensor) -> bool:
        if same_value(here, end):
            return True
        start, goal = decode_state(here), decode_state(end)
        if not isinstance(start, MT19937State) or not isinstance(goal, MT19937State):
            return False
        return count_words(start, goal, limit=_STEPS) is not None

    def distance(self, entry: Tensor, position: Tensor) -> str:
        start, end = decode_state(entry), decode_state(position)
        if not isinstance(start, MT19937State) or not isinstance(end, MT19937State):
            return "an unknown number of 32-bit words"
        words = count_words(start, end)
        return "another sequence (the stream was re-seeded or set)" if words is None else f"{words} 32-bit words"

    def new_stream(self, seed: int, index: int = 0) -> Generator:
        handle = Generator()
        handle.manual_seed(seed)
        return handle

    def bind(self, handle: Generator) -> list[Generator] | None:
        if handle is self._bound:
            return None
        binding = [self._bound]
        self._open.append(binding)
        self._swap(handle)
        return binding

    def _swap(self, handle: Generator) -> None:
        outgoing = self._bound
        if handle is outgoing:
            return
        live = self._default.get_state()
        if outgoing is self._default:
            self._parked = live
        else:
            outgoing.set_state(live)
        self._default.set_state(self._parked if handle is self._default else handle.get_state())
        self._bound = handle

    def bound_stream(self, index: int = 0) -> Generator | None:
        return None if self._bound is self._default else self._bound

    def depth(self, index: int = 0) -> int:
        return len(self._open)

    def unwind(self, index: int, depth: int, handle: Generator | None = None) -> None:
        bindings = self._open[depth:]
        del self._open[depth:]
        if handle is not None or bindings:
            self._swap(handle if handle is not None else bindings[0][0])

    def unbind(self, token: list[Generator] | None) -> None:
        back = None if token is None else _end_binding(self._open, token)
        if back is not None:
            self._swap(back)


class CUDABackend:
    """CUDA streams outside graph capture: philox, several handles may share one state."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._open: dict[int, list[list[Generator]]] = {}

    def default(self, index: int) -> Generator:
        handle: Generator = torch.cuda.default_generators[index].graphsafe_get_state()
        return handle

    def read(self, handle: Generator) -> Tensor:
        return handle.get_state()

    def write(self, handle: Generator, value: Tensor) -> None:
        handle.set_state(value)

    # Seed and offset can neither be read nor written one by one during capture; the bytes can.
    def take(self, handle: Generator) -> tuple[int, int]:
        try:
            return handle.initial_seed(), handle.get_offset()
        except RuntimeError:
            return philox_words(handle.get_state())

    def put(self, handle: Generator, taken: tuple[int, int]) -> None:
        seed, offset = taken
        try:
            if handle.initial_seed() != seed:
                handle.manual_seed(seed)
            handle.set_offset(offset)
        except RuntimeError:
            handle.set_state(PhiloxState(seed, offset).to_tensor())

    def position(self, handle: Generator) -> int:
        try:
            offset: int = handle.get_offset()
        except RuntimeError:
            return philox_words(handle.get_state())[1]
        return offset

    # Built-in functions: they run for every stream of every region.
    same = equal = staticmethod(operator.eq)
    leads_to = staticmethod(operator.le)

    def unmoved(self, entry: tuple[int, int], position: int) -> bool:
        return entry[1] == position

    def distance(self, entry: tuple[int, int], position: int) -> str:
        start = entry[1]
        moved = (
            "back (it was re-seeded or set)" if position < start else f"{position - start} random numbers per thread"
        )
        return f"{moved} (offset {start} to {position})"

    def new_stream(self, seed: int, index: int) -> Generator:
        # clone_state keeps this working where Transformer Engine's own trackers work: the result is graph-safe.
        handle: Generator = torch.cuda.default_generators[index].clone_state()
        handle.manual_seed(seed)
        return handle

    def bind(self, handle: Generator) -> tuple[int, list[Generator]]:
        index = device_index(handle)
        default = torch.cuda.default_generators[index]
        binding = [default.graphsafe_get_state(), handle]
        default.graphsafe_set_state(handle)  # first: where it raises there is nothing to end
        self._open.setdefault(index, []).append(binding)
        return index, binding

    def bound_stream(self, index: int) -> Generator | None:
        bindings = self._open.get(index)
        return bindings[-1][1] if bindings else None

    def depth(self, index: int) -> int:
        return len(self._open.get(index, ()))

    def unwind(self, index: int, depth: int, handle: Generator | None = None) -> None:
        bindings = self._open.get(index, [])[depth:]
        if bindings:
            del self._open[index][depth:]
        if handle is not None or bindings:
            torch.cuda.default_generators[index].graphsafe_set_state(handle if handle is not None else bindings[0][0])

    def unbind(self, token: tuple[int, list[Generator]]) -> None:
        index, binding = token
        back = _end_binding(self._open[index], binding)
        if back is not None:
            torch.cuda.default_generators[index].graphsafe_set_state(back)


def _end_binding(open_bindings: list[list[Generator]], binding: list[Generator]) -> Generator | None:
    """Forget a binding; return what the default generator must be bound to now, or None if it stays as it is.

    A binding starts with the stream under it; see Note [Two threads may fork at once].
    """
    if open_bindings and open_bindings[-1] is binding:
        open_bindings.pop()
        return binding[0]
    place = next((number for number, other in enumerate(open_bindings) if other is binding), None)
    if place is None:  # unwound
        return None
    above = open_bindings[place + 1 : place + 2]
    del open_bindings[place]
    if not above:  # another thread has ended its binding in this moment
        return binding[0]
    above[0][0] = binding[0]
    return None


_BACKENDS: dict[str, DeviceBackend] = {"cpu": CPUBackend(), "cuda": CUDABackend()}


def get_backend(device_type: str) -> DeviceBackend:
    """Return the backend of a device type.

    Parameters
    ----------
    device_type : str
        ``"cpu"`` or ``"cuda"``.

    Raises
    ------
    UnsupportedDeviceError
        If this package has no backend for the type.
    """
    try:
        return _BACKENDS[device_type]
    except KeyError:
        raise UnsupportedDeviceError(
            f"random-number streams of device type {device_type!r} cannot be tracked: there are backends for "
            f"{', '.join(sorted(_BACKENDS))}. Keep the stream on one of these devices"
        ) from None


# Keyed by device: asking a torch.device for its type string costs several times this look-up.
_by_device: dict[torch.device, DeviceBackend] = {}


def backend_of(handle: Generator) -> DeviceBackend:
    """Return the backend of the device that ``handle`` belongs to."""
    device = handle.device
    backend = _by_device.get(device)
    if backend is None:
        backend = _by_device[device] = get_backend(device.type)
    return backend
