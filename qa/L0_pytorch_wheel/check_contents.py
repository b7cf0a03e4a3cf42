# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Check what is in the sdist and the two wheels: ``python3 check_contents.py SDIST WHEEL NATIVE_WHEEL``."""

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
    "transformer_engine_ext/integrations/*.py",
    "transformer_engine_ext/testing/*.py",
    "*.dist-info/licenses/LICENSE",
    "*.dist-info/entry_points.txt",
]

#: What only the wheel with the native library holds.
NATIVE = ["transformer_engine_ext/csrc/philox_state.so", "transformer_engine_ext/csrc/build_info.json"]

#: Beginnings of requirements, and lines of the entry points.
REQUIRED = ["torch>=", "safetensors", "packaging>=", "tqdm>="]
ENTRY_POINTS = [
    "te-ext = transformer_engine_ext.cli:main",
    "transformer_engine_ext = transformer_engine_ext.testing.pytest_plugin",
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
    "examples/*.ipynb",
    "examples/*.py",
    "qa/L0_pytorch_unittest/test.sh",
    "qa/L0_pytorch_wheel/stand_in/torch/__init__.py",
    "tests/pytorch/conftest.py",
    "tests/pytorch/_helpers.py",
    "tests/pytorch/distributed/run_*.py",
]

#: Core metadata that must be there; the licence as an expression, not as a classifier (PEP 639).
METADATA = {"Name": "transformer-engine-ext", "License-Expression": "Apache-2.0", "Requires-Python": ">=3.10"}


def wheel_problems(wheel: Path, native: bool) -> list[str]:
    """Return what is wrong with a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        text = {name: archive.read(name).decode() for name in fnmatch.filter(names, "*.dist-info/*")}
    (metadata,) = (Parser().parsestr(text[name]) for name in text if name.endswith("/METADATA"))
    (entry_points,) = (text[name] for name in text if name.endswith("/entry_points.txt"))
    wanted = WHEEL + NATIVE if native else WHEEL
    problems = [f"lacks {pattern}" for pattern in wanted if not fnmatch.filter(names, pattern)]
    if not native:
        problems += [f"holds {name}" for pattern in NATIVE for name in fnmatch.filter(names, pattern)]
    packages = ("transformer_engine_ext/", "transformer_engine_ext-")
    problems += [f"also installs {name}" for name in names if not name.startswith(packages)]
    problems += [
        f"{key} is {metadata[key]!r}, expected {value!r}" for key, value in METADATA.items() if metadata[key] != value
    ]
    if not str(metadata.get_payload()).lstrip().startswith("# transformer-engine-ext"):
        problems.append("has no README as its description")
    required = metadata.get_all("Requires-Dist") or []
    problems += [f"does not require {name}" for name in REQUIRED if not any(r.startswith(name) for r in required)]
    problems += [f"lacks the entry point {line!r}" for line in ENTRY_POINTS if line not in entry_points]
    # One for every Python; with a library, for one platform.
    if not fnmatch.fnmatch(wheel.name, "*-py3-none-linux_*.whl" if native else "*-py3-none-any.whl"):
        problems.append("has another tag than expected")
    return [f"{wheel.name} {problem}" for problem in problems]


def sdist_problems(sdist: Path) -> list[str]:
    """Return what is wrong with a source distribution."""
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    problems = [f"{sdist.name} lacks {pattern}" for pattern in SDIST if not fnmatch.filter(names, pattern)]
    return problems + [f"{sdist.name} holds {name}" for name in names if fnmatch.fnmatch(name, "*.py[cod]")]


def main() -> int:
    """Return the exit code."""
    sdist, pure, native = map(Path, sys.argv[1:])
    problems = sdist_problems(sdist) + wheel_problems(pure, native=False) + wheel_problems(native, native=True)
    for problem in problems:
        print(f"Error: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
