# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The fixture ``rng_guard``: which tests of a user it fails, with what text, and what it costs the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Imported here, since pytester forgets the modules that an inner session imports.
import transformer_engine_ext.testing.guard  # noqa: F401
from _helpers import REPO
from transformer_engine_ext.pytorch.rng.devices import get_backend

pytest_plugins = ["pytester"]

PLUGIN = "transformer_engine_ext.testing.pytest_plugin"

PREAMBLE = """
import pytest, torch
from torch.nn import functional as F
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

DEVICE = {device!r}
engines = pytest.mark.parametrize("use_reentrant", [True, False])

def streams(*names):
    tracker = CudaRNGStatesTracker(DEVICE)
    for seed, name in enumerate(names):
        tracker.add(name, seed)
    return tracker

def ones():
    return torch.ones(64, device=DEVICE, requires_grad=True)
"""

RIGHT = """
@engines
def test_right(rng_guard, use_reentrant):
    tracker = streams("a", "b")
    def inner(x):
        with tracker.fork("b"):
            return F.dropout(x, 0.5).exp()
    def region(x):
        with tracker.fork("a"):
            x = F.dropout(x, 0.5)
        return te_checkpoint(inner, F.dropout(x, 0.5), use_reentrant=use_reentrant).exp()
    with tracker.fork("a"):
        y = te_checkpoint(region, ones(), use_reentrant=use_reentrant)
        y.sum().backward()
    # In the non-reentrant engine the outer recompute need not run the inner region's forward to its end.
    assert rng_guard.recomputes == 2
    assert not rng_guard.problems

def test_without_a_region(rng_guard):
    torch.rand(3, device=DEVICE)
    assert rng_guard.recomputes == 0
"""

# Four ways to be wrong that no engine can see, and one that has a failure of its own.
WRONG = """
def handle_as_generator():
    tracker = streams("noise")
    handle = tracker.get_states()["noise"]
    def region(x):
        return x * torch.rand(x.shape, device=DEVICE, generator=handle) * x
    te_checkpoint(region, ones()).sum().backward()

def test_handle(rng_guard):
    handle_as_generator()

@pytest.mark.usefixtures("rng_guard")
def test_used_by_a_mark():
    handle_as_generator()

def test_not_preserved(rng_guard):
    te_checkpoint(torch.nn.Dropout(0.5), ones(), preserve_rng_state=False).sum().backward()

left = []

def test_left_bound(rng_guard):
    left.append(streams("left"))
    left[0].fork("left").__enter__()

def test_fails_by_itself(rng_guard):
    handle_as_generator()
    assert 1 == 2

def test_without_the_fixture():
    handle_as_generator()
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, device: str) -> pytest.Pytester:
    """A session that has the plug-in once, whether or not the package is installed, and no other."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)  # pytest warns of a plug-in that others imported before
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    pytester.device = device  # type: ignore[attr-defined]
    return pytester


def session(inner: pytest.Pytester, text: str) -> pytest.RunResult:
    inner.makepyfile(PREAMBLE.format(device=inner.device) + text)  # type: ignore[attr-defined]
    return inner.runpytest_inprocess("-rA", "--tb=short", "-p", "no:cacheprovider", "-p", PLUGIN)


def test_right_tests_pass(inner: pytest.Pytester) -> None:
    session(inner, RIGHT).assert_outcomes(passed=3)


def test_wrong_tests_fail_and_say_why(inner: pytest.Pytester) -> None:
    result = session(inner, WRONG)
    result.assert_outcomes(failed=5, passed=1)  # and no error: the test fails, not its teardown
    text = result.stdout.str()
    moved = "64 32-bit words" if inner.device == "cpu" else "random numbers per thread"  # type: ignore[attr-defined]
    for line in (
        f"recompute 1 moved stream 'noise' by *{moved}*; it must leave every stream in place",
        # Or 'default', where a test before this one has made it known by that name.
        "recompute 1 moved stream 'default*' by *; it must leave every stream in place",
        "the default generator of * was left bound to stream 'left' when the test ended",
        "Likely causes: the function draws with generator= from a tracked stream (use tracker.fork(name) instead)*",
    ):
        result.stdout.fnmatch_lines([f"*{line}*"])
    assert text.count("moved stream 'noise'") >= 3, "by the fixture, by the mark, and beside the test's own failure"
    result.stdout.fnmatch_lines(["E   assert 1 == 2"])
    result.stdout.fnmatch_lines(["PASSED *test_without_the_fixture"])


def test_what_a_test_leaves_bound_fails_that_test_only(inner: pytest.Pytester) -> None:
    text = """
def test_left_bound(rng_guard):
    streams("left").fork("left").__enter__()

def test_after(rng_guard):
    te_checkpoint(torch.nn.Dropout(0.5), ones()).sum().backward()
    assert rng_guard.recomputes == 1
"""
    session(inner, text).assert_outcomes(failed=1, passed=1)
    assert get_backend(inner.device).depth(0) == 0, "what was left bound is still noted"  # type: ignore[attr-defined]


def test_a_guard_is_gone_after_its_test(inner: pytest.Pytester) -> None:
    hooks = sys.modules["transformer_engine_ext.pytorch.recompute.hooks"]
    before = hooks.active_hooks()
    session(inner, RIGHT)
    assert hooks.active_hooks() == before


def test_a_broken_engine_is_found(inner: pytest.Pytester) -> None:
    text = """
from transformer_engine_ext.pytorch.rng.snapshot import Rewound

def test_no_restore(rng_guard, monkeypatch):
    monkeypatch.setattr(Rewound, "_restore", lambda self: self._undo[0][0](self))
    y = te_checkpoint(torch.nn.Dropout(0.5), ones())
    torch.rand(3, device=DEVICE)
    y.sum().backward()
    assert rng_guard.recomputes == 1
"""
    result = session(inner, text)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*recompute 1 moved stream 'default*"])
    assert get_backend(inner.device).depth(0) == 0  # type: ignore[attr-defined]


def test_it_costs_others_nothing(tmp_path: Path) -> None:
    """A session that does not use it imports neither torch nor any other part of the package."""
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other():\n"
        "    ours = sorted(name for name in sys.modules if name.startswith('transformer_engine_ext'))\n"
        "    assert ours == ['transformer_engine_ext', 'transformer_engine_ext.testing',\n"
        "                    'transformer_engine_ext.testing.pytest_plugin']\n"
        "    assert 'torch' not in sys.modules\n"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", PLUGIN, str(tmp_path)]
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
