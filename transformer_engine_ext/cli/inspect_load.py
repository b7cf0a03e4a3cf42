# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading whatever holds saved streams into one form: a header and a row per rank."""

from __future__ import annotations

import os
import re
import zipfile
from dataclasses import dataclass
from typing import Any

from transformer_engine_ext.errors import StateFormatError
from transformer_engine_ext.pytorch.distributed.atomic_write import check_target
from transformer_engine_ext.pytorch.distributed.checkpoint_folder import CheckpointFolder, read_ranks
from transformer_engine_ext.pytorch.distributed.megatron_checkpoint import is_megatron_folder, read_megatron_rng_state
from transformer_engine_ext.pytorch.distributed.rng_file import read_header, read_rows
from transformer_engine_ext.pytorch.distributed.saved_table import Header, Row, bytes_of
from transformer_engine_ext.pytorch.distributed.state_dicts import KEY_START
from transformer_engine_ext.pytorch.distributed.streams import megatron_streams

__all__ = ["FILE", "FOLDER", "MEGATRON", "Saved", "load"]

FILE, FOLDER, MEGATRON = "ParallelRNG file", "torch.distributed.checkpoint folder", "Megatron checkpoint"


@dataclass(frozen=True)
class Saved:
    """What a path holds.

    Attributes
    ----------
    path, kind : str
        Where it was, and what kind of thing it is.
    header : Header
        For a Megatron checkpoint: axes from the places that it was saved for, streams declared as Megatron seeds them,
        and neither seed nor derivation.
    rows : list of Row
        One per rank, or per place of a Megatron checkpoint.
    """

    path: str
    kind: str
    header: Header
    rows: list[Row]


def load(path: str) -> Saved:
    """Read a path.

    Raises
    ------
    OSError
        If it cannot be opened, or is a device or a pipe.
    StateFormatError
        If it holds no streams, or is damaged.
    """
    if os.path.isdir(path):
        if CheckpointFolder.is_one(path):
            folder = CheckpointFolder(path)
            if any(KEY_START in name for name in folder.names()):
                return Saved(path, FOLDER, *read_ranks(folder))
        if is_megatron_folder(path):
            return _megatron(path)
        raise StateFormatError(
            f"{path}: this folder holds no random-number streams: neither torch.distributed.checkpoint's with a "
            "ParallelRNG in it, nor Megatron's with 'rng_state'"
        )
    check_target(path, "inspect")  # before anything reads: a pipe would wait, and /dev/zero never end
    if zipfile.is_zipfile(path):
        return _megatron(path)
    header = read_header(path)
    return Saved(path, FILE, header, read_rows(path, header))


def _megatron(path: str) -> Saved:
    places, elements = [], []
    for place, rng_state in read_megatron_rng_state(path).items():
        for number, element in enumerate(rng_state):
            coordinates = {axis: int(position) for axis, position in re.findall(r"(\w+) (\d+)", place)}
            places.append({**coordinates, **({"dp": number} if len(rng_state) > 1 else {})})
            elements.append(_streams_of(element))
    axes = {axis: 1 + max(place[axis] for place in places) for axis in places[0]}
    known = {spec.name: spec for spec in megatron_streams(gtp=True, egtp=True)}
    names = list(elements[0])
    if any(list(element) != names for element in elements):
        raise StateFormatError(f"{path}: its ranks have different streams, of which no table can be made")
    streams = []
    for name, state in elements[0].items():
        spec = known.get(name)
        # Where a stream varies over axes that places do not tell (ep), nothing can be said about its seeds.
        declared = spec is not None and set(spec.varies_over) <= {"pp", "dp", "tp"}
        streams.append(
            {
                "name": name,
                "device": "cuda" if len(state) == 16 else "cpu",
                "engine": {"python-random": "python", "numpy-random": "numpy"}.get(name, ""),
                "varies_over": list(spec.varies_over) if spec else [],
                "lockstep_over": list(spec.lockstep_over) if spec else [],
                "seed_offset": spec.seed_offset if spec else None,
                "declared": declared,
            }
        )
    rows = [
        Row(tuple(place.values()), tuple(element.values())) for place, element in zip(places, elements, strict=True)
    ]
    header = Header(axes, len(rows), tuple(streams), derivation="unknown")
    return Saved(path, MEGATRON, header.with_checksums(rows), rows)


def _streams_of(element: dict[str, Any]) -> dict[str, bytes]:
    cpu, cuda = element["torch_rng_state"], element["cuda_rng_state"]
    streams = {"default": bytes_of(cpu if cuda is None else cuda)}
    streams.update({name: bytes_of(state) for name, state in element["rng_tracker_states"].items()})
    if cuda is not None:
        streams["default-cpu"] = bytes_of(cpu)
    streams["python-random"] = repr(element["random_rng_state"]).encode()
    kind, words, *rest = element["np_rng_state"]
    streams["numpy-random"] = repr([kind, words.tolist(), rest]).encode()
    return streams
