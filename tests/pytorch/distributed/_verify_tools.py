# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What the cases of run_verify.py are written with."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from transformer_engine_ext.errors import StreamMismatchError
from transformer_engine_ext.pytorch.distributed.collectives import ControlGroup


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def everywhere(value: object) -> list[object]:
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def fails_alike(call: Callable[[], object], kind: type[Exception] = StreamMismatchError) -> str:
    """Assert that a call fails on every rank with one text, which is returned."""
    with pytest.raises(kind) as caught:
        call()
    (text,) = set(everywhere(str(caught.value)))
    return str(text)


def table_of(text: str) -> dict[int, list[str]]:
    """Return the rows of a message's table: rank to cells."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {int(row[0]): row[1:] for row in rows if row[0].isdigit()}


class CountedMessages:
    """How many bytes this rank passed to collectives, and to how many of them, while it was in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.sent = 0
        for name in ("total", "gather", "broadcast", "scatter", "first_failure"):
            monkeypatch.setattr(ControlGroup, name, self._counting(name, getattr(ControlGroup, name)))

    def _counting(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def counting(control: ControlGroup, payload: object, what: str) -> object:
            self.names.append(name)
            self.sent += (
                8 * len(payload) if isinstance(payload, list) else len(payload) if isinstance(payload, bytes) else 0
            )
            return method(control, payload, what)

        return counting
