# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``te-ext demo`` from end to end: what it prints, its exit codes, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from _helpers import REPO, _descendants, requires_cuda
from transformer_engine_ext.cli import main
from transformer_engine_ext.cli.demo_text import load_corpus

STEPS = 4
EXACT = ["none", "reentrant", "non-reentrant", "resumed"]


@pytest.fixture(autouse=True)
def workers_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])))


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["demo", "--steps", str(STEPS), "--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=requires_cuda)])
def test_d9_demo_passes(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run_json(capsys, "--device", device)
    assert (output["format"], output["version"], output["error"]) == ("te-ext.demo", 1, None)
    assert (output["device"], output["nproc"], output["steps"]) == (device, 2, STEPS)
    assert (code, output["passed"]) == (0, True), output
    arms = {arm["name"]: arm for arm in output["arms"]}
    assert list(arms) == [*EXACT, "live handles"]
    regions = output["size"]["layers"] * STEPS * 2  # over both ranks
    for name in EXACT:
        assert arms[name]["mismatching_elements"] == 0
        assert arms[name]["max_loss_difference"] == 0.0
        assert arms[name]["final_loss"] == arms["none"]["final_loss"]
        assert arms[name]["streams_equal"]
        assert arms[name]["recomputes"] == (0 if name == "none" else regions)
    contrast = arms["live handles"]
    assert contrast["recomputes"] == regions
    assert contrast["first_mismatching_step"] == 0
    assert contrast["mismatching_elements"] > contrast["gradient_elements"] // 10
    assert {arm["gradient_elements"] for arm in arms.values()} == {contrast["gradient_elements"]}


# Imported by every Python process that starts with this folder on its path; changes the demo's workers only.
SABOTAGE = """
import sys
if any("cli.demo_worker" in argument for argument in sys.orig_argv):
    from transformer_engine_ext.cli import demo_arms
    right, wrong = demo_arms.te_checkpoint, demo_arms.live_handle_checkpoint
    def te_checkpoint(block, x, *, use_reentrant, get_rng_state_tracker, **options):
        if use_reentrant:
            return wrong(block, get_rng_state_tracker(), x)  # recomputes with other numbers
        return block(x)  # does not recompute at all
    def live_handle_checkpoint(block, tracker, x):
        return right(block, x, use_reentrant=True, get_rng_state_tracker=lambda: tracker)
    demo_arms.te_checkpoint, demo_arms.live_handle_checkpoint = te_checkpoint, live_handle_checkpoint
"""


def test_a_broken_engine_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    code = main(["demo", "--steps", str(STEPS), "--device", "cpu"])
    table = capsys.readouterr().out
    assert code == 1, table
    expected = {
        "no checkpointing": "exact",
        "te_checkpoint, reentrant": "FAIL: gradients differ from step 0 on",
        "te_checkpoint, non-reentrant": "FAIL: 0 recomputes instead of 16",
        "stopped half-way": "FAIL: 8 recomputes instead of 16",
        "live handles": "FAIL: no mismatch, so this run proves nothing",
    }
    for start, verdict in expected.items():
        assert [line.endswith(verdict) for line in table.splitlines() if line.startswith(start)] == [True], table
    assert "\nFAIL in " in table
    assert "Declaration of Independence" in table


def test_f2_a_dead_rank_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NVTE_EXT_TEST_DIE_AT", "0:1")
    started = time.monotonic()
    code = main(["demo", "--steps", str(STEPS), "--device", "cpu"])
    assert time.monotonic() - started < 60
    captured = capsys.readouterr()
    assert code == 3
    assert captured.out == ""
    assert "rank 0 of 2 died, killed by signal 9 (SIGKILL)" in captured.err
    assert "PeerFailureError: rank 1 of 2 stopped in arm 'none' at step 1" in captured.err
    assert "one is gone: rank 0 died, killed by signal 9" in captured.err
    assert _descendants(os.getpid()) == []


def _running(pid: int) -> bool:
    try:
        # A zombie, which only its new parent can reap, runs no more.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_orphans(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, here = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    # As the te-ext command starts, whose folder the user's own modules may lie in; no rank may take them for others.
    (here / "queue.py").write_text("raise RuntimeError('this is not the queue of the standard library')")
    start = "import sys; sys.path.remove(''); from transformer_engine_ext.cli import main; sys.exit(main())"
    launcher = subprocess.Popen(
        [sys.executable, "-c", start, "demo", "--device", "cpu", "--steps", "100000"],
        cwd=here,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell lets its background jobs ignore SIGINT, this test among them, and the demo would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 60
        while len(ranks := _descendants(launcher.pid)) < 2:
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)
        launcher.send_signal(number)
        output, errors = launcher.communicate(timeout=30)
        assert launcher.returncode == (128 + number if number != signal.SIGKILL else -number), errors
        assert output == b""
        first, *last = errors.decode().splitlines()
        assert first == (
            "te-ext demo: 2 ranks (gloo, cpu) train 5 arms of 100000 steps; the result comes when all have ended"
        )
        assert (
            last
            == {
                signal.SIGINT: ["te-ext: interrupted"],
                signal.SIGTERM: ["te-ext: ended by SIGTERM"],
                signal.SIGKILL: [],
            }[number]
        )
        deadline = time.monotonic() + 20
        while any(map(_running, ranks)):
            assert time.monotonic() < deadline, "ranks outlived the launcher"
            time.sleep(0.1)
        if number != signal.SIGKILL:
            assert list(temporary.iterdir()) == []
    finally:
        for pid in [launcher.pid, *_descendants(launcher.pid)]:
            if _running(pid):
                os.kill(pid, signal.SIGKILL)
        launcher.communicate()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nproc", "3"], "--nproc must divide the model's 4 heads, so one of [1, 2, 4]; got 3"),
        (["--nproc", "0"], "got 0"),
        (["--nproc", "two"], "invalid int value: 'two'"),
        (["--steps", "3"], "--steps must be at least 4"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", *arguments])
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert text in captured.err
    assert captured.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--device", "cuda"])
    assert caught.value.code == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err


def test_help_and_version_answer_without_torch() -> None:
    script = (
        "import sys\nfrom transformer_engine_ext.cli import main\n"
        "try: main([{!r}])\nexcept SystemExit as stop: code = stop.code\n"
    )
    for option, expected in {"--help": "demo", "--version": "transformer-engine-ext 0"}.items():
        check = script.format(option) + "assert 'torch' not in sys.modules and code == 0"
        output = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True).stdout
        assert expected in output


def test_help_names_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "tensor-parallel ranks, one of 1, 2, 4 (default: 2)" in text
    assert "training steps per arm, at least 4 (default: 30)" in text


def test_corpus_batches_are_excerpts_and_cost_no_stream() -> None:
    corpus = load_corpus()
    text = "".join(corpus.alphabet[token] for token in corpus.tokens.tolist())
    assert len(text) > 15_000
    before = torch.get_rng_state()
    tokens, targets = corpus.batch(3, 20, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    for row, shifted in zip(tokens.tolist(), targets.tolist(), strict=True):
        excerpt = "".join(corpus.alphabet[token] for token in [*row, shifted[-1]])
        assert excerpt in text
        assert row[1:] == shifted[:-1]
    again, _ = corpus.batch(3, 20, seed=5)
    assert torch.equal(again, tokens)
    assert not torch.equal(corpus.batch(3, 20, seed=6)[0], tokens)
