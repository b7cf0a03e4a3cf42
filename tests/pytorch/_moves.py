# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Which functions move streams while tests run: those of Python, or those of the native library; see conftest.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

#: What moves streams in all tests but those that choose for themselves: ``python``, ``native``, or, where it is unset,
#: what the package decides.
SETTING = "NVTE_EXT_TEST_MOVES"

# The package is imported where it is needed: with this file every test would have it imported before it starts.


def setting() -> str:
    """Return what the environment asks for; empty where it leaves it to the package."""
    asked = os.environ.get(SETTING, "").strip()
    if asked not in ("", "native", "python"):
        raise pytest.UsageError(f"{SETTING}={asked!r} is unknown: expected python, native, or nothing")
    return asked


def library(folder: Path) -> ModuleType:
    """Return the native library: the one that the package would use, or one that is built once in a cache folder.

    Skips the test where there is none and it cannot be built.

    Raises
    ------
    NativeBuildError
        If the compiler fails.
    """
    from transformer_engine_ext.pytorch.rng import native_jit, native_streams
    from transformer_engine_ext.pytorch.rng.native_build import STREAMS, TorchBuild

    usable, _ = native_streams.streams_status()
    found = native_streams.load() if usable else None
    if found is not None:
        return found
    reason = STREAMS.obstacle()
    if reason is not None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("NVTE_EXT_CACHE_DIR"):
            patch.setenv("NVTE_EXT_CACHE_DIR", str(folder))
        # See Note [One builds, the others wait]
        built = native_jit.ensure_built(STREAMS, TorchBuild.running())
    return native_streams._import(built / STREAMS.file)


def use(native: Any) -> None:
    """Have the functions of a native library move streams, and read the settings, from now on; None: Python's."""
    from transformer_engine_ext.pytorch.recompute import ambient
    from transformer_engine_ext.pytorch.rng import moves
    from transformer_engine_ext.pytorch.rng.devices import get_backend

    if not ambient._settings:  # else the first region would decide once more
        ambient._look_up()
    cpu = get_backend("cpu")
    moves.use(native, (cpu, get_backend("cuda")), cpu.bound_stream(0) is not None)
    ambient.use(native)


def used() -> Any:
    """Return the native library in use, or None; what the package decides is decided after this."""
    from transformer_engine_ext.pytorch.recompute import ambient
    from transformer_engine_ext.pytorch.rng import moves

    if not ambient._settings:
        ambient._look_up()
    return moves.used()


@contextmanager
def using(native: Any) -> Iterator[None]:
    """Use a native library, or None, and afterwards what was in use before."""
    before = used()
    use(native)
    try:
        yield
    finally:
        use(before)
