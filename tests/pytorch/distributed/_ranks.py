# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Several named checks in one launch of a few ranks: starting Python and torch takes longer than the checks do.

A worker ends with ``run_cases(CASES)``; the test file lists the same names and asserts each one with ``assert_case``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from _helpers import PASS_TOKEN, TESTS, run_distributed

# A worker imports this file before te_checkpoint, so the replacement is in place when it does. Asked of the script's
# name, since the test files import this file too, in the process that pytest runs in.
if os.environ.get("NVTE_EXT_TEST_PLAIN_CHECKPOINT") and Path(sys.argv[0]).name.startswith("run_"):
    import _plain_checkpoint  # noqa: F401

#: A rank that waits for one that failed gives up after this many seconds, and reports a failure too.
COLLECTIVE_TIMEOUT = 30


def case_names(script: str) -> list[str]:
    """Return the names of a worker's cases, from the keys that it writes as ``"name": case_``."""
    return re.findall(r'^    "([^"]+)": case_\w+', (TESTS / "distributed" / script).read_text(), re.MULTILINE)


@functools.cache
def _output(script: str, nproc: int, arguments: tuple[str, ...], count_lines: bool) -> str:
    return run_distributed(script, nproc, *arguments, check=False, timeout=170, count_lines=count_lines).stdout


def assert_case(script: str, nproc: int, name: str, *arguments: str, count_lines: bool = False) -> None:
    """Assert that every rank passed the case `name` of a worker; all cases of a worker run in one launch."""
    output = _output(script, nproc, arguments, count_lines)
    passed = [rank for rank in range(nproc) if f"[rank {rank}] {name}: passed" in output]
    if passed == list(range(nproc)):
        return
    begin = output.find(f"] {name}: failed")
    text = output[begin : begin + 4000] if begin >= 0 else output[-4000:]
    raise AssertionError(f"{script}: case {name!r} passed on ranks {passed} of {nproc}:\n{text}")


def run_cases(cases: Mapping[str, Callable[[], None]], backend: str = "gloo") -> None:
    """Run the cases on this rank, print one line for each, and end."""
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT))
    rank = dist.get_rank()
    for name, case in cases.items():
        torch.manual_seed(1000 + rank)
        try:
            case()
            line = f"[rank {rank}] {name}: passed\n"
        except Exception:
            line = f"[rank {rank}] {name}: failed\n{traceback.format_exc()}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        dist.barrier()
    dist.destroy_process_group()
    print(PASS_TOKEN, flush=True)


@contextlib.contextmanager
def gathers(expected: int) -> Iterator[None]:
    """Count the all-gathers inside."""
    calls, gather = 0, dist.all_gather_into_tensor

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return gather(*args, **kwargs)

    dist.all_gather_into_tensor = counted
    try:
        yield
    finally:
        dist.all_gather_into_tensor = gather
    assert calls == expected, f"{calls} all-gathers, expected {expected}"
