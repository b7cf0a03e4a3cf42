# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The real Transformer Engine and Megatron-core, where they are installed: marks, and the modules."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    """Import a module of theirs; skip the test if it is not installed, fail it if it is installed and broken."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, while they are imported
        return importlib.import_module(name)


#: Their warnings are no errors of ours.
their_warnings = pytest.mark.filterwarnings("ignore")
