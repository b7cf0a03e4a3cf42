# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""te-ext doctor and te-ext run."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from _helpers import REPO, requires_cuda
from _patched import stand_ins
from transformer_engine_ext.cli import doctor_probe, doctor_report, main
from transformer_engine_ext.cli.doctor_probe import Row, probe, probe_one
from transformer_engine_ext.errors import PatchError
from transformer_engine_ext.integrations.probing import Subject


def doctor(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["doctor", "--device", "cpu", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_it_says_what_is_right_and_what_it_could_not_test(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = doctor(capsys)
    assert code == 0
    for line in (
        "torch 2",
        "captured streams: ",
        "moving streams: ",
        "patch() would do this:",
        "RIGHT: all 8 probes are exact",
        "Control (contrast",
    ):
        assert line in text
    assert "Not tested: CUDA streams and CUDA graphs" in text


def test_json_and_junit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, text = doctor(capsys, "--json", "--junitxml", tmp_path / "sub" / "doctor.xml")
    found = json.loads(text)
    assert (code, found["format"], found["version"], found["verdict"]) == (0, "te-ext.doctor", 1, "right")
    assert len(found["probe"]) == 8
    assert {row["mismatches"] for row in found["probe"]} == {0}
    assert found["control"]["mismatches"] > 100
    assert set(found["packages"]) == {"transformer-engine", "megatron-core"}
    suite = ElementTree.parse(tmp_path / "sub" / "doctor.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("11", "0", "3")


def test_what_was_expected_and_cannot_be_tested_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for expect in ("patched", "unpatched"):
        code, text = doctor(capsys, "--expect", expect)
        assert code == 2
        assert f"UNTESTED: --expect {expect}" in text


def test_a_wrong_checkpoint_is_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_probe, "own_subject", doctor_probe.contrast)
    code, text = doctor(capsys)
    assert code == 1
    assert "WRONG: " in text
    assert "streams moved" in text


def test_a_probe_that_sees_nothing_is_no_proof(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_probe, "contrast", doctor_probe.own_subject)
    code, text = doctor(capsys)
    assert code == 2
    assert "was not seen to be wrong" in text


def test_a_probe_that_fails_is_an_error_with_its_text() -> None:
    def fails(*_: Any) -> torch.Tensor:
        raise OSError("no such stream\nmore")

    subject = Subject("x", fails, doctor_probe.own_subject("cpu").new_tracker)
    row = probe_one(subject, "-", True, "tracked", "eager", "cpu")
    assert (row.mismatches, row.error) == (None, "OSError: no such stream")
    control = Row("c", "-", "reentrant", "tracked", "eager", 5, 10)
    assert doctor_report.judge([row], control, None, True)[0] == "untested"
    row.mismatches = 0
    assert doctor_report.judge([row], control, None, True)[0] == "right"
    row.streams_right = False
    assert doctor_report.judge([row], control, None, True)[0] == "wrong"
    row.state = "unpatched"
    assert doctor_report.judge([row], control, None, True)[0] == "right", "what is not asked for does not count"
    assert doctor_report.judge([row], control, "unpatched", True)[0] == "wrong"


def test_the_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "masks.png"
    assert doctor(capsys, "--plot", file)[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_plot_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_report.importlib.util, "find_spec", lambda name: None)
    assert main(["doctor", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_the_table_of_what_the_doctor_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The README's columns for PyTorch and DeepSpeed are made by this tool."""
    table = runpy.run_path(str(REPO / "tests" / "tools" / "mismatch_table.py"))
    table["main"](["--device", "cpu", "--json"])
    document = json.loads(capsys.readouterr().out)
    cells = {tuple(row[:3]): row[4] for row in document["rows"] if row[3] == "eager"}
    for engine in ("reentrant", "non-reentrant"):
        ours = [text for key, text in cells.items() if key[:2] == ("transformer_engine_ext", engine)]
        assert ours == ["0 of 4096"] * len(doctor_probe.STREAMS)
        assert cells["torch.utils.checkpoint", engine, "default"] == "0 of 4096"
        tracked = cells["torch.utils.checkpoint", engine, "tracked"]
        assert re.fullmatch(r"1\d\d\d of 4096, streams moved", tracked)
    assert document["versions"]["torch"] == torch.__version__


@requires_cuda
def test_on_a_gpu_all_of_this_package_is_exact() -> None:
    rows = list(probe([doctor_probe.own_subject("cuda")], "-", "cuda"))
    assert len(rows) == 24
    assert [row for row in rows if row.mode == "eager" and not row.exact] == []


SCRIPT = """
import sys
import torch
import transformer_engine.pytorch as te

print(__name__, sys.argv[1:], sys.path[0] == sys.argv[0].rpartition("/")[0])
tracker = te.CudaRNGStatesTracker()
tracker.add("model-parallel-rng", 1)
def region(x):
    with tracker.fork():
        return torch.nn.functional.dropout(x, 0.5)
x = torch.ones(512, requires_grad=True)
y = te.checkpoint(region, x)
y.sum().backward()
print(f"wrong: {int((y != x.grad).sum())}\\n", end="")  # in one piece, whatever other ranks print
sys.exit(5)
"""


def _script(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(REPO), str(folder / "packages")])
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with stand_ins(tmp_path / "packages", monkeypatch):
        pass
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_run_patches_a_script_that_is_not_touched(scripts: Path) -> None:
    done = _script(scripts, "-m", "transformer_engine_ext", "run", "--report", "train.py", "--steps", "3", "-m", "x")
    assert "transformer_engine.pytorch.distributed.checkpoint (code)" in done.stderr
    assert done.returncode == 5, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "__main__ ['--steps', '3', '-m', 'x'] False"
    assert second == "wrong: 0"


def test_run_strictly_where_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def patch(*, strict: bool) -> None:
        assert strict
        raise PatchError("patch(strict=True) could not replace everything")

    monkeypatch.setattr("transformer_engine_ext.integrations.patching.patch", patch)
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('started')")
    assert main(["run", "--strict", str(script)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("te-ext run: patch(strict=True) could not replace everything\n")
    assert said.endswith(f"{script} was not started; without --strict it is\n")


def test_run_a_module(scripts: Path) -> None:
    done = _script(scripts, "-m", "transformer_engine_ext", "run", "-m", "train", "--x")
    assert (done.returncode, done.stdout.splitlines()[1]) == (5, "wrong: 0"), done.stderr


def test_run_refuses_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["run", "nowhere.py"])
    assert error.value.code == 2
    assert "no such file: nowhere.py; with -m" in capsys.readouterr().err


def test_run_under_torchrun(scripts: Path) -> None:
    (scripts / "rank.py").write_text(SCRIPT.replace("sys.exit(5)", "import os; print(f'rank {os.environ[\"RANK\"]}')"))
    done = _script(
        scripts,
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"),
        *("transformer_engine_ext", "run", "rank.py", "--a"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrong: 0") == 2
    assert "rank 0" in done.stdout
    assert "rank 1" in done.stdout
