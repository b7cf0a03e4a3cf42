# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""D10: ``distribute_saved_activations`` on any shape and group. The option belongs to the reentrant engine, as in TE.

On CUDA the ranks share one device, with gloo between them.
"""

from __future__ import annotations

import pytest
from _ranks import assert_case, case_names

SCRIPT = "run_saved_activations.py"


@pytest.mark.parametrize("name", case_names(SCRIPT))
def test_saved_activations(name: str, device: str) -> None:
    assert_case(SCRIPT, 2, name, device, count_lines=True)


def test_d10_sub_groups_of_the_world() -> None:
    assert_case(SCRIPT, 4, "d10 pairs of four", "cpu", "four", count_lines=True)
