# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The file that holds the random-number streams of all ranks of a job.

One `safetensors <https://github.com/huggingface/safetensors>`_ file: no pickle, readable without
``torch.distributed`` or a GPU. Tensors, with ``R`` ranks, ``A`` axes and ``S`` streams of the kind:

================  =====================  ==========================================================================
``coordinates``   ``int32 [R, A]``       position of each rank on each axis
``philox``        ``uint64 [R, S, 2]``   CUDA streams: seed and offset (random numbers per thread, a multiple of 4)
``mt19937``       ``uint8 [U, 5056]``    CPU streams: the different states, as of ``torch.Generator.get_state()``
``mt19937_rows``  ``int32 [R, S]``       which of them each rank's streams are at
================  =====================  ==========================================================================

States of another kind (``python``, ``numpy``) are stored like ``mt19937``. A JSON header under ``header`` in the file's
metadata has axis sizes, the streams in the order of their columns, and a checksum per rank's row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from transformer_engine_ext.errors import StateFormatError
from transformer_engine_ext.pytorch.distributed.atomic_write import check_target
from transformer_engine_ext.pytorch.distributed.saved_table import (
    FORMAT,
    PHILOX,
    REMEDY,
    VERSION,
    Header,
    Row,
    digest_of,
    row_checksum,
)

__all__ = ["encode", "read_coordinates", "read_header", "read_row", "read_rows"]

_Path = str | os.PathLike[str]


def encode(header: Header, rows: Sequence[Row]) -> bytes:
    """Return the bytes of the file.

    Parameters
    ----------
    header : Header
        Without checksums.
    rows : sequence of Row
        One per rank, in the order of ranks.
    """
    coordinates = np.array([row.coordinates for row in rows], dtype=np.int32)
    tensors = {"coordinates": coordinates.reshape(len(rows), len(header.axes))}
    for engine in header.engines():
        picked = header.positions(engine)
        if engine == PHILOX:
            data = b"".join(row.states[index] for row in rows for index in picked)
            tensors[engine] = np.frombuffer(data, dtype="<u8").reshape(len(rows), len(picked), 2)
            continue
        # Note [Equal states are stored once]
        # A CPU state has 5 KB, and most ranks of a large job stand at the same few of them, since seeds differ along
        # few axes only. So the file holds every different state once, and a small number per rank and stream.
        pool: dict[bytes, int] = {}
        numbers = [[pool.setdefault(row.states[index], len(pool)) for index in picked] for row in rows]
        tensors[engine] = np.frombuffer(b"".join(pool), dtype=np.uint8).reshape(len(pool), -1)
        tensors[f"{engine}_rows"] = np.array(numbers, dtype=np.int32)
    text = header.with_checksums(rows).to_json()
    metadata = {"format": FORMAT, "version": str(VERSION), "header": text, "header_checksum": digest_of(text)}
    encoded: bytes = safetensors.numpy.save(tensors, metadata)
    return encoded


@contextmanager
def _opened(path: _Path) -> Iterator[Any]:
    check_target(path, "load")
    try:
        with open(path, "rb"):
            pass  # safetensors reports an unreadable file as a missing one
        with safetensors.safe_open(os.fspath(path), framework="numpy") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise StateFormatError(f"{path}: no safetensors file, or a truncated one ({error}). {REMEDY}") from error


def read_header(path: _Path) -> Header:
    """Read and check the header; no state is read.

    Raises
    ------
    OSError
        If the file cannot be opened, or is a folder or a device.
    StateFormatError
        If it is no file of this kind, of another version, truncated or damaged.
    """
    with _opened(path) as file:
        metadata: dict[str, str] = file.metadata() or {}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
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
    if digest_of(text) != metadata.get("header_checksum"):
        raise StateFormatError(f"{path}: the header does not match its own checksum. {REMEDY}")
    try:
        header = Header.from_json(text)
        expected = _expected_shapes(header, shapes)
    except (KeyError, TypeError, ValueError) as error:
        raise StateFormatError(f"{path}: the header lacks or misuses a field ({error!r}). {REMEDY}") from error
    if shapes != expected or len(header.checksums) != header.world_size:
        raise StateFormatError(f"{path}: the header promises tensors {expected}, the file holds {shapes}. {REMEDY}")
    return header


def _expected_shapes(header: Header, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    expected: dict[str, tuple[int, ...]] = {"coordinates": (header.world_size, len(header.axes))}
    for engine in header.engines():
        columns = len(header.positions(engine))
        if engine == PHILOX:
            expected[engine] = (header.world_size, columns, 2)
            continue
        pool = shapes.get(engine, (0, 0))  # how many different states there are is the file's own
        expected[engine] = (pool[0], header.state_bytes(engine) or pool[-1])
        expected[f"{engine}_rows"] = (header.world_size, columns)
    return expected


def read_coordinates(path: _Path) -> list[tuple[int, ...]]:
    """Return each rank's position on each axis, of a file whose header has been read."""
    with _opened(path) as file:
        return [tuple(place) for place in file.get_tensor("coordinates").tolist()]


def read_row(path: _Path, header: Header, rank: int) -> Row:
    """Read what the rank that saved as `rank` contributed; the rows of the others are not read.

    Raises
    ------
    StateFormatError
        If the row does not match its checksum.
    """
    states: dict[int, bytes] = {}
    with _opened(path) as file:
        place = tuple(file.get_slice("coordinates")[rank].tolist())
        for engine in header.engines():
            if engine == PHILOX:
                found = [state.tobytes() for state in file.get_slice(engine)[rank]]
            else:
                pool = file.get_slice(engine)
                numbers = file.get_slice(f"{engine}_rows")[rank].tolist()
                _check_numbers(path, numbers, pool.get_shape()[0])
                found = [pool[number].tobytes() for number in numbers]
            states.update(zip(header.positions(engine), found, strict=True))
    row = Row(place, tuple(states[index] for index in range(len(header.streams))))
    _check_row(path, header, rank, row)
    return row


def read_rows(path: _Path, header: Header) -> list[Row]:
    """Read the rows of all ranks, in the order of ranks.

    Raises
    ------
    StateFormatError
        If a row does not match its checksum.
    """
    columns: dict[int, list[bytes]] = {}
    for engine in header.engines():
        picked = header.positions(engine)
        with _opened(path) as file:
            table = file.get_tensor(engine)
            numbers = None if engine == PHILOX else file.get_tensor(f"{engine}_rows")
        if numbers is None:
            columns.update({index: [pair.tobytes() for pair in table[:, at]] for at, index in enumerate(picked)})
            continue
        _check_numbers(path, [int(numbers.min(initial=0)), int(numbers.max(initial=0))], len(table))
        pool = [state.tobytes() for state in table]  # See Note [Equal states are stored once]
        columns.update({index: [pool[n] for n in numbers[:, at].tolist()] for at, index in enumerate(picked)})
    rows = []
    for rank, place in enumerate(read_coordinates(path)):
        rows.append(Row(place, tuple(columns[index][rank] for index in range(len(header.streams)))))
        _check_row(path, header, rank, rows[-1])
    return rows


def _check_numbers(path: _Path, numbers: Sequence[int], size: int) -> None:
    if any(not 0 <= number < size for number in numbers):
        raise StateFormatError(f"{path}: a row points at a state that the file does not hold. {REMEDY}")


def _check_row(path: _Path, header: Header, rank: int, row: Row) -> None:
    # See Note [A row knows its rank]
    if row_checksum(rank, row) != header.checksums[rank]:
        raise StateFormatError(f"{path}: the row of rank {rank} does not match its checksum. {REMEDY}")
