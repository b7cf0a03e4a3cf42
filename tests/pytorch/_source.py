# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The source files of the repository, for the tests that read them instead of running them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from _helpers import REPO

PACKAGE = REPO / "transformer_engine_ext"

#: Folders that hold source files, and source files outside of them.
ROOTS = ("transformer_engine_ext", "tests", "qa", "benchmarks", "examples", "docs", ".ci", "setup.py")

SUFFIXES = (".py", ".sh", ".cpp", ".h", ".cu")


def source_files(root: Path = REPO) -> Iterator[Path]:
    """Every source file below `root` that is the project's own; named folders only, so no virtual environment."""
    for name in ROOTS:
        path = root / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in found:
            if file.is_file() and (file.suffix in SUFFIXES or file.parent.name == ".ci"):
                yield file
