# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""For the tests of code that uses this package: the pytest fixture ``rng_guard``.

pytest finds it by itself once the package is installed; see :mod:`transformer_engine_ext.testing.pytest_plugin`.
"""
