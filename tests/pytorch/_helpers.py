# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What several test files share: the CUDA marks, and the launcher of tests that need several processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pytest

TESTS = Path(__file__).resolve().parent
REPO = TESTS.parents[1]

#: A worker of :func:`run_distributed` prints this, once per rank, after its last check.
PASS_TOKEN = "DISTRIBUTED CHECK PASSED"

#: How much of a failed run's output goes into the AssertionError, and with it into the JUnit file.
TAIL_CHARS = 4000

# Note [Skips that may not be skips]
# On a machine without a GPU the CUDA tests skip. On a GPU runner the same skip would be a green run that tested
# nothing, so the runner exports NVTE_EXT_FAIL_WITHOUT_CUDA=<number of GPUs it promises> and every test that needs at
# most that many fails instead of skipping. conftest.py turns the mark into the skip or the failure.
FAIL_WITHOUT_CUDA = "NVTE_EXT_FAIL_WITHOUT_CUDA"

# Note [Whose lines are counted]
# In a run with --cov, coverage also measures every Python process that a test starts: it leaves its settings in this
# variable, and each interpreter looks for it. Importing torch then takes half as long again, in several hundred
# processes. Few of them reach what the tests' own process does not, so conftest.py moves the variable out of the way,
# and `measured` gives it back: for the ranks of collectives, for the debug mode, for a library that is loaded.
COVERAGE = "COVERAGE_PROCESS_CONFIG"
COVERAGE_ASIDE = f"{COVERAGE}_ASIDE"


def requires_cuda_devices(count: int) -> pytest.MarkDecorator:
    """Mark for a test that needs `count` CUDA devices; the test skips or fails as `requires_cuda` does."""
    return pytest.mark.requires_cuda(count)


#: Mark for a test that needs one CUDA device.
requires_cuda = requires_cuda_devices(1)


def run_distributed(
    script: str | os.PathLike[str],
    nproc: int,
    *args: object,
    timeout: float = 120.0,
    token: str = PASS_TOKEN,
    check: bool = True,
    count_lines: bool = False,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `script` on `nproc` processes of this machine under ``torch.distributed.run`` and check how it ended.

    Parameters
    ----------
    script
        Path of the worker; a relative one is looked for in ``tests/pytorch/distributed``.
    nproc
        Number of ranks.
    *args
        Command line of the worker; each is passed as ``str``.
    timeout
        Seconds, start-up of Python and torch included. After that everything that was started is ended.
    token
        What every rank must print: an exit code of 0 alone does not show that the checks were reached.
    check
        False: the exit code and the token are left to the caller (for runs that must fail). A time-out still raises.
    count_lines
        Whether a run with ``--cov`` counts the lines that the ranks reach. See Note [Whose lines are counted]
    env
        Variables to set besides the present environment.

    Returns
    -------
    subprocess.CompletedProcess
        ``returncode`` and ``stdout``, in which the standard error of all ranks is mixed in.

    Raises
    ------
    AssertionError
        Time-out, exit code other than 0, or fewer than `nproc` tokens; with the last 4000 characters of output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    # See Note [Ranks write whole lines and end at once]
    command += [str(TESTS / "distributed" / name) for name in ("_rank.py", script)]
    command += map(str, args)
    environment = _worker_environment(env or {})
    what = f"{Path(script).name} on {nproc} ranks"
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # A file, not a pipe: a worker that outlives its launcher would hold the pipe open, and reading would hang.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=measured(environment) if count_lines else environment,
            start_new_session=True,
        )
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            raise AssertionError(f"{what}: not finished after {timeout:g} s, ended. {_tail(output)}") from None
        except BaseException:  # a Ctrl-C or pytest-timeout must not leave ranks behind either
            _end(process)
            raise
        text = _read(output)
        if check and returncode != 0:
            raise AssertionError(f"{what}: exit code {returncode}, expected 0. {_tail(output)}")
        if check and text.count(token) < nproc:
            found = text.count(token)
            raise AssertionError(f"{what}: {found} of {nproc} ranks printed {token!r}. {_tail(output)}")
    return subprocess.CompletedProcess(command, returncode, text)


def measured(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process whose lines are counted too."""
    # See Note [Whose lines are counted]
    return {**env, **({COVERAGE: env[COVERAGE_ASIDE]} if COVERAGE_ASIDE in env else {})}


def _worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1", **extra}
    # The tests also run from a checkout that is not installed, and workers may import this file.
    paths = [str(REPO), str(TESTS), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env


def _end(process: subprocess.Popen[bytes], grace: float = 5.0) -> None:
    """End a launcher and its ranks, which torch puts in sessions of their own, so that one killpg misses them."""
    ranks = _descendants(process.pid)
    for pid in ranks:
        _signal(pid, signal.SIGABRT)  # faulthandler then prints where each thread hangs
    deadline = time.monotonic() + grace
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in (*ranks, *_descendants(process.pid)):
        _signal(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """Process ids below `pid`, from /proc; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (command) state ppid ...", and the command may itself hold blanks and parentheses.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # ended meanwhile
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        todo.extend(below := children.get(todo.pop(), []))
        found.extend(below)
    return found


def _read(output: IO[str]) -> str:
    output.seek(0)
    return output.read()


def _tail(output: IO[str]) -> str:
    return f"Last {TAIL_CHARS} characters of output:\n{_read(output)[-TAIL_CHARS:]}"
