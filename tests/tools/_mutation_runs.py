# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The mutation check's test runs: pytest in a fork of a process that has torch imported already."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# What takes long to import and is the same for every mutant. Nothing here may start a thread: a fork has none of them.
WARM = ("torch", "torch.utils.checkpoint", "torch._dynamo", "torch.distributed.tensor", "hypothesis", "numpy")


def import_once() -> None:
    """Import what every run needs, so that no run has to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in WARM:
            importlib.import_module(name)


@dataclass
class Baseline:
    """The run without a mutant: how long each passing test takes, and which lines of the package it reaches."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    cuda: bool = False

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Baseline:
        """Make one of what JSON has kept, in which all keys are text."""
        lines = {file: {int(line): tests for line, tests in by.items()} for file, by in found["lines"].items()}
        return cls(found["seconds"], found["failed"], lines, found["cuda"])

    def expected(self, tests: list[str]) -> float:
        """Return how many seconds these tests may take."""
        # The first test of a file may do what all of it needs, such as one launch of several processes.
        files = {test.partition("::")[0] for test in tests}
        slowest = {file: max(t for test, t in self.seconds.items() if test.startswith(f"{file}::")) for file in files}
        return sum(self.seconds[test] for test in tests) + sum(slowest.values())

    def reaching(self, file: str, first: int, last: int) -> set[str]:
        """Return the passing tests that run any of these lines."""
        by_line = self.lines.get(file, {})
        found = {test for line in range(first, last + 1) for test in by_line.get(line, [])}
        return found & self.seconds.keys()


class _Order:
    """Pytest plug-in: runs exactly the tests of a list, in its order."""

    def __init__(self, tests: list[str]) -> None:
        self.places = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.places), key=lambda i: self.places[i.nodeid])


class _FirstFailure:
    """Pytest plug-in: remembers which test failed first, and how."""

    def __init__(self) -> None:
        self.by = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.by:
            self.by = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.by:
            self.by = f"{report.nodeid} (import)"


class _Recorder:
    """Pytest plug-in: notes duration, outcome and reached lines of every test."""

    def __init__(self, package: Path) -> None:
        import coverage

        self.package = package
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=[f"{package}/*"])
        self.seconds: dict[str, float] = {}
        self.bad: set[str] = set()
        self.skipped: set[str] = set()

    def pytest_sessionstart(self) -> None:
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.bad.add(report.nodeid)
        if report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.bad.add(report.nodeid)

    def save(self, path: Path) -> None:
        import torch

        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {
            Path(file).relative_to(self.package).as_posix(): {
                line: [test for test in tests if test] for line, tests in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        good = {test: t for test, t in self.seconds.items() if test not in self.bad and test not in self.skipped}
        found = {"seconds": good, "failed": sorted(self.bad), "lines": lines, "cuda": torch.cuda.is_available()}
        path.write_text(json.dumps(found))


class Job:
    """A forked run of pytest: ended by itself or, with all it started, after `limit` seconds."""

    def __init__(self, root: Path, body: Callable[[], int], limit: float) -> None:
        self.root, self.limit, self.start = root, limit, time.monotonic()
        self.seconds, self.status, self.hung = 0.0, None, False
        (root / "by.txt").write_text("")
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become_job(root, body)

    status: int | None

    def done(self) -> bool:
        """Tell whether it has ended, and end it if its time is over."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self.seconds = time.monotonic() - self.start
        if pid == 0 and self.seconds > self.limit:
            self.hung = True
            os.killpg(self.pid, signal.SIGKILL)
            pid, status = os.waitpid(self.pid, 0)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
        return pid != 0

    def verdict(self) -> tuple[str, str]:
        """Return ("passed" or "killed", by what)."""
        by = (self.root / "by.txt").read_text()
        if self.hung:
            return "killed", "hangs"
        if self.status == 0:
            return "passed", ""
        if (self.status == 1 and by) or (self.status == 2 and by):
            return "killed", by
        if self.status is not None and self.status < 0:
            return "killed", f"crash, signal {-self.status}"
        # Neither passed nor failed: no verdict on the mutant, but a fault of this script or of pytest's set-up.
        output = (self.root / "out.txt").read_text()
        raise SystemExit(f"pytest ended with {self.status} without a failing test:\n{output}")

    def stop(self) -> None:
        """End it and all it started."""
        if not self.done():
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _become_job(root: Path, body: Callable[[], int]) -> None:
    """Be the forked child: a session of its own, in the copy of the repository; never returns."""
    code = 3
    try:
        os.setsid()
        os.chdir(root)
        output = os.open(root / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["PYTHONPATH"] = str(root)
        sys.path[:] = [str(root), *(path for path in sys.path if Path(path or ".").resolve() != Path.cwd())]
        code = body()
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _pytest(root: Path, arguments: list[str], plugins: list[Any]) -> int:
    # hypothesis is imported already, so pytest cannot rewrite its assertions, and says so.
    quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    base = [*quiet, "--rootdir", str(root), "-c", "pyproject.toml"]
    code = int(pytest.main([*base, *arguments], plugins=plugins))
    package = sys.modules.get("transformer_engine_ext")
    if package is not None and not str(package.__file__).startswith(str(root)):
        print(f"the tests ran {package.__file__}, not the copy in {root}")
        return 3
    return code


def start_mutant(root: Path, tests: list[str], limit: float) -> Job:
    """Run these tests in the copy at `root` until one fails."""

    def body() -> int:
        sys.dont_write_bytecode = True
        first = _FirstFailure()
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        code = _pytest(root, ["-x", "--tb=line", *files], [_Order(tests), first])
        (root / "by.txt").write_text(first.by)
        return code

    return Job(root, body, limit)


def start_baseline(root: Path, package: str, files: list[str]) -> Baseline:
    """Run all tests without a mutant, wait for them, and return what they reach."""

    def body() -> int:
        recorder = _Recorder(root / package)
        code = _pytest(root, ["--tb=short", *files], [recorder])
        recorder.save(root / "baseline.json")
        return 0 if code in (0, 1) else 3

    job = Job(root, body, 3600)
    while not job.done():
        time.sleep(0.1)
    if job.status != 0:
        raise SystemExit(f"the run without a mutant ended with {job.status}:\n{(root / 'out.txt').read_text()[-4000:]}")
    return Baseline.from_json(json.loads((root / "baseline.json").read_text()))
