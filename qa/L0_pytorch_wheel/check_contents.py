# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Check what is in the sdist and the two wheels: ``python3 check_contents.py CHECKOUT SDIST WHEEL NATIVE_WHEEL``."""

from __future__ import annotations

import fnmatch
import subprocess
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
    "transformer_engine_ext/csrc/streams.cpp",
    "transformer_engine_ext/pytorch/rng/*.py",
    "transformer_engine_ext/pytorch/recompute/*.py",
    "transformer_engine_ext/pytorch/distributed/*.py",
    "transformer_engine_ext/integrations/*.py",
    "transformer_engine_ext/testing/*.py",
    "*.dist-info/licenses/LICENSE",
    "*.dist-info/entry_points.txt",
]

#: What only the wheel with the native libraries holds.
NATIVE = [
    "transformer_engine_ext/csrc/philox_state.so",
    "transformer_engine_ext/csrc/build_info.json",
    "transformer_engine_ext/csrc/streams.so",
    "transformer_engine_ext/csrc/streams_build_info.json",
]

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
    "transformer_engine_ext/csrc/streams.cpp",
    "transformer_engine_ext/py.typed",
    "transformer_engine_ext/cli/data/*.txt",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "benchmarks/*.py",
    "docs/conf.py",
    "docs/_ext/rules.py",
    "docs/*.md",
    "docs/api/*.md",
    "docs/pictures/*.png",
    "examples/*.ipynb",
    "examples/*.py",
    "qa/*/test.sh",
    "qa/L0_pytorch_wheel/stand_in/torch/__init__.py",
    "tests/pytorch/conftest.py",
    "tests/pytorch/_helpers.py",
    "tests/pytorch/test_*.py",
    "tests/pytorch/distributed/run_*.py",
    "tests/tools/*.py",
    "tests/typing/client.py",
]

#: Tracked files that a source distribution has no use for.
NOT_IN_SDIST = (".gitignore",)

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
    # One for every Python; with the libraries, for one platform and every CPython from 3.10 on.
    if not fnmatch.fnmatch(wheel.name, "*-cp310-abi3-linux_*.whl" if native else "*-py3-none-any.whl"):
        problems.append("has another tag than expected")
    return [f"{wheel.name} {problem}" for problem in problems]


def licence_problems(wheel: Path) -> list[str]:
    """Return what is wrong with the text of the licence and of py.typed in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        texts = [archive.read(name).decode() for name in fnmatch.filter(archive.namelist(), "*/licenses/LICENSE")]
    whole = [text for text in texts if "Apache License" in text and "END OF TERMS AND CONDITIONS" in text]
    return [] if whole else [f"{wheel.name} holds no whole Apache licence"]


def sdist_problems(sdist: Path, checkout: Path) -> list[str]:
    """Return what is wrong with a source distribution."""
    with tarfile.open(sdist) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
        licence = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/LICENSE")
        text = licence.read().decode() if licence is not None else ""
    problems = [f"lacks {pattern}" for pattern in SDIST if not fnmatch.filter(names, pattern)]
    problems += [f"holds {name}" for name in names if fnmatch.fnmatch(name, "*.py[cod]")]
    if text != (checkout / "LICENSE").read_text():
        problems.append("holds another licence than the checkout")
    problems += [f"lacks the tracked file {name}" for name in tracked(checkout) if name not in names]
    return [f"{sdist.name} {problem}" for problem in problems]


def tracked(checkout: Path) -> list[str]:
    """Return the files that git tracks there and that lie there; none where it is no checkout of git's."""
    if not (checkout / ".git").exists():
        return []  # an unpacked sdist, say; never those of a repository around it
    command = ["git", "-c", "safe.directory=*", "-C", str(checkout), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"note: git cannot list the files of {checkout} ({error}); the sdist is compared with patterns only")
        return []
    return [name for name in listed if name and name not in NOT_IN_SDIST and (checkout / name).exists()]


def main() -> int:
    """Return the exit code."""
    checkout, sdist, pure, native = map(Path, sys.argv[1:])
    problems = (
        sdist_problems(sdist, checkout) + wheel_problems(pure, native=False) + wheel_problems(native, native=True)
    )
    problems += licence_problems(pure) + licence_problems(native)
    for problem in problems:
        print(f"Error: {problem}")
    if not problems:
        print(
            f"{sdist.name} and {len(sys.argv) - 3} wheels hold what they must, {len(tracked(checkout))} tracked files"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
