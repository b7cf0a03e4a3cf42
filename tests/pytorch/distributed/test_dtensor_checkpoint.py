# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""F1: DTensor's random operators inside regions, on two ranks; with ``cuda`` both share one device."""

from __future__ import annotations

import pytest
from _ranks import assert_case, case_names

SCRIPT = "run_dtensor_checkpoint.py"


@pytest.mark.parametrize("name", case_names(SCRIPT))
def test_dtensor(name: str, device: str) -> None:
    assert_case(SCRIPT, 2, name, device)
