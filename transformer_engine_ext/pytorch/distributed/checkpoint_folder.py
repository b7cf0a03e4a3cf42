# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of ``torch.distributed.checkpoint``, read without its planners and without unpickling anything."""

from __future__ import annotations

import io
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from transformer_engine_ext.errors import StateFormatError
from transformer_engine_ext.pytorch.distributed.inert_pickle import Record, as_array, load_plain, load_zip
from transformer_engine_ext.pytorch.distributed.saved_table import Header, Row, state_of
from transformer_engine_ext.pytorch.distributed.state_dicts import KEY_START, read_rank

__all__ = ["CheckpointFolder", "read_ranks"]

# What pack_rank's keys become when nested dictionaries are flattened.
_OUR_KEY = re.compile(
    rf"^(?P<owner>.*?)\.?(?P<key>{KEY_START}\d+ of \d+ \(.*?\) \[.*?\])\.(?:description|streams\.(?P<stream>.+))$",
    re.DOTALL,
)


class CheckpointFolder:
    """The items of a folder: what they are called and where they lie.

    Parameters
    ----------
    path : path-like
        The folder, with its ``.metadata``.

    Raises
    ------
    OSError
        If ``.metadata`` cannot be read.
    StateFormatError
        If it is of another kind.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with open(os.path.join(path, ".metadata"), "rb") as stream:
            metadata = load_plain(stream.read(), f"{self.path}/.metadata")
        entries = metadata.field("storage_data") if isinstance(metadata, Record) else None
        if not isinstance(entries, dict) or not all(
            isinstance(part, Record) for pair in entries.items() for part in pair
        ):
            raise StateFormatError(f"{self.path}: '.metadata' is not that of torch.distributed.checkpoint")
        self._items: dict[str, list[Record]] = defaultdict(list)
        for index, where in entries.items():
            self._items[str(index.field("fqn"))].append(where)

    @staticmethod
    def is_one(path: str | os.PathLike[str]) -> bool:
        """Tell whether a path looks like such a folder."""
        return os.path.isfile(os.path.join(path, ".metadata"))

    def names(self) -> Iterator[str]:
        """Yield the items' names."""
        return iter(self._items)

    def read(self, name: str) -> Any:
        """Return an item that was saved in one piece, with records in place of objects.

        Raises
        ------
        OSError
            If the file that should hold it cannot be read.
        StateFormatError
            If it lies in several pieces, is compressed or damaged.
        """
        pieces = self._items[name]
        where = f"{self.path}: item {name.partition(' [')[0]!r}"
        if len(pieces) != 1 or pieces[0].field("transform_descriptors"):
            raise StateFormatError(f"{where} is split over ranks or compressed, which no random-number state is")
        file, offset, length = (pieces[0].field(field) for field in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or os.path.basename(file) != file or "\0" in file:
            raise StateFormatError(f"{where} should lie in {file!r}, which is not in the folder")
        if not all(isinstance(number, int) and 0 <= number < 1 << 62 for number in (offset, length)):
            raise StateFormatError(f"{where} has no place in its file: '.metadata' is damaged")
        with open(os.path.join(self.path, file), "rb") as stream:
            stream.seek(offset)
            data = stream.read(length)
        return load_zip(io.BytesIO(data), where)


def read_ranks(folder: CheckpointFolder) -> tuple[Header, list[Row]]:
    """Return the streams of all ranks, from a checkpoint that has ``ParallelRNG.state_dict()`` of every rank in it.

    Raises
    ------
    OSError
        If a file cannot be read.
    StateFormatError
        If there is no such dictionary, more than one per rank, one of a rank is missing, or one is damaged.
    """
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for name in folder.names():
        if (match := _OUR_KEY.match(name)) is None:
            continue
        entry = found[match["owner"]].setdefault(match["key"], {"description": None, "streams": {}})
        if match["stream"] is None:
            entry["description"] = folder.read(name)
        else:
            entry["streams"][match["stream"]] = state_of(as_array(folder.read(name), name).tobytes())
    if len(found) != 1:
        owners = ", ".join(map(repr, found)) or "none"
        raise StateFormatError(
            f"{folder.path}: a checkpoint of torch.distributed.checkpoint should hold one ParallelRNG, this one holds "
            f"{owners}. Save {{'rng': rng}} with rng the ParallelRNG, on every rank"
        )
    rows: dict[int, Row] = {}
    header: Header | None = None
    for entries in found.values():
        for key, entry in entries.items():
            rank, theirs, row = read_rank(entry, f"{folder.path}: entry {key.partition(' [')[0]!r}")
            if header is not None and theirs != header:
                raise StateFormatError(f"{folder.path}: rank {rank} saved other streams, axes or seed than the others")
            header, rows[rank] = theirs, row
    if header is None or sorted(rows) != list(range(header.world_size)):
        raise StateFormatError(
            f"{folder.path}: of {header.world_size if header else 0} ranks only {sorted(rows)} have saved their streams"
        )
    ordered = [rows[rank] for rank in range(header.world_size)]
    return header.with_checksums(ordered), ordered
