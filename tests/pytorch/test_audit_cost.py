# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What the audit costs: one look at every covered stream after forward, and one after the recompute, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from _proof import ENGINE_IDS, ENGINES
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.rng import moves
from transformer_engine_ext.pytorch.rng.devices import get_backend

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


@pytest.fixture
def looks(device: str, python_moves: None, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
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


@pytest.fixture
def native_looks(device: str, native_moves: ModuleType) -> Iterator[Counter[str]]:
    """Count how many streams of the device the functions of the native library are given."""
    counts: Counter[str] = Counter()
    backend = get_backend(device)

    def of_device(streams: list[Any]) -> int:
        return sum(entry[1] is backend for entry in streams)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("positions", "retake", "rewind", "stand_where"):
            real = getattr(moves, name)

            def counted(streams: list[Any], *args: Any, name: str = name, real: Any = real) -> Any:
                counts[name] += of_device(streams)
                return real(streams, *args)

            patch.setattr(moves, name, counted)

        def take(its: Any, handle: torch.Generator) -> Any:
            counts["take"] += its is backend
            return native_moves.take(its, handle)

        def touch(recordings: list[Any], name: str, handle: torch.Generator) -> bool:
            before = len(recordings[-1].streams)
            done = native_moves.touch(recordings, name, handle)
            counts["take"] += of_device(recordings[-1].streams[before:])
            return done

        patch.setattr(moves, "take", take)
        patch.setattr(moves, "touch", touch)
        for name in ("position", "take", "put", "read", "write", "same"):
            patch.setattr(backend, name, lambda *_, name=name: pytest.fail(f"the backend was asked to {name}"))
        yield counts


@engines
@pytest.mark.parametrize("touched", [0, 1, 3])
def test_two_looks_per_touched_stream_and_none_at_others(
    device: str, looks: Counter[str], use_reentrant: bool, touched: int
) -> None:
    forward, backward = looks_of_a_region(device, looks, use_reentrant, touched)
    covered = touched + 1  # and the default stream
    assert forward == {"take": covered, "position": covered}
    assert backward == {"take": covered, "position": covered, "put": 2 * covered}


@engines
@pytest.mark.parametrize("touched", [0, 1, 3])
def test_the_native_library_looks_as_often(
    device: str, native_looks: Counter[str], use_reentrant: bool, touched: int
) -> None:
    forward, backward = looks_of_a_region(device, native_looks, use_reentrant, touched)
    covered = touched + 1
    assert forward == {"take": covered, "positions": covered}
    assert backward == {"retake": covered, "positions": covered, "stand_where": covered, "rewind": 2 * covered}


def looks_of_a_region(
    device: str, looks: Counter[str], use_reentrant: bool, touched: int
) -> tuple[Counter[str], Counter[str]]:
    """Return what is counted in the forward, and in the backward, of a region that uses so many of five streams."""
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
    forward = +looks
    looks.clear()
    y.sum().backward()
    return forward, +looks


@engines
@pytest.mark.parametrize("counted", ["looks", "native_looks"])
def test_nothing_is_read_without_preserve_rng_state(
    device: str, request: pytest.FixtureRequest, counted: str, use_reentrant: bool
) -> None:
    looks = request.getfixturevalue(counted)
    x = torch.ones(8, device=device, requires_grad=True)
    te_checkpoint(torch.sin, x, use_reentrant=use_reentrant, preserve_rng_state=False).sum().backward()
    assert not looks
