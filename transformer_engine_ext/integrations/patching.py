# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``patch()``: put this package into an installed Transformer Engine and Megatron-core; ``unpatch()`` undoes it."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine_ext.errors import PatchError
from transformer_engine_ext.integrations import megatron as megatron_core
from transformer_engine_ext.integrations.late_imports import ImportWatch
from transformer_engine_ext.integrations.plan import Plan
from transformer_engine_ext.integrations.report import PatchReport, Skipped
from transformer_engine_ext.integrations.te_targets import plan_transformer_engine
from transformer_engine_ext.integrations.versions import installed_version, try_import, version_note

__all__ = ["patch", "patch_report", "patched", "unpatch"]

_TE = "transformer_engine.pytorch.distributed"


class _Patches:
    """What is replaced now: a plan per module, and the watch for modules that are still to come."""

    def __init__(self) -> None:
        self.plans: dict[str, Plan] = {}
        self.failed: dict[str, str] = {}
        self.wanted: set[str] = set()
        self.watch: ImportWatch | None = None
        self.lock = threading.RLock()

    def install(self, name: str) -> None:
        """Patch one imported module; a failure becomes a reason, since it must not break an import."""
        if name not in self.wanted or name in self.plans:
            return
        module = sys.modules[name]
        try:
            plan = plan_transformer_engine(module) if name == _TE else megatron_core.plan_megatron(module)
            plan.apply()
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}"
            return
        self.failed.pop(name, None)
        self.plans[name] = plan

    def want(self, names: tuple[str, ...]) -> None:
        """Patch modules now if they are imported, else when they are."""
        self.wanted.update(names)
        for name in names:
            if sys.modules.get(name) is not None:
                self.install(name)
        if self.watch is None:
            self.watch = ImportWatch((), self.install)
        self.watch.modules = self.wanted - set(self.plans)
        self.watch.start()

    def drop(self, names: set[str]) -> list[str]:
        """Undo the plans of some modules; returns what was in the way."""
        self.wanted -= names
        trouble = []
        for name in [name for name in reversed(self.plans) if name in names]:
            trouble += self.plans.pop(name).undo()
        for name in names:
            self.failed.pop(name, None)
        if self.watch is not None:
            self.watch.modules = self.wanted - set(self.plans)
            if not self.wanted:
                self.watch.stop()
        return trouble


_patches = _Patches()


def patch(*, te: bool = True, megatron: bool = True, strict: bool = False) -> PatchReport:
    """Make an installed Transformer Engine and Megatron-core recompute with their forward's random numbers.

    Functions keep their identity and get this package's code, classes keep theirs and get its methods, so every copy is
    reached, whoever holds it and whenever it was made. Doing it again changes nothing.

    Parameters
    ----------
    te : bool
        Patch Transformer Engine; it is imported if it is installed.
    megatron : bool
        Patch Megatron-core: now if it is imported, else when it is.
    strict : bool
        Raise if something could not be replaced.

    Returns
    -------
    PatchReport
        What was replaced where, and what could not be, and why. Print it.

    Raises
    ------
    PatchError
        With ``strict``: something that was asked for could not be replaced. Nothing is undone.

    Warns
    -----
    UserWarning
        For a version that is not known here.

    Notes
    -----
    Out of reach: CUDA graphs that were captured before, and regions whose forward ran before.

    Examples
    --------
    >>> import transformer_engine_ext
    >>> with transformer_engine_ext.patched() as report:
    ...     names = [replaced.target for replaced in report.replaced]
    """
    with _patches.lock:
        problem = _want_transformer_engine() if te else ""
        if megatron:
            _patches.want(_megatron_modules())
        report = patch_report()
        if problem:
            report.skipped.insert(0, Skipped("transformer_engine", problem))
            report.versions["transformer-engine"] = problem
    for note in _version_notes(te, megatron):
        report.notes.append(note)
        warnings.warn(note, UserWarning, stacklevel=2)
    if strict and report.skipped:
        lines = "\n".join(f"  {skipped.target}: {skipped.reason}" for skipped in report.skipped)
        raise PatchError(
            f"patch(strict=True) could not replace everything:\n{lines}\nCall patch() without strict to go on with "
            "what was replaced, or unpatch() to undo it"
        )
    return report


def unpatch() -> list[str]:
    """Put back everything that ``patch()`` replaced.

    Returns
    -------
    list of str
        What somebody else has replaced since, and was therefore left alone; empty as a rule.
    """
    with _patches.lock:
        return _patches.drop(set(_patches.wanted))


@contextmanager
def patched(*, te: bool = True, megatron: bool = True, strict: bool = False) -> Iterator[PatchReport]:
    """Patch inside, and leave behind what was there before; nests, and inside ``patch()`` it changes nothing.

    Parameters
    ----------
    te, megatron, strict : bool
        See ``patch``.

    Yields
    ------
    PatchReport
        See ``patch``.
    """
    before = set(_patches.wanted)
    try:
        yield patch(te=te, megatron=megatron, strict=strict)
    finally:
        with _patches.lock:
            _patches.drop(_patches.wanted - before)


def patch_report() -> PatchReport:
    """Return what is patched at present."""
    report = PatchReport()
    with _patches.lock:
        for package in ("transformer-engine", "megatron-core"):
            report.versions[package] = installed_version(package) or "not installed"
        for plan in _patches.plans.values():
            plan.report_to(report)
        report.skipped += [Skipped(name, reason) for name, reason in _patches.failed.items()]
        report.waiting = sorted(_patches.wanted - set(_patches.plans) - set(_patches.failed))
    return report


def _megatron_modules() -> tuple[str, ...]:
    return megatron_core.MODULES


def _want_transformer_engine() -> str:
    """Import and patch Transformer Engine; return the reason where it cannot be imported."""
    if _TE not in sys.modules:
        module, reason = try_import("transformer_engine.pytorch")
        if module is None:
            missing = (
                installed_version("transformer-engine") is None and "No module named 'transformer_engine" in reason
            )
            _patches.want((_TE,))
            return "not installed" if missing else f"installed, but cannot be imported: {reason}"
    _patches.want((_TE,))
    return "" if _TE in sys.modules else f"transformer_engine.pytorch was imported, but not {_TE}"


def _version_notes(te: bool, megatron: bool) -> list[str]:
    notes = []
    for package, wanted in (("transformer-engine", te), ("megatron-core", megatron)):
        version = installed_version(package) if wanted else None
        note = version_note(package, version) if version is not None else None
        if note is not None:
            notes.append(note)
    return notes
