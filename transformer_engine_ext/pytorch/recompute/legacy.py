# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's deprecated calling conventions."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine_ext.errors import CheckpointArgumentError

__all__ = ["take_old_keyword", "take_positional_options"]

Options = tuple[bool, Any, Any]


def _is_group(value: object) -> bool:
    return torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)


# Note [Positional options]
# Calls written for Transformer Engine before 1.5 pass (distribute, tracker, group) between the function and its
# arguments. Its rule to recognise them is kept to the letter, also where it misreads a call: more than three extra
# arguments, a bool, a callable, None or a process group. A tracker of None was never recognised there, so the three
# values ended up in the function; that form counts here only where it cannot be anything else: with a process group,
# or if the function's signature does not take the arguments as given.
def take_positional_options(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], stacklevel: int
) -> tuple[tuple[Any, ...], Options | None]:
    """Split deprecated positional options off a call's arguments.

    Parameters
    ----------
    function : callable
        The checkpointed function.
    args, kwargs : tuple, dict
        The call's arguments.
    stacklevel : int
        Of the warning, counted from here.

    Returns
    -------
    tuple
        The function's own arguments, and ``(distribute, tracker getter, group)``, or None for a call of today's form.
    """
    if len(args) <= 3 or not isinstance(args[0], bool):
        return args, None
    distribute, getter, group = args[:3]
    if group is not None and not _is_group(group):
        return args, None
    if getter is None:
        if group is None and _binds(function, args, kwargs):
            return args, None
    elif not callable(getter):
        return args, None
    warnings.warn(
        "Passing distribute_saved_activations, get_rng_state_tracker and tp_group to te_checkpoint as positional "
        "arguments is deprecated; pass them as keyword arguments",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return args[3:], (distribute, getter, group)


def _binds(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        inspect.signature(target).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a built-in without a signature: nothing speaks against the call as it stands
        return True
    return True


def take_old_keyword(kwargs: dict[str, Any], getter: Any, stacklevel: int) -> Any:
    """Take the tracker getter from its keyword of Transformer Engine 0.x, ``get_cuda_rng_tracker``.

    Raises
    ------
    CheckpointArgumentError
        If the present keyword is given too.
    """
    if "get_cuda_rng_tracker" not in kwargs:
        return getter
    old = kwargs.pop("get_cuda_rng_tracker")
    if getter is not None:
        raise CheckpointArgumentError(
            "te_checkpoint got both get_rng_state_tracker and its old name get_cuda_rng_tracker; pass the first only"
        )
    warnings.warn(
        "get_cuda_rng_tracker is the old name of an argument of te_checkpoint; pass get_rng_state_tracker instead",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return old
