# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What the doctor lists before it probes: versions, what imports and why not, the native libraries, settings."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine_ext import __version__
from transformer_engine_ext.errors import SettingError
from transformer_engine_ext.integrations.probing import import_states
from transformer_engine_ext.pytorch.rng.native import native_status, prepare
from transformer_engine_ext.pytorch.rng.native_streams import prepare as prepare_streams
from transformer_engine_ext.pytorch.rng.native_streams import streams_status

__all__ = ["environment"]


def environment() -> dict[str, Any]:
    """Return ``versions``, ``packages``, ``native``, ``streams`` and ``settings``, all of them plain values."""
    versions = {
        "transformer-engine-ext": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    return {
        "versions": versions,
        "packages": import_states(),
        "native": _native(),
        "streams": _state(prepare_streams, streams_status),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NVTE_")},
    }


def _native() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"usable": None, "how": "not looked for: only CUDA graphs need it, and there is no CUDA device"}
    return _state(prepare, native_status)


def _state(prepare: Callable[[], object], status: Callable[[], tuple[bool, str]]) -> dict[str, Any]:
    try:
        if os.environ.get("NVTE_EXT_JIT") == "1":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # the report says it too
                prepare()
        usable, how = status()
    except (SettingError, ImportError) as error:
        usable, how = False, str(error)
    return {"usable": usable, "how": how}
