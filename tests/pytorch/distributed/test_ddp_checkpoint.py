# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B10 on two ranks: DistributedDataParallel with shared parameters, and the user's saved-tensor hooks.

torch's DDP takes reentrant regions only with ``static_graph=True``; the rest runs non-reentrant.
"""

from __future__ import annotations

import pytest
from _ranks import assert_case, case_names

SCRIPT = "run_ddp_checkpoint.py"


@pytest.mark.parametrize("name", case_names(SCRIPT))
def test_ddp(name: str) -> None:
    assert_case(SCRIPT, 2, name)
