# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's ``activation_recompute_forward``: flags that are put back, memories that belong together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformer_engine_ext.integrations.plan import Plan
from transformer_engine_ext.integrations.transformer_engine import current_hook
from transformer_engine_ext.pytorch.recompute.phase import (
    FORWARD,
    RECOMPUTE,
    enter_phase,
    leave_phase,
    use_reentrant_activation_recompute,
)

__all__ = ["contexts_for", "inside_region"]


class _Covered(threading.local):
    depth = 0


_covered = _Covered()

# Contexts of forward and recompute that were built apart from each other: the oldest forward belongs to the first
# recompute, as Transformer Engine has it.
_unpaired: deque[dict[str, Any]] = deque()


# Note [Contexts that belong together share a memory]
# A pair from get_activation_recompute_contexts() shares one memory: first-module flag, autocast, scales. Megatron's
# CheckpointWithoutOutput builds the two apart, around code of its own; patched, it enters the hook itself with a memory
# that it keeps, and the contexts inside have nothing left to do.
@contextmanager
def inside_region(memory: dict[str, Any], recompute: bool) -> Iterator[None]:
    """Run as a region of ours: flags and FP8 state as the hook sets them; contexts entered inside do nothing.

    Parameters
    ----------
    memory : dict
        The region's; the same for its forward and its recompute.
    recompute : bool
        Which of the two this is.
    """
    # Whatever engine runs around it: the forward runs without grad, and the recompute's graph is the one that is used.
    token = _enter(memory, recompute, True)
    _covered.depth += 1
    try:
        yield
    finally:
        _covered.depth -= 1
        _leave(token)


def _enter(memory: dict[str, Any], recompute: bool, reentrant: bool) -> Any:
    before = enter_phase(RECOMPUTE if recompute else FORWARD, reentrant)
    hook = current_hook()
    try:
        token = None
        if hook is not None:
            token = (hook.enter_recompute if recompute else hook.enter_forward)(memory, reentrant)
    except BaseException:
        leave_phase(before)
        raise
    return before, hook, memory, recompute, token


def _leave(entered: Any) -> None:
    before, hook, memory, recompute, token = entered
    try:
        if hook is not None:
            (hook.leave_recompute if recompute else hook.leave_forward)(memory, token)
    finally:
        leave_phase(before)


def contexts_for(plan: Plan, distributed: Any) -> None:
    """Plan the replacement of ``activation_recompute_forward`` and of what makes pairs of it."""
    cls = getattr(distributed, "activation_recompute_forward", None)
    if not isinstance(cls, type) or not all(name in vars(cls) for name in ("__enter__", "__exit__")):
        plan.skip(f"{distributed.__name__}.activation_recompute_forward", "this version has no such class")
        return

    def enter(self: Any) -> None:
        entered = vars(self).setdefault("_te_ext_entered", [])
        if _covered.depth:
            entered.append(None)
        elif not self.activation_recompute:
            entered.append(_outside(distributed))
        else:
            memory = vars(self).get("_te_ext_memory")
            if memory is None and self.recompute_phase:
                memory = _unpaired.popleft() if _unpaired else {}
            elif memory is None:
                memory = {}
                _unpaired.append(memory)
            entered.append(_enter(memory, self.recompute_phase, use_reentrant_activation_recompute()))

    def leave(self: Any, *exception: Any) -> None:
        entered = vars(self)["_te_ext_entered"].pop()
        if callable(entered):
            entered()
        elif entered is not None:
            _leave(entered)

    def pair() -> tuple[Any, Any]:
        memory: dict[str, Any] = {}
        made = (
            cls(activation_recompute=True, recompute_phase=False),
            cls(activation_recompute=True, recompute_phase=True),
        )
        for context in made:
            context._te_ext_memory = memory
        return made

    plan.attribute(cls, "__enter__", enter)
    plan.attribute(cls, "__exit__", leave)
    plan.code(distributed, "get_activation_recompute_contexts", lambda original: pair)
    plan.on_undo(_unpaired.clear)


def _outside(distributed: Any) -> Callable[[], None]:
    """Set Transformer Engine's flags to "no region"; returns what puts them back."""
    hook = current_hook()
    if hook is None:
        return lambda: None
    before = hook.set_flags((False, False, use_reentrant_activation_recompute()))

    def put_back() -> None:
        hook.set_flags(before)

    return put_back
