# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""As much of a torch with CUDA as setup.py asks about, for building a native wheel where there is none.

It also has Python's headers be found where there are none, since nothing is compiled with them.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

_paths = {**sysconfig.get_paths(), "include": str(Path(__file__).resolve().parents[1])}
sysconfig.get_paths = lambda *_, **__: _paths

__version__ = "2.11.0+cu130"


class version:  # noqa: N801 (its name in torch)
    """Build information."""

    cuda = "13.0"


class Generator:
    """Of a torch before 2.14: without ``philox_state``."""


def compiled_with_cxx11_abi() -> bool:
    """Return what every build of torch 2.7 and later returns."""
    return True
