# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""How the seed of every stream on every rank follows from the one seed of the job."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer_engine_ext.pytorch.distributed.streams import StreamSpec
from transformer_engine_ext.pytorch.distributed.threefry import fold, key_of, tag, threefry2x32

__all__ = ["DERIVATIONS", "SeedTable", "check_seed", "derive_seed", "derive_seeds", "derive_table"]

# Seed distance between neighbours on an axis, per formula. Sources: Megatron-core, _set_random_seed (pp, dp) in
# megatron/training/initialize.py and model_parallel_cuda_manual_seed (the others) in
# megatron/core/tensor_parallel/random.py; it has none for cp, so that distance is this package's own. DeepSpeed,
# model_parallel_cuda_manual_seed in deepspeed/runtime/activation_checkpointing/checkpointing.py. ColossalAI,
# ParallelContext.set_seed in colossalai/legacy/context/parallel_context.py.
_STRIDES: dict[str, dict[str, int]] = {
    "megatron": {"pp": 100, "dp": 10, "tp": 1, "ep": 100, "etp": 1, "gtp": 1 << 16, "egtp": 1 << 16, "cp": 1 << 20},
    "deepspeed": {"tp": 1},
    "colossalai": {"tp": 1, "pp": 1024},
}

#: What ``ParallelRNG(derivation=...)`` takes.
DERIVATIONS = (*_STRIDES, "fold_in")

# A seed goes through torch.Generator.manual_seed, which takes a 64-bit word; the top bit stays free for signed readers.
_SEED_LIMIT = 1 << 63

# Axes folded over the same ranks multiply to more combinations than there are ranks; this many take about a second.
_MOST_CELLS = 1 << 21


@dataclass(frozen=True)
class SeedTable:
    """The seeds of one stream over the whole mesh.

    Attributes
    ----------
    spec : StreamSpec
        The stream.
    axes : tuple of str
        The axes that it varies over and that have more than one position, in the order of `seeds`' dimensions.
    seeds : numpy.ndarray
        ``uint64``, one dimension per axis.
    """

    spec: StreamSpec
    axes: tuple[str, ...]
    seeds: Any

    def at(self, coordinates: Mapping[str, int]) -> int:
        """Return the seed at one rank's coordinates; an axis that is missing there counts as position 0."""
        return int(self.seeds[tuple(coordinates.get(axis, 0) for axis in self.axes)])

    def over(self, names: Sequence[str], places: Any) -> Any:
        """Return ``uint64 [ranks]``: the seeds of many ranks, whose coordinates are rows of `places`."""
        columns = tuple(places[:, names.index(axis)] for axis in self.axes)
        return self.seeds[columns] if columns else np.broadcast_to(self.seeds, (len(places),))


def check_seed(seed: object) -> int:
    """Return a job's seed as an int; numpy's and torch's integers are taken too.

    Raises
    ------
    TypeError
        If it is no integer.
    ValueError
        If it is not in ``0 .. 2**63 - 1``.
    """
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(seed, bool):
        raise TypeError(f"the seed must be an int, got {type(seed).__name__}")
    if not 0 <= number < _SEED_LIMIT:
        raise ValueError(f"the seed is {number}; it must lie in 0 .. 2**63 - 1")
    return number


def derive_table(
    derivation: str,
    specs: Sequence[StreamSpec],
    seed: int,
    axes: Mapping[str, int],
    *,
    bits: int,
    generation: int = 0,
    taken: Iterable[int] = (),
) -> dict[str, SeedTable]:
    """Return the seeds of all streams over the whole mesh, without communication.

    Parameters
    ----------
    derivation : str
        ``"megatron"``: ``seed + seed_offset + 100*pp + 10*dp + tp + 100*ep + etp + 65536*gtp + 65536*egtp``, each
        coordinate only if the stream varies over its axis; with :func:`megatron_streams` bit for bit what
        Megatron-core uses. ``"deepspeed"``: ``seed + seed_offset + tp``. ``"colossalai"``:
        ``seed + seed_offset + tp + 1024*pp``. ``"fold_in"``: see Note [Folding in].
    specs : sequence of StreamSpec
        All streams of the job; their order has no influence.
    seed : int
        Seed of the job, ``0 <= seed < 2**63``.
    axes : mapping of str to int
        Size of each axis; a missing one has size 1.
    bits : int
        How many low bits of a seed the device's generator uses: 64 on CUDA (philox), 32 on the CPU (mt19937).
    generation : int
        Counts fresh starts from one seed, say after a resume on another layout. From 1 on, every derivation gives
        ``"fold_in"`` seeds with the generation mixed in: a linear formula would repeat numbers that were drawn before.
    taken : iterable of int
        Seeds that ``"fold_in"`` must avoid, since other streams use them.

    Returns
    -------
    dict of str to SeedTable
        Per stream name.

    Raises
    ------
    ValueError
        If the derivation is unknown or lacks a formula for an axis or an offset for a stream, or a result is no
        63-bit number.
    TypeError
        If ``seed`` is no integer.
    """
    seed = check_seed(seed)
    if derivation not in DERIVATIONS:
        raise ValueError(f"derivation={derivation!r} is not available; choose from {', '.join(map(repr, DERIVATIONS))}")
    if derivation == "fold_in" or generation:
        return _fold_in(specs, seed, axes, bits=bits, generation=generation, taken=taken)
    return {spec.name: _linear(derivation, spec, seed, axes) for spec in specs}


def derive_seeds(
    derivation: str,
    specs: Sequence[StreamSpec],
    seed: int,
    coordinates: Mapping[str, int],
    axes: Mapping[str, int],
    *,
    bits: int,
    generation: int = 0,
    taken: Iterable[int] = (),
) -> dict[str, int]:
    """Return the seeds of all streams on the rank at `coordinates`; the rest is as in :func:`derive_table`."""
    table = derive_table(derivation, specs, seed, axes, bits=bits, generation=generation, taken=taken)
    return {name: seeds.at(coordinates) for name, seeds in table.items()}


def derive_seed(
    derivation: str,
    spec: StreamSpec,
    seed: int,
    coordinates: Mapping[str, int],
    axes: Mapping[str, int],
    *,
    bits: int,
    generation: int = 0,
    among: Sequence[StreamSpec] = (),
) -> int:
    """Return the seed of one stream on one rank; `among` are all streams of the job, which ``"fold_in"`` looks at."""
    specs = among or (spec,)
    return derive_seeds(derivation, specs, seed, coordinates, axes, bits=bits, generation=generation)[spec.name]


def _varied(spec: StreamSpec, axes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(axis for axis in spec.varies_over if axes.get(axis, 1) > 1)


def _linear(derivation: str, spec: StreamSpec, seed: int, axes: Mapping[str, int]) -> SeedTable:
    strides = _STRIDES[derivation]
    if spec.seed_offset is None:
        raise ValueError(
            f"stream {spec.name!r} has no seed_offset, and the {derivation!r} derivation adds it to the job's seed; "
            "give one that keeps it apart from the other streams, or use derivation='fold_in'"
        )
    unknown = [axis for axis in spec.varies_over if axis not in strides]
    if unknown:
        raise ValueError(
            f"stream {spec.name!r} varies over {unknown[0]!r}, for which the {derivation!r} derivation has no "
            f"formula; its axes are {', '.join(strides)}. derivation='fold_in' takes any axis"
        )
    varied = _varied(spec, axes)
    first = seed + spec.seed_offset
    last = first + sum(strides[axis] * (axes[axis] - 1) for axis in varied)
    if first < 0 or last >= _SEED_LIMIT:
        raise ValueError(
            f"stream {spec.name!r}: seed {seed} gives seeds {first} .. {last}; all must lie in 0 .. 2**63 - 1"
        )
    seeds: Any = np.full([axes[axis] for axis in varied], first, np.uint64)
    for dimension, axis in enumerate(varied):
        steps = np.arange(axes[axis], dtype=np.uint64) * np.uint64(strides[axis])
        seeds = seeds + steps.reshape([-1 if other == dimension else 1 for other in range(len(varied))])
    return SeedTable(spec, varied, seeds)


# Note [Folding in]
# The key is the job's seed; mixed into it, by Threefry-2x32 each: the stream's name (64 bits of BLAKE2b), then for each
# axis of varies_over, by name, the pair (32 bits of BLAKE2b of the axis, coordinate), then the generation if it is not
# 0. The result's low word is the seed on the CPU, whose twister takes 32 bits; on CUDA it is 63 bits. So a stream's
# seeds depend neither on the order of declaration nor on axes that it does not vary over, and an axis of size 1 is the
# same as none. Hashes meet by chance, in 32 bits already with some ten thousand ranks: all cells of the mesh are laid
# out in a fixed order (streams by name, then coordinates), and of those that share a seed all but the first are hashed
# again with a salt 1, 2, ... until none do. Every rank computes the whole mesh, so all agree without a message.
def _fold_in(
    specs: Sequence[StreamSpec],
    seed: int,
    axes: Mapping[str, int],
    *,
    bits: int,
    generation: int,
    taken: Iterable[int],
) -> dict[str, SeedTable]:
    layouts: list[tuple[StreamSpec, tuple[str, ...], list[int]]] = []
    first: list[Any] = []
    second: list[Any] = []
    for spec in sorted(specs, key=lambda spec: spec.name):
        varied = tuple(sorted(_varied(spec, axes)))
        sizes = [axes[axis] for axis in varied]
        if math.prod(sizes) > _MOST_CELLS:
            raise ValueError(
                f"stream {spec.name!r} varies over {' x '.join(f'{axis}={axes[axis]}' for axis in varied)}, more than "
                f"{_MOST_CELLS} combinations; name fewer axes, for instance only those of one of two folded meshes"
            )
        layouts.append((spec, varied, sizes))
        keys = threefry2x32(key_of(seed), key_of(tag(spec.name, 2)))
        places = dict(zip(varied, np.indices(sizes, np.uint32).reshape(len(sizes), -1), strict=True)) if sizes else {}
        for axis in sorted(spec.varies_over):
            keys = fold(keys, axis, places.get(axis, np.zeros(1, np.uint32)))
        if generation:
            keys = fold(keys, "\0generation", np.array([generation], np.uint32))
        for words, key in zip((first, second), keys, strict=True):
            words.append(np.broadcast_to(key, (math.prod(sizes),)))
    seeds = _unique((np.concatenate(first), np.concatenate(second)), bits, taken)
    tables: dict[str, SeedTable] = {}
    for spec, varied, sizes in layouts:
        count = math.prod(sizes)
        tables[spec.name] = SeedTable(spec, varied, seeds[:count].reshape(sizes))
        seeds = seeds[count:]
    return {spec.name: tables[spec.name] for spec in specs}


def _unique(keys: tuple[Any, Any], bits: int, taken: Iterable[int]) -> Any:
    """Return a seed per key, all different modulo ``2**bits``."""
    forbidden = np.array(sorted({seed % (1 << bits) for seed in taken}), np.uint64)
    seeds = _word(keys, bits)
    salt = 0
    while True:
        order = np.argsort(seeds, kind="stable")  # of equal ones the first in the fixed order comes first
        again: Any = np.zeros(len(seeds), bool)
        again[order[1:]] = seeds[order[1:]] == seeds[order[:-1]]
        again |= np.isin(seeds, forbidden)
        if not again.any():
            return seeds
        salt += 1
        salted = fold((keys[0][again], keys[1][again]), "\0salt", np.array([salt], np.uint32))
        seeds[again] = _word(salted, bits)


def _word(keys: tuple[Any, Any], bits: int) -> Any:
    low = keys[0].astype(np.uint64)
    return low if bits == 32 else low | ((keys[1] & np.uint32(0x7FFFFFFF)).astype(np.uint64) << np.uint64(32))
