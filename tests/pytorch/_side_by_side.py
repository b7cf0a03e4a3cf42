# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Run one scenario under torch's non-reentrant engine and under ours, and compare everything that it reports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointError

from transformer_engine_ext.pytorch import te_checkpoint

Checkpoint = Callable[..., Any]

theirs: Checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
ours: Checkpoint = functools.partial(te_checkpoint, use_reentrant=False)


def _plain(value: Any) -> Any:
    """Turn tensors into lists, so that reports compare with ``==`` and differ readably."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def outcome(run: Callable[[], Any]) -> Any:
    """Return what `run` returns, or the name of the kind of error it raises, as torch's users would catch it."""
    try:
        return _plain(run())
    except CheckpointError:
        return "CheckpointError"
    except RuntimeError:
        return "RuntimeError"
    except ValueError:
        return "ValueError"


def same_as_torch(scenario: Callable[[Checkpoint], dict[str, Any]]) -> dict[str, Any]:
    """Assert that the reports of a scenario under both engines are equal, and return the report."""
    torch.manual_seed(0)
    expected = _plain(scenario(theirs))
    torch.manual_seed(0)
    actual = _plain(scenario(ours))
    assert actual == expected
    return actual
