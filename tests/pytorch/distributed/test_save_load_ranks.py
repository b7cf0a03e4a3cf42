# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Saving and loading on several ranks: errors of one rank, other layouts, DCP, training that goes on, killed ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from _ranks import assert_case, case_names

from _helpers import PASS_TOKEN, REPO, TESTS, run_distributed
from transformer_engine_ext.pytorch.distributed.rng_file import read_header, read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streams")


@pytest.mark.parametrize("name", case_names("run_save_load.py"))
def test_case(name: str, folder: Path) -> None:
    assert_case("run_save_load.py", 4, name, str(folder))


def test_d9_training_goes_on(tmp_path: Path) -> None:
    """On 2 ranks to 2, and what these saved on 4, and what those saved on 1."""
    two, four, one = (tmp_path / name for name in ("two", "four", "one"))
    for path in (two, four, one):
        path.mkdir()
    run_distributed("run_resume.py", 2, two, "first")
    run_distributed("run_resume.py", 4, two, "again", four)
    run_distributed("run_resume.py", 1, four, "again", one)


@pytest.mark.parametrize("victim", ["while-reading", "before-rename"])
def test_f2_a_rank_is_killed_during_save(victim: str, tmp_path: Path) -> None:
    script = TESTS / "distributed" / "run_killed_save.py"
    paths = [str(REPO), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, tmp_path, str(rank), victim],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    killed = 1 if victim == "while-reading" else 0
    assert ranks[killed].returncode == -signal.SIGKILL, outputs[killed]
    assert ranks[1 - killed].returncode == 0, outputs[1 - killed]
    assert PASS_TOKEN in outputs[1 - killed]
    # The former file is whole, and what is left of the new one is out of the way.
    header = read_header(tmp_path / "streams")
    assert len(read_rows(tmp_path / "streams", header)) == 2
    left = [file.name for file in tmp_path.iterdir() if not file.name.startswith("store-")]
    assert len(left) == (1 if victim == "while-reading" else 2)
