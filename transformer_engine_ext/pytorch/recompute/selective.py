# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Selective checkpointing: keep streams in step when a random operator's result is cached instead of recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine_ext.pytorch.rng.capture import set_host_offset
from transformer_engine_ext.pytorch.rng.coverage import cuda_in_use
from transformer_engine_ext.pytorch.rng.devices import get_backend

__all__ = ["replaying_draws"]

Context = AbstractContextManager[Any]


# Note [A cached draw still moves its stream]
# A selective policy may save the result of a random operator. The recompute then takes it from the cache and draws
# nothing, so every later random operator would start too early in the stream and draw another mask. So forward notes
# how each random operator moved its stream, and the recompute moves it alike, whether the operator ran or came from
# the cache. On CUDA that is an increment of the offset, which holds in and out of graph capture; on CPU the state.
class _Draws(TorchDispatchMode):
    """Notes, or replays, how every random operator moves its stream."""

    def __init__(self, noted: list[Tensor | int], replay: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted
        self._replay = replay
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        cuda = get_backend("cuda")
        before = {index: cuda.position(cuda.default(index)) for index in cuda_in_use()}
        result = func(*args, **kwargs)
        device = _device_of(result)
        if device is None or device.type not in ("cpu", "cuda"):
            return result
        index = device.index or 0
        handle = get_backend(device.type).default(index)
        if self._replay:
            if self._next < len(self._noted):
                self._move(handle, self._noted[self._next], before.get(index))
        elif device.type == "cuda":
            self._noted.append(cuda.position(handle) - before[index])
        else:
            self._noted.append(get_backend("cpu").read(handle))
        self._next += 1
        return result

    @staticmethod
    def _move(handle: Generator, noted: Tensor | int, start: int | None) -> None:
        if isinstance(noted, Tensor):
            get_backend("cpu").write(handle, noted)
        elif start is not None:
            set_host_offset(handle, start + noted)


def _device_of(result: Any) -> torch.device | None:
    """Return the device that a random operator ran on."""
    while isinstance(result, (tuple, list)) and result:
        result = result[0]
    return result.device if isinstance(result, Tensor) else None


def replaying_draws(forward: Context, recompute: Context) -> tuple[Context, Context]:
    """Wrap the contexts of a selective policy so that cached random operators still move their streams.

    Parameters
    ----------
    forward, recompute : context managers
        What ``context_fn`` returned. Unless one is a dispatch mode, no operator can be cached: they stay as they are.
    """
    if not isinstance(recompute, TorchDispatchMode) and not isinstance(forward, TorchDispatchMode):
        return forward, recompute
    noted: list[Tensor | int] = []
    return _Both(forward, noted, False), _Both(recompute, noted, True)


@contextmanager
def _around(context: Context, draws: _Draws) -> Iterator[None]:
    # The mode entered last sees an operator first, so it also sees those that the policy's mode answers from its cache.
    with context, draws:
        yield


class _Both:
    """A policy's context with the noting of draws around it; may be entered again, as ``retain_graph`` needs."""

    def __init__(self, context: Context, noted: list[Tensor | int], replay: bool) -> None:
        self._parts = (context, noted, replay)
        self._open: list[Context] = []

    def __enter__(self) -> None:
        context, noted, replay = self._parts
        both = _around(context, _Draws(noted, replay))
        both.__enter__()
        self._open.append(both)

    def __exit__(self, *exception: Any) -> bool | None:
        return self._open.pop().__exit__(*exception)
