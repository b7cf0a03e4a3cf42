# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The extension module that moves streams faster, where there is one; without it Python does the same.

It is an extension module of CPython's limited API, built like the other library (``native.py``): when the package is
installed, or on demand (``NVTE_EXT_JIT=1``). Nothing here runs at import.
"""

from __future__ import annotations

import threading
import warnings
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from transformer_engine_ext.errors import NativeUnavailableError, UnsupportedCaptureError
from transformer_engine_ext.pytorch.rng import native_find
from transformer_engine_ext.pytorch.rng.native_build import STREAMS, TorchBuild

__all__ = ["MODULE", "load", "prepare", "streams_status"]

#: The module's name; ``PyInit_`` and this is its function in the library.
MODULE = "transformer_engine_ext_streams"


class _Loaded(NamedTuple):
    module: ModuleType
    origin: str


# Note [The fast module is looked for once]
# Every region asks, so what the first look found, or that it found nothing, stays for the life of the process. A later
# look happens only on request: prepare() and streams_status() take notice of a library that was built meanwhile. What
# could not be built because a graph was being captured is no answer; the next region asks again.
_loaded: _Loaded | None = None
_settled = False
_lock = threading.RLock()


def load() -> ModuleType | None:
    """Return the module, or None where Python has to do; costs nothing from the second call on.

    With ``NVTE_EXT_JIT=1`` and no library that fits, the first call compiles it, or waits for the process of this job
    that does; never while a graph is being captured. With ``NVTE_EXT_JIT=1`` a failure is a warning, once.

    Raises
    ------
    NativeUnavailableError
        With ``NVTE_EXT_NATIVE=1``, if there is none; the text names what to install or to set.
    UnsupportedCaptureError
        With ``NVTE_EXT_NATIVE=1``, if it would have to be compiled while a graph is being captured.
    SettingError
        If one of the environment variables holds an unknown value.
    """
    # See Note [The fast module is looked for once]
    if not _settled:
        prepare()
    return None if _loaded is None else _loaded.module


def prepare() -> None:
    """Look for the module again unless it is loaded, and build it as :func:`load` does; raises what that raises."""
    global _settled
    with _lock:
        try:
            _find(may_build=True)
        except (NativeUnavailableError, UnsupportedCaptureError) as error:
            asked = native_find.settings()
            if asked.native == "1":
                raise
            if isinstance(error, UnsupportedCaptureError):
                return
            _settled = True
            if asked.jit and asked.native != "0":
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        _settled = True


def streams_status() -> tuple[bool, str]:
    """Tell whether streams are moved by the module, and by which, or why not; loads the library, but builds nothing.

    Raises
    ------
    SettingError
        If one of the environment variables holds an unknown value.
    """
    try:
        return True, _find(may_build=False).origin
    except NativeUnavailableError as error:
        return False, str(error)


def _find(*, may_build: bool) -> _Loaded:
    global _loaded
    with _lock:
        if _loaded is None:
            build = TorchBuild.running()
            path, reason = native_find.find(STREAMS, build, may_build=may_build)
            if reason is not None:
                raise NativeUnavailableError(_explain(reason))
            try:
                _loaded = _Loaded(_import(path), f"{path}, built for {build}")
            except Exception as error:  # whatever it is, Python does the same
                raise NativeUnavailableError(_explain(f"{path} cannot be loaded: {error}")) from error
        return _loaded


def _import(path: Path) -> ModuleType:
    loader = ExtensionFileLoader(MODULE, str(path))
    spec = spec_from_file_location(MODULE, path, loader=loader)
    if spec is None:
        raise ImportError(f"no module can be made of {path}")
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def _explain(reason: str) -> str:
    return (
        f"{STREAMS.file}, which {STREAMS.purpose}, can't be used here, so Python does the same, slower: {reason}\n"
        "To have it, do one of these:\n"
        f"{native_find.INSTALL}"
        "  - set NVTE_EXT_JIT=1, which compiles it on demand.\n"
        "NVTE_EXT_NATIVE=0 does without; only NVTE_EXT_NATIVE=1 makes its absence an error."
    )
