# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan: replacements for one package, collected first, then applied together, undone together."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from transformer_engine_ext.errors import PatchError
from transformer_engine_ext.integrations.report import PatchReport, Replaced, Skipped, copies_of
from transformer_engine_ext.integrations.swapping import AttributeSwap, CodeSwap, plain_function

__all__ = ["Plan"]

#: Takes the original function, returns what runs instead.
Make = Callable[[types.FunctionType], Callable[..., Any]]


class Plan:
    """Replacements that belong together.

    Attributes
    ----------
    replaced, skipped : list
        See ``PatchReport``.
    notes : list of str
        See ``PatchReport``.
    """

    def __init__(self) -> None:
        self._swaps: list[CodeSwap | AttributeSwap] = []
        self._undos: list[Callable[[], None]] = []
        self.replaced: list[Replaced] = []
        self.skipped: list[Skipped] = []
        self.notes: list[str] = []
        self._applied = 0

    def skip(self, target: str, reason: str) -> None:
        """Report that something is left as it is."""
        self.skipped.append(Skipped(target, reason))

    def code(self, owner: Any, name: str, make: Make) -> bool:
        """Give a function, or a class's method, other code. See Note [Functions keep their identity].

        Parameters
        ----------
        owner : module or type
            Where it is.
        name : str
            Its name there.
        make : callable
            Takes the original, returns what runs instead.

        Returns
        -------
        bool
            Whether that is possible; if not, ``skipped`` says why.
        """
        target = f"{_path(owner)}.{name}"
        value = inspect.getattr_static(owner, name, None)
        if value is None:
            self.skip(target, "this version has no such name")
            return False
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        try:
            function = plain_function(value)
        except PatchError as error:
            self.skip(target, f"{error}; whoever holds it keeps the original behaviour")
            return False
        swap = CodeSwap(function, lambda *args, **kwargs: None)
        self._swaps.append(CodeSwap(function, make(swap.original)))
        self.replaced.append(Replaced(target, "code", copies_of(value, target)))
        return True

    def attribute(self, owner: type, name: str, value: Any) -> None:
        """Give a class another attribute; the class keeps its identity."""
        how = "method" if name in vars(owner) else "added"
        self._swaps.append(AttributeSwap(owner, name, value))
        self.replaced.append(Replaced(f"{_path(owner)}.{name}", how))

    def on_undo(self, step: Callable[[], None]) -> None:
        """Run ``step`` after everything was put back."""
        self._undos.append(step)

    def apply(self) -> None:
        """Put everything in; if one replacement fails, those before it are taken out again."""
        try:
            for swap in self._swaps:
                swap.apply()
                self._applied += 1
        except BaseException:
            self.undo()
            raise

    def undo(self) -> list[str]:
        """Put everything back, in reverse; returns what was in the way."""
        trouble = []
        for swap, replaced in reversed(list(zip(self._swaps, self.replaced, strict=True))[: self._applied]):
            problem = swap.undo()
            if problem is not None:
                trouble.append(f"{replaced.target}: {problem}")
        self._applied = 0
        while self._undos:
            self._undos.pop()()
        return trouble

    def report_to(self, report: PatchReport) -> None:
        """Add what this plan did to a report."""
        report.replaced += self.replaced
        report.skipped += self.skipped
        report.notes += self.notes


def _path(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)
