# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of a test run: what tests counted goes to the file that NVTE_EXT_TEST_FIGURES names, a JSON object a line."""

from __future__ import annotations

import json
import os

import torch


def note(**figures: object) -> None:
    """Append figures of the test that is running; without the variable nothing happens."""
    path = os.environ.get("NVTE_EXT_TEST_FIGURES")
    if path:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        with open(path, "a") as file:
            file.write(json.dumps({"torch": torch.__version__, "test": test, **figures}) + "\n")
