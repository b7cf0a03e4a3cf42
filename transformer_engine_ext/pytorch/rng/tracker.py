# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``CudaRNGStatesTracker``: named streams with Transformer Engine's interface, on CUDA and on CPU."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Generator, Tensor

from transformer_engine_ext.errors import (
    StateFormatError,
    StreamExistsError,
    StreamStateTypeError,
    UnknownStreamError,
    UnsupportedDeviceError,
)
from transformer_engine_ext.pytorch.rng.devices import DeviceBackend, backend_of, device_index, get_backend
from transformer_engine_ext.pytorch.rng.recording import born_in_forward, note_birth, note_table, reborn, touch
from transformer_engine_ext.pytorch.rng.registry import register_tracker
from transformer_engine_ext.pytorch.rng.state import MT19937State, PhiloxState, decode_state

__all__ = ["CudaRNGStatesTracker", "StreamStates", "covers_itself"]


class StreamStates(dict[str, Generator]):
    """Live handles, as ``get_states`` has always returned them, which also carry the values of that moment.

    Attributes
    ----------
    state_values : dict
        Stream name to ``uint8`` CPU tensor (16 bytes for CUDA, 5056 for CPU). ``set_states`` writes these back.
    """

    # See Note [Saved states are values]: a caller that saves with get_states() and restores with set_states() holds
    # handles that move on. The values beside them are what makes such a caller exact without a change.
    def __init__(self, handles: Mapping[str, Generator], state_values: Mapping[str, Tensor]) -> None:
        super().__init__(handles)
        self.state_values = dict(state_values)
        self._captured = dict(handles)

    def value_of(self, name: str) -> Tensor | None:
        """Return the value that an entry carries; None if the entry was replaced since."""
        if self.get(name) is not self._captured.get(name):
            return None
        return self.state_values.get(name)

    def copy(self) -> StreamStates:
        """Return a shallow copy that carries the same values."""
        twin = StreamStates(self._captured, self.state_values)
        twin.clear()
        twin.update(self)
        return twin

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamStates:
        return StreamStates(_clone_handles(self, memo, self), {name: self._value_now(name) for name in self})

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamStates, (dict(self), {name: self._value_now(name) for name in self})

    def _value_now(self, name: str) -> Tensor:
        carried = self.value_of(name)
        return backend_of(self[name]).read(self[name]) if carried is None else carried


class CudaRNGStatesTracker:
    """Named random-number streams, forked one at a time into the default generator.

    Follows ``transformer_engine.pytorch.CudaRNGStatesTracker``: same methods, attributes and error classes.

    Parameters
    ----------
    device : str or torch.device, optional
        Where ``add`` makes streams. The default is the current CUDA device if CUDA is available, else the CPU; it is
        looked up when a stream is added, so making a tracker touches no CUDA context.

    Attributes
    ----------
    states_ : dict
        Stream name to ``torch.Generator``.
    seeds_ : set of int
        Seeds given to ``add`` so far.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        self._states: dict[str, Generator] = {}
        self.seeds_: set[int] = set()
        self._device = torch.device(device) if device is not None else None
        register_tracker(self)

    # See Note [First touch]: whoever takes a handle inside a region may draw from it without a fork.
    @property
    def states_(self) -> dict[str, Generator]:
        """Stream name to ``torch.Generator``."""
        for name, handle in self._states.items():
            touch(name, handle)
        return self._states

    @states_.setter
    def states_(self, states: dict[str, Generator]) -> None:
        self._states = states

    def reset(self) -> None:
        """Forget all streams and seeds."""
        note_table(self)
        self._states = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Generator]:
        """Return the streams' handles, with the values that they have now.

        Returns
        -------
        StreamStates
            A new ``dict`` of name to ``torch.Generator``. Given to ``set_states``, it restores today's values.
        """
        states = self.states_
        return StreamStates(states, {name: backend_of(handle).read(handle) for name, handle in states.items()})

    def set_states(self, states: Mapping[str, Generator | Tensor]) -> None:
        """Set the tracker's streams; those that ``states`` does not name are dropped.

        Parameters
        ----------
        states : mapping of str to torch.Generator or torch.Tensor
            What ``get_states`` returned: the values it carries are written in place into the streams that exist,
            others are adopted. A plain dict of generators: the handles are adopted. ``uint8`` state tensors (16 bytes
            CUDA, 5056 bytes CPU, any device): written in place, or into a new stream where the name is new. The
            mapping is neither kept nor changed.

        Raises
        ------
        StreamStateTypeError
            If ``states`` is no mapping, or an entry is neither a generator nor a tensor.
        StateFormatError
            If a tensor is no RNG state, or one of another device type than the stream that it names.

        Notes
        -----
        On an error nothing has changed.
        """
        if not isinstance(states, Mapping):
            raise StreamStateTypeError(
                "set_states takes a dict of stream name to torch.Generator or uint8 tensor, got a "
                f"{type(states).__name__}. Nothing was changed"
            )
        handles: dict[str, Generator] = {}
        writes: list[tuple[Generator, Tensor]] = []
        born: list[Generator] = []
        for name, state in states.items():
            mine = self._states.get(name)
            if isinstance(state, Generator):
                carried = states.value_of(name) if isinstance(states, StreamStates) else None
                handles[name] = state if mine is None or carried is None else mine
                if carried is not None:
                    writes.append((handles[name], _checked(name, handles[name], carried)))
            elif isinstance(state, Tensor):
                if mine is None:
                    mine = self._stream_for(name, state)
                    born.append(mine)
                handles[name] = mine
                writes.append((mine, _checked(name, mine, state)))
            else:
                raise StreamStateTypeError(
                    f"the state of stream {name!r} is a {type(state).__name__}; expected a torch.Generator or a uint8 "
                    "state tensor, as get_states() and torch.Generator.get_state() return them. Nothing was changed"
                )
        note_table(self)
        for handle in born:
            note_birth(handle, "", None)
        for name, handle in handles.items():
            touch(name, handle)
        for handle, value in writes:
            backend_of(handle).write(handle, value)
        self._states = handles

    # Note [Seeds that start one sequence]
    # A generator takes a seed modulo 2**64 (so -1 is 2**64 - 1), and the CPU's twister uses the low 32 bits of that:
    # streams whose seeds agree there are one and the same sequence.
    def add(self, name: str, seed: int) -> None:
        """Add a stream at the start of a seed.

        Parameters
        ----------
        name : str
            Name to fork it by.
        seed : int
            Seed; used by no other stream of this tracker.

        Raises
        ------
        StreamExistsError
            If the name or the seed is in use. Nothing has changed then.
        TypeError
            If ``seed`` is no integer.
        """
        try:
            seed = operator.index(seed)
        except TypeError:
            raise TypeError(f"the seed of stream {name!r} must be an integer, got {type(seed).__name__}") from None
        bits = 32 if _device_of(self).type == "cpu" else 64
        for other in self.seeds_:
            # See Note [Seeds that start one sequence]
            if (other - seed) % (1 << bits) == 0:
                same = "" if other == seed else f" as {other}, of which a generator takes the same {bits} bits"
                raise StreamExistsError(
                    f"seed {seed} already exists{same}: another stream of this tracker starts from it, so stream "
                    f"{name!r} would draw the same numbers. Streams: {_listed(self._states)}. Choose another seed, or "
                    "reset() first"
                )
        if name in self._states:
            raise StreamExistsError(
                f"cuda rng state {name} already exists. Streams: {_listed(self._states)}. "
                "Choose another name, or reset() first"
            )
        backend, index = self._placement()
        handle = backend.new_stream(seed, index)
        again = reborn(self, name)
        if again is not None:
            backend.write(again, backend.read(handle))
            handle = again
        note_table(self)
        note_birth(handle, name, self)
        self._states[name] = handle
        self.seeds_.add(seed)

    def fork(self, name: str = "model-parallel-rng") -> _Fork:
        """Return a context (or decorator) in which the default generator draws from a stream.

        Parameters
        ----------
        name : str
            The stream. On exit, also by an exception, it keeps its progress and the default generator is bound to
            what it was bound to before. Forks nest. Re-seeding the default generator inside re-seeds the stream.

        Raises
        ------
        UnknownStreamError
            On entry, if there is no such stream.
        """
        return _Fork(self, name)

    def _placement(self) -> tuple[DeviceBackend, int]:
        device = _device_of(self)
        backend = get_backend(device.type)
        if device.type == "cpu":
            return backend, 0
        torch.cuda.init()
        return backend, torch.cuda.current_device() if device.index is None else device.index

    def _stream_for(self, name: str, state: Tensor) -> Generator:
        """Make a stream for a state tensor whose name is new."""
        if not isinstance(_decoded(name, state), PhiloxState):
            return get_backend("cpu").new_stream(0, 0)
        if not torch.cuda.is_available():
            raise UnsupportedDeviceError(
                f"the state of stream {name!r} was saved on a CUDA device, and CUDA is not available here. "
                "Nothing was changed"
            )
        device = self._device
        torch.cuda.init()
        index = device.index if device is not None and device.index is not None else torch.cuda.current_device()
        return get_backend("cuda").new_stream(0, index)

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaRNGStatesTracker:
        # A deep copy is independent: its streams start where these stand. (A module that keeps tracker.fork takes its
        # tracker along when it is copied.)
        twin = copy.copy(self)
        twin._states = _clone_handles(self._states, memo)
        twin.seeds_ = set(self.seeds_)
        register_tracker(twin)
        return twin

    def __repr__(self) -> str:
        lines = [f"  {name}: {decode_state(backend_of(h).read(h)).describe()}" for name, h in self._states.items()]
        return f"{type(self).__name__}({len(self._states)} streams)" + "".join("\n" + line for line in lines)


class _Fork(ContextDecorator):
    """Context that binds one stream; a class, since a generator-based context costs about a microsecond more."""

    def __init__(self, tracker: CudaRNGStatesTracker, name: str) -> None:
        self._tracker = tracker
        self._name = name
        self._bound: list[tuple[DeviceBackend, Any]] = []

    def _recreate_cm(self) -> _Fork:
        return _Fork(self._tracker, self._name)

    def __enter__(self) -> None:
        name = self._name
        try:
            handle = self._tracker._states[name]
        except KeyError:
            raise UnknownStreamError(
                f"cuda rng state {name} is not added. Streams of this tracker: {_listed(self._tracker._states)}. "
                f"Add it first: tracker.add({name!r}, seed){_added_once(self._tracker, name)}"
            ) from None
        touch(name, handle)  # See Note [First touch]
        backend = backend_of(handle)
        self._bound.append((backend, backend.bind(handle)))

    def __exit__(self, *exception: object) -> None:
        backend, token = self._bound.pop()
        backend.unbind(token)


def _device_of(tracker: CudaRNGStatesTracker) -> torch.device:
    """Return where a tracker makes streams, possibly without an index."""
    return tracker._device or torch.device("cuda" if torch.cuda.is_available() else "cpu")


def covers_itself(tracker: object) -> bool:
    """Tell whether a tracker's forks report their streams, so that a snapshot need not cover them at entry."""
    # A subclass with a fork of its own may move streams in another way; covering it whole is always right. A class of
    # another library that was given this very fork reports as ours do.
    return getattr(type(tracker), "fork", None) is CudaRNGStatesTracker.fork


def _checked(name: str, handle: Generator, value: Tensor) -> Tensor:
    """Return ``value`` as bytes on the CPU, or say why it cannot be a state of ``handle``."""
    decoded = _decoded(name, value)
    expected = "cuda" if isinstance(decoded, PhiloxState) else "cpu"
    if handle.device.type != expected:
        raise StateFormatError(
            f"the state of stream {name!r} was saved on a {expected} generator, and the stream lives on "
            f"{handle.device}; a state cannot move between device types. Nothing was changed"
        )
    value = value.detach().cpu().contiguous().clone()
    if expected == "cpu":
        try:
            Generator().set_state(value)
        except RuntimeError as error:
            raise StateFormatError(
                f"the state given for stream {name!r} is damaged: {str(error).splitlines()[0]}. Nothing was changed"
            ) from None
    return value


def _decoded(name: str, value: Tensor) -> PhiloxState | MT19937State:
    try:
        return decode_state(value)
    except StateFormatError as error:
        raise StateFormatError(f"the state given for stream {name!r}: {error}. Nothing was changed") from None


def _clone_handles(
    handles: Mapping[str, Generator], memo: dict[int, Any], values: StreamStates | None = None
) -> dict[str, Generator]:
    clones = {}
    for name, handle in handles.items():
        if id(handle) not in memo:
            backend = backend_of(handle)
            clone = backend.new_stream(0, device_index(handle))
            backend.write(clone, backend.read(handle) if values is None else values._value_now(name))
            memo[id(handle)] = clone
        clones[name] = memo[id(handle)]
    return clones


def _added_once(tracker: CudaRNGStatesTracker, name: str) -> str:
    """Return a hint for the recompute of a region that added a stream in its forward, and now does not."""
    if not born_in_forward(tracker, name):
        return ""
    return (
        ". The forward of this checkpointed region added it, and its recompute, which starts from the streams that "
        "there were before, did not: add streams before the region, or in every run of it"
    )


def _listed(states: Mapping[str, object]) -> str:
    return ", ".join(repr(name) for name in states) or "none"
