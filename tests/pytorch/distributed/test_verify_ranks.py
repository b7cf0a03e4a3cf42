# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""d1, d2, d3, f2: verify() on two and four gloo ranks."""

from __future__ import annotations

import pytest
from _ranks import assert_case, case_names

from _helpers import run_distributed

NAMES = case_names("run_verify.py")
FOUR_ONLY = NAMES[-3:]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FOUR_ONLY])
def test_two_ranks(name: str) -> None:
    assert_case("run_verify.py", 2, name)


@pytest.mark.parametrize("name", NAMES)
def test_four_ranks(name: str) -> None:
    assert_case("run_verify.py", 4, name, "4")


def test_f2_rank_dies_before_verify() -> None:
    run_distributed("run_verify_dead.py", 4)
