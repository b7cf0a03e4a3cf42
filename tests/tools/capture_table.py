# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What the capture tests counted, as tables: wrong mask elements, graph nodes, and bits of a real layer.

    NVTE_EXT_TEST_FIGURES=figures.jsonl python -m pytest -m requires_cuda tests/pytorch/test_capture*.py
    python tests/tools/capture_table.py figures.jsonl

The exit code is 1 if an element was wrong.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def _parts(test: str) -> tuple[str, str]:
    """Return a test's function, with the parameters that are not its engine, and the engine."""
    name = test.rpartition("::")[2]
    engine = "non-reentrant" if "nonreentrant" in name else "reentrant" if "reentrant" in name else "non-reentrant only"
    kept = re.sub(r"-?\b(non)?reentrant\b|\bcuda-?", "", name).replace("[]", "")
    return kept.removeprefix("test_"), engine


def main(paths: list[str]) -> int:
    """Print the tables; return the exit code."""
    rows: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    others: list[dict[str, Any]] = []
    lines = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    lines = [line for line in lines if "2.14" not in line["test"].partition("[")[2]]  # devices that are not there
    versions = sorted({line["torch"] for line in lines})
    for line in lines:
        if "elements" in line:
            cell = rows[_parts(line["test"])][line["torch"]]
            cell[0] += line["wrong"]
            cell[1] += line["elements"]
        else:
            others.append(line)
    print("| test | engine | " + " | ".join(f"torch {v}: wrong of elements" for v in versions) + " |")
    print("|---|---|" + "---|" * len(versions))
    wrong = 0
    for (name, engine), cells in sorted(rows.items()):
        wrong += sum(cell[0] for cell in cells.values())
        shown = [f"{cells[v][0]} of {cells[v][1]:,}" if v in cells else "-" for v in versions]
        print(f"| {name} | {engine} | " + " | ".join(shown) + " |")
    for line in others:
        test, version = line.pop("test"), line.pop("torch")
        print(f"{' '.join(_parts(test))}, torch {version}: " + ", ".join(f"{k} {v}" for k, v in line.items()))
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
