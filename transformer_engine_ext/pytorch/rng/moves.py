# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Moves of several streams at once: what a region does at its entry, at its end, and around its recompute.

The functions here say what is done. Where the native library ``csrc/streams.cpp`` is there, its functions of the same
names take their places (``use``): they do the same in one call and without the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Generator

if TYPE_CHECKING:
    from transformer_engine_ext.pytorch.rng.devices import DeviceBackend

__all__ = [
    "Stream",
    "bind_cpu",
    "mark",
    "positions",
    "retake",
    "rewind",
    "stand_where",
    "swap_cpu",
    "take",
    "touch",
    "unpack_cpu",
    "use",
    "used",
]

#: What to call a stream in messages, its backend, its handle, and its value at one moment, as the backend takes it.
Stream = tuple[str, "DeviceBackend", Generator, Any]


def _take(backend: DeviceBackend, handle: Generator) -> Any:
    """Return one stream's value."""
    return backend.take(handle)


def _positions(streams: list[Stream]) -> list[Any]:
    """Return where each stream stands now."""
    return [backend.position(handle) for _, backend, handle, _ in streams]


def _retake(streams: list[Stream]) -> list[Stream]:
    """Return the streams with the values that they have now."""
    return [(name, backend, handle, backend.take(handle)) for name, backend, handle, _ in streams]


# Note [The earliest value wins]
# Two handles can share one CUDA state (a second name for the default stream, say). Their values were noted at different
# moments, and only the earliest is the one at entry, so it must be written last.
def _rewind(streams: list[Stream]) -> None:
    """Write the streams' values, in place, the first one last."""
    for _, backend, handle, value in reversed(streams):
        backend.put(handle, value)


def _stand_where(streams: list[Stream], ends: list[Any], reached: list[Any]) -> bool:
    """Tell whether all streams reached the positions where they ended before."""
    for (_, backend, _, _), end, position in zip(streams, ends, reached, strict=True):
        if not backend.same(end, position):
            return False
    return True


take: Callable[[DeviceBackend, Generator], Any]
positions: Callable[[list[Stream]], list[Any]]
retake: Callable[[list[Stream]], list[Stream]]
rewind: Callable[[list[Stream]], None]
stand_where: Callable[[list[Stream], list[Any], list[Any]], bool]

# Of the native library alone: None without it.
#: Note a stream in the recordings that do not know it, as ``recording.touch`` does; False: not done.
touch: Callable[[list[Any], str, Generator], bool] | None
#: Return autograd's sequence number, and where a CUDA stream stands (0 for None): what is noted at every saved tensor.
mark: Callable[[Generator | None], tuple[int, int]] | None
#: Exchange the value of the CPU's default generator, given first: its own goes into the second, the third's comes in.
swap_cpu: Callable[[Generator, Generator, Generator], None] | None
#: Write what the library's ``take`` returned for a CPU stream into a generator, whatever is bound. Stays when the
#: library goes out of use: a region may still hold such values.
unpack_cpu: Callable[[Generator, bytes], None] | None
#: Tell the library whether a CPU stream is bound to the default generator.
bind_cpu: Callable[[bool], None] | None

_HERE = {"take": _take, "positions": _positions, "retake": _retake, "rewind": _rewind, "stand_where": _stand_where}
_NAMES = (*_HERE, "touch", "mark", "swap_cpu", "bind_cpu")
_native: Any = None
unpack_cpu = None


def use(native: Any, backends: Sequence[DeviceBackend] = (), cpu_bound: bool = False) -> None:
    """Use a native library's functions from now on.

    Parameters
    ----------
    native : module or None
        ``csrc/streams.cpp``, loaded; None for the functions of this module.
    backends : sequence of DeviceBackend
        Those of the CPU and of CUDA, whose streams it may move by itself.
    cpu_bound : bool
        Whether a CPU stream is bound to the default generator now.
    """
    global _native, unpack_cpu
    if native is not None:
        unpack_cpu = native.unpack_cpu
        native.set_backends(*backends)
        native.bind_cpu(cpu_bound)
    _native = native
    for name in _NAMES:
        globals()[name] = _HERE.get(name) if native is None else getattr(native, name)


def used() -> Any:
    """Return the native library in use, or None."""
    return _native


use(None)
