# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The streams of one job, seeded, saved and restored over all its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from transformer_engine_ext.errors import LayoutMismatchError, StateFormatError
from transformer_engine_ext.pytorch.distributed.collectives import DEFAULT_TIMEOUT, ControlGroup
from transformer_engine_ext.pytorch.distributed.derivations import DERIVATIONS, check_seed, derive_table
from transformer_engine_ext.pytorch.distributed.held_streams import HeldStreams
from transformer_engine_ext.pytorch.distributed.rng_file import FORMAT, VERSION, Header
from transformer_engine_ext.pytorch.distributed.saved_streams import load_streams, save_streams
from transformer_engine_ext.pytorch.distributed.streams import (
    DEFAULT_STREAM,
    KNOWN_AXES,
    StreamSpec,
    check_collisions,
    standard_streams,
)
from transformer_engine_ext.pytorch.distributed.topology import Layout, Topology, describe_place, resolve_topology
from transformer_engine_ext.pytorch.rng import CudaRNGStatesTracker

__all__ = ["ParallelRNG"]

_ON_LAYOUT_CHANGE = ("error",)


class ParallelRNG:
    """The declared streams of a job on this rank.

    Parameters
    ----------
    topology : DeviceMesh, mapping of str to ProcessGroup, or None
        Where this rank stands: a mesh with named dimensions, or this rank's group per axis. None: no axes.
    streams : sequence of StreamSpec, optional
        The streams; default: those of the system that `derivation` names, with ``"fold_in"`` those of
        :func:`megatron_streams`. An axis that the topology lacks counts as one of size 1.
    tracker : CudaRNGStatesTracker, optional
        The tracker that holds all streams but ``"default"``; by default a new one.
    derivation : str
        How seeds follow from the job's seed: ``"megatron"``, ``"deepspeed"``, ``"colossalai"`` or ``"fold_in"``; see
        :func:`derive_table`.
    on_layout_change : str
        What :meth:`load` does with a file of another layout: ``"error"`` refuses it.
    device : torch.device, str or int, optional
        Whose streams these are; by default the current CUDA device, or the CPU if there is none.
    timeout : timedelta
        How long :meth:`save` and :meth:`load` wait for the other ranks.

    Attributes
    ----------
    tracker : CudaRNGStatesTracker
        Pass ``lambda: rng.tracker`` as ``get_rng_state_tracker``.
    layout : Layout
        Axis sizes and this rank's coordinates.

    Raises
    ------
    ValueError
        For a value that is not among those above, a stream declared twice, or an axis that nothing defines.
    TypeError
        For a topology or a stream of another type.

    Notes
    -----
    With CUDA, the CPU's default generator is seeded, saved and restored besides the declared streams, under the name
    ``"default-cpu"``: data loading and initialisation draw from it, so a resume is not exact without it.

    Examples
    --------
    >>> rng = ParallelRNG({"tp": tp_group})                       # doctest: +SKIP
    >>> rng.seed(1234)                                            # doctest: +SKIP
    >>> with rng.tracker.fork("model-parallel-rng"):              # doctest: +SKIP
    ...     y = torch.nn.functional.dropout(x, 0.1)
    >>> rng.save("streams.safetensors")                           # doctest: +SKIP
    """

    def __init__(
        self,
        topology: Topology,
        streams: Sequence[StreamSpec] | None = None,
        *,
        tracker: CudaRNGStatesTracker | None = None,
        derivation: str = "megatron",
        on_layout_change: str = "error",
        device: torch.device | str | int | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        _choose("derivation", derivation, DERIVATIONS)
        self.derivation = derivation
        self.on_layout_change = _choose("on_layout_change", on_layout_change, _ON_LAYOUT_CHANGE)
        self.layout: Layout = resolve_topology(topology)
        self.streams = _check_streams(
            standard_streams(derivation, self.layout.axes) if streams is None else streams, self.layout
        )
        device = _device(device)
        self.tracker = CudaRNGStatesTracker(device) if tracker is None else tracker
        self._control = ControlGroup(timeout)
        self._seed: int | None = None
        self._held = HeldStreams(self.streams, self.tracker, device)

    def seed(self, seed: int) -> None:
        """Start every stream anew from one seed of the job. Local; call it on every rank with the same number.

        A stream that exists is re-seeded in place: whoever holds its generator, such as a module or a CUDA graph it
        is registered with, sees the new numbers.

        Parameters
        ----------
        seed : int
            ``0 <= seed < 2**63``.

        Raises
        ------
        SeedCollisionError
            If two streams of one rank would draw the same numbers. Nothing is changed then.
        ValueError, TypeError
            If the seed is out of range or no int, or a stream lacks what the derivation needs.
        """
        # See Note [Streams that may share a seed]
        bits = self._held.seed_bits
        seed = check_seed(seed)
        table = derive_table(self.derivation, self.streams, seed, self.layout.axes, bits=bits)
        for place in self.layout.places():
            seeds = {name: stream.at(place) for name, stream in table.items()}
            check_collisions(self.streams, seeds, bits=bits, where=f"the rank at {describe_place(place)}")
        self._held.seed({name: stream.at(self.layout.coordinates) for name, stream in table.items()})
        self._seed = seed

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's streams as values. Local, draws nothing, changes nothing.

        Returns
        -------
        dict
            ``format``, ``version``, ``axes``, ``coordinates``, ``world_size``, ``seed`` and ``streams``: per stream
            its state, ``uint8`` on the CPU (16 bytes philox or 5056 bytes mt19937).
        """
        return {
            "format": FORMAT,
            "version": VERSION,
            "axes": dict(self.layout.axes),
            "coordinates": dict(self.layout.coordinates),
            "world_size": self.layout.world_size,
            "seed": self._seed,
            "streams": self._held.read(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put this rank's streams, in place, where :meth:`state_dict` found them. Local.

        Raises
        ------
        StateFormatError
            If it is no such dictionary, of another version, or a state was cast or cut.
        LayoutMismatchError
            If it was taken on another layout, at other coordinates, or of other streams. For any error, nothing is
            changed.
        """
        _check_dictionary(state_dict)
        saved = (dict(state_dict["axes"]), int(state_dict["world_size"]), dict(state_dict["coordinates"]))
        here = (self.layout.axes, self.layout.world_size, self.layout.coordinates)
        if saved != here:
            raise LayoutMismatchError(
                f"the dictionary was taken with axes {saved[0]}, world size {saved[1]}, at coordinates {saved[2]}; "
                f"this rank has axes {here[0]}, world size {here[1]} and coordinates {here[2]}. Nothing was changed; "
                "resume on the layout that saved it"
            )
        self._held.write(state_dict["streams"])
        self._seed = state_dict["seed"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the streams of all ranks to one ``safetensors`` file. Collective: every rank must call it.

        Rank 0 writes, beside the target first, and then renames: a kill at any point leaves the former file. When
        this returns, on any rank, the file is on disk.

        Raises
        ------
        PeerFailureError
            If another rank died or did not come within the time-out.
        OSError
            If rank 0 could not write; raised on every rank.
        """
        save_streams(path, self._control, self.layout, self._header(), self._held.read())

    def load(self, path: str | os.PathLike[str], on_layout_change: str | None = None) -> None:
        """Put the streams of all ranks, in place, where :meth:`save` found them. Collective.

        Each rank reads its own row. The ranks agree that all of them can load before any of them changes anything.

        Parameters
        ----------
        path : path-like
            The file; every rank must be able to read it.
        on_layout_change : str, optional
            Overrides the constructor's.

        Raises
        ------
        LayoutMismatchError
            If the file is of another layout or other streams; names both.
        StateFormatError
            If it is no such file, of another version, truncated or damaged.
        OSError
            If it cannot be opened.
        PeerFailureError
            If another rank died or did not come within the time-out.
        """
        if on_layout_change is not None:
            _choose("on_layout_change", on_layout_change, _ON_LAYOUT_CHANGE)
        header, states = load_streams(path, self._control, self.layout, self._header(), self._held.check)
        self._held.write(states)
        self._seed = header.seed

    def _header(self) -> Header:
        return Header(
            axes=self.layout.axes,
            world_size=self.layout.world_size,
            streams=tuple(self._held.describe()),
            seed=self._seed,
            derivation=self.derivation,
        )


def _check_dictionary(state_dict: Mapping[str, Any]) -> None:
    missing = {"format", "version", "axes", "coordinates", "world_size", "seed", "streams"} - set(state_dict)
    if missing or state_dict["format"] != FORMAT:
        raise StateFormatError(
            f"this is no dictionary of ParallelRNG.state_dict(): it has the keys {sorted(map(str, state_dict))}, and "
            f"format={state_dict.get('format')!r} instead of {FORMAT!r}. Nothing was changed"
        )
    if state_dict["version"] != VERSION:
        raise StateFormatError(
            f"the dictionary is of version {state_dict['version']}, this release reads version {VERSION}. Nothing was "
            "changed; load it with the release of transformer-engine-ext that made it"
        )


def _choose(what: str, value: str, accepted: Sequence[str]) -> str:
    if value not in accepted:
        raise ValueError(f"{what}={value!r} is not available; this release accepts {', '.join(map(repr, accepted))}")
    return value


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _check_streams(streams: Sequence[StreamSpec], layout: Layout) -> tuple[StreamSpec, ...]:
    streams = tuple(streams)
    for index, spec in enumerate(streams):
        if not isinstance(spec, StreamSpec):
            raise TypeError(f"streams holds StreamSpec objects, got {type(spec).__name__} at position {index}")
        if any(other.name == spec.name for other in streams[:index]):
            raise ValueError(f"stream {spec.name!r} is declared twice")
        known = {*KNOWN_AXES, *layout.axes}
        for axis in (*spec.varies_over, *spec.lockstep_over):
            if axis not in known:
                raise ValueError(
                    f"stream {spec.name!r} names the axis {axis!r}, which the topology does not have "
                    f"({layout.describe()}) and which has no fixed meaning ({', '.join(KNOWN_AXES)})"
                )
    if not any(spec.name == DEFAULT_STREAM for spec in streams):
        raise ValueError(
            f"no stream named {DEFAULT_STREAM!r} among {[spec.name for spec in streams]}; every job draws from the "
            "default generator, so declare StreamSpec('default', ..., is_default=True)"
        )
    return streams
