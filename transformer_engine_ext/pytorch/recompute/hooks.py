# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Region hooks: how other libraries' state (FP8 scales, say) takes part in a region without being named here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

__all__ = [
    "RegionHook",
    "active_hooks",
    "enter_hooks",
    "leave_hooks",
    "register_hook_source",
    "register_region_hook",
    "unregister_region_hook",
]


class RegionHook(Protocol):
    """What takes part in every region.

    Notes
    -----
    ``memory`` is a dict that belongs to the region and to this hook: what ``enter_forward`` puts there,
    ``enter_recompute`` finds again. It must hold no tensor that the region is meant to free. Recomputes may happen
    several times (``retain_graph``), or never, and in another thread than the forward. What an ``enter`` returns is
    handed to the matching ``leave``, which runs on every exit, exceptions included.
    """

    def enter_forward(self, memory: dict[str, Any], reentrant: bool) -> Any:
        """Before the region's forward."""

    def leave_forward(self, memory: dict[str, Any], token: Any) -> None:
        """After the region's forward."""

    def enter_recompute(self, memory: dict[str, Any], reentrant: bool) -> Any:
        """Before a recompute of the region."""

    def leave_recompute(self, memory: dict[str, Any], token: Any) -> None:
        """After a recompute of the region."""


# A tuple that is replaced as a whole: a region keeps the hooks of its forward for its recompute, so one that is
# registered or removed in between cannot see half a region.
_hooks: tuple[RegionHook, ...] = ()


def register_region_hook(hook: RegionHook) -> None:
    """Let ``hook`` take part in every region that starts from now on; a second registration changes nothing."""
    global _hooks
    if not any(known is hook for known in _hooks):
        _hooks = (*_hooks, hook)


def unregister_region_hook(hook: RegionHook) -> None:
    """Leave ``hook`` out of regions that start from now on."""
    global _hooks
    _hooks = tuple(known for known in _hooks if known is not hook)


# Note [Hooks of other libraries come late]
# A library that a hook is for may be imported after this package, or never, and must not be imported by it. So a source
# says which module to wait for; at the start of each region the sources whose module is there by now are asked for
# their hooks, once. The package's own sources are looked for by name at the first region: imports go one way, and this
# layer knows no library by name.
_sources: tuple[tuple[str, Callable[[], None]], ...] = ()
_own_sources = ".integrations"
_asked = False


def register_hook_source(module: str, load: Callable[[], None]) -> None:
    """Call ``load``, which registers a hook, at the first region that starts after ``module`` was imported.

    Parameters
    ----------
    module : str
        Absolute name, as in ``sys.modules``; it is never imported from here.
    load : callable
        Called once.
    """
    global _sources
    _sources = (*_sources, (module, load))


def _load_sources() -> None:
    global _asked, _sources
    if not _asked:
        _asked = True
        import_module(_own_sources, __name__.partition(".")[0])
    for source in _sources:
        module, load = source
        if sys.modules.get(module) is not None:
            _sources = tuple(known for known in _sources if known is not source)
            load()


def active_hooks() -> tuple[RegionHook, ...]:
    """Return the hooks for a region that starts now."""
    if not _asked:
        _load_sources()
    for module, _ in _sources:
        if module in sys.modules:
            _load_sources()
    return _hooks


Entered = list[tuple[RegionHook, dict[str, Any], Any]]


def enter_hooks(
    hooks: tuple[RegionHook, ...], memories: list[dict[str, Any]], recompute: bool, reentrant: bool
) -> Entered:
    """Enter all hooks in order; if one raises, those already entered are left again."""
    entered: Entered = []
    try:
        for hook, memory in zip(hooks, memories, strict=True):
            enter = hook.enter_recompute if recompute else hook.enter_forward
            entered.append((hook, memory, enter(memory, reentrant)))
    except BaseException:
        leave_hooks(entered, recompute)
        raise
    return entered


def leave_hooks(entered: Entered, recompute: bool) -> None:
    """Leave all hooks in reverse order; each is left even if another raises."""
    failed: BaseException | None = None
    while entered:
        hook, memory, token = entered.pop()
        try:
            (hook.leave_recompute if recompute else hook.leave_forward)(memory, token)
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed
