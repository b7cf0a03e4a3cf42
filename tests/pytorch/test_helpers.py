# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The helpers of the other tests: they must fail when there is something to fail about."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch

from _helpers import (
    COVERAGE,
    COVERAGE_ASIDE,
    FAIL_WITHOUT_CUDA,
    PASS_TOKEN,
    REPO,
    TESTS,
    measured,
    requires_cuda,
    requires_cuda_devices,
    run_distributed,
)
from _leaks import bindings, flags, leaks

pytest_plugins = ["pytester"]

#: A rank in one of several states of trouble; it leaves its process id in the folder given.
WORKER = f"""
import os, sys, time
rank, folder, trouble = os.environ["RANK"], sys.argv[1], sys.argv[2]
open(os.path.join(folder, rank), "w").write(str(os.getpid()))
if trouble == "none":
    for number in range(300):
        print("line", number, "of", rank)
print("worker", rank, "of", os.environ["WORLD_SIZE"], trouble)
if trouble == "hangs" and rank == "1":
    def where_it_hangs():
        time.sleep(600)
    where_it_hangs()
if trouble == "fails" and rank == "1":
    sys.exit("rank 1 gives up")
if trouble != "silent" or rank == "0":
    print("{PASS_TOKEN}")
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "run_worker.py"
    path.write_text(WORKER)
    return path


def test_run_distributed_passes(worker: Path, tmp_path: Path) -> None:
    result = run_distributed(worker, 2, tmp_path, "none")
    assert "worker 1 of 2 none" in result.stdout
    # See Note [Ranks write whole lines and end at once]
    assert len(re.findall(r"^line \d+ of [01]$", result.stdout, re.MULTILINE)) == 600, "ranks wrote into a line"


def test_run_distributed_needs_every_rank_to_arrive(worker: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"1 of 2 ranks printed '{PASS_TOKEN}'"):
        run_distributed(worker, 2, tmp_path, "silent")


def test_run_distributed_reports_a_failing_rank(worker: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit code 1, expected 0(.|\n)*rank 1 gives up"):
        run_distributed(worker, 2, tmp_path, "fails")
    assert run_distributed(worker, 2, tmp_path, "fails", check=False).returncode == 1


def test_run_distributed_ends_a_hanging_rank(worker: Path, tmp_path: Path) -> None:
    for timeout in (8, 16, 32, 64):  # longer on a busy machine, where the ranks start late
        with pytest.raises(AssertionError, match=f"not finished after {timeout} s, ended") as caught:
            run_distributed(worker, 2, tmp_path, "hangs", timeout=timeout)
        if "where_it_hangs" in str(caught.value):
            break
    else:
        pytest.fail(f"no traceback of the hanging rank: {caught.value}")
    deadline = time.monotonic() + 10
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Ended, but not yet collected by whoever inherited it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


CUDA_TEST = """
from _helpers import requires_cuda, requires_cuda_devices

@requires_cuda
def test_one():
    pass

@requires_cuda_devices(2)
def test_two():
    pass

def test_device(device):
    assert device == "cpu"
"""


@pytest.mark.parametrize(
    ("promised", "outcomes"),
    [
        (None, {"passed": 1, "skipped": 3}),
        ("1", {"passed": 1, "skipped": 1, "errors": 2}),
        ("2", {"passed": 1, "errors": 3}),
    ],
)
def test_skips_fail_where_cuda_is_promised(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, promised: str | None, outcomes: dict[str, int]
) -> None:
    # See Note [Skips that may not be skips]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(FAIL_WITHOUT_CUDA, raising=False)
    if promised is not None:
        monkeypatch.setenv(FAIL_WITHOUT_CUDA, promised)
    pytester.makeconftest((TESTS / "conftest.py").read_text())
    pytester.makepyfile(CUDA_TEST)
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:benchmark").assert_outcomes(**outcomes)


LEAKY_TEST = """
import pytest, torch
from transformer_engine_ext.pytorch.rng.devices import get_backend
from transformer_engine_ext.pytorch.rng.recording import Recording

def test_binds():
    get_backend("cpu").bind(torch.Generator())

def test_rests():
    assert get_backend("cpu").default(0) is torch.default_generator

def test_records():
    Recording().open()

def test_names():
    from transformer_engine_ext.pytorch.rng import set_all_rng_states
    set_all_rng_states({"other": torch.Generator()})

def test_hooks():
    torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__()
"""


def test_what_a_test_leaves_behind_fails_it(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only it: the binding is put back. In a process of its own, since hooks and recordings are not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(REPO)]))
    pytester.makeconftest((TESTS / "conftest.py").read_text())
    pytester.makepyfile(LEAKY_TEST)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:benchmark")
    result.assert_outcomes(passed=5, errors=4)
    result.stdout.fnmatch_lines(["*the default generator of cpu is bound to another stream than before*"])
    result.stdout.fnmatch_lines(["*open recordings is 1, expected 0*"])
    result.stdout.fnmatch_lines(["*streams given to set_all_rng_states is *other*, expected *"])
    result.stdout.fnmatch_lines(["*saved-tensor hooks is True, expected False*"])


@requires_cuda
def test_a_cuda_binding_that_is_left_behind_is_found() -> None:
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    before, flagged = bindings(), flags()
    other = default.clone_state()
    assert leaks(before, flagged) == []
    default.graphsafe_set_state(other)
    assert len(leaks(before, flagged)) == 1
    assert leaks(before, flagged) == []


@requires_cuda
def test_cuda_is_there() -> None:
    assert torch.ones(1, device="cuda").item() == 1


@requires_cuda_devices(2)
def test_two_devices_are_there() -> None:
    assert torch.ones(1, device="cuda:1").item() == 1


def test_few_processes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # See Note [Whose lines are counted]
    assert COVERAGE not in os.environ
    monkeypatch.setenv(COVERAGE_ASIDE, "the settings")
    assert measured(os.environ)[COVERAGE] == "the settings"
    monkeypatch.delenv(COVERAGE_ASIDE)
    assert measured(os.environ) == dict(os.environ)


def test_what_a_test_tells_is_printed_once(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((TESTS / "conftest.py").read_text())
    pytester.makepyfile("def test_tells(tell):\n    tell('told\\nin two lines')\n\ndef test_does_not():\n    pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:benchmark")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*told by tests*", "told", "in two lines", "*2 passed*"])
    assert result.stdout.str().count("in two lines") == 1


def test_every_test_starts_from_the_known_seed() -> None:
    assert torch.initial_seed() == 0
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.manual_seed(0) and torch.rand(3))
