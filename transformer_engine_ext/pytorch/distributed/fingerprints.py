# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What one rank tells the others about its streams: a few numbers as long as all is well, and a report if not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Generator, Tensor

from transformer_engine_ext.pytorch.distributed.topology import Layout, axes_in_order
from transformer_engine_ext.pytorch.rng.state import (
    MT19937_STATE_BYTES,
    PHILOX_STATE_BYTES,
    MT19937State,
    PhiloxState,
    count_words,
    decode_state,
)

__all__ = ["UNKNOWN", "Reports", "Standing", "agreement_word", "differ", "lockstep_word", "pack_report", "standing_of"]

#: Stands for a seed that a state does not tell, or a number of draws that is not worth counting.
UNKNOWN = -1

# A prime. Sums of 2**19 words below it fit into the signed 64 bits in which they travel.
_MODULUS = (1 << 44) - 17

# Draws of a CPU stream that are counted for a report, about 60 ms; beyond, the report has a digest instead.
_COUNTED = 1 << 18


@dataclass(frozen=True)
class Standing:
    """Where a stream stands.

    Attributes
    ----------
    seed : int
        ``UNKNOWN`` for a state that does not tell it.
    digest : int
        63 bits that identify the whole state.
    drawn : int
        Position: CUDA offset, or 32-bit words drawn since the seed on the CPU; ``UNKNOWN`` if not counted.
    """

    seed: int
    digest: int
    drawn: int = UNKNOWN


def standing_of(state: Tensor, *, count: bool = False) -> Standing:
    """Return where a state stands; with `count`, also the words that a CPU stream has drawn, unless they are many."""
    digest = _hash(state.numpy().tobytes())
    if state.numel() not in (PHILOX_STATE_BYTES, MT19937_STATE_BYTES):
        return Standing(UNKNOWN, digest)
    decoded = decode_state(state)
    if isinstance(decoded, PhiloxState):
        return Standing(decoded.seed, digest, decoded.offset)
    return Standing(decoded.seed, digest, _words_drawn(decoded) if count else UNKNOWN)


def _words_drawn(state: MT19937State) -> int:
    start = decode_state(Generator().manual_seed(state.seed).get_state())
    words = count_words(start, state, limit=_COUNTED) if isinstance(start, MT19937State) else None
    return UNKNOWN if words is None else words


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


# Note [One number tells whether all agree]
# A rank that must agree with its peers on a value d contributes (h(rank) - h(next peer)) * d, where h is a hash and the
# peers form a ring. Around a ring of equal values these add up to 0; a value that differs makes another sum, but for a
# chance of 2**-44. Contributions of all rings, for all streams and axes, go into one sum over all ranks: so each rank
# sends one number, however many ranks, rings and streams there are, and has to know the members of its own rings only.
# That seeds differ where they must cannot be seen from a sum. It follows if every rank still has the seeds that it was
# given when the whole mesh was last checked (by the audit in seed(), or by a report of all ranks); ranks that have not,
# or that mean another check, are counted in that sum as well.
def agreement_word(value: str, rank: int, world_size: int) -> int:
    """Return this rank's contribution to a sum that is 0 if all ranks have the same `value`."""
    return _contribution(_hash(value.encode()), rank, (rank + 1) % world_size)


def lockstep_word(
    standings: Mapping[str, Standing], lockstep: Mapping[str, Sequence[str]], layout: Layout, axes: Sequence[str] | None
) -> int:
    """Return this rank's contribution to a sum that is 0 if all streams stand where their peers stand.

    Parameters
    ----------
    standings : mapping of str to Standing
        Of this rank's streams.
    lockstep : mapping of str to sequence of str
        Per stream the axes along which it must agree.
    layout : Layout
        With this rank's peers.
    axes : sequence of str, optional
        Only these; default all.
    """
    word = 0
    for name, along in lockstep.items():
        for axis in along:
            if axis in layout.peers and (axes is None or axis in axes):
                ring = layout.peers[axis]
                value = _hash(f"{name}/{axis}/{standings[name].digest}".encode())
                word += _contribution(value, layout.rank, ring[(layout.coordinates[axis] + 1) % len(ring)])
    return word % _MODULUS


def differ(total: int) -> bool:
    """Tell from the sum of all ranks' contributions whether some value differs."""
    return total % _MODULUS != 0


def _contribution(value: int, rank: int, following: int) -> int:
    weight = _hash(b"%d" % rank) - _hash(b"%d" % following)
    return weight * value % _MODULUS


def pack_report(belief: str, layout: Layout, standings: Mapping[str, Standing]) -> bytes:
    """Return all that the check of one rank needs, as bytes; their number does not depend on that of the ranks."""
    axes = axes_in_order(layout.axes)
    numbers = [*(layout.coordinates[axis] for axis in axes), *(layout.peers[axis][0] for axis in axes)]
    for standing in standings.values():
        seed = standing.seed - (1 << 64) if standing.seed >> 63 > 0 else standing.seed
        numbers += [seed, standing.digest, standing.drawn]
    text = belief.encode()
    table: bytes = np.array(numbers, np.int64).tobytes()
    return len(text).to_bytes(8, "little") + text + table


@dataclass(frozen=True)
class Reports:
    """The reports of all ranks, as arrays.

    Attributes
    ----------
    axes : tuple of str
        Axes of the layout.
    streams : tuple of str
        Names.
    coordinates, leaders : numpy.ndarray
        ``int64 [ranks, axes]``: position on each axis, and the first rank of the group along it.
    seeds, digests, drawn : numpy.ndarray
        ``int64 [ranks, streams]``; see :class:`Standing`. Seeds from 2**63 on are negative.
    """

    axes: tuple[str, ...]
    streams: tuple[str, ...]
    coordinates: Any
    leaders: Any
    seeds: Any
    digests: Any
    drawn: Any

    @classmethod
    def unpack(cls, payloads: Sequence[bytes]) -> Reports:
        """Return the reports of ranks that believe the same."""
        start = 8 + int.from_bytes(payloads[0][:8], "little")
        belief = json.loads(payloads[0][8:start])
        axes, streams = tuple(belief["axes"]), tuple(stream["name"] for stream in belief["streams"])
        table = np.frombuffer(b"".join(payload[start:] for payload in payloads), np.int64).reshape(len(payloads), -1)
        count = len(axes)
        standings = table[:, 2 * count :].reshape(len(payloads), len(streams), 3)
        return cls(
            axes, streams, table[:, :count], table[:, count : 2 * count], *(standings[:, :, part] for part in range(3))
        )
