# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Stand-in packages for a test, and nothing of them, nor of a patch, left behind."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import _standin
from transformer_engine_ext import unpatch
from transformer_engine_ext.integrations import _transformer_engine, patching, transformer_engine
from transformer_engine_ext.pytorch.recompute import hooks, phase

PACKAGES = ("transformer_engine", "megatron")


def _ours() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in PACKAGES]


@contextlib.contextmanager
def stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch, install: bool = True) -> Iterator[Path]:
    """Make the stand-ins importable inside; the real packages, if there are any, are out of sight."""
    hidden = {name: sys.modules.pop(name) for name in _ours()}
    if install:
        _standin.install(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(hooks, "_hooks", ())
    monkeypatch.setattr(hooks, "_sources", (("transformer_engine.pytorch.distributed", _transformer_engine),))
    monkeypatch.setattr(hooks, "_asked", True)
    monkeypatch.setattr(transformer_engine, "_hook", None)
    monkeypatch.setattr(phase, "_fp8_probe", phase._no_fp8)
    monkeypatch.setattr(patching, "_version_notes", lambda te, megatron: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the stand-ins live on the CPU
    finders = list(sys.meta_path)
    try:
        yield folder
        assert unpatch() == []
    finally:
        unpatch()
        sys.meta_path[:] = finders
        for name in _ours():
            del sys.modules[name]
        sys.modules.update(hidden)
