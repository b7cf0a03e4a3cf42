# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run where there is no GPU, and their results say what was measured and on what."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from _helpers import REPO

BENCHMARKS = REPO / "benchmarks"

NAMES = sorted(path.stem for path in BENCHMARKS.glob("benchmark_*.py"))

# One process for all: importing torch takes longer than a quick run.
_RUN = """
import importlib, sys
more = {"benchmark_overhead": ["--sections", "engines", "streams", "saved", "regions", "nesting"]}  # import takes long
for name in sys.argv[2:]:
    importlib.import_module(name).main(["--quick", "--json", f"{sys.argv[1]}/{name}.json", *more.get(name, [])])
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all benchmarks without CUDA; return the folder of their results."""
    folder = tmp_path_factory.mktemp("results")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join((str(BENCHMARKS), str(REPO)))}
    command = [sys.executable, "-c", _RUN, str(folder), *NAMES]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def _read(results: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    return content


def test_there_are_benchmarks() -> None:
    assert {"benchmark_graph_recompute", "benchmark_overhead", "benchmark_training_step"} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_result_of_a_run_without_cuda(results: Path, name: str) -> None:
    content = _read(results, name)
    assert content["benchmark"] == name.removeprefix("benchmark_")
    assert content["environment"]["gpu"] is None
    assert content["environment"]["torch"]
    assert content["environment"]["cpu"]
    assert content["notes"], "what could not be run without CUDA, or what is simulated, is not said"
    assert content["rows"]
    for row in content["rows"]:
        unit = next(key for key in row if key.endswith("median")).removesuffix("median")
        assert row[f"{unit}q1"] <= row[f"{unit}median"] <= row[f"{unit}q3"], row
        assert row[f"{unit}median"] > 0 or "region" in row["side"], row  # differences may come out negative


@pytest.mark.parametrize("name", ["benchmark_graph_recompute", "benchmark_training_step"])
def test_stacks_are_compared_exactly(results: Path, name: str) -> None:
    """Ours is exact, bit for bit; torch's engines, which know no streams, show that a wrong mask would be counted."""
    rows = [row for row in _read(results, name)["rows"] if row.get("dropout") != 0]
    ours = [row for row in rows if "ours" in row["side"]]
    assert len(ours) == 2
    assert all(row["unequal_elements"] == row["mask_mismatches"] == 0 for row in ours)
    assert all(row["of_elements"] > 1000 and row["mask_elements"] > 1000 for row in ours)
    for row in rows:
        if "torch" in row["side"]:
            assert row["unequal_elements"] > row["of_elements"] / 2
            assert row["mask_mismatches"] > row["mask_elements"] / 8


def test_picture(results: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed: pip install -e '.[plot]'")
    command = [sys.executable, BENCHMARKS / "plot.py", "--results", results, "--out", tmp_path / "picture.png"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=120)
    assert (tmp_path / "picture.png").stat().st_size > 10_000
