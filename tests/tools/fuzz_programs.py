# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The long run of the random programs: the generator of the property test without hypothesis's bookkeeping.

    python tests/tools/fuzz_programs.py --programs 100000 --jobs 2
    python tests/tools/fuzz_programs.py --programs 5000 --device cuda --first 700000

Program number n is the same on every machine. A program that fails is shrunk and shown as Python that builds it; the
exit code is 1 if any did, or if the programs no longer cover what they should.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pytorch"))
sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: an installed package, or another copy, comes first

import torch

from _program_check import Package, check, coverage_report, too_rare
from _program_strategies import Writer, numbered_program
from _programs import Program

CHUNK = 250


class Chunk(NamedTuple):
    """What a worker has to say about a range of programs."""

    tried: int
    features: Counter[str]
    failures: list[tuple[int, str]]


class Tape:
    """Answers the generator's questions from a list, and with 0, the simplest, where the list has ended."""

    def __init__(self, answers: list[int], source: random.Random | None = None) -> None:
        self.answers = list(answers)
        self.source = source
        self.at = 0

    def __call__(self, below: int) -> int:
        if self.at == len(self.answers):
            self.answers.append(self.source.randrange(below) if self.source else 0)
        answer = self.answers[self.at] if self.answers[self.at] < below else 0
        self.at += 1
        return answer


def _failure(program: Program, device: str, engine: Package) -> str:
    try:
        check(program, device, engine)
    except AssertionError as error:
        return str(error)
    return ""


def _kind(message: str) -> str:
    """What stays the same of a failure while its program shrinks."""
    return re.sub(r"\d+|statement .*", "", message.partition("\n")[0].partition(": ")[2] or message)[:40]


def shrink(number: int, device: str, engine: Package, seconds: float = 20.0) -> str:
    """Return the message of the simplest program found that fails as program `number` does."""
    tape = Tape([], random.Random(number))
    best = _failure(Writer(tape).program(), device, engine)
    answers, kind, end = tape.answers, _kind(best), time.monotonic() + seconds
    size = len(answers)
    while size and time.monotonic() < end:
        at = 0
        while at < len(answers) and time.monotonic() < end:
            rest = answers[at + size :]
            lower = [[answers[at] - 1]] if size == 1 and answers[at] else []
            for middle in ([], [0] * len(answers[at : at + size]), *lower):
                trial = Tape(answers[:at] + middle + rest)
                if trial.answers == answers:
                    continue
                message = _failure(Writer(trial).program(), device, engine)
                if message and _kind(message) == kind:
                    answers, best = trial.answers[: trial.at], message
                    break
            else:
                at += size
        size //= 2
    return best


def run_chunk(first: int, count: int, device: str) -> Chunk:
    """Check programs `first` to `first + count`."""
    torch.set_num_threads(1)
    engine, features, failures = Package(), Counter[str](), []
    for number in range(first, first + count):
        try:
            features.update(check(numbered_program(number), device, engine))
        except AssertionError as error:
            failures.append((number, str(error)))
    return Chunk(count, features, failures)


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=int(os.environ.get("NVTE_EXT_TEST_PROGRAMS") or 100_000))
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", type=int, default=3, help="failures to shrink and show; the rest is counted")
    options = parser.parse_args()

    start = time.monotonic()
    features, failures, tried = Counter[str](), [], 0
    last = options.first + options.programs
    chunks = [(first, min(CHUNK, last - first)) for first in range(options.first, last, CHUNK)]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        results = pool.map(run_chunk, *zip(*chunks, strict=True), [options.device] * len(chunks))
        for done, chunk in enumerate(results, 1):
            tried += chunk.tried
            features.update(chunk.features)
            failures += chunk.failures
            if done % max(1, len(chunks) // 20) == 0 or done == len(chunks):
                seconds = time.monotonic() - start
                print(f"{tried:>8} programs, {len(failures)} failed, {seconds:.0f} s", flush=True)

    for number, message in failures[: options.show]:
        print(f"\nprogram {number}: {message}\nshrunk: {shrink(number, options.device, Package())}")
    kinds = Counter(_kind(message) for _, message in failures)
    for kind, count in kinds.most_common():
        print(f"{count} failed with: {kind}")
    print(coverage_report(tried, features, options.device))
    rare = too_rare(tried, features) if tried >= 500 else {}
    if rare:
        print(f"too rare: {rare}")
    seconds = time.monotonic() - start
    print(f"{tried} programs, {len(failures)} failed, {seconds:.0f} s, {tried / seconds:.0f} programs/s")
    return 1 if failures or rare else 0


if __name__ == "__main__":
    sys.exit(main())
