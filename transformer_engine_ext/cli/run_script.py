# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``te-ext run``: run a training script that is not to be touched, patched."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser"]

#: Exit code where the script was not started, as for wrong arguments.
EXIT_UNFIT = 2

_EPILOG = """
The exit code is the script's own; 2 if there is no such script, or if --strict does not let it start.

Under torchrun: torchrun [options] -m transformer_engine_ext run train.py --its-own-options. Processes that the script
starts itself are not patched; let it call transformer_engine_ext.patch() in them.
"""


def add_parser(commands: Any) -> None:
    """Add the command to ``te-ext``."""
    parser = commands.add_parser(
        "run", help="run a script with Transformer Engine and Megatron patched", epilog=_EPILOG
    )
    parser.add_argument(
        "-m", dest="as_module", action="store_true", help="SCRIPT is a module's name, as python -m takes it"
    )
    parser.add_argument("--strict", action="store_true", help="fail if something could not be patched")
    parser.add_argument("--report", action="store_true", help="print what was patched to stderr first")
    parser.add_argument("script", metavar="SCRIPT", help="a file, or a module's name with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from transformer_engine_ext.errors import PatchError
    from transformer_engine_ext.integrations.patching import patch

    script = arguments.script
    if not arguments.as_module and not Path(script).exists():
        parser.error(
            f"no such file: {script}" + ("; with -m it is taken as a module's name" if "/" not in script else "")
        )
    try:
        report = patch(strict=arguments.strict)
    except PatchError as error:
        print(f"te-ext run: {error}\n{script} was not started; without --strict it is", file=sys.stderr)
        return EXIT_UNFIT
    if arguments.report:
        print(report, file=sys.stderr)
    # What the script finds is what it would find if Python had started it.
    sys.argv = [script, *arguments.arguments]
    if arguments.as_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
    return 0
