# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``te-ext demo``: train a tensor-parallel GPT with and without checkpointing, and show that nothing differs."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformer_engine_ext.cli import demo_report
from transformer_engine_ext.cli.demo_config import CONTRAST, REFERENCE, ModelSize
from transformer_engine_ext.cli.endings import end_on_signals

__all__ = ["add_parser"]

#: Version of what ``--json`` prints.
JSON_VERSION = 1

#: Exit codes besides 0: an arm came out otherwise than it must; a rank died or failed. (2: bad arguments.)
EXIT_WRONG = 1
EXIT_FAILED = 3

_EPILOG = """
Exit codes: 0 every arm came out as it must, 1 one did not, 2 wrong arguments, 3 a rank died or failed.
"""

_TITLES = {
    REFERENCE: "no checkpointing",
    "reentrant": "te_checkpoint, reentrant",
    "non-reentrant": "te_checkpoint, non-reentrant",
    "resumed": "stopped half-way, resumed in new processes",
    CONTRAST: "live handles, as Transformer Engine 2.20.2",
}
# The arm that stops uses one engine before and the other after, so that both are saved from and resumed into.
_BEFORE, _AFTER = "reentrant", "non-reentrant"

_SEED = 1234
_MIN_STEPS = 4


def add_parser(commands: Any) -> None:
    """Add the ``demo`` command to the sub-parsers of ``te-ext``."""
    parser = commands.add_parser(
        "demo",
        help="train a tensor-parallel GPT with and without checkpointing and compare every gradient",
        description=str(__doc__).replace("``", ""),
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    divisors = ", ".join(map(str, _divisors(ModelSize().heads)))
    parser.add_argument(
        "--nproc", type=int, default=2, metavar="N", help=f"tensor-parallel ranks, one of {divisors} (default: 2)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=30,
        metavar="N",
        help=f"training steps per arm, at least {_MIN_STEPS} (default: 30)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the demo; returns the exit code."""
    # torch is imported only now, so that `te-ext --help` and a mistyped option answer at once.
    import torch

    from transformer_engine_ext.cli.demo_launch import Launcher
    from transformer_engine_ext.errors import PeerFailureError

    size = ModelSize()
    divisors = _divisors(size.heads)
    if arguments.nproc not in divisors:
        parser.error(f"--nproc must divide the model's {size.heads} heads, so one of {divisors}; got {arguments.nproc}")
    if arguments.steps < _MIN_STEPS:
        parser.error(f"--steps must be at least {_MIN_STEPS}, to have two halves of some steps; got {arguments.steps}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device here (torch.cuda.is_available() is False)")
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # NCCL wants a GPU per rank; ranks that share one exchange CUDA tensors through gloo.
    backend = "nccl" if device == "cuda" and torch.cuda.device_count() >= arguments.nproc else "gloo"
    config = {
        "device": device,
        "backend": backend,
        "nproc": arguments.nproc,
        "steps": arguments.steps,
        "seed": _SEED,
        "size": asdict(size),
        "engine_before": _BEFORE,
        "engine_after": _AFTER,
    }
    started = time.monotonic()
    progress = sys.stderr.isatty() and not arguments.json
    if not progress and not arguments.json:
        # Without a bar nothing would show for half a minute.
        print(
            f"te-ext demo: {arguments.nproc} ranks ({backend}, {device}) train {len(_TITLES)} arms of "
            f"{arguments.steps} steps; the result comes when all have ended",
            file=sys.stderr,
            flush=True,
        )
    # The signals' context outside: it must still be there when the folder and the ranks are cleared away.
    with end_on_signals(), tempfile.TemporaryDirectory(prefix="te-ext-demo-") as folder:
        try:
            with Launcher(Path(folder), config, progress=progress) as launcher:
                launches = [launcher.run(), launcher.run()]
        except PeerFailureError as failure:
            return _print_failure(config, str(failure), as_json=arguments.json)
    results = demo_report.merge(launches, _TITLES)
    passed = demo_report.judge(results)
    seconds = time.monotonic() - started
    if arguments.json:
        arms = [result.to_json() for result in results]
        _print_json(config, passed=passed, error=None, seconds=round(seconds, 1), arms=arms)
    else:
        _print_report(config, results, passed=passed, seconds=seconds)
    return 0 if passed else EXIT_WRONG


def _print_failure(config: dict[str, Any], message: str, *, as_json: bool) -> int:
    if as_json:
        _print_json(config, passed=False, error=message, seconds=None, arms=[])
    else:
        print(f"te-ext demo: {message}", file=sys.stderr)
    return EXIT_FAILED


def _print_json(config: dict[str, Any], **fields: Any) -> None:
    print(json.dumps({"format": "te-ext.demo", "version": JSON_VERSION, **config, **fields}, indent=2))


def _print_report(
    config: dict[str, Any], results: list[demo_report.ArmResult], *, passed: bool, seconds: float
) -> None:
    import torch

    from transformer_engine_ext.cli.demo_text import SOURCE

    size = config["size"]
    print(
        f"{config['nproc']} tensor-parallel ranks ({config['backend']}, {config['device']}, torch {torch.__version__}) "
        f"train a GPT of {size['layers']} layers, hidden {size['hidden']},\n{size['heads']} heads, dropout "
        f"{size['dropout']}, for {config['steps']} steps per arm, all from seed {config['seed']}.\nText: {SOURCE}.\n"
    )
    rows = demo_report.table_rows(results)
    if not _print_rich_table(rows):
        print(demo_report.format_table(demo_report.HEADINGS, rows))
    print(
        f"\nGradients of all {config['steps']} steps and ranks, compared bit for bit with the first arm. The resumed "
        f"arm used the\n{_BEFORE} engine before it stopped and the {_AFTER} one after."
    )
    print(f"{'PASS' if passed else 'FAIL'} in {seconds:.1f} s")


def _print_rich_table(rows: list[tuple[str, ...]]) -> bool:
    """Print the table with rich, if it is installed and this is a terminal that is wide enough."""
    if not sys.stdout.isatty():
        return False
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Column, Table
    except ImportError:
        return False
    console = Console()
    # rich would cut words where columns get narrow; lines may break between words only.
    words = [
        max(len(word) for row in (demo_report.HEADINGS, *rows) for word in row[column].split())
        for column in range(len(demo_report.HEADINGS))
    ]
    if console.width < sum(words) + len(words) - 1:
        return False
    columns = [Column(heading, min_width=width) for heading, width in zip(demo_report.HEADINGS, words, strict=True)]
    table = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, padding=0, leading=1)
    for row in rows:
        table.add_row(*row, style="bold red" if "FAIL" in row[-1] else None)
    console.print(table)
    return True
