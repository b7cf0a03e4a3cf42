# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend on a device that is not there: what test_backends.py shows on real ones, on any machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from _capture import FakeKit
from transformer_engine_ext.pytorch.rng.devices import get_backend


@pytest.fixture(params=[True, False], ids=["before 2.14", "since 2.14"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeKit:
    kit = FakeKit(request.param)
    kit.machine.install(monkeypatch)
    return kit


def standing(handle: Any) -> tuple[int, int]:
    return handle.initial_seed(), handle.state.offset


@pytest.mark.parametrize("reseeded", [False, True])
def test_put_takes_back_what_take_took(fake: FakeKit, reseeded: bool) -> None:
    backend, stream = get_backend("cuda"), fake.default().clone_state().manual_seed(21)
    stream.set_offset(12)
    taken, value = backend.take(stream), backend.read(stream)
    if reseeded:
        stream.manual_seed(22)
    else:
        stream.set_offset(40)
    assert not backend.equal(taken, backend.take(stream))
    backend.put(stream, taken)
    assert standing(stream) == (21, 12)
    assert torch.equal(backend.read(stream), value)


def test_values_are_taken_and_put_during_capture_too(fake: FakeKit) -> None:
    """There torch refuses to read or to write an offset by itself."""
    backend, stream = get_backend("cuda"), fake.default()
    graph = fake.graph()
    with graph.capturing():
        before = backend.take(stream)
        fake.machine.mask(torch.empty(4))
        moved = backend.take(stream)
        assert moved[0] == before[0]
        assert moved[1] == backend.position(stream) > before[1]
        backend.put(stream, before)
        assert backend.take(stream) == before


def test_unwind_forgets_bindings_that_nobody_ends(fake: FakeKit) -> None:
    backend, default = get_backend("cuda"), fake.default()
    own = default.state
    streams = [default.clone_state().manual_seed(seed) for seed in (1, 2, 3)]
    tokens = [backend.bind(stream) for stream in streams]
    assert backend.depth(0) == 3
    backend.unwind(0, 1)
    assert backend.depth(0) == 1
    assert default.state is streams[0].state
    for token in reversed(tokens):  # those above come too late to matter
        backend.unbind(token)
    assert default.state is own
    assert backend.depth(0) == 0
    backend.bind(streams[0])
    backend.unwind(0, 0, streams[2])
    assert default.state is streams[2].state
    assert backend.depth(0) == 0


def test_a_bind_that_fails_leaves_nothing_to_end(fake: FakeKit, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, default = get_backend("cuda"), fake.default()
    stream = default.clone_state()

    def refuse(self: Any, other: Any) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(type(default), "graphsafe_set_state", refuse)
    with pytest.raises(RuntimeError, match="refused"):
        backend.bind(stream)
    assert backend.depth(0) == 0
    assert backend.bound_stream(0) is None
