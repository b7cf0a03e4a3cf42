# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The file that holds the random-number streams of all ranks of a job.

One `safetensors <https://github.com/huggingface/safetensors>`_ file: no pickle, readable without
``torch.distributed`` or a GPU. Tensors, with ``R`` ranks, ``A`` axes and ``S`` streams of the kind:

===============  ==========================  =====================================================================
``coordinates``  ``int32 [R, A]``            position of each rank on each axis
``philox``       ``uint64 [R, S_cuda, 2]``   seed and offset (random numbers per thread, a multiple of 4)
``mt19937``      ``uint8 [R, S_cpu, 5056]``  ``torch.Generator.get_state()`` of CPU streams
===============  ==========================  =====================================================================

and a JSON header under ``header`` in the file's metadata: axis sizes, the streams in the order of their columns, and a
checksum per rank's row.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from transformer_engine_ext.errors import StateFormatError
from transformer_engine_ext.pytorch.rng.state import MT19937_STATE_BYTES, PHILOX_STATE_BYTES

__all__ = [
    "FORMAT",
    "VERSION",
    "Header",
    "Row",
    "encode",
    "read_coordinates",
    "read_header",
    "read_row",
    "state_bytes",
    "write_atomically",
]

FORMAT = "transformer_engine_ext.rng"
#: Version of the layout described above. A reader refuses every other one.
VERSION = 1

_ENGINES = {"cuda": "philox", "cpu": "mt19937"}
_STATE_BYTES = {"philox": PHILOX_STATE_BYTES, "mt19937": MT19937_STATE_BYTES}


def state_bytes(device: str) -> int:
    """Return the size of one state of a stream on ``"cuda"`` or ``"cpu"``, in bytes."""
    return _STATE_BYTES[_ENGINES[device]]


@dataclass(frozen=True)
class Row:
    """What one rank contributes: its coordinates, in the order of the axes, and its states, in that of the streams."""

    coordinates: tuple[int, ...]
    states: tuple[bytes, ...]


@dataclass(frozen=True)
class Header:
    """Contents of the JSON header.

    Attributes
    ----------
    axes : dict of str to int
        Axis sizes, in the order of the columns of ``coordinates``.
    world_size : int
        Number of ranks, and so of rows.
    streams : tuple of dict
        Per stream ``name``, ``device`` (``"cuda"`` or ``"cpu"``) and how it was declared.
    seed : int or None
        What the job was last seeded with, for the reader's information.
    derivation : str
        How the seeds followed from it.
    checksums : tuple of str
        Per rank; see :func:`_checksum`.
    """

    axes: dict[str, int]
    world_size: int
    streams: tuple[dict[str, Any], ...]
    seed: int | None = None
    derivation: str = "megatron"
    checksums: tuple[str, ...] = ()

    def columns(self, engine: str) -> list[str]:
        """Return the names of the streams in one of the state tensors, in order."""
        return [stream["name"] for stream in self.streams if _ENGINES[stream["device"]] == engine]


# Note [A row knows its rank]
# The checksum of a row covers the rank number and the coordinates besides the states. So a flipped bit, two rows that
# changed places and a file put together from two others are all found, and each rank has to read its own row only.
def _checksum(rank: int, row: Row) -> str:
    digest = hashlib.blake2b(json.dumps([rank, *row.coordinates]).encode(), digest_size=8)
    for state in row.states:
        digest.update(state)
    return digest.hexdigest()


def encode(header: Header, rows: Sequence[Row]) -> bytes:
    """Return the bytes of the file.

    Parameters
    ----------
    header : Header
        Without checksums.
    rows : sequence of Row
        One per rank, in the order of ranks.
    """
    coordinates = torch.tensor([row.coordinates for row in rows], dtype=torch.int32)
    tensors = {"coordinates": coordinates.reshape(len(rows), len(header.axes))}
    for engine in _STATE_BYTES:
        picked = [index for index, stream in enumerate(header.streams) if _ENGINES[stream["device"]] == engine]
        if picked:
            data = bytearray(b"".join(row.states[index] for row in rows for index in picked))
            tensor = torch.frombuffer(data, dtype=torch.uint8).reshape(len(rows), len(picked), -1)
            tensors[engine] = tensor.view(torch.uint64) if engine == "philox" else tensor
    fields = {
        "axes": header.axes,
        "world_size": header.world_size,
        "streams": header.streams,
        "seed": header.seed,
        "derivation": header.derivation,
        "checksums": [_checksum(rank, row) for rank, row in enumerate(rows)],
    }
    text = json.dumps(fields)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    metadata = {"format": FORMAT, "version": str(VERSION), "header": text, "header_checksum": digest}
    return safetensors.torch.save(tensors, metadata)


# Note [A save never damages the former file]
# The bytes go to a new file beside the target, reach the disk (fsync), and only then take the target's name in one
# atomic step; fsync of the directory makes the step itself durable. A kill at any point leaves the former file whole
# or the new one whole, and at worst a hidden *.tmp file that no reader looks at.
def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file such that under its name there is always a whole one.

    Raises
    ------
    OSError
        If the directory does not exist or cannot be written; the former file then is as it was.
    """
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header; no state is read.

    Raises
    ------
    OSError
        If the file cannot be opened.
    StateFormatError
        If it is no file of this kind, of another version, truncated or damaged.
    """
    try:
        with safetensors.safe_open(os.fspath(path), framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise StateFormatError(f"{path}: no safetensors file, or a truncated one ({error}). {_REMEDY}") from error
    if metadata.get("format") != FORMAT:
        raise StateFormatError(
            f"{path}: a safetensors file, but not of random-number streams: expected the metadata format={FORMAT!r}, "
            f"got {metadata.get('format')!r}. Pass the path that ParallelRNG.save() was given"
        )
    if metadata.get("version") != str(VERSION):
        raise StateFormatError(
            f"{path}: written in version {metadata.get('version')} of the format, this release reads version "
            f"{VERSION}; load it with the release of transformer-engine-ext that wrote it"
        )
    text = metadata.get("header", "")
    if hashlib.blake2b(text.encode(), digest_size=8).hexdigest() != metadata.get("header_checksum"):
        raise StateFormatError(f"{path}: the header does not match its own checksum. {_REMEDY}")
    try:
        fields = json.loads(text)
        header = Header(**{**fields, "streams": tuple(fields["streams"]), "checksums": tuple(fields["checksums"])})
        expected = {"coordinates": [header.world_size, len(header.axes)]}
        for engine, words in (("philox", 2), ("mt19937", MT19937_STATE_BYTES)):
            if columns := header.columns(engine):
                expected[engine] = [header.world_size, len(columns), words]
    except (KeyError, TypeError, ValueError) as error:
        raise StateFormatError(f"{path}: the header lacks or misuses a field ({error!r}). {_REMEDY}") from error
    if shapes != expected or len(header.checksums) != header.world_size:
        raise StateFormatError(f"{path}: the header promises tensors {expected}, the file holds {shapes}. {_REMEDY}")
    return header


def read_coordinates(path: str | os.PathLike[str]) -> Tensor:
    """Return ``coordinates``, ``int32 [ranks, axes]``, of a file whose header has been read."""
    with safetensors.safe_open(os.fspath(path), framework="pt") as file:
        coordinates: Tensor = file.get_tensor("coordinates")
    return coordinates


def read_row(path: str | os.PathLike[str], header: Header, rank: int) -> dict[str, Tensor]:
    """Read the states of the rank that saved as `rank`.

    Returns
    -------
    dict of str to torch.Tensor
        Per stream its state, one-dimensional ``uint8`` on the CPU.

    Raises
    ------
    StateFormatError
        If the row does not match its checksum.
    """
    found: dict[str, Tensor] = {}
    with safetensors.safe_open(os.fspath(path), framework="pt") as file:
        place = tuple(file.get_slice("coordinates")[rank].tolist())
        for engine in _STATE_BYTES:
            columns = header.columns(engine)
            if columns:
                states = file.get_slice(engine)[rank].contiguous().view(torch.uint8)
                found.update(zip(columns, (state.clone() for state in states), strict=True))
    row = Row(place, tuple(bytes(found[stream["name"]].tolist()) for stream in header.streams))
    # See Note [A row knows its rank]
    if _checksum(rank, row) != header.checksums[rank]:
        raise StateFormatError(f"{path}: the row of rank {rank} does not match its checksum. {_REMEDY}")
    return found


_REMEDY = "The file is damaged; nothing was loaded. Use an earlier save"
