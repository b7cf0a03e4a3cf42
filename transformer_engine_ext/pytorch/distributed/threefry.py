# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Threefry-2x32, the published mixing function behind the ``"fold_in"`` derivation, over arrays."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

__all__ = ["fold", "key_of", "tag", "threefry2x32"]

# Source of all constants: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as
# 1, 2, 3", SC'11, and the authors' Random123 library: rotation distances R_32x2, 20 rounds, and Skein's parity word.
# JAX's random.fold_in rests on the same function.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Encrypt counters under keys with 20 rounds of Threefry-2x32.

    Parameters
    ----------
    key, counter : pair of numpy.ndarray
        ``uint32`` words, of shapes that broadcast; at least one-dimensional.

    Returns
    -------
    pair of numpy.ndarray
        ``uint32`` words. For one key it is a bijection of the counters: two of them never give one result.
    """
    words = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    first, second = counter[0] + words[0], counter[1] + words[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            first = first + second
            second = ((second << np.uint32(distance)) | (second >> np.uint32(32 - distance))) ^ first
        first = first + words[(group + 1) % 3]
        second = second + words[(group + 2) % 3] + np.uint32(group + 1)
    return first, second


def key_of(number: int) -> tuple[Any, Any]:
    """Return a 64-bit number as a key: low word, high word."""
    return np.array([number & 0xFFFFFFFF], np.uint32), np.array([number >> 32], np.uint32)


def tag(text: str, words: int = 1) -> int:
    """Return 32 bits (or `words` times as many) that stand for a name: its BLAKE2b digest, little-endian."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4 * words).digest(), "little")


def fold(key: tuple[Any, Any], name: str, value: Any) -> tuple[Any, Any]:
    """Return new keys: `key` with the statement "`name` is `value`" mixed in.

    Parameters
    ----------
    key : pair of numpy.ndarray
        ``uint32``.
    name : str
        Such as the name of an axis.
    value : numpy.ndarray
        ``uint32``; broadcasts with the key.
    """
    return threefry2x32(key, (np.array([tag(name)], np.uint32), value))
