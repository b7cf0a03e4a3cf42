# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a native library that lies somewhere fits the torch and the Python that run."""

from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

from transformer_engine_ext.pytorch.rng.native_build import (
    INFO_FORMAT,
    Library,
    NativeBuildError,
    TorchBuild,
    python_misfit,
    source_hash,
)

__all__ = ["misfit"]


def misfit(library: Library, folder: Path, torch: TorchBuild) -> str | None:
    """Return why the library in `folder` must not be loaded into this process, or None; loads nothing.

    A library that was built for another torch may crash the process when it is loaded, so nobody loads one before this
    function returned None.
    """
    path, path_info = (folder / name for name in library.files)
    if not path.is_file():
        return f"there is no {library.file} in {folder}"
    try:
        info: Any = json.loads(path_info.read_text())
        cuda = None if info["cuda"] is None else str(info["cuda"])
        built = TorchBuild(str(info["torch"]), cuda, info["cxx11_abi"], folder, False)
        built_minor, built_format = built.minor, info["format"]
        machine, digest = info["machine"], info["source_sha256"]
        python = info["python"] if library.extension else None
    except FileNotFoundError:
        return f"there is no {library.info} beside {path}, so nobody knows which torch it was built for"
    except (OSError, ValueError, KeyError, TypeError, NativeBuildError) as error:
        return f"{path_info} is damaged ({type(error).__name__}: {error})"
    if built_format != INFO_FORMAT:
        return f"{path_info} has format {built_format!r}, expected {INFO_FORMAT}"
    if built_minor != torch.minor or (_unreleased(built, torch) and built.version != torch.version):
        return f"{path} was built for torch {built.version}, this is torch {torch.version}"
    if library.uses_cuda and _major(built.cuda) != _major(torch.cuda):
        return f"{path} was built for CUDA {built.cuda}, this torch has {torch.cuda or 'no CUDA'}"
    if built.cxx11_abi != torch.cxx11_abi:
        return f"{path} was built with the other C++ ABI of libstdc++ than this torch"
    if machine != platform.machine():
        return f"{path} was built for {machine}, this machine is {platform.machine()}"
    if library.source.is_file() and digest != source_hash(library):
        return f"{path} was built from another version of {library.source.name}"
    return _python_reason(path, python) if library.extension else None


def _python_reason(path: Path, built: object) -> str | None:
    reason = python_misfit()
    if reason is not None:
        return f"{path} cannot be loaded: {reason}"
    # Every version of one implementation does: that is what the limited API is for.
    if built != sys.implementation.name:
        return f"{path} was built for {built}, this is {sys.implementation.name}"
    return None


def _unreleased(*builds: TorchBuild) -> bool:
    """Tell whether one of the versions is a nightly or an alpha: two of one minor version may differ inside."""
    return any(re.match(r"\d+\.\d+\.\d+(\+|$)", build.version) is None for build in builds)


def _major(version: str | None) -> str | None:
    return None if version is None else version.split(".")[0]
