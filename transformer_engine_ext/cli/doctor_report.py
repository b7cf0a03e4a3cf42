# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdict and its forms: text, JSON, JUnit, pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from transformer_engine_ext.cli.demo_report import format_table
from transformer_engine_ext.cli.doctor_probe import MODES, Row

__all__ = ["judge", "plot", "plot_problem", "text", "to_json", "write_junit"]


def judged(row: Row, expect: str | None) -> bool:
    """Tell whether a row counts for the verdict."""
    return row.state in ("-", expect or "patched")


def judge(rows: list[Row], control: Row, expect: str | None, installed: bool) -> tuple[str, str]:
    """Return ``"right"``, ``"wrong"`` or ``"untested"``, and why in a sentence."""
    if not control.mismatches:
        return "untested", "the control, a checkpoint that is wrong on purpose, was not seen to be wrong"
    if expect is not None and not installed:
        return "untested", f"--expect {expect}, but neither Transformer Engine nor Megatron-core can be probed here"
    counted = [row for row in rows if judged(row, expect)]
    wrong = [row for row in counted if row.mismatches is not None and not row.exact]
    if wrong:
        return "wrong", f"{len(wrong)} of {len(counted)} probes recomputed with other random numbers, or moved streams"
    failed = [row for row in counted if row.mismatches is None]
    if failed:
        return "untested", f"{len(failed)} of {len(counted)} probes could not be run; the first: {failed[0].error}"
    return "right", f"all {len(counted)} probes are exact"


def to_json(row: Row) -> dict[str, Any]:
    """Return a row as plain values."""
    return {
        "subject": row.subject,
        "state": row.state,
        "engine": row.engine,
        "stream": row.stream,
        "mode": row.mode,
        "mismatches": row.mismatches,
        "of": row.of,
        "streams_right": row.streams_right,
        "error": row.error or None,
    }


def _cell(row: Row) -> str:
    if row.mismatches is None:
        return row.error if len(row.error) <= 60 else row.error[:57] + "..."
    return f"{row.mismatches} of {row.of}" + ("" if row.streams_right else ", streams moved")


def text(document: dict[str, Any], report: str, rows: list[Row], control: Row) -> str:
    """Return everything as text."""
    lines = [f"{name} {value}" for name, value in document["versions"].items() if value is not None]
    for package, state in document["packages"].items():
        version = state["version"] or "not installed"
        lines.append(f"{package} {version}" + (f", cannot be imported: {state['reason']}" if state["reason"] else ""))
    lines.append(f"captured streams: {document['native']['how'].splitlines()[0]}")
    lines.append(f"moving streams: {document['streams']['how'].splitlines()[0]}")
    lines += [f"{name}={value}" for name, value in document["settings"].items()]
    lines += ["", "patch() would do this:", *("  " + line for line in report.splitlines()), ""]
    modes = [mode for mode in MODES if any(row.mode == mode for row in rows)]
    keys = list(dict.fromkeys((row.subject, row.state, row.engine, row.stream) for row in rows))
    cells = {(row.subject, row.state, row.engine, row.stream, row.mode): _cell(row) for row in rows}
    lines.append("Gradient elements that belong to another mask than the output:")
    lines.append(
        format_table(
            ("checkpoint", "state", "engine", "stream", *modes),
            [(*key, *(cells.get((*key, mode), "") for mode in modes)) for key in keys],
        )
    )
    lines.append(f"Control ({control.subject}, must differ): {_cell(control)}")
    lines += [f"Not tested: {reason}" for reason in document["untested"]]
    lines.append(f"{document['verdict'].upper()}: {document['why']}")
    return "\n".join(lines)


def write_junit(file: Path, rows: list[Row], expect: str | None, untested: list[str]) -> None:
    """Write one test case per probe that counts, and a skipped one for what could not be tested."""
    suite = ElementTree.Element("testsuite", name="te-ext doctor")
    failures = errors = 0
    for row in rows:
        if not judged(row, expect):
            continue
        name = f"{row.state}, {row.engine}, {row.stream}, {row.mode}"
        case = ElementTree.SubElement(suite, "testcase", classname=f"doctor.{row.subject}", name=name)
        if row.mismatches is None:
            errors += 1
            ElementTree.SubElement(case, "error", message=row.error)
        elif not row.exact:
            failures += 1
            ElementTree.SubElement(case, "failure", message=_cell(row))
    for reason in untested:
        case = ElementTree.SubElement(suite, "testcase", classname="doctor", name=reason.partition(":")[0])
        ElementTree.SubElement(case, "skipped", message=reason)
    counts = {"tests": len(suite), "failures": failures, "errors": errors, "skipped": len(untested)}
    for name, count in counts.items():
        suite.set(name, str(count))
    file.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(file, encoding="utf-8", xml_declaration=True)


def plot_problem() -> str:
    """Return why pictures cannot be drawn; "" if they can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib"
    return ""


def plot(file: Path, rows: list[Row], control: Row) -> None:
    """Draw forward mask, recompute mask and their difference, one line per checkpoint and state."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    chosen: dict[tuple[str, str], Row] = {}
    for row in (control, *rows):
        if row.masks is not None and row.stream in ("tracked", "default, then tracked"):
            chosen.setdefault((row.subject, row.state), row)
    figure, axes = pyplot.subplots(
        len(chosen), 3, figsize=(9, 3 * len(chosen) + 0.5), squeeze=False, layout="constrained"
    )
    for line, row in zip(axes, chosen.values(), strict=True):
        if row.masks is None:
            continue
        forward, recompute = (mask.reshape(64, -1).float() for mask in row.masks)
        state = "" if row.state == "-" else f", {row.state}"
        titles = (f"{row.subject}{state}\nforward", "recompute", f"difference: {_cell(row)}")
        for axis, picture, title in zip(line, (forward, recompute, (forward - recompute).abs()), titles, strict=True):
            axis.imshow(
                picture.numpy(), cmap="gray_r" if axis is not line[2] else "Reds", vmin=0, vmax=1, interpolation="none"
            )
            axis.set_title(title, fontsize=9)
            axis.set_xticks([])
            axis.set_yticks([])
    figure.suptitle("Dropout masks of one region: kept elements are dark")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
