# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The ``te-ext`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from transformer_engine_ext import __version__
from transformer_engine_ext.cli import demo, doctor, inspect, run_script
from transformer_engine_ext.cli.endings import run_to_an_end

__all__ = ["main"]

_EPILOG = """
te-ext COMMAND --help tells a command's options and exit codes. What ends one from outside shows as in a shell: 129
(SIGHUP), 130 (Ctrl-C), 141 (nobody reads the output any more), 143 (SIGTERM).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``te-ext``.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; default: those of the process.

    Returns
    -------
    int
        The exit code; 129 after SIGHUP, 130 after Ctrl-C, 141 if nobody reads the output any more, 143 after SIGTERM.

    Raises
    ------
    SystemExit
        With code 2 after bad arguments, with 0 after ``--help`` and ``--version``.
    """
    parser = argparse.ArgumentParser(
        prog="te-ext", description="Activation checkpointing that is exact in its random numbers.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"transformer-engine-ext {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    demo.add_parser(commands)
    inspect.add_parser(commands)
    doctor.add_parser(commands)
    run_script.add_parser(commands)
    arguments = parser.parse_args(argv)
    return run_to_an_end(lambda: int(arguments.run(arguments)), "te-ext")
