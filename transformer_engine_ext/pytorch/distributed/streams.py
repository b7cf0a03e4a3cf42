# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Which streams a job has, and on which mesh axes each of them differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from transformer_engine_ext.errors import SeedCollisionError

__all__ = [
    "DEFAULT_STREAM",
    "KNOWN_AXES",
    "StreamSpec",
    "check_collisions",
    "colossalai_streams",
    "deepspeed_streams",
    "megatron_streams",
    "standard_streams",
]

#: Name of the stream that is the device's default generator.
DEFAULT_STREAM = "default"

#: Axis names with a fixed meaning. One that a job's topology lacks counts as an axis of size 1.
KNOWN_AXES = ("pp", "dp", "cp", "tp", "ep", "etp", "gtp", "egtp")

# Distances from the job's seed. Source: model_parallel_cuda_manual_seed in megatron/core/tensor_parallel/random.py, for
# the GTP streams with their 65536 * (1 + gtp) at gtp = 0. Megatron has no streams that vary over cp: the last two are
# this package's own, out of reach of the others.
_MODEL_PARALLEL_OFFSET = 2718
_EXPERT_PARALLEL_OFFSET = 1024
_GTP_OFFSET = _MODEL_PARALLEL_OFFSET + 65536
_EXPERT_GTP_OFFSET = _EXPERT_PARALLEL_OFFSET + 32768 + 65536
_CONTEXT_PARALLEL_OFFSET = 1 << 28
_TENSOR_CONTEXT_PARALLEL_OFFSET = 1 << 29


@dataclass(frozen=True)
class StreamSpec:
    """Declaration of one stream.

    Parameters
    ----------
    name : str
        Name under which ``tracker.fork(name)`` finds the stream; ``"default"`` is the device's default generator.
    varies_over : iterable of str
        Mesh axes on which neighbours get different seeds. There is no default, because a forgotten axis means equal
        dropout masks where different ones were meant (or the reverse), and nothing else would notice.
    lockstep_over : iterable of str, optional
        Axes along which all ranks must stand at the same *position* of the stream, for example ``("tp",)`` for
        dropout on replicated activations. No axis can be in both, since different seeds have no common position.
    seed_offset : int, optional
        Added to the job's seed. Every derivation but ``"fold_in"`` needs it.
    is_default : bool, optional
        The stream is the device's default generator. True exactly for the name ``"default"``.

    Raises
    ------
    ValueError
        If a declaration contradicts itself.
    TypeError
        If an axis list is a single string, which would be read as its letters.
    """

    name: str
    varies_over: tuple[str, ...]
    lockstep_over: tuple[str, ...]
    seed_offset: int | None
    is_default: bool

    def __init__(
        self,
        name: str,
        varies_over: Iterable[str],
        *,
        lockstep_over: Iterable[str] = (),
        seed_offset: int | None = None,
        is_default: bool = False,
    ) -> None:
        if not name:
            raise ValueError("a stream needs a name, got an empty string")
        axes = {
            "varies_over": _axes(name, "varies_over", varies_over),
            "lockstep_over": _axes(name, "lockstep_over", lockstep_over),
        }
        both = sorted(set(axes["varies_over"]) & set(axes["lockstep_over"]))
        if both:
            raise ValueError(
                f"stream {name!r}: axis {both[0]!r} is in varies_over and in lockstep_over; streams with different "
                "seeds have no common position, so name it in one of the two"
            )
        if is_default != (name == DEFAULT_STREAM):
            raise ValueError(
                f"stream {name!r} with is_default={is_default}: the device's default generator is the stream named "
                f"{DEFAULT_STREAM!r}, and only that one has is_default=True"
            )
        for field, value in {"name": name, **axes, "seed_offset": seed_offset, "is_default": is_default}.items():
            object.__setattr__(self, field, value)


def _axes(name: str, field: str, axes: Iterable[str]) -> tuple[str, ...]:
    if isinstance(axes, str):
        raise TypeError(
            f"stream {name!r}: {field} takes a sequence of axis names, got the string {axes!r}; write ({axes!r},)"
        )
    axes = tuple(axes)
    if len(set(axes)) != len(axes):
        raise ValueError(f"stream {name!r}: {field}={axes} names an axis twice")
    return axes


def megatron_streams(
    *,
    data_parallel_random_init: bool = False,
    gtp: bool = False,
    egtp: bool = False,
    context_parallel: bool = False,
    tensor_context_parallel: bool = False,
) -> tuple[StreamSpec, ...]:
    """Return the streams that Megatron-core seeds, with its names and offsets.

    Parameters
    ----------
    data_parallel_random_init : bool
        Megatron's option of that name: every stream differs over ``dp`` as well.
    gtp, egtp : bool
        Add ``gtp-remat-rng`` and ``egtp-remat-rng``, which Megatron has where generalised tensor parallelism (of the
        expert layers) has more than one rank. ``ParallelRNG`` adds them by itself if the topology has such an axis.
    context_parallel : bool
        Add ``context-parallel-rng``, which differs over ``cp`` and agrees over ``tp``: for dropout on activations
        that are split along the sequence. Not a stream of Megatron's, whose cp ranks share all of theirs.
    tensor_context_parallel : bool
        Add ``tensor-context-parallel-rng``, which differs over ``tp`` and ``cp``.

    Returns
    -------
    tuple of StreamSpec
        ``default``, ``data-parallel-rng``, ``model-parallel-rng`` and ``expert-parallel-rng``, then what was asked
        for. The first two start from the same seed, as in Megatron.
    """
    base = ("pp", "dp") if data_parallel_random_init else ("pp",)
    streams = [
        StreamSpec(DEFAULT_STREAM, base, lockstep_over=("tp",), seed_offset=0, is_default=True),
        StreamSpec("data-parallel-rng", base, lockstep_over=("tp",), seed_offset=0),
        StreamSpec("model-parallel-rng", (*base, "tp"), seed_offset=_MODEL_PARALLEL_OFFSET),
        StreamSpec("expert-parallel-rng", (*base, "ep", "etp"), seed_offset=_EXPERT_PARALLEL_OFFSET),
    ]
    if gtp:
        streams.append(StreamSpec("gtp-remat-rng", (*base, "tp", "gtp"), seed_offset=_GTP_OFFSET))
    if egtp:
        streams.append(StreamSpec("egtp-remat-rng", (*base, "ep", "etp", "egtp"), seed_offset=_EXPERT_GTP_OFFSET))
    if context_parallel:
        offset = _CONTEXT_PARALLEL_OFFSET
        streams.append(StreamSpec("context-parallel-rng", (*base, "cp"), lockstep_over=("tp",), seed_offset=offset))
    if tensor_context_parallel:
        offset = _TENSOR_CONTEXT_PARALLEL_OFFSET
        streams.append(StreamSpec("tensor-context-parallel-rng", (*base, "tp", "cp"), seed_offset=offset))
    return tuple(streams)


def deepspeed_streams() -> tuple[StreamSpec, ...]:
    """Return the streams that DeepSpeed seeds: the default one, alike on all ranks, and ``model-parallel-rng``."""
    return (
        StreamSpec(DEFAULT_STREAM, (), lockstep_over=("tp",), seed_offset=0, is_default=True),
        StreamSpec("model-parallel-rng", ("tp",), seed_offset=_MODEL_PARALLEL_OFFSET),
    )


def colossalai_streams() -> tuple[StreamSpec, ...]:
    """Return the streams that ColossalAI seeds: its DATA mode as ``default``, TENSOR as ``model-parallel-rng``."""
    return (
        StreamSpec(DEFAULT_STREAM, (), lockstep_over=("tp",), seed_offset=0, is_default=True),
        StreamSpec("model-parallel-rng", ("pp", "tp"), seed_offset=0),
    )


def standard_streams(derivation: str, axes: Mapping[str, int]) -> tuple[StreamSpec, ...]:
    """Return the streams of a job that declares none: those of the system whose formula it uses."""
    if derivation == "deepspeed":
        return deepspeed_streams()
    if derivation == "colossalai":
        return colossalai_streams()
    return megatron_streams(gtp=axes.get("gtp", 1) > 1, egtp=axes.get("egtp", 1) > 1)


# Note [Streams that may share a seed]
# Two streams of one rank on one seed draw the same numbers, which is an error, with one exception: Megatron starts the
# default generator and `data-parallel-rng` from one seed by design. So the default generator may share its seed with a
# tracked stream that is *declared* the same (offset and axes); equal by declaration is equal on every rank and visible
# in the source, whereas families that merely meet on some coordinates are what this check is for. Two tracked streams
# never may: the tracker refuses a second stream on one seed too.
def check_collisions(specs: Sequence[StreamSpec], seeds: Mapping[str, int], *, bits: int, where: str) -> None:
    """Refuse two streams of one rank that would draw the same numbers.

    Parameters
    ----------
    specs : sequence of StreamSpec
        The streams.
    seeds : mapping of str to int
        Seed of each of them.
    bits : int
        How many low bits of a seed the device's generator uses: 64 on CUDA (philox), 32 on the CPU (mt19937).
    where : str
        Rank or coordinates, for the message.

    Raises
    ------
    SeedCollisionError
        Naming both streams and their seeds.
    """
    seen: dict[int, StreamSpec] = {}
    for spec in sorted(specs, key=lambda spec: not spec.is_default):
        used = seeds[spec.name] % (1 << bits)
        other = seen.setdefault(used, spec)
        if other is spec:
            continue
        same_declaration = (other.seed_offset, set(other.varies_over)) == (spec.seed_offset, set(spec.varies_over))
        if other.is_default and same_declaration:
            seen[used] = spec  # a third stream on this seed collides with the tracked one
            continue
        raise SeedCollisionError(
            f"streams {other.name!r} (seed {seeds[other.name]}) and {spec.name!r} (seed {seeds[spec.name]}) on "
            f"{where} would draw the same numbers: the device uses the low {bits} bits of a seed. Expected a seed per "
            "stream; give one of them another seed_offset, or change the job's seed if that is what wraps around"
        )
