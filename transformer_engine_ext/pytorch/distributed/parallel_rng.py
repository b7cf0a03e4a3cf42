# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The streams of one job, seeded, saved and restored over all its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from transformer_engine_ext.pytorch.distributed.arguments import (
    check_axes,
    check_device,
    check_include,
    check_repair,
    check_streams,
    check_timeout,
    check_tracker,
    choose,
    warn_of_unknown_axes,
)
from transformer_engine_ext.pytorch.distributed.collectives import DEFAULT_TIMEOUT, ControlGroup
from transformer_engine_ext.pytorch.distributed.collisions import audit_seeds
from transformer_engine_ext.pytorch.distributed.derivations import DERIVATIONS, check_seed, derive_table
from transformer_engine_ext.pytorch.distributed.held_streams import HeldStreams
from transformer_engine_ext.pytorch.distributed.megatron_format import fit_state, make_state, parse_state
from transformer_engine_ext.pytorch.distributed.resharding import LoadReport
from transformer_engine_ext.pytorch.distributed.saved_streams import fresh_state, load_streams, save_streams
from transformer_engine_ext.pytorch.distributed.saved_table import Header, state_of
from transformer_engine_ext.pytorch.distributed.state_dicts import pack_rank, unpack_rank
from transformer_engine_ext.pytorch.distributed.streams import StreamSpec, standard_streams
from transformer_engine_ext.pytorch.distributed.topology import Layout, Topology, resolve_topology
from transformer_engine_ext.pytorch.distributed.verify import Every, Verifier
from transformer_engine_ext.pytorch.rng import CudaRNGStatesTracker

__all__ = ["ParallelRNG"]

_ON_CHANGE = ("error", "rederive")


class ParallelRNG:
    """The declared streams of a job on this rank.

    Parameters
    ----------
    topology : DeviceMesh, list of DeviceMesh, mapping of str to ProcessGroup, or None
        Where this rank stands: a mesh with named dimensions, several of them, or this rank's group per axis, such as
        :func:`from_megatron` returns. None: no axes. See :func:`resolve_topology`. An axis of more than one rank that
        no stream names and that has no fixed meaning is an ``UnknownAxisWarning``, on rank 0.
    streams : sequence of StreamSpec, optional
        The streams; default: those of the system that `derivation` names, with ``"fold_in"`` those of
        :func:`megatron_streams`. An axis that the topology lacks counts as one of size 1.
    tracker : CudaRNGStatesTracker, optional
        The tracker that holds all streams but ``"default"``; by default a new one.
    derivation : str
        How seeds follow from the job's seed: ``"megatron"``, ``"deepspeed"``, ``"colossalai"`` or ``"fold_in"``; see
        :func:`derive_table`.
    on_layout_change : str
        What :meth:`load` does with a file of another layout: ``"error"`` refuses it, ``"rederive"`` keeps the streams
        that do not vary over a changed axis, and continues the others past everything that was drawn; see
        Note [Streams on another layout].
    device : torch.device, str or int, optional
        Whose streams these are; by default the current CUDA device, or the CPU if there is none.
    include : sequence of str
        ``"python"``, ``"numpy"``: seed, save and restore the global generators of Python's ``random`` and of numpy as
        well, as streams named ``"python-random"`` and ``"numpy-random"``. See Note [Generators of the host].
    timeout : timedelta or float
        How long :meth:`verify`, :meth:`save` and :meth:`load` wait for the other ranks; a number is seconds.

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

    :meth:`verify`, :meth:`save` and :meth:`load` are collective calls of all ranks of the default process group.

    Examples
    --------
    >>> rng = ParallelRNG({"tp": tp_group})                       # doctest: +SKIP
    >>> rng.seed(1234)                                            # doctest: +SKIP
    >>> rng.verify()                                              # doctest: +SKIP
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
        include: Sequence[str] = (),
        timeout: timedelta | float = DEFAULT_TIMEOUT,
    ) -> None:
        choose("derivation", derivation, DERIVATIONS)
        self.derivation = derivation
        self.on_layout_change = choose("on_layout_change", on_layout_change, _ON_CHANGE)
        self.layout: Layout = resolve_topology(topology)
        self.streams = check_streams(
            standard_streams(derivation, self.layout.axes) if streams is None else streams, self.layout
        )
        warn_of_unknown_axes(self.streams, self.layout)
        device = check_device(device)
        self.tracker = check_tracker(tracker, device)
        self._control = ControlGroup(check_timeout(timeout))
        self._seed: int | None = None
        self._generation = 0
        self._held = HeldStreams(self.streams, self.tracker, device, check_include(include))
        self._verifier = Verifier(self._control, self.layout, self._held, derivation)

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
            If two streams of one rank, of any rank, would draw the same numbers. Nothing is changed then.
        ValueError, TypeError
            If the seed is out of range or no int, or a stream lacks what the derivation needs.

        Warns
        -----
        SeedCollisionWarning
            On rank 0, if streams of different ranks start from one seed; with a table of them.
        """
        # See Note [Streams that may share a seed]
        bits = self._held.seed_bits
        seed = check_seed(seed)
        table = derive_table(self.derivation, self.streams, seed, self.layout.axes, bits=bits)
        audit_seeds(table, self.layout, bits=bits, derivation=self.derivation)
        seeds = {name: stream.at(self.layout.coordinates) for name, stream in table.items()}
        self._held.seed(seeds)
        self._verifier.vouch(f"seed {seed}", seeds)
        self._seed, self._generation = seed, 0

    def verify(self, *, axes: Sequence[str] | None = None, repair: str | None = None) -> tuple[str, ...]:
        """Check that the streams of all ranks agree as declared. Collective: every rank must call it, at one step.

        Seeds must be equal on the ranks that have the same coordinates on a stream's ``varies_over``, and differ
        between neighbours on each of these axes. Positions must be equal along each axis of ``lockstep_over``, and
        may be anything elsewhere: ranks of other pipeline stages stand elsewhere.

        While all is well, each rank sends four numbers in one collective, whatever the number of ranks. Only if
        something does not agree, or the seeds were not set by :meth:`seed` since the last check (after a load, say),
        rank 0 gathers a report of some hundred bytes from each rank.

        Parameters
        ----------
        axes : sequence of str, optional
            Compare only ranks that differ along these axes, e.g. ``("tp",)``; default all.
        repair : str, optional
            ``"broadcast"``: where a stream that must agree does not, the ranks that stand out get, in place, the state
            of the first rank of the majority, or of the group's first rank if there is no majority; rank 0 logs the
            table as a warning. Streams that are alike where they must differ are never repaired.

        Returns
        -------
        tuple of str
            The streams that were repaired.

        Raises
        ------
        StreamMismatchError
            With the same text on every rank: what does not hold, and a table of the streams and ranks concerned. A
            cell is ``seed +position`` (CUDA: the offset; CPU: 32-bit words drawn, or a digest of the state after
            many), with a ``*`` where it stands out.
        LayoutMismatchError
            If the ranks have other axes, streams or arguments.
        PeerFailureError
            If another rank died or did not come within the time-out.
        Exception
            What a rank failed with, on every rank: inside a fork, say, or arguments that are none.
        """
        return self._verifier.run(lambda: (check_axes(axes, self.layout), check_repair(repair)))

    def every(self, n: int, *, axes: Sequence[str] | None = None, repair: str | None = None) -> Every:
        """Return a hook for a training loop that calls :meth:`verify` on every n-th call.

        Call it once per step on every rank, outside of forks and regions: after the optimizer's step, say, or give it
        to ``optimizer.register_step_post_hook``; it ignores its arguments. Calls are counted from 1 by each hook, so
        that calls n, 2n, ... verify; all ranks need the same `n` and the same number of calls, or the one that verifies
        waits for the others until the time-out.

        Parameters
        ----------
        n : int
            At least 1.
        axes, repair
            As for :meth:`verify`.

        Examples
        --------
        >>> optimizer.register_step_post_hook(rng.every(100))         # doctest: +SKIP
        """
        if isinstance(n, bool) or not hasattr(n, "__index__") or n < 1:
            raise ValueError(f"n is a number of steps, at least 1; got {n!r}")
        check_axes(axes, self.layout)
        check_repair(repair)
        return Every(lambda: self.verify(axes=axes, repair=repair), n)

    def states(self) -> dict[str, Tensor]:
        """Return the value of each of this rank's streams: name to ``uint8`` on the CPU. Local, changes nothing.

        16 bytes philox (seed, offset) for a stream on CUDA, 5056 bytes mt19937 for one on the CPU.
        """
        return self._held.read()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's streams as values, for a checkpoint. Local, draws nothing, changes nothing.

        With this and :meth:`load_state_dict` the object is a ``Stateful`` of ``torch.distributed.checkpoint``, which
        asks for the state before it loads one: call :meth:`seed` first, as every job does.

        Returns
        -------
        dict
            One entry, whose key names the rank and the layout: ``description`` (JSON text) and ``streams``, as from
            :meth:`states`. See Note [A key per rank].
        """
        self._control.check_world("taking the state")
        return pack_rank(self.layout, self._header(), self._held.read())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put this rank's streams, in place, where :meth:`state_dict` found them. Local.

        Raises
        ------
        StateFormatError
            If it is no such dictionary, of another version, or a state was changed or cut. A state that was moved to
            a device or cast to a floating type is read back.
        LayoutMismatchError
            If it was taken on another layout, by another rank, or of other streams. For any error, nothing is changed.
        """
        saved, states = unpack_rank(state_dict, self.layout, self._header())
        self._held.write({name: state_of(state) for name, state in states.items()})
        self._seed, self._generation = saved.seed, saved.generation

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the streams of all ranks to one ``safetensors`` file. Collective: every rank must call it.

        Rank 0 writes, beside the target first, and then renames: a kill at any point leaves the former file. When
        this returns, on any rank, the file is on disk.

        Raises
        ------
        PeerFailureError
            If another rank died or did not come within the time-out.
        LayoutMismatchError
            If the ranks do not save the same things.
        OSError
            If rank 0 could not write.
        Exception
            What a rank failed with, on every rank.
        """
        save_streams(path, self._control, self.layout, lambda: (self._header(), self._held.read()))

    def load(
        self, path: str | os.PathLike[str], on_layout_change: str | None = None, on_stream_change: str = "error"
    ) -> LoadReport:
        """Put the streams of all ranks, in place, where :meth:`save` found them. Collective.

        Each rank reads its own row. The ranks agree that all of them can load before any of them changes anything.

        Parameters
        ----------
        path : path-like
            The file; every rank must be able to read it. Or the folder of a ``torch.distributed.checkpoint`` that has
            this object's :meth:`state_dict` in it.
        on_layout_change : str, optional
            Overrides the constructor's.
        on_stream_change : str
            For streams that only the file has, or only this job, or that are declared otherwise: ``"error"`` refuses,
            ``"rederive"`` drops the first, and starts the others from the derivation's seed, past what was drawn.

        Returns
        -------
        LoadReport
            What was done with each stream.

        Raises
        ------
        LayoutMismatchError
            If the file is of another layout or other streams, and may not be; names both.
        StateFormatError
            If it is no such file, of another version, truncated or damaged.
        OSError
            If it cannot be opened.
        PeerFailureError
            If another rank died or did not come within the time-out.
        """

        def policies() -> tuple[str, str]:
            layout_policy = self.on_layout_change if on_layout_change is None else on_layout_change
            return (
                choose("on_layout_change", layout_policy, _ON_CHANGE),
                choose("on_stream_change", on_stream_change, _ON_CHANGE),
            )

        saved, states, report = load_streams(
            path, self._control, self.layout, self._header, self._held.check, fresh_state, policies
        )
        self._held.write(states)
        self._seed, self._generation = saved.seed, report.generation
        return report

    def megatron_rng_state(self, *, generators: bool = False) -> list[dict[str, Any]]:
        """Return this rank's random numbers as Megatron's checkpoints hold them under ``rng_state``. Local.

        Parameters
        ----------
        generators : bool
            Whether tracked streams are ``torch.Generator`` copies, as Megatron's graph-safe tracker has them, instead
            of byte tensors, which every Megatron reads.

        Returns
        -------
        list of dict
            Of one; with ``--data-parallel-random-init`` Megatron wants those of all data-parallel ranks in one list.
            Python's and numpy's global generators are in it.
        """
        return [make_state(self._held.read(), self.tracker.states_, generators=generators)]

    def load_megatron_rng_state(self, rng_state: Any, on_stream_change: str = "error") -> LoadReport:
        """Put this rank's streams, and Python's and numpy's global generators, where Megatron saved them. Local.

        Call :meth:`seed` with the job's seed before: without it, streams of another rank are not noticed, which some
        of Megatron's formats hand out (see Note [Megatron saves some streams of another rank]), and none can be
        derived.

        Parameters
        ----------
        rng_state : list of dict
            What a Megatron checkpoint holds under that name, live or from :func:`read_megatron_rng_state`: byte
            tensors or generators, on any device.
        on_stream_change : str
            For streams that it lacks, that this job lacks or that are another rank's: ``"error"`` or ``"rederive"``.

        Raises
        ------
        StateFormatError
            If it is no such list.
        LayoutMismatchError
            If the streams differ and may not. For any error, nothing is changed.
        """
        choose("on_stream_change", on_stream_change, _ON_CHANGE)
        state = parse_state(rng_state, self.layout.coordinates.get("dp", 0))
        expected: dict[str, int] = {}
        if self._seed is not None and not self._generation:
            bits = self._held.seed_bits
            table = derive_table(self.derivation, self.streams, self._seed, self.layout.axes, bits=bits)
            expected = {name: stream.at(self.layout.coordinates) for name, stream in table.items()}
        states, report = fit_state(
            state, self._header(), self.layout.coordinates, self.layout.rank, expected, fresh_state, on_stream_change
        )
        self._held.write(states)
        state.restore_host()
        self._generation = report.generation
        return report

    def _header(self) -> Header:
        return Header(
            axes=self.layout.axes,
            world_size=self.layout.world_size,
            streams=tuple(self._held.describe()),
            seed=self._seed,
            derivation=self.derivation,
            generation=self._generation,
        )
