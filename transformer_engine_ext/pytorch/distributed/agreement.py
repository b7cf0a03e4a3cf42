# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on one rank goes wrong on all of them, at once and with the rank named."""

from __future__ import annotations

import builtins
import json
from typing import Any

from transformer_engine_ext import errors
from transformer_engine_ext.errors import PeerFailureError
from transformer_engine_ext.pytorch.distributed.collectives import ControlGroup

__all__ = ["agree", "describe_error", "raise_relayed", "rebuild_error"]

# What one rank raises, the others raise too, as this class; anything else is a RuntimeError there.
_RELAYED: dict[str, Any] = {
    name: kind
    for module in (builtins, errors)
    for name, kind in vars(module).items()
    if isinstance(kind, type)
    and issubclass(kind, (OSError, RuntimeError, ValueError, TypeError, LookupError, errors.TEExtError))
    and not issubclass(kind, UnicodeError)  # takes other arguments
}


def describe_error(error: Exception | None) -> bytes:
    """Return an error as bytes for other ranks; empty for None."""
    if error is None:
        return b""
    # The class itself or its nearest base that the others know. Subclasses of OSError follow from the number.
    name = next((kind.__name__ for kind in type(error).__mro__ if _RELAYED.get(kind.__name__) is kind), "")
    number = error.errno if isinstance(error, OSError) else None
    text = str(error) if name else f"{type(error).__name__}: {error}"
    return json.dumps([name, number, text]).encode()


def rebuild_error(description: bytes, rank: int, what: str) -> Exception:
    """Return the error that `rank` described, with operation and rank named."""
    name, number, text = json.loads(description)
    message = f"{what}: rank {rank}: {text}"
    kind: type[Exception] = _RELAYED.get(name, RuntimeError)
    return kind(message) if number is None else kind(number, message)


def raise_relayed(control: ControlGroup, problem: Exception | None, failing: int, what: str) -> None:
    """Raise, on every rank, what rank `failing` passes as its `problem`; a rank with a problem of its own raises it."""
    try:
        description = control.relay(describe_error(problem), failing, what)
    except PeerFailureError:
        if problem is not None:
            raise problem from None
        raise
    raise problem if problem is not None else rebuild_error(description, failing, what)


def agree(control: ControlGroup, problem: Exception | None, what: str) -> None:
    """Return if no rank has a problem, else raise on every rank. Collective."""
    failing = control.first_failure(problem is not None, what)
    if failing is not None:
        raise_relayed(control, problem, failing, what)
