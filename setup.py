# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Native parts only; everything else about the package is static and lies in pyproject.toml."""

from setuptools import Extension, setup

# Pure Python so far, so that an isolated build never compiles against another torch than the user's.
EXT_MODULES: list[Extension] = []

setup(ext_modules=EXT_MODULES)
