# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The global generators of Python's ``random`` and of numpy, read and written like a stream's state."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_engine_ext.errors import StateFormatError, StreamStateTypeError

__all__ = [
    "HOST_STATE_BYTES",
    "HOST_STREAMS",
    "check_host_state",
    "fresh_host_state",
    "pack_host",
    "read_host",
    "seed_host",
    "write_host",
]

#: Stream name to kind of state (its ``engine`` in saved files).
HOST_STREAMS = {"python-random": "python", "numpy-random": "numpy"}

# Both are Mersenne twisters of 624 32-bit words. Python keeps the position as a 625th, and a second normal if it has
# drawn one; numpy's legacy generator likewise. Sources: Modules/_randommodule.c and Lib/random.py, getstate();
# numpy.random.get_state(). Packed with a fixed size, so that every rank's row has the same.
_PACKED = {"python": struct.Struct("<625I I d"), "numpy": struct.Struct("<624I I I d")}
HOST_STATE_BYTES = _PACKED["python"].size

_PYTHON_VERSION = 3


def read_host(kind: str) -> Tensor:
    """Return the state of ``"python"`` or ``"numpy"``: ``uint8 [2512]`` on the CPU."""
    return torch.frombuffer(
        bytearray(_pack_python(random.getstate()) if kind == "python" else _pack_numpy()), dtype=torch.uint8
    )


def pack_host(kind: str, state: tuple[Any, ...]) -> bytes:
    """Return what ``random.getstate()`` or ``numpy.random.get_state()`` gave as the bytes of a state."""
    if kind == "python":
        python = random.Random()
        python.setstate(state)
        return _pack_python(python.getstate())
    numpy = np.random.RandomState()
    numpy.set_state(state)
    return _pack_numpy(numpy)


def write_host(kind: str, state: Tensor) -> None:
    """Set the generator to a state that :func:`check_host_state` accepted."""
    fields = _PACKED[kind].unpack(state.numpy().tobytes())
    if kind == "python":
        random.setstate((_PYTHON_VERSION, fields[:625], fields[626] if fields[625] else None))
    else:
        np.random.set_state(("MT19937", np.array(fields[:624], np.uint32), *fields[624:]))


def seed_host(kind: str, seed: int) -> None:
    """Start the generator from a seed, as ``random.seed`` and ``numpy.random.seed`` do (numpy takes 32 bits)."""
    if kind == "python":
        random.seed(seed)
    else:
        np.random.seed(seed % (1 << 32))


def fresh_host_state(kind: str, seed: int) -> bytes:
    """Return the state that follows from a seed, without touching the generator."""
    if kind == "python":
        return _pack_python(random.Random(seed).getstate())
    return _pack_numpy(np.random.RandomState(seed % (1 << 32)))


def check_host_state(name: str, kind: str, state: Tensor) -> None:
    """Raise if :func:`write_host` could not write `state`.

    Raises
    ------
    StateFormatError
        If it was cut or cast, or is no state of this kind.
    """
    if state.dtype != torch.uint8 or state.numel() != HOST_STATE_BYTES:
        raise StateFormatError(
            f"the state of stream {name!r} has {state.numel()} elements of {state.dtype}, expected {HOST_STATE_BYTES} "
            "of torch.uint8. Nothing was changed"
        )
    fields = _PACKED[kind].unpack(state.detach().cpu().contiguous().numpy().tobytes())
    position, second = fields[-3:-1] if kind == "numpy" else (fields[624], fields[625])
    if position > 624 or second > 1:
        raise StateFormatError(
            f"the state of stream {name!r} is none of {kind}'s generator: its position is {position} of 624. Nothing "
            "was changed"
        )


def _pack_python(state: tuple[Any, ...]) -> bytes:
    version, words, second = state
    if version != _PYTHON_VERSION:
        raise StreamStateTypeError(
            f"Python's random has a state of version {version}, this release knows version {_PYTHON_VERSION}; leave "
            "'python' out of include"
        )
    return _PACKED["python"].pack(*words, second is not None, 0.0 if second is None else second)


def _pack_numpy(source: Any = np.random) -> bytes:
    state = source.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise StreamStateTypeError(
            f"numpy's global generator is a {state['bit_generator']}, whose state this release cannot keep; leave "
            "'numpy' out of include, or keep numpy's default MT19937"
        )
    twister = state["state"]
    return _PACKED["numpy"].pack(*twister["key"].tolist(), twister["pos"], state["has_gauss"], state["gauss"])
