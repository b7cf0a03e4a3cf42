# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Ambient settings that a recompute must share with its forward: autocast, default dtype and device, kernel choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["Ambient", "autocast_cache"]

# (enabled, dtype) of each device type, and whether weight casts are cached.
_AutocastState = tuple[tuple[tuple[bool, torch.dtype], ...], bool]


def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type == "cpu":
        return ("cpu",)
    return ("cpu", accelerator.type)


_types: tuple[str, ...] | None = None


def _autocast_state() -> _AutocastState:
    global _types
    if _types is None:
        _types = _device_types()
    return (
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _types),
        torch.is_autocast_cache_enabled(),
    )


class Ambient:
    """Settings of the moment of construction."""

    __slots__ = ("_autocast", "_device_mode", "_dtype", "_kernels")

    def __init__(self) -> None:
        self._autocast = _autocast_state()
        self._dtype = torch.get_default_dtype()
        self._kernels = _kernels()
        self._device_mode = _device_mode() if torch._C._len_torch_function_stack() else None

    @property
    def casts(self) -> bool:
        """Whether autocast was on for any device type."""
        return any(enabled for enabled, _ in self._autocast[0])

    def again(self) -> AbstractContextManager[object]:
        """Return a context with these settings; it costs nothing where they hold already."""
        now = _autocast_state()
        dtype, kernels = torch.get_default_dtype(), _kernels()
        same = now == self._autocast and dtype is self._dtype and kernels == self._kernels
        if same and self._device_mode is None:
            return _SAME
        stack = ExitStack()
        if kernels != self._kernels:  # See Note [Another kernel draws other numbers]
            stack.callback(_set_kernels, kernels)
            _set_kernels(self._kernels)
        if dtype is not self._dtype:
            torch.set_default_dtype(self._dtype)
            stack.callback(torch.set_default_dtype, dtype)
        (wanted, cache), (present, _) = self._autocast, now
        for kind, setting, other in zip(_types or (), wanted, present, strict=True):
            if setting != other:
                stack.enter_context(torch.autocast(kind, enabled=setting[0], dtype=setting[1], cache_enabled=cache))
        stack.enter_context(autocast_cache(cache))
        if self._device_mode is not None:
            stack.enter_context(torch.device(self._device_mode))
        return stack


_SAME = nullcontext()


# Note [Another kernel draws other numbers]
# The fused and the plain attention kernels, and cuDNN's and the native recurrent ones, turn the same random numbers
# into different masks. Which one runs depends on switches that sdpa_kernel() and cudnn.flags() set for a scope, and a
# backward usually runs outside of the scope that its forward ran in.
_SWITCHES = [
    (read, write)
    for getter, setter in (
        *((f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in ("flash", "mem_efficient", "math", "cudnn")),
        ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
        ("_get_sdp_priority_order", "_set_sdp_priority_order"),
        ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    )
    if (read := getattr(torch._C, getter, None)) and (write := getattr(torch._C, setter, None))
]
_READS = [read for read, _ in _SWITCHES]


def _kernels() -> list[Any]:
    return [read() for read in _READS]


def _set_kernels(values: list[Any]) -> None:
    for (_, write), value in zip(_SWITCHES, values, strict=True):
        write(value)


def _device_mode() -> torch.device | None:
    """Return the device of the innermost ``torch.device`` context, where factory functions make their tensors."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return modes[-1].device if modes else None


# Note [Casts made without grad stay out of the cache]
# Autocast keeps the low-precision copy of a weight for the rest of its scope. A copy made under no_grad has no graph,
# so whoever finds it in the cache later (the recompute, or code outside the region in the same scope) would compute no
# gradient for that weight. A reentrant forward runs under no_grad, so its casts must not be kept.
# The casts of the recompute do have a graph; it caches as the forward's surroundings did, since a weight that is used
# twice gets the sum of its gradients in another precision when it is cast twice.
@contextmanager
def autocast_cache(enabled: bool) -> Iterator[None]:
    """Switch autocast's cache of weight casts on or off inside."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
