# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Compare two JUnit files; fail on any test that passes in the first and not in the second.

python compare_junit.py unpatched.xml patched.xml
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def outcomes(file: Path) -> dict[str, str]:
    """Return test name to ``passed``, ``failed`` or ``skipped``."""
    found = {}
    for case in ElementTree.parse(file).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def main() -> int:
    """Print counts of both, and what got lost; return 1 if something did, or nothing passed at all."""
    before, after = (outcomes(Path(argument)) for argument in sys.argv[1:3])
    for name, found in (("unpatched", before), ("patched", after)):
        counts = Counter(found.values())
        print(f"{name}: " + ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")))
    passed = [test for test, outcome in before.items() if outcome == "passed"]
    lost = [f"{test}: {after.get(test, 'not run')}" for test in passed if after.get(test) != "passed"]
    won = [test for test, outcome in after.items() if outcome == "passed" and before.get(test) == "failed"]
    for test in won:
        print(f"passes patched only: {test}")
    for line in lost:
        print(f"passes unpatched only: {line}")
    return 1 if lost or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
