# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Which cases were tested where: a table from the JUnit files of test runs.

    python -m pytest --junitxml=cpu.xml tests; python tests/tools/case_table.py "CPU=cpu.xml" "H200, torch 2.11=gpu.xml"

A test carries the ids of its cases in its name (``test_b12_e7_...``) or in its parameters (``[b10 shared weights]``).
Each cell says how many tests of the case passed, failed and skipped in that run. The exit code is 1 if a case failed,
or passed nowhere.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict

#: A letter of the case list's sections and a number, between underscores, brackets or blanks.
CASE = re.compile(r"(?<![a-z0-9])([a-f])(\d{1,2})(?![a-z0-9])")


def cases_of(name: str) -> set[tuple[str, int]]:
    """Return the cases that a test's name carries: its leading ids, and those in its parameters."""
    function, _, parameters = name.partition("[")
    leading = re.match(r"test_((?:[a-f]\d{1,2}_)+)", function)
    text = (leading[1] if leading else "") + " " + re.sub(r"[-,]", " ", parameters)
    return {(letter, int(number)) for letter, number in CASE.findall(text.replace("_", " "))}


def read(path: str) -> dict[tuple[str, int], Counter[str]]:
    """Return, per case, how many of its tests passed, failed and were skipped."""
    found: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for test in ElementTree.parse(path).iter("testcase"):
        outcome = "passed"
        for child in test:
            outcome = {"skipped": "skipped", "failure": "failed", "error": "failed"}.get(child.tag, outcome)
        for case in cases_of(test.get("name", "")):
            found[case][outcome] += 1
    return found


def main(arguments: list[str]) -> int:
    """Print the table; return the exit code."""
    if not arguments or not all("=" in argument for argument in arguments):
        print(__doc__)
        return 2
    runs = {label: read(path) for label, _, path in (argument.rpartition("=") for argument in arguments)}
    cases = sorted({case for found in runs.values() for case in found})
    print("| case | " + " | ".join(runs) + " |\n|---|" + "---|" * len(runs))
    wrong = []
    for case in cases:
        cells = []
        for found in runs.values():
            counts = found.get(case, Counter())
            cells.append(", ".join(f"{counts[o]} {o}" for o in ("passed", "failed", "skipped") if counts[o]) or "-")
        name = f"{case[0].upper()}{case[1]}"
        print(f"| {name} | " + " | ".join(cells) + " |")
        counts = [found.get(case, Counter()) for found in runs.values()]
        if any(c["failed"] for c in counts) or not any(c["passed"] for c in counts):
            wrong.append(name)
    if wrong:
        print(f"\nfailed, or passed nowhere: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
