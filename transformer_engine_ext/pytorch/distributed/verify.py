# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Proof, at any moment, that the streams of all ranks agree as they were declared."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from transformer_engine_ext.errors import LayoutMismatchError, StreamMismatchError
from transformer_engine_ext.pytorch.distributed.agreement import agree, describe_error, rebuild_error
from transformer_engine_ext.pytorch.distributed.collectives import ControlGroup
from transformer_engine_ext.pytorch.distributed.fingerprints import (
    Reports,
    agreement_word,
    differ,
    lockstep_word,
    pack_report,
    standing_of,
)
from transformer_engine_ext.pytorch.distributed.held_streams import HeldStreams
from transformer_engine_ext.pytorch.distributed.mismatches import Fault, find_faults, render
from transformer_engine_ext.pytorch.distributed.topology import Layout, axes_in_order

__all__ = ["Every", "Verifier", "judge"]

#: Returns the axes and the repair that were asked for, checked; raises for others.
Arguments = Callable[[], tuple[Sequence[str] | None, str | None]]

_log = logging.getLogger("transformer_engine_ext")

_WHAT = "verifying the streams"

# A repaired seed may stand at a position that its own group is not at, which the next round mends.
_ROUNDS = 3

_REMEDY = (
    "A stream that must agree was drawn from on some ranks only (work under an `if rank == ...`, other shapes, another "
    "order), or was set or seeded otherwise. Find that place; verify(repair='broadcast') resets streams that must "
    "agree from one rank, and seed() starts all of them anew"
)


class Verifier:
    """The check of one rank's streams against all others'.

    Parameters
    ----------
    control : ControlGroup
        The ranks.
    layout : Layout
        Where this rank stands.
    held : HeldStreams
        Its streams.
    derivation : str
        How their seeds follow from the job's.
    """

    def __init__(self, control: ControlGroup, layout: Layout, held: HeldStreams, derivation: str) -> None:
        self._control, self._layout, self._held, self._derivation = control, layout, held, derivation
        self._origin = "nothing"
        self._seeds: dict[str, int] | None = None

    def vouch(self, origin: str, seeds: Mapping[str, int]) -> None:
        """Note the seeds that this rank has now, which by `origin` are right over the whole mesh."""
        # See Note [One number tells whether all agree]
        self._origin, self._seeds = origin, dict(seeds)

    def run(self, choose: Arguments) -> tuple[str, ...]:
        """Check, repair if asked, and return the names of the streams that were repaired; see ParallelRNG.verify.

        What `choose` raises, every rank raises: it is called inside of the exchange.
        """
        repaired: dict[str, None] = {}
        for left in range(_ROUNDS, -1, -1):
            faults, text, repair = self._faults(choose)
            if not text:
                break
            if repair is None or not left or any(fault.kind == "repeat" for fault in faults):
                raise StreamMismatchError(f"{text}\n{_REMEDY}")
            self._repair(faults)
            if self._control.rank == 0:
                _log.warning("verify(repair=%r) resets streams from one rank:\n%s", repair, text)
            repaired.update(dict.fromkeys(fault.stream for fault in faults))
        return tuple(repaired)

    def _faults(self, choose: Arguments) -> tuple[list[Fault], str, str | None]:
        """Return what does not hold, its description, and how to repair it; the same on every rank."""
        layout, control = self._layout, self._control
        streams = self._held.describe()
        problem: Exception | None = None
        words = [1, 0, 0, 0]
        try:
            axes, repair = choose()
            belief = json.dumps(
                {
                    "axes": {axis: layout.axes[axis] for axis in axes_in_order(layout.axes)},
                    "world_size": layout.world_size,
                    "streams": streams,
                    "derivation": self._derivation,
                    "verify": [axes, repair],
                }
            )
            states = self._held.read("verify")
            standings = {name: standing_of(state) for name, state in states.items()}
            lockstep = {stream["name"]: stream["lockstep_over"] for stream in streams}
            moved = self._seeds is None or any(standings[name].seed != seed for name, seed in self._seeds.items())
            words = [
                0,
                int(moved),
                agreement_word(f"{self._origin} {belief}", layout.rank, layout.world_size),
                lockstep_word(standings, lockstep, layout, axes),
            ]
        except Exception as error:
            problem = error
        failed, moved_ranks, beliefs, positions = control.total(words, _WHAT)
        if failed:
            agree(control, problem, _WHAT)
        if not (moved_ranks or differ(beliefs) or differ(positions)):
            return [], "", repair
        counted = {name: standing_of(state, count=True) for name, state in states.items()}
        payloads = control.gather(pack_report(belief, layout, counted), _WHAT)
        verdict_bytes = b""
        if payloads is not None:
            try:
                verdict_bytes = judge(payloads, streams, axes)
            except Exception as error:  # the other ranks wait for the verdict
                problem = error
                verdict_bytes = json.dumps({"error": describe_error(error).decode()}).encode()
        verdict = json.loads(control.broadcast(verdict_bytes, _WHAT))
        if "error" in verdict:
            raise problem if problem is not None else rebuild_error(verdict["error"].encode(), 0, _WHAT)
        if "beliefs" in verdict:
            raise LayoutMismatchError(verdict["beliefs"])
        faults = [
            Fault(kind, stream, axis, tuple(ranks), tuple(group))
            for kind, stream, axis, ranks, group in verdict["faults"]
        ]
        if not faults and axes is None:
            self.vouch("a report of all ranks", {name: standing.seed for name, standing in standings.items()})
        return faults, verdict["text"], repair

    def _repair(self, faults: Sequence[Fault]) -> None:
        # What a rank sends does not depend on who else needs what: its states of the streams concerned.
        states = self._held.read()
        concerned = sorted({fault.stream for fault in faults})
        mine = b"".join(states[name].numpy().tobytes() for name in concerned)
        sizes = {name: states[name].numel() for name in concerned}
        payloads = self._control.gather(mine, _WHAT)
        outgoing = None
        if payloads is not None:
            start = dict(zip(concerned, accumulate([0, *sizes.values()]), strict=False))
            rows: list[dict[str, bytes]] = [{} for _ in payloads]
            for fault in faults:
                begin = start[fault.stream]
                state = payloads[fault.source][begin : begin + sizes[fault.stream]]
                for rank in fault.ranks:
                    rows[rank][fault.stream] = state
            outgoing = [json.dumps({name: data.hex() for name, data in row.items()}).encode() for row in rows]
        received = json.loads(self._control.scatter(outgoing, _WHAT))
        new = {name: torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8) for name, data in received.items()}
        problem: Exception | None = None
        try:
            self._held.write({**states, **new})
        except Exception as error:
            problem = error
        agree(self._control, problem, _WHAT)


def judge(payloads: Sequence[bytes], streams: Sequence[Mapping[str, Any]], axes: Sequence[str] | None) -> bytes:
    """Return the verdict on all ranks' reports, as JSON: ``faults`` and their ``text``, or why there can be none.

    Parameters
    ----------
    payloads : sequence of bytes
        A report per rank, from :func:`pack_report`.
    streams, axes
        As for :func:`find_faults`.
    """
    beliefs = [payload[8 : 8 + int.from_bytes(payload[:8], "little")] for payload in payloads]
    others = [rank for rank, belief in enumerate(beliefs) if belief != beliefs[0]]
    if others:
        first, other = json.loads(beliefs[0]), json.loads(beliefs[others[0]])
        key = next((key for key in first if first[key] != other.get(key)), "what is checked")
        first, other = ({"what is checked": belief, **belief} for belief in (first, other))
        listed = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        text = (
            f"the ranks do not check the same things: {key} is {first[key]} on rank 0 and {other[key]} on rank "
            f"{others[0]} (and differs on ranks {listed}). Build ParallelRNG with the same axes, streams, derivation "
            "and device type on every rank, and call verify() with the same arguments"
        )
        return json.dumps({"beliefs": text}).encode()
    reports = Reports.unpack(payloads)
    faults = find_faults(reports, streams, axes)
    sizes = " x ".join(
        f"{axis}={len(set(reports.coordinates[:, index].tolist()))}" for index, axis in enumerate(reports.axes)
    )
    head = f"the streams of the {len(payloads)} ranks ({sizes or 'no axes'}) do not agree as declared:\n"
    text = head + render(reports, streams, faults) if faults else ""
    rows = [[fault.kind, fault.stream, fault.axis, fault.ranks, fault.group] for fault in faults]
    return json.dumps({"faults": rows, "text": text}).encode()


class Every:
    """Hook that verifies at every n-th call; see ``ParallelRNG.every``.

    Attributes
    ----------
    calls : int
        How often it was called.
    """

    def __init__(self, verify: Callable[[], object], n: int) -> None:
        self._verify, self._n = verify, n
        self.calls = 0

    def __call__(self, *arguments: object, **keywords: object) -> None:
        """Count a step; arguments are ignored, so that it fits where hooks get some."""
        self.calls += 1
        if self.calls % self._n == 0:
            self._verify()
