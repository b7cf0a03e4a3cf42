# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What a save of all ranks' streams consists of, whatever kind of file holds it: a header, and a row per rank."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from transformer_engine_ext.pytorch.rng.state import MT19937_STATE_BYTES, PHILOX_STATE_BYTES

__all__ = [
    "FORMAT",
    "MT19937",
    "PHILOX",
    "REMEDY",
    "VERSION",
    "Header",
    "Row",
    "digest_of",
    "engine_of",
    "row_checksum",
]

FORMAT = "transformer_engine_ext.rng"
#: Version of the layouts of file and dictionary. A reader refuses every other one.
VERSION = 1

PHILOX, MT19937 = "philox", "mt19937"
_ENGINES = {"cuda": PHILOX, "cpu": MT19937}
_STATE_BYTES = {PHILOX: PHILOX_STATE_BYTES, MT19937: MT19937_STATE_BYTES}

REMEDY = "The file is damaged; nothing was loaded. Use an earlier save"


def digest_of(text: str) -> str:
    """Return 16 hexadecimal digits that identify a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def bytes_of(state: Tensor) -> bytes:
    """Return the bytes of a ``uint8`` state on any device."""
    data: bytes = state.detach().cpu().contiguous().numpy().tobytes()
    return data


def state_of(data: bytes) -> Tensor:
    """Return a state as a tensor, ``uint8 [bytes]`` on the CPU."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def engine_of(stream: Mapping[str, Any]) -> str:
    """Return the kind of a described stream's state: its ``engine``, by default what its device type uses."""
    engine: str = stream.get("engine") or _ENGINES[stream["device"]]
    return engine


@dataclass(frozen=True)
class Row:
    """What one rank contributes: its coordinates, in the order of the axes, and its states, in that of the streams."""

    coordinates: tuple[int, ...]
    states: tuple[bytes, ...]


# Note [A row knows its rank]
# The checksum of a row covers the rank number and the coordinates besides the states. So a flipped bit, two rows that
# changed places and a file put together from two others are all found, and each rank has to read its own row only.
def row_checksum(rank: int, row: Row) -> str:
    """Return the checksum of the row of one rank."""
    place = struct.pack(f"<{1 + len(row.coordinates)}q", rank, *row.coordinates)
    digest = hashlib.blake2b(place, digest_size=8)
    for state in row.states:
        digest.update(state)
    return digest.hexdigest()


@dataclass(frozen=True)
class Header:
    """What all ranks have in common.

    Attributes
    ----------
    axes : dict of str to int
        Axis sizes, in the order of a row's coordinates.
    world_size : int
        Number of ranks, and so of rows.
    streams : tuple of dict
        Per stream ``name``, ``device`` (``"cuda"`` or ``"cpu"``), for other kinds of state ``engine``, and how it was
        declared: ``varies_over``, ``lockstep_over``, ``seed_offset``.
    seed : int or None
        What the job was last seeded with.
    derivation : str
        How the seeds followed from it.
    generation : int
        How often streams were derived anew, because the layout had changed, since the job was seeded.
    checksums : tuple of str
        Per rank; see :func:`row_checksum`.
    """

    axes: dict[str, int]
    world_size: int
    streams: tuple[dict[str, Any], ...]
    seed: int | None = None
    derivation: str = "megatron"
    generation: int = 0
    checksums: tuple[str, ...] = ()

    def engines(self) -> list[str]:
        """Return the kinds of state, each once."""
        return list(dict.fromkeys(map(engine_of, self.streams)))

    def positions(self, engine: str) -> list[int]:
        """Return which of the streams have states of a kind."""
        return [index for index, stream in enumerate(self.streams) if engine_of(stream) == engine]

    def names(self) -> list[str]:
        """Return the streams' names, in order."""
        return [stream["name"] for stream in self.streams]

    def with_checksums(self, rows: Sequence[Row]) -> Header:
        """Return the header of a table with these rows."""
        return replace(self, checksums=tuple(row_checksum(rank, row) for rank, row in enumerate(rows)))

    def to_json(self) -> str:
        """Return the header as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Header:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        KeyError, TypeError, ValueError
            If a field is missing, unknown or of another type.
        """
        fields = json.loads(text)
        streams = tuple(dict(stream) for stream in fields.pop("streams"))
        header = cls(**{**fields, "streams": streams, "checksums": tuple(fields["checksums"])})
        if any(not isinstance(stream["name"], str) for stream in streams) or not isinstance(header.world_size, int):
            raise TypeError("a stream's name is no text, or the number of ranks no number")
        for stream in streams:
            engine_of(stream), list(stream["varies_over"]), list(stream["lockstep_over"])
        dict(header.axes)
        return header

    @property
    def identity(self) -> str:
        """16 hexadecimal digits that identify the whole table, since the checksums cover the rows."""
        return digest_of(self.to_json())

    def state_bytes(self, engine: str) -> int | None:
        """Return the size of one state of a kind in bytes; None if this module does not fix it."""
        return _STATE_BYTES.get(engine)
