# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Ambient settings that a recompute must share with its forward: autocast, default dtype and device, kernel choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from transformer_engine_ext.pytorch.rng import accelerate

__all__ = ["Ambient", "autocast_cache"]

# Reading a setting, and writing it.
_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


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
_accelerator = ""
_AUTOCASTS = 4  # how many of the settings are those of autocast; they come first


def _look_up() -> None:
    """Find the settings, at the first region: the build of torch says nothing of accelerators before."""
    global _settings, _accelerator
    accelerator = torch.accelerator.current_accelerator()
    _accelerator = "cpu" if accelerator is None else accelerator.type
    autocast: list[_Setting] = []
    for kind in ("cpu", _accelerator):
        autocast.append((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)))
        autocast.append((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)))
    others = [
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        *_KERNELS,
    ]
    _settings = [*autocast, *others]
    use(accelerate())


def use(native: Any) -> None:
    """Read the settings by the native library ``csrc/streams.cpp`` from now on; None: by torch's Python functions."""
    global key
    if native is not None:
        native.set_accelerator(_accelerator)
    key = _now if native is None else native.ambient


# The settings of the moment: their values in the order of _settings or, from the native library and in a twentieth of
# the time, bytes that differ whenever one of them does. For these the values are kept.
Key = list[Any] | bytes
_known: dict[bytes, list[Any]] = {}

_enabled, _dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_cached, _default_dtype = torch.is_autocast_cache_enabled, torch.get_default_dtype
_kernels = [read for read, _ in _KERNELS]


def _now() -> list[Any]:
    """Return the values of the settings, in their order; written out, since two of these run per region."""
    return [
        _enabled("cpu"),
        _dtype("cpu"),
        _enabled(_accelerator),
        _dtype(_accelerator),
        _cached(),
        _default_dtype(),
        *[read() for read in _kernels],
    ]


#: Returns the settings of the moment, to compare with a region's.
key: Callable[[], Key] = _now


class Ambient:
    """Settings of the moment of construction.

    Attributes
    ----------
    casts : bool
        Whether autocast was on for any device type.
    key : list or bytes
        The settings, to compare with those of another moment.
    device_mode : torch.device or None
        Where factory functions make their tensors; None without a ``torch.device`` context.
    """

    __slots__ = ("casts", "device_mode", "key")

    def __init__(self) -> None:
        if not _settings:
            _look_up()
        self.key = now = key()
        if type(now) is bytes and now not in _known:
            _known[now] = _now()
        self.casts = bool(now[0] or now[2])
        self.device_mode = _device_mode() if torch._C._len_torch_function_stack() else None

    def again(self) -> AbstractContextManager[object]:
        """Return a context with these settings; none is needed where ``key()`` equals ``key`` and there is no mode."""
        return self._differing(_now(), _known[self.key] if isinstance(self.key, bytes) else self.key)

    @contextmanager
    def _differing(self, now: list[Any], values: list[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            # Inside of an autocast scope weight casts are cached until the outermost one ends, which this one may be.
            if now[:_AUTOCASTS] != values[:_AUTOCASTS]:
                torch.autocast_increment_nesting()
                stack.callback(_end_autocast)
            for (_, write), wanted, present in zip(_settings, values, now, strict=True):
                if wanted != present:
                    stack.callback(write, present)
                    write(wanted)
            if self.device_mode is not None:
                stack.enter_context(torch.device(self.device_mode))
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
