# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Ambient settings that a recompute must share with its forward: autocast, default dtype and device, kernel choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

__all__ = ["Ambient", "autocast_cache"]

# Reading a setting, and writing it.
_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def _autocast_settings() -> list[_Setting]:
    accelerator = torch.accelerator.current_accelerator()
    types = ("cpu",) if accelerator is None or accelerator.type == "cpu" else ("cpu", accelerator.type)
    found: list[_Setting] = []
    for kind in types:
        found.append((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)))
        found.append((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)))
    return found


# Note [Another kernel draws other numbers]
# The fused and the plain attention kernels, and cuDNN's and the native recurrent ones, turn the same random numbers
# into different masks. Which one runs depends on switches that sdpa_kernel() and cudnn.flags() set for a scope, and a
# backward usually runs outside of the scope that its forward ran in.
_KERNELS = [
    (read, write)
    for getter, setter in (
        *((f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in ("flash", "mem_efficient", "math", "cudnn")),
        ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
        ("_get_sdp_priority_order", "_set_sdp_priority_order"),
        ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    )
    if (read := getattr(torch._C, getter, None)) and (write := getattr(torch._C, setter, None))
]
_settings: list[_Setting] = []
_reads: list[Callable[[], Any]] = []
_autocasts = 0  # how many of the settings are those of autocast; they come first


def _look_up() -> None:
    """Find the settings, at the first region: the build of torch says nothing of accelerators before."""
    global _settings, _reads, _autocasts
    autocast = _autocast_settings()
    others = [
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        *_KERNELS,
    ]
    _settings, _autocasts = [*autocast, *others], len(autocast)
    _reads = [read for read, _ in _settings]


class Ambient:
    """Settings of the moment of construction."""

    __slots__ = ("_device_mode", "_values")

    def __init__(self) -> None:
        if not _reads:
            _look_up()
        self._values = [read() for read in _reads]
        self._device_mode = _device_mode() if torch._C._len_torch_function_stack() else None

    @property
    def casts(self) -> bool:
        """Whether autocast was on for any device type."""
        return any(self._values[number] for number in range(0, _autocasts, 2))

    def again(self) -> AbstractContextManager[object] | None:
        """Return a context with these settings, or None where they hold already."""
        now = [read() for read in _reads]
        if now == self._values and self._device_mode is None:
            return None
        return self._differing(now)

    @contextmanager
    def _differing(self, now: list[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            # Inside of an autocast scope weight casts are cached until the outermost one ends, which this one may be.
            if now[:_autocasts] != self._values[:_autocasts]:
                torch.autocast_increment_nesting()
                stack.callback(_end_autocast)
            for (_, write), wanted, present in zip(_settings, self._values, now, strict=True):
                if wanted != present:
                    stack.callback(write, present)
                    write(wanted)
            if self._device_mode is not None:
                stack.enter_context(torch.device(self._device_mode))
            yield


def _end_autocast() -> None:
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()


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
