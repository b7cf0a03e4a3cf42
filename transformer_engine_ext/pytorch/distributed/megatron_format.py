# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's ``rng_state``: one rank's random numbers as Megatron's checkpoints hold them, read and written.

A list of dictionaries; of one, or with ``--data-parallel-random-init`` of one per data-parallel rank. Source:
``get_rng_state`` in megatron/training/checkpointing.py.

======================  ================================================================================
``random_rng_state``    ``random.getstate()``
``np_rng_state``        ``numpy.random.get_state()``
``torch_rng_state``     ``torch.get_rng_state()``, ``uint8 [5056]``
``cuda_rng_state``      ``torch.cuda.get_rng_state()``, ``uint8 [16]``; None where a job has no GPU
``rng_tracker_states``  the tracker's ``get_states()``: stream name to ``uint8`` tensor or ``torch.Generator``
======================  ================================================================================
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Generator, Tensor

from transformer_engine_ext.errors import LayoutMismatchError, StateFormatError
from transformer_engine_ext.pytorch.distributed.host_states import HOST_STREAMS, pack_host
from transformer_engine_ext.pytorch.distributed.inert_pickle import Record, as_array, as_bytes, describe
from transformer_engine_ext.pytorch.distributed.resharding import FreshState, LoadReport, changed_streams, reshard
from transformer_engine_ext.pytorch.distributed.saved_table import Header, Row, bytes_of, state_of
from transformer_engine_ext.pytorch.rng.devices import backend_of
from transformer_engine_ext.pytorch.rng.state import decode_state
from transformer_engine_ext.pytorch.rng.tracker import StreamStates

__all__ = ["MegatronState", "fit_state", "make_state", "parse_state"]

_KEYS = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
_WHERE = "rng_state"


@dataclass(frozen=True, eq=False)
class MegatronState:
    """One dictionary of the list, as values.

    Attributes
    ----------
    python : tuple
        For ``random.setstate``.
    numpy : tuple
        For ``numpy.random.set_state``.
    cpu : bytes
        State of the CPU's default generator.
    cuda : bytes or None
        State of the CUDA device's default generator.
    streams : dict of str to bytes
        The tracker's streams.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: bytes
    cuda: bytes | None
    streams: dict[str, bytes]

    def restore_host(self) -> None:
        """Put Python's and numpy's global generators where they were."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def to_dict(self) -> dict[str, Any]:
        """Return the dictionary with byte tensors, which every Megatron can read."""
        return {
            "random_rng_state": self.python,
            "np_rng_state": self.numpy,
            "torch_rng_state": state_of(self.cpu),
            "cuda_rng_state": None if self.cuda is None else state_of(self.cuda),
            "rng_tracker_states": {name: state_of(state) for name, state in self.streams.items()},
        }


def make_state(states: Mapping[str, Tensor], tracked: Mapping[str, Generator], *, generators: bool) -> dict[str, Any]:
    """Return this rank's dictionary.

    Parameters
    ----------
    states : mapping of str to torch.Tensor
        All streams of this rank, the default ones included.
    tracked : mapping of str to torch.Generator
        The tracker's streams.
    generators : bool
        Whether ``rng_tracker_states`` holds generators, copies that do not move on, instead of byte tensors.
    """
    default = states["default"]
    on_cuda = "default-cpu" in states
    streams: dict[str, Any] = {name: states[name].clone() for name in tracked if name in states}
    if generators:
        for name, state in streams.items():
            backend, handle = backend_of(tracked[name]), tracked[name]
            streams[name] = backend.new_stream(0, handle.device.index or 0)
            backend.write(streams[name], state)
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": (states["default-cpu"] if on_cuda else default).clone(),
        "cuda_rng_state": default.clone() if on_cuda else None,
        "rng_tracker_states": streams,
    }


def parse_state(rng_state: Any, data_parallel_rank: int = 0) -> MegatronState:
    """Return the values in Megatron's list, from live objects or from the records of a file.

    Parameters
    ----------
    rng_state : list of dict, or dict
        Tensors on any device, generators of any device.
    data_parallel_rank : int
        Which element of a longer list.

    Raises
    ------
    StateFormatError
        If it is something else.
    """
    if isinstance(rng_state, (list, tuple)):
        if len(rng_state) > 1 and data_parallel_rank >= len(rng_state):
            raise StateFormatError(
                f"{_WHERE} has the states of {len(rng_state)} data-parallel ranks, and this is rank "
                f"{data_parallel_rank}. Nothing was changed; resume with as many data-parallel ranks as were saved"
            )
        rng_state = rng_state[data_parallel_rank if len(rng_state) > 1 else 0] if rng_state else None
    if not isinstance(rng_state, Mapping) or not set(_KEYS) <= set(rng_state):
        found = sorted(map(str, rng_state)) if isinstance(rng_state, Mapping) else describe(rng_state)
        raise StateFormatError(
            f"{_WHERE} is Megatron's list of dictionaries with the keys {', '.join(_KEYS)}; got {found}. Nothing was "
            "changed"
        )
    cuda, tracked = rng_state["cuda_rng_state"], rng_state["rng_tracker_states"]
    return MegatronState(
        python=_python_state(rng_state["random_rng_state"]),
        numpy=_numpy_state(rng_state["np_rng_state"]),
        cpu=_state("torch_rng_state", rng_state["torch_rng_state"]),
        cuda=None if cuda is None else _state("cuda_rng_state", cuda),
        streams={str(name): _state(f"stream {name!r}", state) for name, state in _plain(tracked).items()},
    )


def _plain(tracked: Any) -> Mapping[Any, Any]:
    """Return the tracker's states as a mapping; values where they came with the handles."""
    if isinstance(tracked, Record) and tracked.name == "StreamStates":
        return dict(tracked.args[1])
    if isinstance(tracked, StreamStates):
        return {name: state if (value := tracked.value_of(name)) is None else value for name, state in tracked.items()}
    if not isinstance(tracked, Mapping):
        raise StateFormatError(f"{_WHERE}: rng_tracker_states is a {describe(tracked)}, expected a dictionary")
    return tracked


def _state(what: str, value: Any) -> bytes:
    # A generator is its value: the device that it was saved on does not matter.
    if isinstance(value, Generator):
        value = backend_of(value).read(value)
    elif isinstance(value, Record) and value.name == "Generator":
        value = value.state[2]
    if isinstance(value, Tensor):
        decode_state(value)
        return bytes_of(value)
    data = as_bytes(value, f"{_WHERE}: {what}")
    decode_state(state_of(data))
    return data


def _python_state(state: Any) -> tuple[Any, ...]:
    try:
        version, words, gauss = state
        candidate = (int(version), tuple(map(int, words)), gauss)
        random.Random().setstate(candidate)
    except (TypeError, ValueError) as error:
        raise StateFormatError(f"{_WHERE}: random_rng_state is no state of Python's random ({error!r})") from error
    return candidate


def _numpy_state(state: Any) -> tuple[Any, ...]:
    try:
        kind, words, position, has_gauss, gauss = state
        words = as_array(words, f"{_WHERE}: np_rng_state") if isinstance(words, Record) else np.asarray(words)
        gauss = as_array(gauss, f"{_WHERE}: np_rng_state") if isinstance(gauss, Record) else gauss
        candidate = (str(kind), words.astype(np.uint32), int(position), int(has_gauss), float(gauss))
        np.random.RandomState().set_state(candidate)
    except (TypeError, ValueError, IndexError) as error:
        raise StateFormatError(f"{_WHERE}: np_rng_state is no state of numpy.random ({error!r})") from error
    return candidate


# Note [Megatron saves some streams of another rank]
# Megatron's torch_dist checkpoints declare the data-parallel and context-parallel peers of a rank as its copies, so all
# of them get the states of one, also for streams that differ between them (expert-parallel-rng over ep, for one).
# Source: replica_id in get_rng_state, megatron/training/checkpointing.py. Whether a state is this rank's own shows in
# its seed, if the job's seed is known: that is why seed() should come before the load.
def fit_state(
    state: MegatronState,
    running: Header,
    place: Mapping[str, int],
    rank: int,
    expected: Mapping[str, int],
    fresh: FreshState,
    on_stream_change: str,
) -> tuple[dict[str, Tensor], LoadReport]:
    """Return the states that this rank goes on with.

    Parameters
    ----------
    state : MegatronState
        What was read.
    running : Header
        Of this job; its seed is that of the job.
    place : mapping of str to int
        This rank's coordinates.
    rank : int
        This rank.
    expected : mapping of str to int
        The seeds that the streams should have here; empty if the job's seed is not known.
    fresh : callable
        As for :func:`reshard`.
    on_stream_change : str
        ``"error"`` or ``"rederive"``, for streams that are missing, unknown here, or another rank's.

    Raises
    ------
    LayoutMismatchError
        If streams are missing, unknown or another rank's, and may not be.
    """
    found = dict(state.streams)
    found["default"] = state.cpu if state.cuda is None else state.cuda
    if state.cuda is not None:
        found["default-cpu"] = state.cpu
    declared = {stream["name"]: stream for stream in running.streams}
    # The host's generators are in Megatron's list whether or not they are streams of this job.
    host = {name: getattr(state, kind) for name, kind in HOST_STREAMS.items() if name in declared}
    found.update({name: pack_host(HOST_STREAMS[name], value) for name, value in host.items()})
    streams = tuple(
        {
            **declared.get(name, {"name": name, "varies_over": [], "lockstep_over": []}),
            **({} if name in host else _kind(data)),
        }
        for name, data in found.items()
    )
    saved = replace(running, streams=streams, checksums=())
    problems = changed_streams(saved, running)
    foreign = {
        name: decode_state(state_of(found[name])).seed
        for name, seed in expected.items()
        if name in found and name not in problems and decode_state(state_of(found[name])).seed != seed
    }
    for name, seed in foreign.items():
        problems[name] = f"started from seed {seed}, but from {expected[name]} at {dict(place)}: another rank's"
    if problems and on_stream_change == "error":
        listed = "; ".join(f"{name!r}: {problem}" for name, problem in problems.items())
        raise LayoutMismatchError(
            f"{_WHERE} does not fit the streams of this job. {listed}. Nothing was changed; declare the streams as "
            "they were saved and call seed() with that job's seed, or pass on_stream_change='rederive' to drop what is "
            "unknown and to derive what is missing or another rank's"
        )
    # Another rank's streams become ones declared otherwise, so that they are derived anew, past where that rank stood.
    elsewhere = ["another rank"]
    streams = tuple({**stream, "varies_over": elsewhere} if stream["name"] in foreign else stream for stream in streams)
    row = Row(tuple(place[axis] for axis in running.axes), tuple(found.values()))
    saved = replace(saved, streams=streams)
    states, report = reshard(saved, [row], running, [place], 0, fresh, row=0)
    return {name: state_of(data) for name, data in states.items()}, report


def _kind(data: bytes) -> dict[str, str]:
    return {"device": "cuda" if len(data) == 16 else "cpu", "engine": ""}
