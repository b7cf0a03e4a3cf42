# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's rendezvous store, and the notice in it that a rank has died."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed

__all__ = ["connect", "host", "post_notice", "read_notice"]

_NOTICE = "death_notice"


# torch does not export the store classes in a way that type checkers see, hence Any.
_dist: Any = torch.distributed


def host() -> Any:
    """Return a store that lives in this process, on a free port (``.port``)."""
    return _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connect(port: int, launch: int, timeout: timedelta) -> Any:
    """Return a connection of its own to the hosted store; keys are private to one launch."""
    return launch_view(_dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout), launch)


def launch_view(store: Any, launch: int) -> Any:
    """Return the part of a store that belongs to one launch."""
    return _dist.PrefixStore(f"launch-{launch}", store)


def post_notice(store: Any, launch: int, text: str) -> None:
    """Tell the ranks of a launch that one of them has ended."""
    launch_view(store, launch).set(_NOTICE, text)


def read_notice(view: Any) -> str | None:
    """Return what the launcher posted; None while nothing is known."""
    try:
        return view.get(_NOTICE).decode() if view.check([_NOTICE]) else None
    except RuntimeError:
        return "the process that started the ranks is gone"
