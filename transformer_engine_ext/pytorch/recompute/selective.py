# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Selective checkpointing: keep streams in step when a random operator's result is cached instead of recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine_ext.pytorch.rng.devices import DeviceBackend, get_backend

__all__ = ["replaying_draws"]

Context = AbstractContextManager[Any]


# Note [A cached draw still moves its stream]
# A selective policy may save the result of a random operator. The recompute then takes it from the cache and draws
# nothing, so every later random operator would start too early in the stream and draw another mask. So forward notes
# where the stream stood after each random operator, and the recompute puts it there after the same operator, whether
# that ran or came from the cache.
class _Draws(TorchDispatchMode):
    """Notes, or replays, the stream position behind every random operator."""

    def __init__(self, noted: list[tuple[DeviceBackend, Tensor]], replay: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted
        self._replay = replay
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return result
        backend, index = _place(result)
        if backend is None:
            return result
        if not self._replay:
            self._noted.append((backend, backend.read(backend.default(index))))
        elif self._next < len(self._noted):
            noted_backend, value = self._noted[self._next]
            if noted_backend is backend:
                backend.write(backend.default(index), value)
        self._next += 1
        return result


def _place(result: Any) -> tuple[DeviceBackend | None, int]:
    """Return the backend and index of the device that a random operator ran on."""
    while isinstance(result, (tuple, list)) and result:
        result = result[0]
    if isinstance(result, Tensor) and result.device.type in ("cpu", "cuda"):
        return get_backend(result.device.type), result.device.index or 0
    return None, 0


def replaying_draws(forward: Context, recompute: Context) -> tuple[Context, Context]:
    """Wrap the contexts of a selective policy so that cached random operators still move their streams.

    Parameters
    ----------
    forward, recompute : context managers
        What ``context_fn`` returned. Unless one is a dispatch mode, no operator can be cached: they stay as they are.
    """
    if not isinstance(recompute, TorchDispatchMode) and not isinstance(forward, TorchDispatchMode):
        return forward, recompute
    noted: list[tuple[DeviceBackend, Tensor]] = []
    return _Both(forward, noted, False), _Both(recompute, noted, True)


@contextmanager
def _around(context: Context, draws: _Draws) -> Iterator[None]:
    # The mode entered last sees an operator first, so it also sees those that the policy's mode answers from its cache.
    with context, draws:
        yield


class _Both:
    """A policy's context with the noting of draws around it; may be entered again, as ``retain_graph`` needs."""

    def __init__(self, context: Context, noted: list[tuple[DeviceBackend, Tensor]], replay: bool) -> None:
        self._parts = (context, noted, replay)
        self._open: list[Context] = []

    def __enter__(self) -> None:
        context, noted, replay = self._parts
        both = _around(context, _Draws(noted, replay))
        both.__enter__()
        self._open.append(both)

    def __exit__(self, *exception: Any) -> bool | None:
        return self._open.pop().__exit__(*exception)
