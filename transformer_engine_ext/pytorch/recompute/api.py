# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``te_checkpoint``: the public entry to both engines."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from transformer_engine_ext.errors import CheckpointArgumentError, DistributedNotInitializedError
from transformer_engine_ext.pytorch.recompute.arguments import PackedCall, pack_call
from transformer_engine_ext.pytorch.recompute.legacy import take_old_keyword, take_positional_options
from transformer_engine_ext.pytorch.recompute.non_reentrant import run_non_reentrant
from transformer_engine_ext.pytorch.recompute.operator_log import OperatorLogs
from transformer_engine_ext.pytorch.recompute.phase import enter_engine, leave_phase
from transformer_engine_ext.pytorch.recompute.reentrant import run_reentrant
from transformer_engine_ext.pytorch.recompute.region import Region
from transformer_engine_ext.pytorch.recompute.saved_activations import Distributed
from transformer_engine_ext.pytorch.rng import covers_itself

__all__ = ["te_checkpoint"]

noop_context_fn = torch_checkpoint.noop_context_fn


def te_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    preserve_rng_state: bool = True,
    early_stop: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a function without keeping its activations; backward runs it again, with the same random numbers.

    A drop-in for ``transformer_engine.pytorch.checkpoint``. The recompute draws what the forward drew from the default
    generators and from every tracked stream that the function forks, so gradients are those of the run without
    checkpointing; afterwards every stream stands where that run would leave it.

    Parameters
    ----------
    function : callable
        What to checkpoint: a module, function, method, partial, or any callable.
    *args, **kwargs
        Its arguments. Tensors in positional and keyword arguments, and inside nested tuples, lists, dicts, dataclasses
        and types registered with torch's pytree, receive gradients.
    use_reentrant : bool
        True: the reentrant engine (backward runs a backward of its own; needs ``.backward()``). Without a tensor
        argument that requires a gradient the other engine runs, since this one could not know about parameters. False:
        the non-reentrant engine, with the semantics of ``torch.utils.checkpoint``.
    distribute_saved_activations : bool
        Reentrant engine only: keep the first tensor argument spread over ``tp_group`` until backward. The caller's own
        tensor is replaced by a flat share in the meantime.
    get_rng_state_tracker : callable, optional
        Returns an RNG tracker. Not needed for this package's trackers, whose streams are covered when they are forked;
        a tracker of another library is covered whole.
    tp_group : torch.distributed.ProcessGroup, optional
        See ``distribute_saved_activations``; the default is the world.
    context_fn : callable
        Returns two contexts, for forward and for recompute, e.g. those of a selective policy.
    determinism_check : {"default", "none"}
        Non-reentrant engine: whether to compare shape, dtype and device of recomputed tensors.
    debug : bool
        Non-reentrant engine: list the operators of forward and recompute when they saved different tensors.
    preserve_rng_state : bool
        False: streams are neither rewound nor audited.
    early_stop : bool, optional
        Non-reentrant engine: end the recompute once all needed tensors are there. The default is True;
        ``torch.utils.checkpoint.set_checkpoint_early_stop`` decides over both.

    Returns
    -------
    object
        What the function returned.

    Raises
    ------
    TypeError
        If ``function`` cannot be called.
    CheckpointArgumentError
        If options contradict each other.
    RecomputeMismatchError
        In backward: the recompute drew other random numbers than the forward.
    SavedTensorMismatchError
        In backward: the recompute saved, or returned, other tensors than the forward.
    ReentrantGradError
        In backward: ``torch.autograd.grad`` or ``create_graph=True`` met a reentrant region.

    Notes
    -----
    Under ``torch.compile`` a region is a graph break. Positional options as before Transformer Engine 1.5 are
    understood, with a ``DeprecationWarning``.

    Examples
    --------
    >>> import torch
    >>> from transformer_engine_ext import te_checkpoint
    >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    >>> x = torch.ones(2, 4, requires_grad=True)
    >>> te_checkpoint(layer, x, use_reentrant=False).sum().backward()
    """
    # See Note [Positional options]
    if len(args) > 3:
        args, positional = take_positional_options(function, args, kwargs, stacklevel=3)
        if positional is not None:
            distribute_saved_activations, get_rng_state_tracker, tp_group = positional
    if "get_cuda_rng_tracker" in kwargs:
        get_rng_state_tracker = take_old_keyword(kwargs, get_rng_state_tracker, stacklevel=3)
    run = _outside_of_graphs if torch.compiler.is_dynamo_compiling() else _checkpoint
    return run(
        function,
        args,
        kwargs,
        use_reentrant,
        distribute_saved_activations,
        get_rng_state_tracker,
        tp_group,
        context_fn,
        determinism_check,
        debug,
        preserve_rng_state,
        early_stop,
    )


def _checkpoint(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use_reentrant: bool,
    distribute: bool,
    getter: Callable[[], Any] | None,
    group: Any,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
    determinism_check: str,
    debug: bool,
    preserve: bool,
    early_stop: bool | None,
) -> Any:
    if not callable(function):
        raise TypeError(f"te_checkpoint takes a callable first, got {type(function).__name__}")
    if determinism_check not in ("default", "none"):
        raise CheckpointArgumentError(
            f"determinism_check should be one of 'default', 'none', but got {determinism_check!r}"
        )
    if not torch.is_grad_enabled():
        before = enter_engine(use_reentrant)
        try:
            if context_fn is noop_context_fn:
                return function(*args, **kwargs)
            with context_fn()[0]:
                return function(*args, **kwargs)
        finally:
            leave_phase(before)
    packed: PackedCall = None
    tensors: Sequence[Tensor] = args
    if kwargs or len(args) != 1 or type(args[0]) is not Tensor:  # else pack_call has nothing to do
        packed, tensors = pack_call(args, kwargs)
    tracker = getter() if getter is not None and preserve else None
    if tracker is not None and covers_itself(tracker):
        tracker = None
    needs = False
    for tensor in tensors:
        if tensor.requires_grad:
            needs = True
            break
    if use_reentrant and needs:
        distributed = _distributed(tensors, group) if distribute else None
        region = Region(function, True, tensors, preserve, tracker, context_fn)
        return run_reentrant(region, args, kwargs, packed, tensors, distributed)
    if distribute and not use_reentrant:
        warnings.warn(
            "distribute_saved_activations=True has no effect with use_reentrant=False: leave it out, or use the "
            "reentrant engine",
            UserWarning,
            stacklevel=3,
        )
    logs = None
    if _decides(torch_checkpoint._checkpoint_debug_enabled, debug):
        if context_fn is not noop_context_fn:
            raise CheckpointArgumentError(
                "debug=True is incompatible with non-default context_fn, whose place it takes; pass only one of them"
            )
        logs = OperatorLogs()
        context_fn = logs.contexts
    region = Region(function, False, tensors, preserve, tracker, context_fn)
    stop = _decides(torch_checkpoint._enable_checkpoint_early_stop, True if early_stop is None else early_stop)
    return run_non_reentrant(region, args, kwargs, packed, tensors, stop, determinism_check == "default", logs)


def _decides(setting: bool | None, argument: bool) -> bool:
    """Return torch's process-wide setting if one is in force, else the argument."""
    return argument if setting is None else setting


def _distributed(tensors: Sequence[Tensor], group: Any) -> Distributed:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise DistributedNotInitializedError(
            "distribute_saved_activations=True needs torch.distributed: call torch.distributed.init_process_group first"
        )
    return Distributed(tensors[0], group)


# torch.compile traces into te_checkpoint, finds is_dynamo_compiling() true and stops at this call: a graph break, after
# which the region runs as it does eagerly. (torch.compiler.disable says the same, but imports all of torch._dynamo at
# once, which doubles the time that importing this package takes.)
_outside_of_graphs = torch._disable_dynamo(_checkpoint)  # type: ignore[attr-defined]
