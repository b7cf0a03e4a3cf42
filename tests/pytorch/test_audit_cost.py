# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What the audit costs: one look at every covered stream after forward, and one after the recompute, and no more."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from _proof import ENGINE_IDS, ENGINES
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.rng.devices import get_backend

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


@pytest.fixture
def looks(device: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often a stream's position, and its whole value, is read."""
    counts: Counter[str] = Counter()
    backend = get_backend(device)
    for name in ("position", "take", "put", "read", "write"):
        real = getattr(backend, name)

        def counted(*args: Any, name: str = name, real: Any = real) -> Any:
            counts[name] += 1
            return real(*args)

        monkeypatch.setattr(backend, name, counted)
    return counts


@engines
@pytest.mark.parametrize("touched", [0, 1, 3])
def test_two_looks_per_touched_stream_and_none_at_others(
    device: str, looks: Counter[str], use_reentrant: bool, touched: int
) -> None:
    tracker = CudaRNGStatesTracker(device=device)
    names = [f"stream {number}" for number in range(5)]
    for seed, name in enumerate(names):
        tracker.add(name, seed)

    def region(x: torch.Tensor) -> torch.Tensor:
        for name in names[:touched]:
            with tracker.fork(name):
                x = F.dropout(x, 0.5)
        return x * x

    x = torch.ones(8, device=device, requires_grad=True)
    te_checkpoint(region, x, use_reentrant=use_reentrant).sum().backward()  # devices awake, caches filled
    looks.clear()
    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    covered = touched + 1  # and the default stream
    assert looks == {"take": covered, "position": covered}
    looks.clear()
    y.sum().backward()
    assert looks == {"take": covered, "position": covered, "put": 2 * covered}


@engines
def test_nothing_is_read_without_preserve_rng_state(device: str, looks: Counter[str], use_reentrant: bool) -> None:
    x = torch.ones(8, device=device, requires_grad=True)
    te_checkpoint(torch.sin, x, use_reentrant=use_reentrant, preserve_rng_state=False).sum().backward()
    assert not looks
