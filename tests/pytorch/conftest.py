# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: the device, a known seed before, and nothing left behind after."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, settings

# In front, so that no installed package with a module of that name can shadow the helpers.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _moves
import _proof
from _helpers import COVERAGE, COVERAGE_ASIDE, FAIL_WITHOUT_CUDA, requires_cuda
from _leaks import bindings, flags, leaks

# How long an example takes says more of what else this machine does than of the test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    _moves.setting()  # an unknown one ends the run before it starts
    config.addinivalue_line("markers", "requires_cuda(count=1): needs that many CUDA devices")


def pytest_report_header() -> str:
    return f"streams are moved by: {_moves.setting() or 'what the package decides'} ({_moves.SETTING})"


def pytest_runtest_setup(item: pytest.Item) -> None:
    # See Note [Skips that may not be skips]
    needed = max((mark.args[0] if mark.args else 1 for mark in item.iter_markers("requires_cuda")), default=0)
    if needed == 0:
        return
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if present >= needed:
        return
    reason = f"needs {needed} CUDA device(s), found {present}"
    promised = int(os.environ.get(FAIL_WITHOUT_CUDA) or 0)
    if promised >= needed:
        pytest.fail(f"{reason}, though {FAIL_WITHOUT_CUDA}={promised} promises {promised}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=requires_cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """Run the test on the CPU and on the current CUDA device."""
    return str(request.param)


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Print a text at the end of the run, also of a test that passes: pytest-xdist's processes have no terminal."""
    return lambda text: record_property("tells", text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for group in terminalreporter.stats.values() for report in group]
    told = [
        str(text)
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "teardown"
        for name, text in report.user_properties
        if name == "tells"
    ]
    if told:
        terminalreporter.section("told by tests")
        terminalreporter.write_line("\n".join(told))


@pytest.fixture(autouse=True, scope="session")
def this_process_is_measured_and_no_other() -> Iterator[None]:
    # See Note [Whose lines are counted]
    with pytest.MonkeyPatch.context() as patch:
        if COVERAGE in os.environ:
            patch.setenv(COVERAGE_ASIDE, os.environ[COVERAGE])
            patch.delenv(COVERAGE)
        yield


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The library of csrc/streams.cpp; compiled, where there is none, once for all processes of this run."""
    folder = tmp_path_factory.getbasetemp()
    return _moves.library((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "native")


@pytest.fixture(autouse=True, scope="session")
def moves_of_this_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """Put into use what NVTE_EXT_TEST_MOVES names, and see that it is in use to the end."""
    asked = _moves.setting()
    if not asked:
        yield
        return
    try:
        native = request.getfixturevalue("native_library") if asked == "native" else None
    except pytest.skip.Exception as reason:
        pytest.fail(f"{_moves.SETTING}=native, but {reason}", pytrace=False)
    _moves.use(native)
    yield
    assert _moves.used() is native, f"a test left other moves in use than {_moves.SETTING}={asked}"


@pytest.fixture
def python_moves() -> Iterator[None]:
    """Run a test with the Python functions, whatever is installed."""
    with _moves.using(None):
        yield


@pytest.fixture
def native_moves(native_library: ModuleType) -> Iterator[ModuleType]:
    """Run a test with the native library; skips where it cannot be built."""
    with _moves.using(native_library):
        yield native_library


@pytest.fixture(params=["python", "native"])
def any_moves(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test once with each of the two."""
    with _moves.using(request.getfixturevalue("native_library") if request.param == "native" else None):
        yield str(request.param)


@pytest.fixture(autouse=True)
def survivors_that_do_not_count_are_told(tell: Callable[[str], None], request: pytest.FixtureRequest) -> Iterator[None]:
    # See Note [Where the death of memory cannot be seen]
    yield
    if _proof.uncounted:
        tell(
            f"{request.node.nodeid}: {len(_proof.uncounted)} survivors on CUDA did not count, since the memory of dead "
            "tensors is never seen to die in this process"
        )
        _proof.uncounted.clear()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Start every test from one seed; fail it if it leaves a stream bound, a flag set or a recording open."""
    torch.manual_seed(0)
    bound, flagged = bindings(), flags()
    yield
    found = leaks(bound, flagged)
    if found:
        pytest.fail("left behind: " + "; ".join(found), pytrace=False)
