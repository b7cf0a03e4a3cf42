# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""A process of the demo, started by its launcher."""

from __future__ import annotations

import os
import sys
import threading


# Note [The demo leaves no process behind]
# Every rank reads its standard input, a pipe that the launcher holds open and never writes to. When the launcher ends,
# however it ends, the pipe closes and the rank ends itself.
def end_with_the_launcher() -> None:
    """Start the thread that waits for the launcher's end."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(config: str, rank: int) -> None:
    """Run one rank, and end the process."""
    end_with_the_launcher()  # before torch is imported, which takes seconds
    from transformer_engine_ext.cli.demo_rank import run_rank

    code = run_rank(config, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread that is inside the store's C++ while the interpreter is taken down ends the process with
    # "terminate called without an active exception", a finished rank among them.
    os._exit(code)
