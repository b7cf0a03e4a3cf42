# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""One rank's streams as a dictionary that generic checkpoint code can carry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_engine_ext.errors import LayoutMismatchError, StateFormatError, StreamStateTypeError
from transformer_engine_ext.pytorch.distributed.resharding import changed_axes, changed_streams
from transformer_engine_ext.pytorch.distributed.saved_table import (
    FORMAT,
    VERSION,
    Header,
    Row,
    bytes_of,
    row_checksum,
)
from transformer_engine_ext.pytorch.distributed.topology import Layout

__all__ = ["KEY_START", "pack_rank", "read_rank", "unpack_rank"]

#: How the keys of ranks' entries begin.
KEY_START = "streams of rank "


# Note [A key per rank]
# Checkpoint code such as torch.distributed.checkpoint takes equal keys of two ranks for copies of one thing and keeps
# one of them. So a rank's streams lie under a key that names the rank, and the layout: with another layout the key is
# not found, and since that error is raised before any of our code runs, the key itself says what to do. Axes of size 1
# do not appear, so that adding one changes nothing.
def _key(layout: Layout) -> str:
    sizes = " x ".join(f"{axis}={size}" for axis, size in sorted(layout.axes.items()) if size > 1) or "no axes"
    return (
        f"{KEY_START}{layout.rank} of {layout.world_size} ({sizes}) [for a checkpoint of another layout use "
        "ParallelRNG.load(path, on_layout_change='rederive')]"
    )


def pack_rank(layout: Layout, header: Header, states: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the dictionary; `states` are kept as they are."""
    place = tuple(layout.coordinates[axis] for axis in header.axes)
    row = Row(place, tuple(bytes_of(states[name]) for name in header.names()))
    description = {
        "format": FORMAT,
        "version": VERSION,
        "rank": layout.rank,
        "coordinates": list(place),
        "header": json.loads(header.to_json()),
        "checksum": row_checksum(layout.rank, row),
    }
    return {_key(layout): {"description": json.dumps(description), "streams": dict(states)}}


def read_rank(entry: Any, where: str) -> tuple[int, Header, Row]:
    """Return rank, header and row of one rank's entry.

    Raises
    ------
    StateFormatError
        If it is no such entry, of another version, or its states are not those that were saved.
    """
    if not isinstance(entry, Mapping) or not {"description", "streams"} <= set(entry):
        raise StateFormatError(f"{where}: no entry of ParallelRNG.state_dict(), which has 'description' and 'streams'")
    try:
        description = json.loads(entry["description"])
        found = description["format"], description["version"]
        if found != (FORMAT, VERSION):
            raise StateFormatError(
                f"{where}: of format {found[0]!r} in version {found[1]}, this release reads {FORMAT!r} in version "
                f"{VERSION}; load it with the release of transformer-engine-ext that made it"
            )
        header, rank = Header.from_json(json.dumps(description["header"])), int(description["rank"])
        checksum, place = description["checksum"], tuple(description["coordinates"])
        streams = dict(entry["streams"])
    except StateFormatError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise StateFormatError(f"{where}: the description lacks or misuses a field ({error!r})") from error
    missing = [name for name in header.names() if name not in streams]
    if missing or len(streams) != len(header.streams):
        raise StateFormatError(
            f"{where}: the description names the streams {header.names()}, the entry holds {sorted(map(str, streams))}"
        )
    # See Note [States that were cast]
    row = Row(place, tuple(bytes_of(_restored(name, streams[name], where)) for name in header.names()))
    if row_checksum(rank, row) != checksum:
        raise StateFormatError(
            f"{where}: the states do not match their checksum, so something has changed them since they were saved "
            "(a cast to a type that cannot hold every byte, a cut, another rank's states)"
        )
    return rank, header, row


# Note [States that were cast]
# Generic loaders move and cast whatever looks like a tensor: .to("cuda"), .float(), .bfloat16(). All of torch's
# floating types of 16 bits and more hold the integers 0 to 255 exactly, so such a state comes back without loss, and
# the checksum proves it.
def _restored(name: str, state: Any, where: str) -> Tensor:
    if not isinstance(state, Tensor):
        raise StreamStateTypeError(
            f"{where}: the state of stream {name!r} is a {type(state).__name__}, expected a uint8 tensor"
        )
    found: Tensor = state.detach().cpu()
    if found.dtype == torch.uint8:
        return found
    back = found.to(torch.uint8)
    if found.is_complex() or found.dtype == torch.bool or not torch.equal(back.to(found.dtype), found):
        raise StateFormatError(
            f"{where}: the state of stream {name!r} was cast to {found.dtype} and cannot be read back without loss; "
            "load states without casting them"
        )
    return back


def unpack_rank(state_dict: Any, layout: Layout, running: Header) -> tuple[Header, dict[str, bytes]]:
    """Return the saved header and this rank's states, from the dictionary that this rank made on this layout.

    Raises
    ------
    StateFormatError
        If it is no such dictionary, or damaged.
    LayoutMismatchError
        If it was taken on another layout, by another rank or of other streams.
    """
    if not isinstance(state_dict, Mapping):
        raise StateFormatError(
            f"load_state_dict takes what ParallelRNG.state_dict() returned, got a {type(state_dict).__name__}. Nothing "
            "was changed"
        )
    entries = {key: entry for key, entry in state_dict.items() if str(key).startswith(KEY_START)}
    if not entries:
        raise StateFormatError(
            "this is no dictionary of ParallelRNG.state_dict(): none of its keys "
            f"{sorted(map(str, state_dict))[:8]} begins with {KEY_START!r}. Nothing was changed"
        )
    key = _key(layout) if _key(layout) in entries else next(iter(entries))
    rank, saved, row = read_rank(entries[key], f"entry {key.partition(' [')[0]!r}")
    here = tuple(layout.coordinates.get(axis, 0) for axis in saved.axes)
    if changed_axes(saved, running) or (rank, saved.world_size, row.coordinates) != (
        layout.rank,
        layout.world_size,
        here,
    ):
        place = dict(zip(saved.axes, row.coordinates, strict=True))
        raise LayoutMismatchError(
            f"the dictionary was taken by rank {rank} of {saved.world_size} with axes {saved.axes}, at {place}; this "
            f"is rank {layout.rank} of {layout.world_size} with axes {layout.axes}, at {layout.coordinates}. Nothing "
            "was changed; resume on the layout that saved it, or load a file of save(), or a checkpoint folder, with "
            "ParallelRNG.load(path, on_layout_change='rederive')"
        )
    if (changes := changed_streams(saved, running)) or saved.derivation != running.derivation:
        listed = "; ".join(f"{name!r}: {change}" for name, change in changes.items())
        raise LayoutMismatchError(
            f"the dictionary holds other streams than this job has. Saved {saved.names()} "
            f"(derivation {saved.derivation!r}), this job has {running.names()} ({running.derivation!r}). {listed}. "
            "Nothing was changed; declare the streams that were saved"
        )
    return saved, dict(zip(saved.names(), row.states, strict=True))
