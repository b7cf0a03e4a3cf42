# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin (`-p patch_plugin`): patches Transformer Engine before tests are imported, in xdist workers too."""

from __future__ import annotations

from typing import Any

import transformer_engine_ext


def pytest_configure(config: Any) -> None:
    """Patch where tests run: not in the process that only hands them out to workers."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    report = transformer_engine_ext.patch()
    if not report.replaced:
        raise RuntimeError(f"nothing was patched:\n{report}")
