# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The messages of a single process, and sizes that no rank can have meant."""

from __future__ import annotations

import pytest
import torch

from transformer_engine_ext.pytorch.distributed.collectives import ControlGroup, _plausible


def test_a_single_process_talks_to_itself() -> None:
    control = ControlGroup()
    assert control.gather(b"one", "a test") == [b"one"]
    assert control.scatter([b"two"], "a test") == b"two"
    assert control.broadcast(b"three", "a test") == b"three"
    assert control.relay(b"four", 0, "a test") == b"four"
    assert control.total([5, 6], "a test") == [5, 6]
    assert control.first_failure(True, "a test") == 0
    assert control.first_failure(False, "a test") is None


@pytest.mark.parametrize("size", [-1, 4, 1 << 36, 1 << 62])
def test_ranks_that_are_in_different_calls(size: int) -> None:
    with pytest.raises(RuntimeError, match=rf"a test: the ranks are not in the same call, since one announced {size} "):
        _plausible(torch.tensor([size]), "a test", least=5)
    assert _plausible(torch.tensor([5]), "a test", least=5) == 5
