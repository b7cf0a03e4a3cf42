# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What the doctor lists before it probes: versions, what imports and why not, the native library, settings."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from transformer_engine_ext import __version__
from transformer_engine_ext.errors import SettingError
from transformer_engine_ext.integrations.probing import import_states
from transformer_engine_ext.pytorch.rng.native import native_status, prepare

__all__ = ["environment"]


def environment() -> dict[str, Any]:
    """Return ``versions``, ``packages``, ``native`` and ``settings``, all of them plain values."""
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
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NVTE_")},
    }


def _native() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"usable": None, "how": "not looked for: only CUDA graphs need it, and there is no CUDA device"}
    try:
        if os.environ.get("NVTE_EXT_JIT") == "1":
            prepare()
        usable, how = native_status()
    except (SettingError, ImportError) as error:
        usable, how = False, str(error)
    return {"usable": usable, "how": how}
