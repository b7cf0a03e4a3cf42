# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The streams of one rank: their generators, read and written by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Generator, Tensor

from transformer_engine_ext.errors import (
    LayoutMismatchError,
    SeedCollisionError,
    StateFormatError,
    StreamStateTypeError,
    UnknownStreamError,
)
from transformer_engine_ext.pytorch.distributed.host_states import (
    HOST_STREAMS,
    check_host_state,
    read_host,
    seed_host,
    write_host,
)
from transformer_engine_ext.pytorch.distributed.streams import DEFAULT_STREAM, StreamSpec
from transformer_engine_ext.pytorch.rng import CudaRNGStatesTracker, PhiloxState, decode_state, get_all_rng_states
from transformer_engine_ext.pytorch.rng.devices import get_backend

__all__ = ["CPU_DEFAULT_STREAM", "HeldStreams"]

#: Name of the CPU's default generator where the declared streams live on CUDA.
CPU_DEFAULT_STREAM = "default-cpu"

_TAKEN = {
    CPU_DEFAULT_STREAM: "the CPU's default generator",
    **{name: f"the global generator of {kind}" for name, kind in HOST_STREAMS.items()},
}


class HeldStreams:
    """The default generators, and the declared streams in a tracker.

    Parameters
    ----------
    specs : sequence of StreamSpec
        With exactly one that is the default.
    tracker : CudaRNGStatesTracker
        Holds the others, or will once they are seeded or loaded.
    device : torch.device
        A CUDA device, without an index the one that is current at first use; or the CPU.
    include : sequence of str
        ``"python"``, ``"numpy"``: the global generators of these are streams as well.
    """

    # Note [Generators of the host]
    # Besides the declared streams there are, as further rows of the same tables, the generators that are not the
    # device's: "default-cpu" where the device is CUDA, and if asked "python-random" and "numpy-random", whose states
    # have another size and an `engine` of their own (see host_states). They start from the default stream's seed, as in
    # Megatron, and so vary over the same axes. They are in lockstep along no axis: a data loader may run on some ranks.
    def __init__(
        self,
        specs: Sequence[StreamSpec],
        tracker: CudaRNGStatesTracker,
        device: torch.device,
        include: Sequence[str] = (),
    ) -> None:
        self._backend = get_backend(device.type)
        self._tracker = tracker
        self._device = device
        self._specs = {spec.name: spec for spec in specs}
        for name, meaning in _TAKEN.items():
            if name in self._specs:
                raise ValueError(f"stream name {name!r} is taken: it stands for {meaning}")
        self._host = {name: kind for name, kind in HOST_STREAMS.items() if kind in include}
        self._generators = [*self._specs, *([CPU_DEFAULT_STREAM] if device.type == "cuda" else [])]
        self._names = [*self._generators, *self._host]

    @property
    def seed_bits(self) -> int:
        """How many low bits of a seed the device's generators use."""
        # mt19937 is initialised from one 32-bit word. Source: aten/src/ATen/core/MT19937RNGEngine.h.
        return 32 if self._device.type == "cpu" else 64

    def describe(self) -> list[dict[str, Any]]:
        """Return name, device type and declaration per stream, in the order of saved columns."""
        described = []
        for name in self._names:
            declared = name in self._specs
            spec = self._specs[name if declared else DEFAULT_STREAM]
            stream = {
                "name": name,
                "device": self._device_type(name),
                "varies_over": list(spec.varies_over),
                "lockstep_over": list(spec.lockstep_over) if declared else [],
                "seed_offset": spec.seed_offset,
            }
            if name in self._host:
                stream["engine"] = self._host[name]
            described.append(stream)
        return described

    def seed(self, seeds: Mapping[str, int]) -> None:
        """Start every stream from its seed, in place where it exists; `seeds` has no collisions among themselves."""
        seeds = {**seeds, **({CPU_DEFAULT_STREAM: seeds[DEFAULT_STREAM]} if self._device.type == "cuda" else {})}
        self._make_missing(seeds)
        for name, handle in self._handles("seed").items():
            backend = get_backend(self._device_type(name))
            backend.write(handle, backend.read(backend.new_stream(seeds[name], handle.device.index or 0)))
        for kind in self._host.values():
            seed_host(kind, seeds[DEFAULT_STREAM])

    def read(self, verb: str = "save") -> dict[str, Tensor]:
        """Return the value of every stream, as CPU tensors of their own; `verb` says what for, if that is refused."""
        handles = self._handles(verb)
        states = {name: get_backend(self._device_type(name)).read(handle).clone() for name, handle in handles.items()}
        return {**states, **{name: read_host(kind) for name, kind in self._host.items()}}

    def check(self, states: Mapping[str, Any]) -> None:
        """Raise if :meth:`write` could not write `states`; change nothing."""
        if set(states) != set(self._names):
            raise LayoutMismatchError(
                f"the saved streams are {sorted(states)}, this job has {sorted(self._names)}. Nothing was changed; "
                "declare the streams that were saved"
            )
        for name, state in states.items():
            if not isinstance(state, Tensor):
                raise StreamStateTypeError(
                    f"the state of stream {name!r} is a {type(state).__name__}, expected a uint8 tensor. "
                    "Nothing was changed"
                )
            if name in self._host:
                check_host_state(name, self._host[name], state)
                continue
            saved_on = "cuda" if isinstance(decode_state(state), PhiloxState) else "cpu"
            if saved_on != self._device_type(name):
                raise LayoutMismatchError(
                    f"the state of stream {name!r} was saved on a {saved_on} generator, and the stream lives on "
                    f"{self._device_type(name)} here. Nothing was changed; resume on the device type that saved"
                )
            if saved_on == "cpu":
                _try_mt19937(name, state)
        self._check_seeds({name: decode_state(states[name]).seed for name in self._generators})
        self._refuse_in_fork("load")

    def write(self, states: Mapping[str, Tensor]) -> None:
        """Put every stream where `states` says, in place; a stream that the tracker lacks is made. All or none."""
        self.check(states)  # See Note [Check everything, agree, then change]
        self._make_missing({name: decode_state(states[name]).seed for name in self._generators})
        for name, handle in self._handles("load").items():
            value = states[name].detach().cpu().contiguous().clone()
            get_backend(self._device_type(name)).write(handle, value)
        for name, kind in self._host.items():
            write_host(kind, states[name].detach().cpu().contiguous())

    def _device_type(self, name: str) -> str:
        return self._device.type if name in self._specs else "cpu"

    def _index(self) -> int:
        if self._device.type == "cuda" and self._device.index is None:
            torch.cuda.init()
            self._device = torch.device("cuda", torch.cuda.current_device())
        return self._device.index or 0

    def _handles(self, verb: str) -> dict[str, Generator]:
        self._refuse_in_fork(verb)  # See Note [Streams are addressed outside of forks]
        states = cast("Mapping[str, Any]", self._tracker.states_)
        missing = [name for name in self._tracked() if name not in states]
        if missing:
            raise UnknownStreamError(
                f"there is no stream {missing[0]!r} to {verb}: the tracker holds {sorted(states) or 'none'}. "
                "Call seed() or load() first"
            )
        self._check_handles(verb)
        handles = {DEFAULT_STREAM: self._backend.default(self._index())}
        handles[CPU_DEFAULT_STREAM] = torch.default_generator
        return {name: handles.get(name) or states[name] for name in self._generators}

    def _check_handles(self, verb: str) -> None:
        """Refuse streams that cannot be written in place: byte states, and generators of another device type."""
        states = cast("Mapping[str, Any]", self._tracker.states_)
        for name in self._tracked():
            handle = states.get(name)
            if handle is not None and not isinstance(handle, Generator):
                raise StreamStateTypeError(
                    f"the tracker holds stream {name!r} as a {type(handle).__name__}; ParallelRNG writes in "
                    "place and needs a torch.Generator. Use transformer_engine_ext's CudaRNGStatesTracker"
                )
            if handle is not None and handle.device.type != self._device.type:
                raise StreamStateTypeError(
                    f"cannot {verb} stream {name!r}: the tracker holds a generator of {handle.device}, and the streams "
                    f"live on {self._device}. Give ParallelRNG the device of the tracker's streams, or set_states() of "
                    "the tracker generators of this one"
                )

    def _tracked(self) -> Iterable[str]:
        return (name for name in self._specs if name != DEFAULT_STREAM)

    def _make_missing(self, seeds: Mapping[str, int]) -> None:
        """Add the streams that the tracker lacks, and let its set of used seeds say what is used now."""
        self._refuse_in_fork("seed")
        self._check_handles("seed")
        self._check_seeds(seeds)
        tracked = {name: seeds[name] for name in self._tracked()}
        present = set(self._tracker.states_)
        # All old seeds go before any new one comes: two seeds of a job may give one number to different streams. A new
        # seed in the set is left from a stream that is gone (set_states), or _check_seeds had found its owner.
        self._tracker.seeds_ -= self._seeds_in_use() | set(tracked.values())
        self._tracker.seeds_ |= {seed for name, seed in tracked.items() if name in present}
        for name, seed in tracked.items():
            if name not in present:
                self._tracker.add(name, seed)

    def _seeds_in_use(self) -> set[int]:
        """Return the seeds of the declared streams that the tracker holds."""
        states = self._tracker.states_
        return {decode_state(self._backend.read(states[name])).seed for name in self._tracked() if name in states}

    def _check_seeds(self, seeds: Mapping[str, int]) -> None:
        """Refuse a seed on which the tracker has a stream that is not declared here."""
        mask = (1 << self.seed_bits) - 1
        others = {name: handle for name, handle in self._tracker.states_.items() if name not in self._specs}
        used = {handle.initial_seed() & mask: name for name, handle in others.items() if isinstance(handle, Generator)}
        for name in self._tracked():
            if (owner := used.get(seeds[name] & mask)) is not None:
                raise SeedCollisionError(
                    f"stream {name!r} would start from seed {seeds[name]}, from which the tracker's stream {owner!r} "
                    "draws already, and that one is not declared here. Nothing was changed; choose another seed, or "
                    "declare all streams of the tracker"
                )

    # Note [Streams are addressed outside of forks]
    # Inside a fork the default generator *is* the forked stream. Seeding, saving or loading there would take one stream
    # for the other, so it is refused, whichever tracker of the process the fork belongs to. Forks of other libraries'
    # trackers do not report to this package; those that bind one of the job's own streams are found by moving one of
    # the two handles and looking at the other, since two CUDA handles do not say whether they share a state.
    def _refuse_in_fork(self, verb: str) -> None:
        index = self._index()
        mine: dict[str, Any] = {name: self._tracker.states_.get(name) for name in self._tracked()}
        bound = self._backend.bound_stream(index)
        default = self._backend.default(index)
        for name, handle in {**get_all_rng_states(), **mine}.items():
            if not isinstance(handle, Generator) or handle.device.type != self._device.type:
                continue
            if handle is bound or (name in mine and self._shares_state(default, handle)):
                of = "" if name in mine else " of another tracker"
                raise RuntimeError(
                    f"cannot {verb} the streams inside tracker.fork({name!r}){of}: there the default generator is that "
                    "stream. Leave the fork first"
                )
        if bound is not None:
            raise RuntimeError(
                f"cannot {verb} the streams inside a fork: the default generator is bound to a stream of a tracker "
                "that is gone. Leave the fork first"
            )

    def _shares_state(self, first: Generator, second: Generator) -> bool:
        if self._device.type == "cpu":
            return False  # CPU handles never share a state
        value = self._backend.read(first)
        decoded = decode_state(value)
        if not isinstance(decoded, PhiloxState) or not torch.equal(value, self._backend.read(second)):
            return False
        moved = PhiloxState(decoded.seed, decoded.offset ^ 4)
        try:
            self._backend.write(first, moved.to_tensor())
            return torch.equal(self._backend.read(second), moved.to_tensor())
        finally:
            self._backend.write(first, value)


def _try_mt19937(name: str, state: Tensor) -> None:
    try:
        torch.Generator().set_state(state.detach().cpu().contiguous())
    except RuntimeError as error:
        raise StateFormatError(
            f"the state of stream {name!r} has the size of an mt19937 state but is none ({error}). Nothing was changed"
        ) from error
