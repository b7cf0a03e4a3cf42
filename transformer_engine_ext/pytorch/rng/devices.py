# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Device backends: how a stream's value is read, written and made the default generator's, per device type.

A *handle* is a ``torch.Generator``. A *value* is what ``Generator.get_state`` returns: a ``uint8`` CPU tensor that
nothing ever changes in place, so one value may be kept by any number of snapshots.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from transformer_engine_ext.errors import UnsupportedDeviceError
from transformer_engine_ext.pytorch.rng.cpu_backend import CPUBackend, end_binding, same_value
from transformer_engine_ext.pytorch.rng.state import PhiloxState, philox_words

__all__ = [
    "BACKENDS",
    "CPU",
    "CPUBackend",
    "CUDABackend",
    "DeviceBackend",
    "backend_of",
    "device_index",
    "get_backend",
    "same_value",
]


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


def device_index(handle: Generator) -> int:
    """Return the index of a stream's device; 0 for the CPU."""
    device = handle.device
    if device.index is not None:
        return device.index
    # torch.Generator("cuda") names no index: it belongs to the current device.
    return 0 if device.type == "cpu" else torch.cuda.current_device()


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
        defaults = torch.cuda.default_generators
        index = 0 if len(defaults) == 1 else device_index(handle)
        default = defaults[index]
        binding = [default.graphsafe_get_state(), handle]
        default.graphsafe_set_state(handle)  # first: where it raises there is nothing to end
        bindings = self._open.get(index)
        if bindings is None:
            bindings = self._open.setdefault(index, [])
        bindings.append(binding)
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
        bindings = self._open[index]
        if bindings and bindings[-1] is binding:  # end_binding, written out
            bindings.pop()
            torch.cuda.default_generators[index].graphsafe_set_state(binding[0])
            return
        back = end_binding(bindings, binding)
        if back is not None:
            torch.cuda.default_generators[index].graphsafe_set_state(back)


CPU = CPUBackend()
BACKENDS: dict[str, DeviceBackend] = {"cpu": CPU, "cuda": CUDABackend()}


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
        return BACKENDS[device_type]
    except KeyError:
        raise UnsupportedDeviceError(
            f"random-number streams of device type {device_type!r} cannot be tracked: there are backends for "
            f"{', '.join(sorted(BACKENDS))}. Keep the stream on one of these devices"
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
