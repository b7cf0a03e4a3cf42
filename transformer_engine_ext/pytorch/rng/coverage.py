# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Which streams a region's snapshot covers at entry: the default generators, and foreign trackers as a whole."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from transformer_engine_ext.errors import StreamStateTypeError, UnsupportedDeviceError
from transformer_engine_ext.pytorch.rng import moves
from transformer_engine_ext.pytorch.rng.devices import BACKENDS, CPU, DeviceBackend, same_value

__all__ = ["Foreign", "cuda_in_use", "default_name", "default_streams"]

Covered = tuple[str, DeviceBackend, Any, Any]


@dataclass(frozen=True)
class _ModuleDefault:
    """Stands for the default generator of a device type that is reached through its torch module only."""

    device: torch.device


class _ModuleBackend:
    """Default generators of other device types (xpu, mps, out-of-tree ones), moved by value.

    These have no tracked streams here: only ``get_rng_state`` and ``set_rng_state`` of the device's torch module are
    needed, which is what ``torch.utils.checkpoint`` asks for too.
    """

    device_type = "other"

    def __init__(self, module: Any) -> None:
        self._module = module

    def default(self, index: int) -> Generator:
        raise NotImplementedError

    def read(self, handle: Any) -> Tensor:
        state: Tensor = self._module.get_rng_state(handle.device)
        return state.cpu().contiguous()

    def write(self, handle: Any, value: Tensor) -> None:
        self._module.set_rng_state(value, handle.device)

    take = position = read
    put = write
    same = equal = unmoved = leads_to = staticmethod(same_value)

    def distance(self, entry: Tensor, position: Tensor) -> str:
        return f"state {bytes(position.tolist()).hex()[:32]}..."

    def new_stream(self, seed: int, index: int) -> Generator:
        raise NotImplementedError

    def bind(self, handle: Any) -> None:
        return None

    def unbind(self, token: None) -> None:
        return None

    def bound_stream(self, index: int) -> None:
        return None

    def depth(self, index: int) -> int:
        return 0

    def unwind(self, index: int, depth: int, handle: Any = None) -> None:
        return None


_others: dict[str, _ModuleBackend] = {}
_other_defaults: dict[torch.device, _ModuleDefault] = {}


def _other(device: torch.device) -> Covered:
    """Return the default stream of a device that has no backend of its own."""
    backend = _others.get(device.type)
    if backend is None:
        module: Any = getattr(torch, device.type, None)
        if not (hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")):
            raise UnsupportedDeviceError(
                f"a tensor of this checkpointed region lives on {device}, and torch.{device.type} offers no "
                "get_rng_state and set_rng_state, so a recompute there could draw other random numbers than its "
                "forward. If the region draws none, pass preserve_rng_state=False"
            )
        backend = _others[device.type] = _ModuleBackend(module)
    handle = _other_defaults.setdefault(device, _ModuleDefault(device))
    return f"default ({device})", backend, handle, backend.take(handle)


def _module_of(function: Callable[..., Any] | None) -> torch.nn.Module | None:
    """Return the module that a call of ``function`` runs, if it shows: itself, its method's owner, or in a partial."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, torch.nn.Module) else None


def _module_devices(module: torch.nn.Module | None) -> Iterator[torch.device]:
    if module is not None:
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            yield tensor.device


_has_context: Callable[[int], bool] | None = getattr(torch._C, "_cuda_hasPrimaryContext", None)


def _in_use(index: int) -> bool:
    """Tell whether this process has touched a CUDA device; True where that cannot be found out."""
    if _has_context is None:
        return True
    try:
        return _has_context(index)
    except RuntimeError:
        return True


#: ``(0,)`` once CUDA runs with one device, which stays so: what ``cuda_in_use`` would return, without the call.
alone: tuple[int, ...] = ()


def cuda_in_use() -> tuple[int, ...]:
    """Return the indices of the CUDA devices that this process uses: the current one, and all with a context."""
    global alone
    if not torch.cuda.is_initialized():
        return ()
    # Generators are made for all visible devices when CUDA starts; counting the devices anew costs a microsecond.
    count = len(torch.cuda.default_generators)
    if count == 1:
        alone = (0,)
        return alone
    current = torch.cuda.current_device()
    return tuple([i for i in range(count) if i == current or _in_use(i)])


def _after_fork() -> None:
    global alone
    alone = ()  # CUDA does not run in a child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.cache  # an accelerator is CUDA or something else, and stays that
def _other_types() -> bool:
    """Tell whether this build of torch drives an accelerator other than CUDA."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type not in ("cpu", "cuda")


@functools.cache
def default_name(index: int) -> str:
    """Return what to call the default stream of a CUDA device in messages."""
    return f"default (cuda:{index})"


# Note [Which devices are covered]
# The default generator of every CUDA device that this process has a context on: a superset of the devices of the
# region's arguments, of its module's parameters and of the tensors in its closure, and cheaper to find than those (a
# walk over a transformer layer's parameters costs more than the whole snapshot). One process per GPU has one context,
# however many devices it sees. Other device types are covered where an argument or a parameter lives on one.
def default_streams(
    tensors: Sequence[Tensor], function: Callable[..., Any] | None, in_use: tuple[int, ...]
) -> list[Covered]:
    """Return the default streams to cover, as ``(name, backend, handle, value)``.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Tensor arguments of the region, nested ones included.
    function : callable or None
        What the region calls.
    in_use : tuple of int
        What ``cuda_in_use`` returns now.

    Returns
    -------
    list of tuple
        The CPU's default stream, and see Note [Which devices are covered].

    Raises
    ------
    UnsupportedDeviceError
        For a device type whose default generator cannot be read and written.
    """
    cpu = CPU
    handle = cpu.bound
    found: list[Covered] = [("default (cpu)", cpu, handle, moves.take(cpu, handle))]
    for index in in_use:
        cuda = BACKENDS["cuda"]
        # What default() does, where the one device is a real one.
        handle = torch.cuda.default_generators[0].graphsafe_get_state() if alone else cuda.default(index)
        found.append((default_name(index), cuda, handle, moves.take(cuda, handle)))
    others = False
    for tensor in tensors:
        if not (tensor.is_cpu or tensor.is_cuda or tensor.is_meta):
            others = True
    if others or (not in_use and _other_types()):
        for device in dict.fromkeys((*(tensor.device for tensor in tensors), *_module_devices(_module_of(function)))):
            if device.type not in ("cpu", "cuda", "meta"):
                found.append(_other(device))
    return found


class Foreign:
    """All streams of another library's tracker, at one moment.

    Parameters
    ----------
    tracker : object
        Anything with ``get_states()`` and ``set_states(states)``, such as the trackers of Transformer Engine and
        Megatron-core. States may be generators (written in place) or ``uint8`` tensors (set back as a whole).

    Raises
    ------
    StreamStateTypeError
        If the tracker lacks these methods, or a state is of another type.
    """

    def __init__(self, tracker: Any) -> None:
        if not (hasattr(tracker, "get_states") and hasattr(tracker, "set_states")):
            raise StreamStateTypeError(
                f"get_rng_state_tracker returned a {type(tracker).__name__}; expected an RNG tracker with get_states() "
                "and set_states(), such as CudaRNGStatesTracker"
            )
        self._tracker = tracker
        self.states = self._copy()
        self.by_value = any(isinstance(state, Tensor) for state in self.states.values())

    def _copy(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, state in self._tracker.get_states().items():
            if isinstance(state, Tensor):
                states[name] = state.clone()
            elif isinstance(state, Generator):
                states[name] = state
            else:
                raise StreamStateTypeError(
                    f"stream {name!r} of the {type(self._tracker).__name__} that was passed holds a "
                    f"{type(state).__name__}; expected a torch.Generator or a uint8 state tensor"
                )
        return states

    def generators(self) -> list[tuple[str, Generator]]:
        """Return the streams that are handles; the snapshot covers them one by one."""
        return [(name, state) for name, state in self.states.items() if isinstance(state, Generator)]

    def positions(self) -> dict[str, Tensor]:
        """Return the states that are held by value."""
        if not self.by_value:
            return {}
        return {name: state for name, state in self._copy().items() if isinstance(state, Tensor)}

    def rewind(self) -> dict[str, Any] | None:
        """Set the saved states; return the live ones for ``restore``, or None if there was nothing to set."""
        if not self.by_value:
            return None
        live = self._copy()
        # Copies: a tracker may keep the tensors that it is given, and write into them.
        self._tracker.set_states(
            {name: state.clone() if isinstance(state, Tensor) else state for name, state in self.states.items()}
        )
        return live

    def restore(self, live: dict[str, Any] | None) -> None:
        """Undo ``rewind``."""
        if live is not None:
            self._tracker.set_states(live)
