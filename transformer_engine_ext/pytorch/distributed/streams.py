# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Which streams a job has, and on which mesh axes each of them differs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = [
    "DATA_PARALLEL_STREAM",
    "DEFAULT_STREAM",
    "KNOWN_AXES",
    "StreamSpec",
    "colossalai_streams",
    "deepspeed_streams",
    "megatron_streams",
    "standard_streams",
]

#: Name of the stream that is the device's default generator.
DEFAULT_STREAM = "default"

#: Name of Megatron's stream that starts from the seed of the default one.
DATA_PARALLEL_STREAM = "data-parallel-rng"

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
        if not isinstance(name, str):
            raise TypeError(f"a stream's name is a string, got {type(name).__name__}")
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
        if seed_offset is not None:
            try:
                seed_offset = operator.index(seed_offset)
            except TypeError:
                raise TypeError(f"stream {name!r}: seed_offset is an int, got {type(seed_offset).__name__}") from None
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
    axes = _listed(name, field, axes)
    if len(set(axes)) != len(axes):
        raise ValueError(f"stream {name!r}: {field}={axes} names an axis twice")
    return axes


def _listed(name: str, field: str, axes: object) -> tuple[str, ...]:
    listed = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    wrong = [axis for axis in listed if not isinstance(axis, str) or not axis]
    if wrong or not isinstance(axes, Iterable):
        raise TypeError(f"stream {name!r}: {field} takes a sequence of axis names such as ('tp',), got {axes!r}")
    return listed


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
        StreamSpec(DATA_PARALLEL_STREAM, base, lockstep_over=("tp",), seed_offset=0),
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
