# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``python -m transformer_engine_ext``: the same as the ``te-ext`` command."""

from __future__ import annotations

import sys

from transformer_engine_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())
