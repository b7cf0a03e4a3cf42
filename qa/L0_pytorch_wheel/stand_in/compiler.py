# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Takes a compiler's arguments and writes a file that is no library."""

from __future__ import annotations

import pathlib
import sys

if __name__ == "__main__":
    pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("no library\n")
