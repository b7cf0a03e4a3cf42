# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's judgement: what it compares, what it adds up, and what it must not let pass."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import torch

from transformer_engine_ext.cli import demo
from transformer_engine_ext.cli.demo_arms import Trace, compare
from transformer_engine_ext.cli.demo_config import CONTRAST, REFERENCE
from transformer_engine_ext.cli.demo_report import HEADINGS, ArmResult, format_table, judge, merge, table_rows

ARMS = {REFERENCE: "plain", "reentrant": "first engine", CONTRAST: "contrast"}


def arm(name: str, **changes: Any) -> ArmResult:
    """Return an arm as it must come out."""
    right: dict[str, Any] = {
        "final_loss": 2.5,
        "max_loss_difference": 0.25 if name == CONTRAST else 0.0,
        "gradient_elements": 1000,
        "mismatching_elements": 900 if name == CONTRAST else 0,
        "first_mismatching_step": 0 if name == CONTRAST else None,
        "recomputes": 0 if name == REFERENCE else 8,
        "regions": 8,
        "streams_equal": name != CONTRAST,
    }
    return ArmResult(name=name, title=ARMS[name], **{**right, **changes})


def test_right_arms_pass() -> None:
    results = [arm(name) for name in ARMS]
    assert judge(results)
    assert [result.verdict for result in results] == ["exact", "exact", "wrong gradients, as expected"]


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("reentrant", {"mismatching_elements": 1, "first_mismatching_step": 3}, "gradients differ from step 3 on"),
        ("reentrant", {"max_loss_difference": 1e-9}, "losses differ"),
        ("reentrant", {"max_loss_difference": math.inf}, "losses differ"),
        ("reentrant", {"streams_equal": False}, "streams end elsewhere"),
        ("reentrant", {"recomputes": 0}, "0 recomputes instead of 8"),
        ("reentrant", {"recomputes": 16}, "16 recomputes instead of 8"),
        ("reentrant", {"recomputes": 0, "regions": 0}, "0 recomputes"),
        ("reentrant", {"gradient_elements": 999}, "compared 999 gradient elements instead of 1,000"),
        (REFERENCE, {"recomputes": 1}, "1 recomputes instead of 0"),
        (CONTRAST, {"mismatching_elements": 0}, "proves nothing"),
        (CONTRAST, {"recomputes": 0}, "0 recomputes instead of 8"),
    ],
)
def test_wrong_arm_fails(name: str, changes: dict[str, Any], problem: str) -> None:
    results = [arm(each, **(changes if each == name else {})) for each in ARMS]
    assert not judge(results)
    verdicts = {result.name: result.verdict for result in results}
    assert problem in verdicts[name]
    assert verdicts[name].startswith("FAIL: ")
    assert [each for each, verdict in verdicts.items() if "FAIL" in verdict] == [name]


def test_nothing_compared_is_no_success() -> None:
    assert not judge([arm(name, gradient_elements=0, mismatching_elements=0) for name in ARMS])


def trace(losses: list[float], gradients: list[list[float]], stream: int = 1) -> Trace:
    return Trace(losses, [torch.tensor(step) for step in gradients], {"default": torch.tensor([stream])}, 4, 4)


def test_compare_is_bit_for_bit() -> None:
    nan = float("nan")
    reference = trace([3.0, 2.0], [[0.0, nan, 1.0], [1.0, 2.0, 3.0]])
    assert compare(reference, reference)["mismatching_elements"] == 0
    other = compare(trace([3.0, 2.5], [[0.0, nan, 1.0], [1.0, -2.0, 3.0000002]], stream=2), reference)
    assert (other["mismatching_elements"], other["gradient_elements"], other["first_mismatching_step"]) == (2, 6, 1)
    assert other["max_loss_difference"] == 0.5
    assert other["streams_equal"] is False
    zeros = compare(trace([3.0, 2.0], [[-0.0, nan, 1.0], [1.0, 2.0, 3.0]]), reference)
    assert (zeros["mismatching_elements"], zeros["first_mismatching_step"]) == (1, 0)
    lost = compare(trace([3.0, nan], [[0.0, nan, 1.0], [1.0, 2.0, 3.0]]), reference)
    assert lost["max_loss_difference"] == math.inf


def test_compare_parts_of_a_run() -> None:
    reference = trace([3.0, 2.0, 1.0], [[1.0], [2.0], [3.0]])
    first = compare(trace([3.0], [[1.0]], stream=9), reference)
    assert first["streams_equal"] is None  # it has not arrived where the reference ended
    rest = compare(trace([2.0, 1.0], [[2.0], [4.0]]), reference, first=1)
    assert (rest["mismatching_elements"], rest["first_mismatching_step"], rest["streams_equal"]) == (1, 2, True)


def part(**changes: Any) -> dict[str, Any]:
    return {
        "losses": [3.0, 2.0],
        "max_loss_difference": 0.0,
        "gradient_elements": 10,
        "mismatching_elements": 0,
        "first_mismatching_step": None,
        "recomputes": 4,
        "regions": 4,
        "streams_equal": True,
        **changes,
    }


def test_merge_adds_up_ranks_and_launches() -> None:
    before = [{"resumed": part(streams_equal=None)}, {"resumed": part(streams_equal=None, max_loss_difference=0.5)}]
    after = [
        {"resumed": part(losses=[1.5])},
        {"resumed": part(losses=[1.5], mismatching_elements=2, first_mismatching_step=7)},
    ]
    (result,) = merge([before, after], {"resumed": "stopped and resumed"})
    assert result == ArmResult("resumed", "stopped and resumed", 1.5, 0.5, 40, 2, 7, 16, 16, True)
    (unfinished,) = merge([before], {"resumed": "stopped"})
    assert not unfinished.streams_equal


def test_rich_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    results = [arm(name) for name in ARMS]
    judge(results)
    assert not demo._print_rich_table(table_rows(results))  # the captured output is no terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert demo._print_rich_table(table_rows(results))
    lines = capsys.readouterr().out.splitlines()
    assert sum("900 of 1,000" in line and "wrong gradients, as expected" in line for line in lines) == 1


def test_table_and_json() -> None:
    results = [arm(name) for name in ARMS]
    judge(results)
    lines = format_table(HEADINGS, table_rows(results)).splitlines()
    assert len(lines) == 2 + len(ARMS)
    column = lines[0].index("mismatching gradient elements")
    assert [line[column:].split("  ")[0] for line in lines[2:]] == ["0 of 1,000", "0 of 1,000", "900 of 1,000"]
    assert json.loads(json.dumps(arm(REFERENCE, final_loss=math.nan).to_json(), allow_nan=False))["final_loss"] is None
