# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""How ``te-ext`` ends when it is interrupted or nobody reads its output, and how the demo's table fits a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from _helpers import REPO
from transformer_engine_ext.cli import demo, demo_report
from transformer_engine_ext.cli.demo_report import ArmResult
from transformer_engine_ext.cli.endings import end_on_signals, run_to_an_end


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which ``te_ext`` is the command."""
    start = f'te_ext() {{ {sys.executable} -m transformer_engine_ext "$@"; }}; {command}'
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.run(["bash", "-c", start], env=env, cwd="/", capture_output=True, text=True, timeout=120)


PRINTS = """
import sys
from transformer_engine_ext.cli.endings import run_to_an_end
sys.exit(run_to_an_end(lambda: [print('x' * 99) for _ in range(9999)] and 0, 'te-ext'))
"""


@pytest.mark.parametrize("reader", ["head -n 1", "true"])
def test_reader_that_goes(reader: str, tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    result = shell(f"{sys.executable} {tmp_path}/prints.py | {reader} > /dev/null; echo code ${{PIPESTATUS[0]}}")
    assert result.stdout == "code 141\n"
    assert result.stderr == ""


def test_other_broken_pipes_stay_errors() -> None:
    def command() -> int:
        raise BrokenPipeError("of a script that te-ext runs")

    with pytest.raises(BrokenPipeError, match="of a script"):
        run_to_an_end(command, "te-ext")


def test_closed_descriptors() -> None:
    """The demo asks its streams whether they are terminals, and starts processes."""
    result = shell("NVTE_EXT_TEST_DIE_AT=0:0 te_ext demo --device cpu --steps 4 >&- 2>&- <&-; echo code $?")
    assert result.stdout == "code 3\n", result
    assert result.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_unwind_and_handlers_come_back(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    steps: list[str] = []

    def command() -> int:
        with end_on_signals():
            try:
                signal.raise_signal(number)
                steps.append("never")
            finally:
                signal.raise_signal(number)  # a second one is not heard
                steps.append("cleared away")
        return 0

    try:
        assert run_to_an_end(command, "te-ext") == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert steps == ["cleared away"]
    assert capsys.readouterr().err == f"te-ext: ended by {number.name}\n"


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with end_on_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_may_run_commands_too() -> None:
    codes: list[int] = []

    def command() -> int:
        with end_on_signals():
            return 7

    thread = threading.Thread(target=lambda: codes.append(run_to_an_end(command, "te-ext")))
    thread.start()
    thread.join()
    assert codes == [7]


def interrupted() -> int:
    raise KeyboardInterrupt


def test_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_to_an_end(interrupted, "te-ext") == 130
    assert capsys.readouterr().err == "te-ext: interrupted\n"


def results() -> list[ArmResult]:
    numbers: dict[str, Any] = {"final_loss": 2.83, "max_loss_difference": 0.0416, "gradient_elements": 3_640_320}
    numbers |= {"mismatching_elements": 3_514_056, "first_mismatching_step": 0, "recomputes": 120, "regions": 120}
    titles = ["stopped half-way, resumed in new processes", "live handles, as Transformer Engine 2.20.2"]
    return [ArmResult(f"arm {i}", title, streams_equal=True, **numbers) for i, title in enumerate(titles)]


@pytest.mark.parametrize("width", [40, 80, 132, 240])
def test_words_of_the_table_are_never_cut(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    rows = demo_report.table_rows(results())
    printed = demo._print_rich_table(rows)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert printed == (width >= 80), "else it is printed without rich"
    if printed:
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        for row in (demo_report.HEADINGS, *rows):
            for word in " ".join(row).split():
                assert word in text, text
        assert max(map(len, text.splitlines())) <= width
