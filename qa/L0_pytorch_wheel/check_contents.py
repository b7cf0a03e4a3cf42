# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Check what is in the sdist and the wheel of a folder: ``python3 check_contents.py DIST``."""

from __future__ import annotations

import fnmatch
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

#: Patterns of which each must match a file of the wheel.
WHEEL = [
    "transformer_engine_ext/__init__.py",
    "transformer_engine_ext/py.typed",
    "transformer_engine_ext/cli/data/*.txt",
    "transformer_engine_ext/csrc/philox_state.cpp",
    "transformer_engine_ext/pytorch/rng/*.py",
    "transformer_engine_ext/pytorch/recompute/*.py",
    "transformer_engine_ext/pytorch/distributed/*.py",
    "*.dist-info/licenses/LICENSE",
    "*.dist-info/entry_points.txt",
]

#: The same for the sdist, below its top folder.
SDIST = [
    "pyproject.toml",
    "setup.py",
    "transformer_engine_ext/csrc/philox_state.cpp",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "qa/L0_pytorch_unittest/test.sh",
    "tests/pytorch/conftest.py",
    "tests/pytorch/_helpers.py",
    "tests/pytorch/distributed/run_*.py",
]

#: Core metadata that must be there; the licence as an expression, not as a classifier (PEP 639).
METADATA = {"Name": "transformer-engine-ext", "License-Expression": "Apache-2.0", "Requires-Python": ">=3.10"}


def main() -> int:
    """Return the exit code."""
    dist = Path(sys.argv[1])
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    problems = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = fnmatch.filter(names, "*.dist-info/METADATA")
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    problems += [f"{wheel.name} lacks {pattern}" for pattern in WHEEL if not fnmatch.filter(names, pattern)]
    packages = ("transformer_engine_ext/", "transformer_engine_ext-")
    problems += [f"{wheel.name} also installs {name}" for name in names if not name.startswith(packages)]
    problems += [
        f"{wheel.name}: {key} is {metadata[key]!r}, expected {value!r}"
        for key, value in METADATA.items()
        if metadata[key] != value
    ]
    if not wheel.name.endswith("-py3-none-any.whl"):
        problems.append(f"{wheel.name} is not a pure Python wheel")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    problems += [f"{sdist.name} lacks {pattern}" for pattern in SDIST if not fnmatch.filter(names, pattern)]
    for problem in problems:
        print(f"Error: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
