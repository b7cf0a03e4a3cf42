# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What users pass to ``ParallelRNG``, checked: each function returns what it means, or says what to pass instead."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from datetime import timedelta
from numbers import Real
from typing import Any

import torch

from transformer_engine_ext.errors import UnknownAxisWarning
from transformer_engine_ext.pytorch.distributed.host_states import HOST_STREAMS
from transformer_engine_ext.pytorch.distributed.streams import DEFAULT_STREAM, KNOWN_AXES, StreamSpec
from transformer_engine_ext.pytorch.distributed.topology import Layout
from transformer_engine_ext.pytorch.rng import CudaRNGStatesTracker
from transformer_engine_ext.pytorch.rng.devices import get_backend

__all__ = [
    "check_axes",
    "check_device",
    "check_include",
    "check_repair",
    "check_streams",
    "check_timeout",
    "check_tracker",
    "choose",
    "warn_of_unknown_axes",
]


def choose(what: str, value: str, accepted: Sequence[str]) -> str:
    """Return one of the accepted words."""
    if value not in accepted:
        raise ValueError(f"{what}={value!r} is not available; this release accepts {', '.join(map(repr, accepted))}")
    return value


def check_device(device: object) -> torch.device:
    """Return the device whose streams are meant; None: CUDA if there is any, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"device is a torch.device, a string such as 'cuda:0' or an index, got {type(device).__name__}")
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device: {str(error).splitlines()[0]}") from None
    get_backend(found.type)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r} is a CUDA device, and torch.cuda.is_available() is False here; pass device='cpu', or "
            "look for what hides the GPU (a CPU build of torch, the driver, CUDA_VISIBLE_DEVICES)"
        )
    count = torch.cuda.device_count() if found.type == "cuda" else 1
    if (found.index or 0) >= count:
        raise ValueError(f"device={device!r} does not exist: this process sees {count} of type {found.type!r}")
    return found


def check_timeout(timeout: object) -> timedelta:
    """Return a time-out; numbers are seconds."""
    if isinstance(timeout, Real) and not isinstance(timeout, bool):
        # Longer than a year is meant as "for ever", which a collective cannot express.
        timeout = timedelta(seconds=min(float(timeout), 366 * 86400.0)) if math.isfinite(timeout) else None
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is a datetime.timedelta or a finite number of seconds, got {timeout!r}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout={timeout} leaves no time for any exchange with other ranks; pass a positive one")
    return timeout


def check_tracker(tracker: Any, device: torch.device) -> CudaRNGStatesTracker:
    """Return the tracker, a new one for None; other classes are taken for what they offer, as Megatron's does."""
    if tracker is None:
        return CudaRNGStatesTracker(device)
    missing = [name for name in ("states_", "seeds_", "add", "fork") if not hasattr(tracker, name)]
    if missing or isinstance(tracker, type):
        hint = "; pass the tracker itself, not the function that returns it" if callable(tracker) else ""
        raise TypeError(
            f"tracker is a CudaRNGStatesTracker or None, got {type(tracker).__name__}, which has no "
            f"{missing[0] if missing else 'instance'}{hint}"
        )
    found: CudaRNGStatesTracker = tracker
    return found


def check_streams(streams: object, layout: Layout) -> tuple[StreamSpec, ...]:
    """Return the declared streams, each once, with axes that exist or have a fixed meaning."""
    if isinstance(streams, StreamSpec) or not hasattr(streams, "__iter__"):
        raise TypeError(f"streams is a sequence of StreamSpec, got {type(streams).__name__}; put it in a list")
    specs = tuple(streams)
    known = {*KNOWN_AXES, *layout.axes}
    for index, spec in enumerate(specs):
        if not isinstance(spec, StreamSpec):
            raise TypeError(f"streams holds StreamSpec objects, got {type(spec).__name__} at position {index}")
        if any(other.name == spec.name for other in specs[:index]):
            raise ValueError(f"stream {spec.name!r} is declared twice")
        for axis in (*spec.varies_over, *spec.lockstep_over):
            if axis not in known:
                raise ValueError(
                    f"stream {spec.name!r} names the axis {axis!r}, which the topology does not have "
                    f"({layout.describe()}) and which has no fixed meaning ({', '.join(KNOWN_AXES)})"
                )
    if not any(spec.name == DEFAULT_STREAM for spec in specs):
        raise ValueError(
            f"no stream named {DEFAULT_STREAM!r} among {[spec.name for spec in specs]}; every job draws from the "
            "default generator, so declare StreamSpec('default', ..., is_default=True)"
        )
    return specs


def warn_of_unknown_axes(streams: Sequence[StreamSpec], layout: Layout, level: int = 2) -> None:
    """Warn, on rank 0, of axes that nothing knows: ranks along a misnamed one would draw equal numbers, unnoticed.

    A warning and no error, since on a mesh for FSDP, say, streams may be meant to be alike along such an axis.
    """
    named = {*KNOWN_AXES, *(axis for spec in streams for axis in (*spec.varies_over, *spec.lockstep_over))}
    unknown = [axis for axis, size in layout.axes.items() if size > 1 and axis not in named]
    if unknown and layout.rank == 0:
        warnings.warn(
            f"no stream names the axes {', '.join(map(repr, unknown))} of the topology ({layout.describe()}), so that "
            "every stream starts from one seed on all ranks along them. If one is another name for an axis with a "
            f"fixed meaning ({', '.join(KNOWN_AXES)}), rename it; else name it in a stream's varies_over or "
            "lockstep_over. If streams are meant to be alike along it, as for FSDP, ignore UnknownAxisWarning",
            UnknownAxisWarning,
            stacklevel=level + 1,
        )


def check_axes(axes: Sequence[str] | None, layout: Layout) -> tuple[str, ...] | None:
    """Return the chosen axes, in the order of their names; None: all."""
    if axes is None:
        return None
    if isinstance(axes, str) or not hasattr(axes, "__iter__") or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(f"axes is a sequence of axis names such as ('tp',), got {axes!r}")
    unknown = [axis for axis in axes if axis not in {*KNOWN_AXES, *layout.axes}]
    if unknown:
        raise ValueError(
            f"axes names {unknown[0]!r}, which the topology does not have ({layout.describe()}) and which has no fixed "
            f"meaning ({', '.join(KNOWN_AXES)})"
        )
    return tuple(sorted(set(axes)))


def check_include(include: Sequence[str]) -> tuple[str, ...]:
    """Return which of the host's generators are asked for."""
    if isinstance(include, str) or not hasattr(include, "__iter__"):
        raise TypeError(f"include is a sequence such as ('python', 'numpy'), got {include!r}")
    for kind in include:
        choose("include", kind, sorted(HOST_STREAMS.values()))
    return tuple(include)


def check_repair(repair: str | None) -> str | None:
    """Return how verify() may repair, or None."""
    return None if repair is None else choose("repair", repair, ("broadcast",))
