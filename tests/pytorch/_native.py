# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""A compiler and a torch that are made up, for the tests of the native libraries' build on any machine."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer_engine_ext.pytorch.rng.native_build import TorchBuild

_COMPILER = """\
import os, pathlib, sys, time

# One line per run, with the process id, as soon as it runs.
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(f"{os.getpid()}\\n")
while os.environ.get("FAKE_UNTIL") and not os.path.exists(os.environ["FAKE_UNTIL"]):
    time.sleep(0.02)
if os.environ.get("FAKE_FAIL"):
    sys.exit("fake.cpp:1: error: " + os.environ["FAKE_FAIL"])
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text(os.environ.get("FAKE_OUTPUT", "a library"))
"""


class FakeCompiler:
    """A program that takes a compiler's arguments, writes text as its output and counts its runs.

    Parameters
    ----------
    folder
        An empty folder of the test.
    """

    def __init__(self, folder: Path) -> None:
        self._log = folder / "compiler.log"
        script = folder / "compiler.py"
        script.write_text(_COMPILER)
        #: Stands in for Python's headers, which not every machine has.
        self.headers = folder / "headers"
        self.headers.mkdir(exist_ok=True)
        (self.headers / "Python.h").touch()
        #: What makes the package use it, to be set in the environment.
        self.env = {"CXX": f"{sys.executable} -S -E {script}", "FAKE_LOG": str(self._log)}

    def use(self, monkeypatch: Any, *, until: Path | None = None, fail: str = "", output: str = "") -> None:
        """Make this process use it, and say how it behaves."""
        for name, value in (self.env | self.behaviour(until=until, fail=fail, output=output)).items():
            monkeypatch.setenv(name, value)
        paths = {**sysconfig.get_paths(), "include": str(self.headers)}
        monkeypatch.setattr(sysconfig, "get_paths", lambda *_, **__: paths)

    def behaviour(self, *, until: Path | None = None, fail: str = "", output: str = "") -> dict[str, str]:
        """Return environment variables that make it wait until a file exists, then fail with a text, or write one."""
        result = {"FAKE_UNTIL": str(until or ""), "FAKE_FAIL": fail}
        return result | ({"FAKE_OUTPUT": output} if output else {})

    @property
    def runs(self) -> list[int]:
        """Process ids of its runs so far."""
        return [int(line) for line in self._log.read_text().split()] if self._log.exists() else []

    def end(self) -> None:
        """End what still runs."""
        for pid in self.runs:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie, whose parent has not asked for it yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


def torch_build(root: Path, **changes: Any) -> TorchBuild:
    """Describe torch 2.11.0 with CUDA 13, but for the `changes`."""
    return TorchBuild("2.11.0+cu130", "13.0", True, root, False)._replace(**changes)
