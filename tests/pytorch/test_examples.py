# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The examples, run as their first lines say, and shown to fail where what they show is not so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from _helpers import REPO, run_distributed

EXAMPLES = REPO / "examples"
NOTEBOOK = EXAMPLES / "mismatch_and_fix.ipynb"

#: What this file runs; a further example must be added here.
RUN = {
    "cuda_graph_recompute.py",
    "megatron_patch.py",
    "mismatch_and_fix.ipynb",
    "pytorch_fsdp2.py",
    "resume_resharded.py",
    "tp_dropout.py",
}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def lines_of(output: str, rank: int) -> list[str]:
    """Return what a rank printed; in an example every such line is a check."""
    lines = re.findall(rf"^rank {rank}: (.*)$", output, re.MULTILINE)
    assert all(line.startswith("ok ") for line in lines), output
    return lines


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")} == RUN


@pytest.mark.parametrize("name", sorted(name for name in RUN if name.endswith(".py")))
def test_example_says_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert re.search(rf"^    (python|torchrun --nproc_per_node=\d) examples/{name}", text, re.MULTILINE)
    assert len(text.splitlines()) < 150, "for a reader, not for us"


def test_tp_dropout() -> None:
    output = run_distributed(EXAMPLES / "tp_dropout.py", 2, token="0 of them differ").stdout
    assert len(lines_of(output, 0)) == len(lines_of(output, 1)) == 5


def test_resume_resharded(tmp_path: Path) -> None:
    script, path = EXAMPLES / "resume_resharded.py", tmp_path / "streams.safetensors"
    run_distributed(script, 2, "save", path, token="")
    output = run_distributed(script, 3, "load", path, token="").stdout
    lines = lines_of(output, 0)
    assert len(lines) == 5
    assert "saved tp=2 (world size 2), running tp=3 (world size 3)" in lines[0]
    assert "'default': 'kept'" in lines[1]
    assert "'model-parallel-rng': 'rederived'" in lines[1]
    assert ", 0 were drawn before" in lines[3]


def test_pytorch_fsdp2() -> None:
    output = run_distributed(EXAMPLES / "pytorch_fsdp2.py", 2, token="te_checkpoint: 0 of 25056").stdout
    for rank in range(2):
        ours, torchs = lines_of(output, rank)
        assert "te_checkpoint: 0 of" in ours
        assert "torch.utils.checkpoint: " in torchs


# Several scripts in one process, since importing torch takes longer than they do; prints a line of JSON for each.
SEVERAL = """
import contextlib, io, json, os, runpy, sys
broken, *scripts = sys.argv[1:]
if broken == "broken":  # PyTorch's checkpoint in the place of ours, on one rank
    import torch.utils.checkpoint
    import transformer_engine_ext.pytorch as package
    package.te_checkpoint = lambda f, *args, use_reentrant=False: torch.utils.checkpoint.checkpoint(
        f, *args, use_reentrant=use_reentrant
    )
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
for script in scripts:
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code
    print("RAN", json.dumps([code, output.getvalue(), errors.getvalue()]))
"""


def several(how: str, *names: str) -> list[tuple[int, str, str]]:
    """Return exit code, standard output and standard error of some scripts."""
    output = python("-c", SEVERAL, how, *(str(EXAMPLES / name) for name in names)).stdout
    found = [tuple(json.loads(line)) for line in re.findall(r"^RAN (.*)$", output, re.MULTILINE)]
    assert len(found) == len(names), output
    return found


def test_alone_on_this_machine() -> None:
    """Without what it needs an example says so and succeeds; with it, it must do what it says."""
    graphs, megatron, tp, fsdp = several(
        "as they are", "cuda_graph_recompute.py", "megatron_patch.py", "tp_dropout.py", "pytorch_fsdp2.py"
    )
    assert graphs[0] == megatron[0] == 0, (graphs, megatron)
    if torch.cuda.is_available():
        assert graphs[1].count(": 0 of 4096") == 5, graphs
        assert "skipped: " in megatron[1] or "after patch(): 0 of 4096" in megatron[1], megatron
    else:
        for _, output, _ in (graphs, megatron):
            assert re.fullmatch(r"skipped: no CUDA device here.*\n", output)
    # Those for several ranks, started without torchrun.
    for name, (code, _, errors) in {"tp_dropout.py": tp, "pytorch_fsdp2.py": fsdp}.items():
        assert code == 2
        assert f"torchrun --nproc_per_node=2 examples/{name}" in errors


def test_examples_fail_where_the_recompute_is_wrong() -> None:
    for code, output, _ in several("broken", "tp_dropout.py", "pytorch_fsdp2.py"):
        assert code == 1
        assert "WRONG" in output


# A kernel would pull in a hundred packages to do what exec does: run the cells one after the other in one namespace.
# Twice: as they are, and with PyTorch's checkpoint in the place of ours.
EXECUTE = """
import json, sys, traceback, warnings
warnings.simplefilter("error")
with open(sys.argv[1]) as file:
    cells = [cell for cell in json.load(file)["cells"] if cell["cell_type"] == "code"]
for broken in (False, True):
    names = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(cells):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            if broken and number == 0:
                names["te_checkpoint"] = lambda f, x: names["torch_checkpoint"](f, x, use_reentrant=False)
    except Exception:
        print("FAILED", traceback.format_exc())
    print("----")
"""


def test_notebook_runs_and_fails_where_the_recompute_is_wrong() -> None:
    pytest.importorskip("matplotlib")
    right, wrong, _ = python("-c", EXECUTE, str(NOTEBOOK)).stdout.split("----\n")
    assert re.search(r"^te_checkpoint +0 of 576 elements differ$", right, re.MULTILINE), right
    assert right.endswith("exact in all 40 steps\n"), right
    assert "FAILED" in wrong
    assert "AssertionError" in wrong


def test_notebook_is_valid_and_shows_what_it_prints() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(notebook)
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert any("exact in all 40 steps" in "".join(output.get("text", "")) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
