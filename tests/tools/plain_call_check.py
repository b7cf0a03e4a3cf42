# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tests would not notice if te_checkpoint did nothing but call its function?

    python tests/tools/plain_call_check.py                          # report, by section of the cases
    python tests/tools/plain_call_check.py --expect-none a b        # exit code 1 if a test_a<n>_ or test_b<n>_ passes
    python tests/tools/plain_call_check.py --expect-none a -- tests/pytorch/test_recompute_rng.py

It runs the suite with the plug-in ``tests/pytorch/_plain_checkpoint.py``. A test of the sections that are about
recomputing has to fail under it; one that passes shows nothing about checkpointing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TESTS = REPO / "tests" / "pytorch"

# Tests of these names try the tools themselves or read sources: they would pass whatever te_checkpoint did.
SECTION = re.compile(r"^test_([a-f])\d+_")


def run_suite(paths: list[str], limit: float) -> list[tuple[str, str, str]]:
    """Run pytest with the plug-in; return ``(file, test, outcome)`` of every test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "_plain_checkpoint", "-p", "no:cacheprovider"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}", *(paths or [str(TESTS)])]
        search = [str(TESTS), str(REPO), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in search if path)}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("NVTE_EXT_TEST_PROGRAMS", "60")
        done = subprocess.run(
            command,
            cwd=REPO,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
        if done.returncode not in (0, 1) or not report.exists():
            raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return [(case.get("file", ""), case.get("name", ""), _outcome(case)) for case in cases]


def _outcome(case: ElementTree.Element) -> str:
    bad = {child.tag for child in case}
    return "skipped" if "skipped" in bad else "failed" if bad & {"failure", "error"} else "passed"


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expect-none", nargs="+", default=[], choices="abcdef", metavar="SECTION")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for the whole suite")
    parser.add_argument("--all", action="store_true", help="also name the tests of other sections that pass")
    parser.add_argument("paths", nargs="*", help="files to run instead of all")
    options = parser.parse_args()

    start = time.monotonic()
    counts: dict[str, Counter[str]] = {}
    passed: dict[str, list[str]] = {}
    for file, name, outcome in run_suite(options.paths, options.limit):
        match = SECTION.match(name)
        section = match.group(1) if match else "-"
        counts.setdefault(section, Counter())[outcome] += 1
        if outcome == "passed":
            passed.setdefault(section, []).append(f"{file}::{name}")

    print("te_checkpoint was a plain call; tests by section of the cases:")
    print("  section  fail  pass  skip")
    for section, count in sorted(counts.items()):
        print(f"  {section:<7} {count['failed']:>5} {count['passed']:>5} {count['skipped']:>5}")
    wrong = [test for section in options.expect_none for test in passed.get(section, [])]
    shown = [test for _, tests in sorted(passed.items()) for test in tests] if options.all else wrong
    for test in shown:
        print(f"  passes all the same: {test}")
    missing = [section for section in options.expect_none if not counts.get(section, Counter())["failed"]]
    for section in missing:
        print(f"  no test of section {section} failed, so nothing was tested")
    print(f"{time.monotonic() - start:.0f} s")
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    sys.exit(main())
