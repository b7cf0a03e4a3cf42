# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Saving and loading the streams of all ranks: who sends what to whom, and what must hold before anything changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from transformer_engine_ext.errors import LayoutMismatchError, PeerFailureError, StateFormatError
from transformer_engine_ext.pytorch.distributed import rng_file
from transformer_engine_ext.pytorch.distributed.collectives import ControlGroup
from transformer_engine_ext.pytorch.distributed.rng_file import Header, Row
from transformer_engine_ext.pytorch.distributed.topology import Layout, describe_axes

__all__ = ["load_streams", "save_streams"]

# What one rank raises, the others raise too, as this class; anything else is a RuntimeError there.
_RELAYED = {error.__name__: error for error in (LayoutMismatchError, StateFormatError, FileNotFoundError, OSError)}


def save_streams(
    path: str | os.PathLike[str], control: ControlGroup, layout: Layout, header: Header, states: Mapping[str, Tensor]
) -> None:
    """Gather all ranks' states on rank 0 and write them there; every rank raises if that fails."""
    what = f"saving the streams to {os.fspath(path)}"
    rows = control.gather(_pack(layout, header, states), what)
    problem: Exception | None = None
    if rows is not None:
        try:
            # See Note [A save never damages the former file]
            rng_file.write_atomically(path, rng_file.encode(header, _unpack(rows, header)))
        except Exception as error:
            problem = error
    outcome = control.broadcast(_describe_error(problem), what)
    if problem is not None:
        raise problem
    if outcome:
        raise _rebuild_error(outcome, rank=0)


def _pack(layout: Layout, header: Header, states: Mapping[str, Tensor]) -> bytes:
    description = {"axes": header.axes, "streams": header.streams, "coordinates": list(layout.coordinates.values())}
    text = json.dumps(description).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(bytes(states[name].tolist()) for name in states)


def _unpack(payloads: list[bytes], header: Header) -> list[Row]:
    rows = []
    expected = json.loads(json.dumps({"axes": header.axes, "streams": header.streams}))
    for rank, payload in enumerate(payloads):
        start = 8 + int.from_bytes(payload[:8], "little")
        description = json.loads(payload[8:start])
        coordinates = tuple(description.pop("coordinates"))
        if description != expected:
            raise LayoutMismatchError(
                f"the ranks do not save the same things: rank 0 has {expected}, rank {rank} has {description}. Build "
                "ParallelRNG with the same axes, streams and device type on every rank"
            )
        states = []
        for stream in header.streams:
            end = start + rng_file.state_bytes(stream["device"])
            states.append(payload[start:end])
            start = end
        rows.append(Row(coordinates, tuple(states)))
    return rows


# Note [Check everything, agree, then change]
# Loading goes through three phases: every rank reads the header and its own row and checks them, the ranks tell each
# other whether that went well, and only if it did everywhere does any of them write into a generator. So a failed load
# leaves no rank changed, and no rank trains on while another one stopped.
def load_streams(
    path: str | os.PathLike[str],
    control: ControlGroup,
    layout: Layout,
    running: Header,
    check: Callable[[Mapping[str, Tensor]], None],
) -> tuple[Header, dict[str, Tensor]]:
    """Return the file's header and this rank's states, once every rank has them; write nothing."""
    what = f"loading the streams from {os.fspath(path)}"
    problem: Exception | None = None
    try:
        header = rng_file.read_header(path)
        _check_layout(path, header, running)
        states = rng_file.read_row(path, header, _find_row(path, header, layout))
        check(states)
    except Exception as error:
        problem = error
    failing = control.first_failure(problem is not None, what)
    if failing is None:
        return header, states
    try:
        text = control.relay(_describe_error(problem), failing, what)
    except PeerFailureError:
        if problem is not None:
            raise problem from None
        raise
    raise problem if problem is not None else _rebuild_error(text, failing)


def _check_layout(path: str | os.PathLike[str], saved: Header, running: Header) -> None:
    if (saved.axes, saved.world_size) != (running.axes, running.world_size):
        raise LayoutMismatchError(
            f"{path} was saved by another layout: saved {describe_axes(saved.axes, saved.world_size)}, running "
            f"{describe_axes(running.axes, running.world_size)}. Nothing was loaded; resume on the layout that saved "
            "it, or call seed() to start new streams"
        )
    saved_streams, running_streams = (
        {stream["name"]: stream["device"] for stream in header.streams} for header in (saved, running)
    )
    if saved_streams != running_streams:
        raise LayoutMismatchError(
            f"{path} holds other streams than this job has (name: device): saved {saved_streams}, running "
            f"{running_streams}. Nothing was loaded; declare the streams that were saved, on the same device type"
        )


def _find_row(path: str | os.PathLike[str], header: Header, layout: Layout) -> int:
    """Return the rank that saved from where this rank stands now; ranks may have been numbered in another order."""
    here = [layout.coordinates[axis] for axis in header.axes]
    table = rng_file.read_coordinates(path).tolist()
    if table[layout.rank] == here:
        return layout.rank  # also where several ranks stand at one place, since the axes do not name them all
    matches = [rank for rank, place in enumerate(table) if place == here]
    if len(matches) != 1:
        former = dict(zip(header.axes, table[layout.rank], strict=True))
        raise LayoutMismatchError(
            f"{path}: rank {layout.rank} stands at {layout.coordinates}, from where {len(matches)} ranks saved; the "
            f"rank of that number saved from {former}. Nothing was loaded; place the ranks as in the job that saved"
        )
    return matches[0]


def _describe_error(error: Exception | None) -> bytes:
    if error is None:
        return b""
    # Subclasses of OSError (PermissionError, IsADirectoryError, ...) are recreated from the number.
    names = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _RELAYED]
    number = error.errno if isinstance(error, OSError) else None
    return json.dumps([names[0] if names else type(error).__name__, number, str(error)]).encode()


def _rebuild_error(outcome: bytes, rank: int) -> Exception:
    name, number, text = json.loads(outcome)
    message: Any = f"rank {rank}: {text}"
    kind = _RELAYED.get(name)
    if kind is None:
        return RuntimeError(f"rank {rank}: {name}: {text}")
    return kind(message) if number is None else kind(number, message)
