# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What ``patch()`` did: a report to print, to test, and to put into a log."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["PatchReport", "Replaced", "Skipped", "copies_of"]


@dataclass(frozen=True)
class Replaced:
    """One thing that runs this package's code now.

    Attributes
    ----------
    target : str
        Where it is defined.
    how : str
        ``"code"`` (the function keeps its identity), ``"method"`` or ``"added"`` (on a class that keeps its).
    copies : tuple of str
        Names under which imported modules hold it too; they are reached with it.
    """

    target: str
    how: str
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """One thing that was left as it was.

    Attributes
    ----------
    target : str
        What was looked for.
    reason : str
        Why, and what follows from it.
    """

    target: str
    reason: str


@dataclass
class PatchReport:
    """What ``patch()`` did.

    Attributes
    ----------
    versions : dict
        Package to version, or to the reason why it has none.
    replaced, skipped : list
        What was replaced where, and what could not be, and why.
    waiting : list of str
        Modules that are not imported yet and will be patched when they are.
    notes : list of str
        What to know: untested versions, classes that keep methods of their own.
    """

    versions: dict[str, str] = field(default_factory=dict)
    replaced: list[Replaced] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists and strings."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{name} {version}" for name, version in self.versions.items()]
        for title, entries in (
            ("replaced", [f"{r.target} ({r.how}){_also(r.copies)}" for r in self.replaced]),
            ("left as it was", [f"{s.target}: {s.reason}" for s in self.skipped]),
            ("will be patched when imported", self.waiting),
            ("to know", self.notes),
        ):
            if entries:
                lines += [f"{title}:", *(f"  {entry}" for entry in entries)]
        return "\n".join(lines) if lines else "nothing is patched"


def _also(copies: tuple[str, ...]) -> str:
    return f"; also bound as {', '.join(copies)}" if copies else ""


def copies_of(value: object, home: str) -> tuple[str, ...]:
    """Return the names by which imported modules hold an object, but for ``home``.

    Parameters
    ----------
    value : object
        Function or class, compared by identity.
    home : str
        Its own ``module.name``.
    """
    found = []
    for module_name, module in list(sys.modules.items()):
        scope = getattr(module, "__dict__", None)
        if not isinstance(scope, dict):
            continue
        for name, held in list(scope.items()):
            if held is value and f"{module_name}.{name}" != home:
                found.append(f"{module_name}.{name}")
    return tuple(sorted(found))
