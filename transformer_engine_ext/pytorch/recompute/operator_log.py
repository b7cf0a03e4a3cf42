# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``debug=True``: the operators that forward and recompute ran, to be listed when they saved different tensors."""

from __future__ import annotations

import difflib
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["OperatorLogs"]


class _Logger(TorchDispatchMode):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines = lines

    def __enter__(self) -> Any:
        self._lines.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Logged before it runs: a recompute may be stopped inside an operator.
        self._lines.append(f"{func}({', '.join(_shown(leaf) for leaf in tree_leaves((args, kwargs or {})))})")
        return func(*args, **(kwargs or {}))


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)


class OperatorLogs:
    """Logs of one region's forward and of its latest recompute."""

    def __init__(self) -> None:
        self._forward: list[str] = []
        self._recompute: list[str] = []

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Return the contexts that write the two logs."""
        return _Logger(self._forward), _Logger(self._recompute)

    def report(self) -> str:
        """Return both logs and where they differ, as text."""
        difference = "\n".join(
            difflib.unified_diff(self._forward, self._recompute, "forward", "recompute", lineterm="", n=2)
        )
        return (
            f"\nOperators executed during the original forward ({len(self._forward)}):\n"
            + _numbered(self._forward)
            + f"\nOperators executed during recomputation ({len(self._recompute)}; it may have been stopped early):\n"
            + _numbered(self._recompute)
            + "\nDifference:\n"
            + (difference or "(none: the operators agree, only the tensors that they saved differ)")
        )


def _numbered(lines: list[str]) -> str:
    return "\n".join(f"  {number:4d}  {line}" for number, line in enumerate(lines, 1))
