# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The backend of CPU streams; see ``devices.py``."""

from __future__ import annotations

import ctypes

import torch
from torch import Generator, Tensor

from transformer_engine_ext.pytorch.rng import moves
from transformer_engine_ext.pytorch.rng.state import MT19937State, count_words, decode_state

__all__ = ["CPUBackend", "end_binding", "same_value"]

# PyDLL: letting go of the interpreter's lock costs more than comparing 5 KB.
_compare = ctypes.PyDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _state_of(taken: Tensor | bytes) -> Tensor:
    """Return a taken value of a CPU stream as ``Generator.get_state`` gives it."""
    if isinstance(taken, bytes):
        generator = Generator()
        assert moves.unpack_cpu is not None  # who took it
        moves.unpack_cpu(generator, taken)
        return generator.get_state()
    return taken


def same_value(first: Tensor | bytes, second: Tensor | bytes) -> bool:
    """Tell whether two state tensors (contiguous, ``uint8``, CPU), or taken values of CPU streams, are equal."""
    if isinstance(first, bytes):
        if isinstance(second, bytes):
            return first == second
        first = _state_of(first)
    elif isinstance(second, bytes):
        second = _state_of(second)
    # torch.equal costs ten times the comparison itself on 5 KB (4.5 to 9 us).
    size = first.numel()
    return size == second.numel() and _compare(first.data_ptr(), second.data_ptr(), size) == 0


def end_binding(open_bindings: list[list[Generator]], binding: list[Generator]) -> Generator | None:
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
    # bound: whose value is in the default generator now.
    def __init__(self) -> None:
        self._open: list[list[Generator]] = []
        self._default = torch.default_generator
        self.bound: Generator = self._default
        # The default stream's value while another stream is bound; None: it is in this generator.
        self._parked: Tensor | None = None
        self._parking = Generator()

    def default(self, index: int = 0) -> Generator:
        return self.bound

    def read(self, handle: Generator) -> Tensor:
        if handle is self.bound:
            return self._default.get_state()
        if handle is self._default:
            return self._parking.get_state() if self._parked is None else self._parked
        return handle.get_state()

    # The native library takes CPU streams as bytes; with it a value is either, since it leaves bound streams to Python.
    def write(self, handle: Generator, value: Tensor | bytes) -> None:
        if isinstance(value, bytes):
            value = _state_of(value)
        if handle is self.bound:
            self._default.set_state(value)
        elif handle is self._default:
            self._parked = value
        else:
            handle.set_state(value)

    take = position = read
    put = write
    same = equal = unmoved = staticmethod(same_value)

    def leads_to(self, here: Tensor | bytes, end: Tensor | bytes) -> bool:
        if self.same(here, end):
            return True
        start, goal = decode_state(_state_of(here)), decode_state(_state_of(end))
        if not isinstance(start, MT19937State) or not isinstance(goal, MT19937State):
            return False
        return count_words(start, goal, limit=_STEPS) is not None

    def distance(self, entry: Tensor | bytes, position: Tensor | bytes) -> str:
        start, end = decode_state(_state_of(entry)), decode_state(_state_of(position))
        if not isinstance(start, MT19937State) or not isinstance(end, MT19937State):
            return "an unknown number of 32-bit words"
        words = count_words(start, end)
        return "another sequence (the stream was re-seeded or set)" if words is None else f"{words} 32-bit words"

    def new_stream(self, seed: int, index: int = 0) -> Generator:
        handle = Generator()
        handle.manual_seed(seed)
        return handle

    def bind(self, handle: Generator) -> list[Generator] | None:
        if handle is self.bound:
            return None
        binding = [self.bound]
        self._open.append(binding)
        self._swap(handle)
        return binding

    def _swap(self, handle: Generator) -> None:
        outgoing = self.bound
        if handle is outgoing:
            return
        default = self._default
        if moves.swap_cpu is not None:
            if outgoing is default:
                self._parked = None
            elif handle is default and self._parked is not None:  # by write(), or before the library was in use
                self._parking.set_state(self._parked)
            moves.swap_cpu(
                default,
                self._parking if outgoing is default else outgoing,
                self._parking if handle is default else handle,
            )
        else:
            live = default.get_state()
            if outgoing is default:
                self._parked = live
            else:
                outgoing.set_state(live)
            if handle is not default:
                incoming = handle.get_state()
            else:
                incoming = self._parking.get_state() if self._parked is None else self._parked
            default.set_state(incoming)
        self.bound = handle
        if moves.bind_cpu is not None:
            moves.bind_cpu(handle is not default)

    def bound_stream(self, index: int = 0) -> Generator | None:
        return None if self.bound is self._default else self.bound

    def depth(self, index: int = 0) -> int:
        return len(self._open)

    def unwind(self, index: int, depth: int, handle: Generator | None = None) -> None:
        bindings = self._open[depth:]
        del self._open[depth:]
        if handle is not None or bindings:
            self._swap(handle if handle is not None else bindings[0][0])

    def unbind(self, token: list[Generator] | None) -> None:
        back = None if token is None else end_binding(self._open, token)
        if back is not None:
            self._swap(back)
