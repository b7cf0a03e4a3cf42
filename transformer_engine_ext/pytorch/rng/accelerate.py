# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Taking the native library for moves of streams into use, once, at the first region."""

from __future__ import annotations

from typing import Any

from transformer_engine_ext.pytorch.rng import moves, native_streams
from transformer_engine_ext.pytorch.rng.devices import get_backend

__all__ = ["accelerate"]


def accelerate() -> Any:
    """Take the native library into use if it is there.

    Returns
    -------
    module or None
        The library; None where there is none, and Python does the same.

    Raises
    ------
    NativeUnavailableError
        With ``NVTE_EXT_NATIVE=1``, if it cannot be loaded.
    """
    native = native_streams.load()
    if native is not None and native is not moves.used():
        cpu = get_backend("cpu")
        moves.use(native, (cpu, get_backend("cuda")), cpu.bound_stream(0) is not None)
    return native
