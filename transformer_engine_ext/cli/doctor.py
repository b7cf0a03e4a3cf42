# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``te-ext doctor``: what is installed, what ``patch()`` would do, and whether recomputes are exact here."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_engine_ext.cli.doctor_probe import Row

__all__ = ["EXIT_UNTESTED", "EXIT_WRONG", "add_parser"]

#: Exit codes: 0 right as configured; something is wrong; what was asked for could not be tested.
EXIT_WRONG, EXIT_UNTESTED = 1, 2

#: Of the JSON that --json prints; raised when a field changes its meaning or goes.
JSON_VERSION = 1

_EPILOG = """
Exit codes: 0 right as configured, 1 wrong, 2 could not be tested. Without --expect, what is judged is this package's
own checkpoint, and the installed ones as patch() makes them where they can be probed. With --expect patched or
unpatched, the installed Transformer Engine and Megatron-core must be there, and exact in that state.
"""


def add_parser(commands: Any) -> None:
    """Add the command to ``te-ext``."""
    parser = commands.add_parser(
        "doctor", help="show what is installed and whether recomputes are exact on this machine", epilog=_EPILOG
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to probe")
    parser.add_argument("--expect", choices=("patched", "unpatched"), help="judge the installed packages in this state")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--junitxml", type=Path, metavar="FILE", help="also write the probes as a JUnit file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw forward and recompute masks (matplotlib)")
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    import torch  # only now, so that `te-ext --help` answers at once

    from transformer_engine_ext.cli import doctor_probe, doctor_report
    from transformer_engine_ext.cli.doctor_environment import environment
    from transformer_engine_ext.integrations.patching import patch, patched, unpatch
    from transformer_engine_ext.integrations.probing import installed_subjects

    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device here (torch.cuda.is_available() is False)")
    if arguments.plot is not None:
        problem = doctor_report.plot_problem()
        if problem:
            print(f"te-ext doctor: {problem}", file=sys.stderr)
            return EXIT_UNTESTED
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[Row] = []
    found = environment()
    subjects, reasons = installed_subjects() if device == "cuda" else ([], _not_on_cpu(found["packages"]))
    rows += doctor_probe.probe([doctor_probe.own_subject(device)], "-", device)
    control = doctor_probe.probe_one(doctor_probe.contrast(device), "-", True, "tracked", "eager", device)
    unpatch()
    rows += doctor_probe.probe(subjects, "unpatched", device)
    with patched() as report:
        rows += doctor_probe.probe(subjects, "patched", device)
        report = patch()
    untested = [f"{package}: {reason}" for package, reason in reasons.items()]
    if device == "cpu":
        untested.append("CUDA streams and CUDA graphs: need a CUDA device (--device cuda)")
    verdict, why = doctor_report.judge(rows, control, arguments.expect, bool(subjects))
    document = {
        "format": "te-ext.doctor",
        "version": JSON_VERSION,
        **found,
        "device": device,
        "patch": report.to_dict(),
        "probe": [doctor_report.to_json(row) for row in rows],
        "control": doctor_report.to_json(control),
        "untested": untested,
        "expect": arguments.expect,
        "verdict": verdict,
        "why": why,
    }
    if arguments.junitxml is not None:
        doctor_report.write_junit(arguments.junitxml, rows, arguments.expect, untested)
    if arguments.plot is not None:
        doctor_report.plot(arguments.plot, rows, control)
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        print(doctor_report.text(document, str(report), rows, control))
    return {"right": 0, "wrong": EXIT_WRONG, "untested": EXIT_UNTESTED}[verdict]


def _not_on_cpu(packages: dict[str, dict[str, str | None]]) -> dict[str, str]:
    reasons = {}
    for package, state in packages.items():
        why = state["reason"] or "its checkpoint needs CUDA, and the probe runs on the CPU"
        reasons[package] = "not installed" if state["version"] is None else why
    return reasons
