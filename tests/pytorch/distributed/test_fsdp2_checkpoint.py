# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""FSDP2 (``fully_shard``) on two ranks with checkpointed blocks: bit for bit the run without checkpointing."""

from __future__ import annotations

import pytest
from _ranks import assert_case, case_names

SCRIPT = "run_fsdp2_checkpoint.py"


@pytest.mark.parametrize("name", case_names(SCRIPT))
def test_fsdp2(name: str) -> None:
    assert_case(SCRIPT, 2, name)
