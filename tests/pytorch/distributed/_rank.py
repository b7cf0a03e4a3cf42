# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a script as a rank of `_helpers.run_distributed`: ``_rank.py SCRIPT ARGUMENTS``."""

from __future__ import annotations

import io
import os
import runpy
import sys
from pathlib import Path

# Note [Ranks write whole lines and end at once]
# torchrun starts Python without buffers, so that print() writes a line and its end one after the other, and on a busy
# machine another rank's line comes in between: here each line is one write. And torch leaves threads of gloo behind
# when a process group is destroyed; one that lets go of a tensor while the interpreter is taken down ends the process
# with "terminate called without an active exception", rarely, but more often the busier the machine is. A rank that is
# done ends without being taken down.
if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(write_through=False, line_buffering=True)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
