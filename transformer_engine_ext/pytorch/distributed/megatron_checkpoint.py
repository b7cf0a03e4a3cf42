# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Finding ``rng_state`` in a checkpoint on disk that Megatron wrote, without Megatron and without unpickling it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from transformer_engine_ext.errors import StateFormatError
from transformer_engine_ext.pytorch.distributed.checkpoint_folder import CheckpointFolder
from transformer_engine_ext.pytorch.distributed.inert_pickle import describe, load_zip
from transformer_engine_ext.pytorch.distributed.megatron_format import parse_state

__all__ = ["is_megatron_folder", "read_megatron_rng_state"]

# torch_dist: "rng_state/shard_{pp}.{tp}_{PP}.{TP}", newer ones with dp_cp as a third number. Source: ShardedObject's
# unique_key, megatron/core/dist_checkpointing/mapping.py.
_SHARD = re.compile(r"^(?:.*[./])?rng_state/shard_(?P<place>\d+(?:\.\d+)*)_\d+(?:\.\d+)*$")
# torch: "mp_rank_{tp:02d}[_{pp:03d}[_{ep:03d}]]". Source: get_checkpoint_name, megatron/training/checkpointing.py.
_FOLDER = re.compile(r"^mp_rank_(?P<tp>\d+)(?:_(?P<pp>\d+))?(?:_(?P<ep>\d+))?$")
_TRACKED = "latest_checkpointed_iteration.txt"
_SHARD_AXES = ("pp", "tp", "dp_cp")


def is_megatron_folder(path: str | os.PathLike[str]) -> bool:
    """Tell whether a folder looks like one of Megatron's: of all iterations, of one, or of one in torch_dist."""
    if not os.path.isdir(path):
        return False
    names = os.listdir(path)
    if _TRACKED in names or any(_FOLDER.match(name) for name in names):
        return True
    return CheckpointFolder.is_one(path) and any(map(_SHARD.match, CheckpointFolder(path).names()))


def read_megatron_rng_state(path: str | os.PathLike[str]) -> dict[str, list[dict[str, Any]]]:
    """Read every rank's ``rng_state`` from a Megatron checkpoint.

    Nothing in it is unpickled by name, weights are not read, and generators of any device come back as byte tensors.

    Parameters
    ----------
    path : path-like
        A file ``model_optim_rng.pt``; the folder of an iteration, in the format ``torch`` or ``torch_dist``; or the
        folder above, of which the latest iteration is taken.

    Returns
    -------
    dict of str to list of dict
        Per place that Megatron saved for, such as ``"pp 0, tp 1"``: what ``ParallelRNG.load_megatron_rng_state``
        takes.

    Raises
    ------
    OSError
        If it cannot be opened.
    StateFormatError
        If there is no ``rng_state`` in it, or it is damaged.
    """
    path = os.fspath(path)
    if not os.path.isdir(path):
        return {"the only place": _plain(_rng_state_of(path))}
    if os.path.exists(tracker := os.path.join(path, _TRACKED)):
        with open(tracker, encoding="utf-8") as stream:
            latest = stream.read().strip()
        path = os.path.join(path, latest if latest == "release" else f"iter_{int(latest):07d}")
    if CheckpointFolder.is_one(path):
        folder = CheckpointFolder(path)
        shards = {match["place"]: name for name in folder.names() if (match := _SHARD.match(name))}
        if not shards:
            raise StateFormatError(f"{path}: no item of this checkpoint is Megatron's 'rng_state'")
        places = {_shard_place(place): name for place, name in sorted(shards.items(), key=lambda item: _key(item[0]))}
        return {place: _plain(_shard_data(folder.read(name))) for place, name in places.items()}
    matches = sorted((match.string, match) for name in os.listdir(path) if (match := _FOLDER.match(name)))
    if not matches:
        raise StateFormatError(f"{path}: no checkpoint of Megatron: neither 'mp_rank_..' folders nor '.metadata'")
    return {
        _folder_place(match): _plain(_rng_state_of(os.path.join(path, name, "model_optim_rng.pt")))
        for name, match in matches
    }


def _rng_state_of(path: str) -> Any:
    contents = load_zip(path, path)
    if not isinstance(contents, Mapping) or "rng_state" not in contents:
        found = sorted(map(str, contents))[:12] if isinstance(contents, Mapping) else describe(contents)
        raise StateFormatError(f"{path}: no Megatron checkpoint with 'rng_state' in it; it holds {found}")
    return contents["rng_state"]


def _shard_data(item: Any) -> Any:
    # A shard is written as a list of its parts' data, with one part, which is itself the list of dictionaries. Source:
    # _mcore_to_torch_sharded_object, megatron/core/dist_checkpointing/strategies/torch.py.
    return item[0] if isinstance(item, list) and item and isinstance(item[0], list) else item


def _plain(rng_state: Any) -> list[dict[str, Any]]:
    elements = rng_state if isinstance(rng_state, list) and rng_state else [rng_state]  # parse_state refuses []
    return [parse_state([element]).to_dict() for element in elements]


def _key(place: str) -> list[int]:
    return list(map(int, place.split(".")))


def _shard_place(place: str) -> str:
    return ", ".join(f"{axis} {position}" for axis, position in zip(_SHARD_AXES, _key(place), strict=False))


def _folder_place(match: re.Match[str]) -> str:
    return ", ".join(f"{axis} {int(match[axis])}" for axis in ("pp", "tp", "ep") if match[axis] is not None)
