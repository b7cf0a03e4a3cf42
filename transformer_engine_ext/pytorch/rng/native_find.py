# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a native library lies that may be loaded: the installed one, or one built on demand; and the settings."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from transformer_engine_ext.errors import SettingError, UnsupportedCaptureError
from transformer_engine_ext.pytorch.rng import native_build, native_fit, native_jit
from transformer_engine_ext.pytorch.rng.native_build import Library, NativeBuildError, TorchBuild

__all__ = ["INSTALL", "PACKAGE_FOLDER", "Settings", "capturing", "find", "settings"]

#: Where an installation puts the libraries.
PACKAGE_FOLDER = native_build.PHILOX.source.parent

#: How to build what is missing, for the ends of messages.
INSTALL = (
    "  - install transformer-engine-ext from source against this torch, with a C++ compiler (no nvcc):\n"
    "    NVTE_EXT_WITH_CSRC=1 pip install --no-build-isolation --no-deps --force-reinstall <folder or sdist>\n"
)


class Settings(NamedTuple):
    """What the environment says about the libraries."""

    native: str  #: NVTE_EXT_NATIVE: "auto", "0" (never load one) or "1" (must be usable from the first region)
    jit: bool  #: NVTE_EXT_JIT


@functools.cache
def settings() -> Settings:
    """Return the settings; read once. See Note [Successes are kept, failures are not].

    Raises
    ------
    SettingError
        If one of the environment variables holds an unknown value.
    """
    try:
        return Settings(
            native=native_build.switch("NVTE_EXT_NATIVE", "auto", ["auto", "0", "1"]),
            jit=native_build.switch("NVTE_EXT_JIT", "0", ["0", "1"]) == "1",
        )
    except NativeBuildError as error:
        raise SettingError(str(error)) from None


def capturing() -> bool:
    """Tell whether the current CUDA stream is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def find(library: Library, build: TorchBuild, *, may_build: bool) -> tuple[Path, str | None]:
    """Return a library's path, and why it can't be used, or None.

    With ``NVTE_EXT_JIT=1`` and no installed library that fits, it is the one in the cache; `may_build` says whether to
    compile it if it is not there.

    Raises
    ------
    UnsupportedCaptureError
        If it would have to be compiled while a graph is being captured.
    SettingError
        If one of the environment variables holds an unknown value.
    """
    asked = settings()
    installed = PACKAGE_FOLDER / library.file
    if asked.native == "0":
        return installed, "NVTE_EXT_NATIVE=0 forbids it"
    try:
        reason = native_fit.misfit(library, PACKAGE_FOLDER, build)
        if reason is not None and asked.jit:
            return _find_in_cache(library, build, may_build)
        return installed, reason
    except OSError as error:  # a folder of somebody else's, say
        return installed, f"looking for it failed: {error}"


def _find_in_cache(library: Library, build: TorchBuild, may_build: bool) -> tuple[Path, str | None]:
    if not library.source.is_file():
        return library.source, f"NVTE_EXT_JIT=1, but {library.source}, its source, is not installed"
    folder = native_jit.cached_folder(library, build)
    path = folder / library.file
    if not path.is_file():
        obstacle = library.obstacle()
        if obstacle is not None:
            return path, f"NVTE_EXT_JIT=1, but {obstacle}"
        if not may_build:
            failure = native_jit.last_failure(folder)
            if failure is not None:
                return path, f"NVTE_EXT_JIT=1, but building it failed: {failure}"
            return path, f"NVTE_EXT_JIT=1, but the library was not built before it was needed (looked in {folder})"
        if capturing():
            raise UnsupportedCaptureError(
                "NVTE_EXT_JIT=1, but the library can't be compiled while a CUDA graph is being captured: call "
                "transformer_engine_ext.pytorch.rng.native.prepare() before the capture starts, or run one region "
                "without capture"
            )
        try:
            native_jit.ensure_built(library, build)
        except NativeBuildError as error:
            return path, f"NVTE_EXT_JIT=1, but building it failed: {error}"
    reason = native_jit.distrust(path) or native_fit.misfit(library, folder, build)
    return path, reason and f"{reason}; delete {folder} to have it built again"
