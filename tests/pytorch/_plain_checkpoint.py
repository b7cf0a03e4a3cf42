# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Pytest plug-in that replaces ``te_checkpoint`` by a plain call, to find tests that would not notice.

    PYTHONPATH=tests/pytorch python -m pytest -p _plain_checkpoint tests/pytorch/test_recompute_rng.py

Every test of a section that must prove a recompute (A, B and E) has to fail under it; the summary lists those that
still pass. It replaces every copy in the package before the first test module is imported, so it does not matter
which import a test uses. Scripts that a test starts in another process import this module when they find
``NVTE_EXT_TEST_PLAIN_CHECKPOINT`` set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

import transformer_engine_ext.pytorch.distributed
import transformer_engine_ext.pytorch.recompute
from _proof import plain_checkpoint


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    legacy = len(args) > 3 and isinstance(args[0], bool) and (args[1] is None or callable(args[1]))
    return plain_checkpoint(function, *(args[3:] if legacy else args), **kwargs)


def _replace_everywhere() -> None:
    original = transformer_engine_ext.pytorch.recompute.te_checkpoint
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "transformer_engine_ext":
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, _call)


_replace_everywhere()
os.environ["NVTE_EXT_TEST_PLAIN_CHECKPOINT"] = "1"
_passed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.append(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("te_checkpoint was a plain call")
    terminalreporter.write_line(f"{len(_passed)} tests passed all the same")
    for nodeid in _passed:
        terminalreporter.write_line(f"  {nodeid}")
