# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The messages of a single process, and sizes that no rank can have meant."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from transformer_engine_ext.pytorch.distributed import collectives
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


def test_groups_end_with_the_job(tmp_path: Path) -> None:
    """See Note [Groups are not kept alive]: a group that outlives the job can abort the process at its end."""
    timeout = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        control = ControlGroup()
        group = collectives._shared.get(timeout)
        assert collectives._shared.get(timeout) is group
        kept, world = weakref.ref(group), weakref.ref(dist.group.WORLD)
        del group
        gc.collect()
        assert kept() is not None, "torch.distributed keeps the group as long as the job lasts"
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert kept() is None
    assert world() is None
    assert control.gather(b"one", "a test") == [b"one"]
