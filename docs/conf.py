# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Sphinx: ``python -m sphinx -b html docs docs/_build/html``, or ``bash qa/L0_pytorch_docs/test.sh``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from transformer_engine_ext import __version__  # noqa: E402 - found by the path above

project = "transformer-engine-ext"
author = "transformer-engine-ext authors"
project_copyright = f"2026, {author}"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "rules"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# The types are in the signatures' text in the words of the docstrings, with shapes and units.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "alabaster"
html_theme_options = {"description": "Activation checkpointing, exact in its random numbers", "page_width": "70em"}
html_show_sourcelink = False
html_show_sphinx = False
