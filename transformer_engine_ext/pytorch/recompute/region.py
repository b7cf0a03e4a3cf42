# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""A region: one checkpointed call, run forward once and recomputed any number of times. Both engines build on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from transformer_engine_ext.errors import RecomputeMismatchError, SuppressedErrorError
from transformer_engine_ext.pytorch.recompute import ambient, debug
from transformer_engine_ext.pytorch.recompute.hooks import active_hooks, enter_hooks, leave_hooks
from transformer_engine_ext.pytorch.recompute.phase import FORWARD, PHASES, RECOMPUTE, current
from transformer_engine_ext.pytorch.recompute.selective import replaying_draws
from transformer_engine_ext.pytorch.rng import Rewound, Snapshot, audit
from transformer_engine_ext.pytorch.rng.recording import stack

__all__ = ["Region", "StopRecompute"]

Context = AbstractContextManager[Any]


class StopRecompute(BaseException):
    """Ends a recompute that has produced all that backward needs.

    A ``BaseException``, so that an ``except Exception`` in the user's function cannot swallow it. Always a fresh
    instance: its traceback holds the frames of the function, and with them tensors.
    """


# Note [A region is independent of its neighbours]
# Whatever a recompute needs is held by the region itself: streams and values, flags, autocast, hooks' memories.
# Nothing is looked up in globals or thread-locals at recompute time, and nothing is used up by a recompute, so regions
# may nest, interleave, be dropped, or be recomputed several times, in any thread.
class Region:
    """What one checkpointed call needs to be run again.

    Parameters
    ----------
    function : callable
        What to run.
    reentrant : bool
        Which engine this is for.
    tensors : sequence of torch.Tensor
        The call's tensor arguments, nested ones included; not kept.
    preserve_rng_state : bool
        Whether to rewind streams for recomputes.
    tracker : object or None
        A tracker whose streams must be covered whole, at entry.
    context_fn : callable
        Returns the contexts for forward and recompute.
    """

    __slots__ = (
        "_forward_context",
        "_function",
        "_hooks",
        "_memories",
        "_recompute_context",
        "ambient",
        "number",  # set in the debug mode only
        "reentrant",
        "snapshot",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        reentrant: bool,
        tensors: Sequence[Tensor],
        preserve_rng_state: bool,
        tracker: object | None,
        context_fn: Callable[[], tuple[Context, Context]],
    ) -> None:
        self._function = function
        self.reentrant = reentrant
        self._forward_context: Context | None = None
        self._recompute_context: Context | None = None
        if context_fn is not noop_context_fn:
            self._forward_context, self._recompute_context = context_fn()
            if preserve_rng_state:
                # See Note [A cached draw still moves its stream]
                self._forward_context, self._recompute_context = replaying_draws(
                    self._forward_context, self._recompute_context
                )
        self.ambient = ambient.Ambient()
        self._hooks = active_hooks()
        self._memories: list[dict[str, Any]] = [{} for _ in self._hooks] if self._hooks else []
        self.snapshot = Snapshot(tensors, function, tracker) if preserve_rng_state else None

    def cuda_clock(self) -> torch.Generator | None:
        """Return the default generator whose position tells how far a run has come; None without CUDA."""
        if self.snapshot is None or not self.snapshot.cuda_ready or self.snapshot.captured:
            return None
        clock: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
        return clock

    def forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the function for the first time.

        Parameters
        ----------
        args, kwargs : sequence, dict
            The original arguments.

        Returns
        -------
        object
            What the function returned.
        """
        context, snapshot = self._forward_context, self.snapshot
        before = current.phase  # See Note [Phase flags are saved and restored]
        current.phase = PHASES[FORWARD, before.recomputing, self.reentrant]
        try:
            hooks, entered = self._hooks, None
            if len(hooks) == 1:  # as a rule; enter_hooks and leave_hooks, written out
                token = hooks[0].enter_forward(self._memories[0], self.reentrant)
            elif hooks:
                entered = enter_hooks(hooks, self._memories, False, self.reentrant)
            if snapshot is not None:
                opened = stack.open
                opened.append(snapshot)
            try:
                if context is None and not debug.ENABLED:
                    return self._function(*args, **kwargs)
                # See Note [Concurrent draws cannot be exact]
                with debug.watching(self, snapshot, FORWARD), nullcontext() if context is None else context:
                    return self._function(*args, **kwargs)
                raise SuppressedErrorError(
                    "the forward context that context_fn returned suppressed an exception of the checkpointed "
                    "function, so there is no result to return; make the context re-raise it"
                )
            finally:
                if snapshot is not None:
                    opened.remove(snapshot)
                if entered is not None:
                    leave_hooks(entered, False)
                elif hooks:
                    hooks[0].leave_forward(self._memories[0], token)
        finally:
            current.phase = before

    def recompute(
        self, args: Sequence[Any], kwargs: dict[str, Any], started: Callable[[Rewound], None] | None = None
    ) -> Any:
        """Run the function again as in its forward: streams rewound, flags, autocast and contexts as they were.

        Parameters
        ----------
        args, kwargs : sequence, dict
            The arguments, with the tensors to compute with.
        started : callable, optional
            Called with the rewound streams before the function runs; not with ``preserve_rng_state=False``.

        Returns
        -------
        object
            What the function returned; None if ``StopRecompute`` ended it.

        Raises
        ------
        RecomputeMismatchError
            If a stream ends elsewhere than after the forward.
        """
        before = current.phase
        current.phase = PHASES[RECOMPUTE, True, self.reentrant]
        try:
            hooks, entered = self._hooks, None
            if len(hooks) == 1:
                token = hooks[0].enter_recompute(self._memories[0], self.reentrant)
            elif hooks:
                entered = enter_hooks(hooks, self._memories, True, self.reentrant)
            try:
                if self.snapshot is None:
                    return self._call(args, kwargs)[0]
                with Rewound(self.snapshot) as rewound:
                    if started is not None:
                        started(rewound)
                    result, rewound.complete = self._call(args, kwargs, rewound)
                if rewound.exact:
                    return result
                try:
                    audit(rewound)  # See Note [The audit is necessary, not sufficient]
                except BaseException:
                    result = None  # whoever keeps the error, and with it this frame, would keep all activations
                    raise
                return result
            finally:
                if entered is not None:
                    leave_hooks(entered, True)
                elif hooks:
                    hooks[0].leave_recompute(self._memories[0], token)
        except RecomputeMismatchError as error:
            debug.explain(error)
            raise
        finally:
            current.phase = before

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any], rewound: Rewound | None = None) -> tuple[Any, bool]:
        """Return the function's result, and whether it ran to its end."""
        context, settings = self._recompute_context, None
        if ambient.key() != self.ambient.key or self.ambient.device_mode is not None:
            settings = self.ambient.again()
        # Not torch.enable_grad: with the other contexts it would cost as much as all of the rewinding.
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        try:
            if settings is None and context is None and not debug.ENABLED:
                return self._function(*args, **kwargs), True
            with nullcontext() if settings is None else settings, debug.watching(self, rewound, RECOMPUTE):
                if context is None:
                    return self._function(*args, **kwargs), True
                with context:
                    return self._function(*args, **kwargs), True
            return None, True
        except StopRecompute:
            # This engine stops none: it is a region around this one that has all it needs, inside a backward that its
            # function runs itself.
            if self.reentrant:
                raise
            return None, False
        finally:
            torch._C._set_grad_enabled(grad)
