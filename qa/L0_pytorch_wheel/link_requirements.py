# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Link all that is installed here, but this package, into a folder: ``python3 link_requirements.py FOLDER``."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

#: Beginnings of names: this package, ways to find it in a checkout, and what an environment must bring itself.
LEFT_OUT = (
    "transformer_engine_ext",
    "__editable__",
    "pip",
    "setuptools",
    "pkg_resources",
    "_distutils_hack",
    "_virtualenv",
)


def main() -> None:
    """Make the folder."""
    folder = Path(sys.argv[1])
    folder.mkdir()
    for site in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
        for entry in Path(site).iterdir():
            if entry.suffix != ".pth" and not entry.name.startswith(LEFT_OUT):
                (folder / entry.name).symlink_to(entry)


if __name__ == "__main__":
    main()
