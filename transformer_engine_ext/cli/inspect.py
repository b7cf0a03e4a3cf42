# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``te-ext inspect``: what a saved state holds, rank by rank, or what changed between two.

PATH is a file of ParallelRNG.save(), a folder of torch.distributed.checkpoint that has a ParallelRNG in it, or a
checkpoint of Megatron (model_optim_rng.pt, or a folder). Nothing that a file names is imported or run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from typing import Any

__all__ = ["add_parser"]

#: Version of what ``--json`` prints.
JSON_VERSION = 1

#: Exit codes besides 0: collisions or disagreements, or two paths that differ; a path cannot be read. (2: arguments.)
EXIT_FOUND = 1
EXIT_FAILED = 3

_EPILOG = "Exit codes: 0 all as declared (two paths: alike), 1 not so, 2 wrong arguments, 3 a path cannot be read"


def add_parser(commands: Any) -> None:
    """Add the ``inspect`` command to the sub-parsers of ``te-ext``."""
    parser = commands.add_parser(
        "inspect",
        help="show the random-number streams in a saved state, or compare two",
        description=str(__doc__).replace("``", ""),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="what to show")
    parser.add_argument("other", metavar="PATH2", nargs="?", help="say what changed from PATH to this one")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--all", action="store_true", help="do not shorten the table of a large job")
    parser.add_argument("--plot", metavar="FILE", help="draw positions of ranks x streams (.png, .svg, .pdf)")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command; returns the exit code."""
    if arguments.plot and arguments.other:
        parser.error("--plot draws one PATH; leave PATH2 out")
    # torch is imported only now, so that `te-ext --help` and a mistyped option answer at once.
    from transformer_engine_ext.cli import inspect_diff, inspect_load, inspect_report
    from transformer_engine_ext.errors import TEExtError

    paths = [path for path in (arguments.path, arguments.other) if path is not None]
    try:
        saved = [inspect_load.load(path) for path in paths]
        if len(saved) == 2:
            difference = inspect_diff.compare(*saved)
            _print_difference(paths, difference, as_json=arguments.json)
            return EXIT_FOUND if difference else 0
        report = inspect_report.examine(saved[0])
        if arguments.plot:
            _draw(report, arguments.plot, parser)
    except (OSError, TEExtError) as error:
        if arguments.json:
            _print_json(paths, error=str(error))
        else:
            print(f"te-ext inspect: {_visible(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    if arguments.json:
        _print_json(paths, report=report.to_json())
    else:
        _print_report(report, shorten=not arguments.all)
    return EXIT_FOUND if report.problems else 0


def _draw(report: Any, path: str, parser: argparse.ArgumentParser) -> None:
    from transformer_engine_ext.cli import inspect_plot

    try:
        inspect_plot.draw(report, path)
    except ImportError as error:
        parser.error(f"--plot needs matplotlib ({error}): pip install matplotlib")
    except ValueError as error:
        parser.error(f"--plot {path}: {error}")
    print(f"te-ext inspect: wrote {path}", file=sys.stderr)


def _print_json(paths: list[str], **fields: Any) -> None:
    known: dict[str, Any] = {"error": None, "report": None, "difference": None}
    print(
        json.dumps({"format": "te-ext.inspect", "version": JSON_VERSION, "paths": paths, **known, **fields}, indent=2)
    )


#: Lines per stream of a shortened table.
_MOST_GROUPS = 8


def _print_report(report: Any, *, shorten: bool) -> None:
    sizes = " x ".join(f"{axis}={size}" for axis, size in report.axes.items()) or "no axes"
    print(f"{_visible(report.path)}: {report.kind}")
    print(f"  {report.ranks} rank{'s' * (report.ranks != 1)}: {_visible(sizes)}")
    seed = "not saved" if report.seed is None else str(report.seed)
    again = f", derived anew {report.generation} times since" if report.generation else ""
    print(f"  seed of the job: {seed}; derivation: {_visible(report.derivation)}{again}\n")
    rows, marked = _rows(report, shorten=shorten)
    if not _print_rich(rows, marked):
        _print_plain(rows)
    if any(cell.startswith("#") for row in rows for cell in row):
        print("\n#...: digest of a state that does not tell a position, or of one of too many to count")
    if report.problems:
        print("\nNot as declared, marked with !:")
        for problem in report.problems:
            print(_wrap(f"- {problem.text}", indent="  "))
    else:
        print("\nNo collisions, and all ranks agree as declared.")


_HEADINGS = ("", "stream", "varies over", "seed", "position", "ranks")


def _rows(report: Any, *, shorten: bool) -> tuple[list[tuple[str, ...]], list[bool]]:
    from transformer_engine_ext.cli.inspect_report import name_ranks

    rows: list[tuple[str, ...]] = [_HEADINGS]
    marked = [False]
    for stream in report.streams:
        groups = sorted(stream.groups, key=lambda group: (not group.marked, group.ranks[0]))
        shown = groups[:_MOST_GROUPS] if shorten else groups
        shown = sorted(shown, key=lambda group: group.ranks[0])
        varies = "unknown" if stream.varies_over is None else ", ".join(stream.varies_over) or "-"
        for number, group in enumerate(shown):
            position = f"#{group.digest}" if group.position is None else f"{group.position:,}"
            seed = "-" if group.seed is None else str(group.seed)
            names = (_visible(stream.name), _visible(varies)) if number == 0 else ("", "")
            ranks = "all" if len(group.ranks) == report.ranks else name_ranks(group.ranks, most=4).partition(" ")[2]
            rows.append(("!" if group.marked else "", *names, seed, position, ranks))
            marked.append(group.marked)
        if len(groups) > len(shown):
            rows.append(("", "", "", f"... {len(groups) - len(shown)} more (--all)", "", ""))
            marked.append(False)
    return rows, marked


def _print_plain(rows: list[tuple[str, ...]]) -> None:
    """Print columns that fit 80 characters for names of usual length; the last one is wrapped."""
    fixed = [max(len(row[column]) for row in rows if "more (" not in row[3]) for column in range(len(rows[0]) - 1)]
    room = max(12, _columns() - sum(fixed) - 2 * len(fixed))
    for row in rows:
        lines = textwrap.wrap(row[-1], room) or [""]
        cells = [
            cell.rjust(width) if column in (3, 4) and "more (" not in cell else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, fixed, strict=False))
        ]
        print("  ".join([*cells, lines[0]]).rstrip())
        for line in lines[1:]:
            print(" " * (sum(fixed) + 2 * len(fixed)) + line)


def _print_rich(rows: list[tuple[str, ...]], marked: list[bool]) -> bool:
    """Print the table with rich, if it is installed and this is a terminal."""
    if not sys.stdout.isatty():
        return False
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table()
    for column, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if column in (3, 4) else "left", overflow="fold")
    for row, mark in zip(rows[1:], marked[1:], strict=True):
        table.add_row(*map(Text, row), style="bold red" if mark else None)
    Console().print(table)
    return True


def _print_difference(paths: list[str], difference: Any, *, as_json: bool) -> None:
    from transformer_engine_ext.cli.inspect_report import name_ranks

    if as_json:
        _print_json(paths, difference={**difference.to_json(), "equal": not difference})
        return
    print(_visible(f"{paths[0]} -> {paths[1]}"))
    if not difference:
        print("No difference: every rank's streams stand where they stood.")
        return
    for name, (before, after) in difference.facts.items():
        print(_wrap(f"{name}: {_fact(before)} -> {_fact(after)}", indent="  "))
    if not difference.same_ranks:
        print(_wrap("Another layout, so states are compared as sets, not rank by rank.", indent="  "))
    for change in difference.changes:
        print(_wrap(f"{change.stream}: {change.what}, {name_ranks(change.ranks)}", indent="  "))


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return " x ".join(f"{axis}={size}" for axis, size in value.items()) or "no axes"
    return str(value)


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(_visible(text), _columns(), initial_indent=indent, subsequent_indent=indent + "  ")


def _visible(text: str) -> str:
    """Return text whose control characters are written out: names come from a file, and would drive the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _columns() -> int:
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() or "COLUMNS" in os.environ else 80
