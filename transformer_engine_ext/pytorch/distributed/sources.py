# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What a path may be that streams are loaded from: a file of ``save``, or a checkpoint folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformer_engine_ext.pytorch.distributed import rng_file
from transformer_engine_ext.pytorch.distributed.checkpoint_folder import CheckpointFolder, read_ranks
from transformer_engine_ext.pytorch.distributed.saved_table import Header, Row

__all__ = ["SavedSource", "open_saved"]


class SavedSource(Protocol):
    """The streams of all ranks."""

    header: Header

    def coordinates(self) -> Sequence[tuple[int, ...]]:
        """Return each rank's coordinates."""

    def row(self, rank: int) -> Row:
        """Return one rank's row, checked."""

    def rows(self) -> Sequence[Row]:
        """Return all rows, checked."""


class _File:
    """A file; what is not asked for is not read, since each of many ranks needs one row."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self.header = path, rng_file.read_header(path)

    def coordinates(self) -> Sequence[tuple[int, ...]]:
        return rng_file.read_coordinates(self._path)

    def row(self, rank: int) -> Row:
        return rng_file.read_row(self._path, self.header, rank)

    def rows(self) -> Sequence[Row]:
        return rng_file.read_rows(self._path, self.header)


@dataclass
class _Table:
    header: Header
    table: list[Row]

    def coordinates(self) -> Sequence[tuple[int, ...]]:
        return [row.coordinates for row in self.table]

    def row(self, rank: int) -> Row:
        return self.table[rank]

    def rows(self) -> Sequence[Row]:
        return self.table


def open_saved(path: str | os.PathLike[str]) -> SavedSource:
    """Open what ``ParallelRNG.save`` wrote, or a folder of ``torch.distributed.checkpoint`` with its state in it.

    Raises
    ------
    OSError
        If it cannot be opened, or is another kind of folder, or a device.
    StateFormatError
        If it holds something else, or is damaged.
    """
    if CheckpointFolder.is_one(path):
        return _Table(*read_ranks(CheckpointFolder(path)))
    return _File(path)
