# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What a generator's state *is*: a value, readable and comparable without the generator it came from."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from transformer_engine_ext.errors import StateFormatError

__all__ = [
    "MT19937_STATE_BYTES",
    "PHILOX_STATE_BYTES",
    "MT19937State",
    "PhiloxState",
    "count_words",
    "decode_state",
    "philox_words",
    "set_offset_word",
]

# Two 64-bit words, seed then offset. Source: aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, CUDAGeneratorImpl::get_state.
PHILOX_STATE_BYTES = 16
# sizeof(CPUGeneratorImplState): the legacy TH layout followed by one cached float normal.
# Source: aten/src/ATen/CPUGeneratorImpl.cpp.
MT19937_STATE_BYTES = 5056

# The legacy layout starts with: uint64 seed, int32 left, int32 seeded, uint64 next, uint64 state[624].
# Source: aten/src/ATen/CPUGeneratorImpl.cpp, CPUGeneratorImplStateLegacy.
_MT_HEADER = struct.Struct("<QiiQ")
_MT_WORDS = 624
_MT_ARRAY = slice(_MT_HEADER.size, _MT_HEADER.size + 8 * _MT_WORDS)

_UINT64 = 1 << 64


@dataclass(frozen=True)
class PhiloxState:
    """Value of a CUDA (philox) stream.

    Attributes
    ----------
    seed : int
        Key of the counter-based generator, ``0 <= seed < 2**64``.
    offset : int
        Random numbers per thread consumed so far; a multiple of 4 (one philox call yields four 32-bit words).
        Source: aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, ``set_philox_offset_per_thread``.

    Raises
    ------
    StateFormatError
        If ``seed`` or ``offset`` does not fit 64 bits, or ``offset`` is not a multiple of 4.
    """

    seed: int
    offset: int

    def __post_init__(self) -> None:
        for field in ("seed", "offset"):
            value = getattr(self, field)
            if not 0 <= value < _UINT64:
                raise StateFormatError(f"philox {field} {value} does not fit an unsigned 64-bit word")
        if self.offset % 4:
            raise StateFormatError(
                f"philox offset {self.offset} is not a multiple of 4, so no CUDA generator can have stood there; "
                "the bytes are probably another kind of state, or damaged"
            )

    def to_tensor(self) -> Tensor:
        """Return the state as a ``uint8`` CPU tensor of 16 bytes, as ``torch.Generator.get_state`` lays it out."""
        return torch.frombuffer(bytearray(struct.pack("<QQ", self.seed, self.offset)), dtype=torch.uint8)

    def describe(self) -> str:
        """Return a short text for messages."""
        return f"philox(seed={self.seed}, offset={self.offset})"


@dataclass(frozen=True)
class MT19937State:
    """Value of a CPU (Mersenne twister) stream: the 5056 bytes of ``torch.Generator.get_state``.

    Raises
    ------
    StateFormatError
        If ``data`` is not 5056 bytes long.
    """

    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != MT19937_STATE_BYTES:
            raise StateFormatError(f"an mt19937 state has {MT19937_STATE_BYTES} bytes, got {len(self.data)}")

    @property
    def seed(self) -> int:
        """Seed that the stream was last seeded with (the twister itself uses its low 32 bits only)."""
        return int(_MT_HEADER.unpack_from(self.data)[0])

    @property
    def index(self) -> int:
        """Position inside the current block of 624 words."""
        # A freshly seeded twister has next == 0 and left == 1: the block is spent and the next draw makes a new one.
        _, left, _, _ = _MT_HEADER.unpack_from(self.data)
        return _MT_WORDS - int(left) + 1

    @property
    def block(self) -> bytes:
        """The twister's 624 words, which change once per 624 draws."""
        return self.data[_MT_ARRAY]

    def to_tensor(self) -> Tensor:
        """Return the state as a ``uint8`` CPU tensor of 5056 bytes."""
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8)

    def digest(self) -> str:
        """Return 16 hexadecimal digits that identify the state."""
        return hashlib.sha256(self.data).hexdigest()[:16]

    def describe(self) -> str:
        """Return a short text for messages."""
        return f"mt19937(seed={self.seed}, digest={self.digest()})"


# Read and written as bytes, by no torch operator: a dispatch mode of the user's (a selective policy, say) may be
# watching operators while this package looks at a state, and must not see any of ours.
def philox_words(value: Tensor) -> tuple[int, int]:
    """Return seed and offset of a 16-byte philox state (``uint8``, CPU, contiguous)."""
    seed, offset = struct.unpack("<QQ", ctypes.string_at(value.data_ptr(), 16))
    return seed, offset


def set_offset_word(value: Tensor, offset: int) -> None:
    """Change the offset word of a 16-byte philox state in place."""
    ctypes.memmove(value.data_ptr() + 8, offset.to_bytes(8, "little"), 8)


def decode_state(state: Tensor) -> PhiloxState | MT19937State:
    """Decode the bytes that ``torch.Generator.get_state`` returns.

    Parameters
    ----------
    state : torch.Tensor
        One-dimensional, ``uint8``, any device; 16 bytes (CUDA) or 5056 bytes (CPU).

    Returns
    -------
    PhiloxState or MT19937State

    Raises
    ------
    StateFormatError
        If the tensor has another dtype, rank or length.
    """
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise StateFormatError(
            f"an RNG state is a one-dimensional uint8 tensor, got {state.dtype} of shape {tuple(state.shape)}; "
            "load states without casting them (for example without .float() or a generic .to(dtype))"
        )
    data = bytes(state.cpu().tolist())
    if len(data) == PHILOX_STATE_BYTES:
        return PhiloxState(*struct.unpack("<QQ", data))
    if len(data) == MT19937_STATE_BYTES:
        return MT19937State(data)
    raise StateFormatError(
        f"an RNG state has {PHILOX_STATE_BYTES} bytes (CUDA) or {MT19937_STATE_BYTES} bytes (CPU), got {len(data)}"
    )


def count_words(start: MT19937State, end: MT19937State, limit: int = 1 << 22) -> int | None:
    """Count the 32-bit words drawn between two states of one CPU stream, for error messages.

    Parameters
    ----------
    start, end : MT19937State
        Earlier and later state.
    limit : int
        Give up after about this many words.

    Returns
    -------
    int or None
        Words drawn from ``start`` to ``end``; None if ``end`` is not reached within ``limit`` words.
    """
    # The twister changes its 624 words only once per block, so stepping whole blocks finds the block of `end`.
    # Without the modes that may be active here (the user's, selective checkpointing's, the debug mode's): these draws
    # are no operators of the function that runs.
    with _disable_current_modes():
        walker = torch.Generator()
        walker.set_state(start.to_tensor())
        here, words = start, 0
        while words <= limit:
            if here.block == end.block and words + end.index >= here.index:
                return words + end.index - here.index
            # random_ over a range below 2**32 takes one 32-bit word per element on the CPU, one element at a time.
            torch.empty(_MT_WORDS, dtype=torch.int64).random_(0, 2, generator=walker)
            here, words = MT19937State(bytes(walker.get_state().tolist())), words + _MT_WORDS
    return None
