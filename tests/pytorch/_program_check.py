# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The interpreter of the random programs that checkpoints, and the comparison with the one that does not.

:class:`Checkpointed` runs a program with real trackers, forks and regions. :func:`check` compares every output, every
gradient and the state of every stream after every statement with :class:`~_program_machines.Reference`, bit for bit,
and sees to it that each region that a backward needs was recomputed in it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import Any

import torch

from _program_machines import KEEP, BoomError, Machine, Record, Reference, TrapError, bits
from _programs import (
    ALIAS,
    SHARED,
    STREAM_SEEDS,
    STREAMS,
    Forward,
    Program,
    Region,
    Trap,
    must_recompute,
    nodes,
)


class Package:
    """What is under test, behind the few calls that a program needs."""

    def __init__(self) -> None:
        # Here, so that the programs and the reference can be used without the package.
        from transformer_engine_ext import pytorch as package
        from transformer_engine_ext.pytorch import recompute

        self._te_checkpoint = package.te_checkpoint
        self._tracker_class = package.CudaRNGStatesTracker
        self.recomputing = package.is_recomputing
        self.in_region = package.in_checkpoint_region
        self.own_recompute = recompute.in_fp8_activation_recompute_phase

    def trackers(self, device: torch.device, default: torch.Generator) -> list[Any]:
        """The two trackers of `STREAMS`."""
        trackers = [self._tracker_class(device=device) for _ in range(2)]
        for (index, name), seed in STREAM_SEEDS.items():
            trackers[index].add(name, seed)
        generators = dict(trackers[1].get_states())
        generators.update({name: trackers[i].get_states()[also] for (_, name), (i, also) in SHARED.items()})
        # On CUDA the default generator object follows what a fork binds to it; a second handle on its state does not.
        generators[ALIAS[1]] = default if default.device.type == "cpu" else default.graphsafe_get_state()
        trackers[1].set_states(generators)  # a plain dict of generators: the tracker adopts the handles
        return trackers

    def checkpoint(self, region: Region, function: Any, h: torch.Tensor, trackers: list[Any]) -> torch.Tensor:
        """`function` of `h` as one checkpointed call."""
        options: dict[str, Any] = {"use_reentrant": region.reentrant, "early_stop": region.early_stop}
        if region.tracker is not None:
            options["get_rng_state_tracker"] = lambda: trackers[region.tracker]
        if region.how == "kwargs":
            return self._te_checkpoint(function, x=h, **options)  # type: ignore[no-any-return]
        return self._te_checkpoint(function, [h] if region.how == "list" else h, **options)  # type: ignore[no-any-return]


class Checkpointed(Machine):
    """The program with trackers, forks and regions of `engine`; `features` collects what took place."""

    def __init__(self, program: Program, device: str, engine: Any) -> None:
        super().__init__(program, device)
        self.engine = engine
        self.trackers = engine.trackers(self.device, self.default)
        self.start = [tracker.get_states() for tracker in self.trackers]
        self.streams = {(t, name): self.start[t][name] for t, name in STREAMS}
        self.features: set[str] = set()
        self.recomputed: Counter[int] = Counter()
        self.forks: tuple[Any, ...] = ()
        self.regions: tuple[bool, ...] = ()
        self.in_backward = False
        bodies = (*program.models, *(s.body for s in program.script if hasattr(s, "body")))
        self.armed = {node.number for body in bodies for node in nodes(body) if type(node) is Trap}
        self.must = {s.batch: must_recompute(program, s) for s in program.script if type(s) is Forward}
        self.pending: list[int] = []  # forwards with regions whose backward has not run

    @contextmanager
    def forked(self, stream: tuple[int, str] | None) -> Any:
        if stream is None:
            yield
            return
        outer, self.forks = self.forks, (*self.forks, stream)
        try:
            with self.trackers[stream[0]].fork(stream[1]):
                yield
        finally:
            self.forks = outer

    def generator(self) -> None:
        return None

    def dropout(self, h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(h, 1 - KEEP)

    def _Draw(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        if self.in_backward:
            alias = bool(self.forks) and self.forks[-1] == ALIAS
            self.features.add(f"recompute draws: {'alias' if alias else 'tracked' if self.forks else 'default'}")
        return super()._Draw(node, h)

    def _Region(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        forks, batch, before = self.forks, self.batch, self.flags()
        plain = not torch.is_grad_enabled()  # then nothing is kept, and the call is no region
        if forks:
            self.features.add("region inside a fork")

        def function(x: torch.Tensor | list[torch.Tensor]) -> Any:
            recomputing, in_region, own = self.flags()
            assert in_region or plain, "in_checkpoint_region() is False inside a region"
            assert recomputing == self.in_backward, f"is_recomputing(): {recomputing}, in backward: {self.in_backward}"
            assert recomputing or not own, "the innermost region is in its recompute, yet none is"
            self.recomputed[node.number] += own
            outer = self.forks, self.batch, self.regions
            # What the recompute runs under is what forward ran under, for the books of this class too.
            self.forks, self.batch, self.regions = forks, batch, (*self.regions, node.reentrant)
            self.features.add(f"engine: {'reentrant' if node.reentrant else 'non-reentrant'}")
            if len(self.regions) > 1:
                self.features.add("nesting of two and more")
                self.features |= {"nesting of both engines"} if len(set(self.regions)) == 2 else set()
                self.features |= {"nesting of three and more"} if len(self.regions) > 2 else set()
            try:
                output = self.body(node.body, x[0] if isinstance(x, list) else x)
                return (output, output.sin()) if node.how == "pair" else output
            finally:
                self.forks, self.batch, self.regions = outer

        try:
            output = self.engine.checkpoint(node, function, h, self.trackers)
            return output[0] if node.how == "pair" else output
        except BoomError:
            self.features.add("exception in forward")
            raise
        finally:
            after = self.flags()
            assert after == before, f"(recomputing, in region, own) were {before} before a region, {after} after it"

    def flags(self) -> tuple[bool, bool, bool]:
        return self.engine.recomputing(), self.engine.in_region(), self.engine.own_recompute()

    def _Unused(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        if any(hasattr(below, "reentrant") for below in nodes(node.body)):
            self.features.add("dropped region")
        return super()._Unused(node, h)

    def _Trap(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        if self.in_backward and node.number in self.armed:
            self.armed.remove(node.number)
            self.features.add("exception in recompute")
            raise TrapError
        return h

    def _do_Forward(self, statement: Forward) -> None:
        super()._do_Forward(statement)
        if self.must[statement.batch]:
            self.pending.append(statement.batch)

    def _do_Discard(self, statement: Any) -> None:
        super()._do_Discard(statement)
        if statement.batch in self.pending:
            self.pending.remove(statement.batch)
            self.features.add("dropped region")

    def grow(self, name: str, seed: int) -> tuple[int, str]:
        self.trackers[0].add(name, seed)
        if self.in_backward:
            self.features.add("recompute adds a stream")
        return 0, name

    def _Seed(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        self.default.manual_seed(node.seed)
        return h

    def _Jump(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        self.trackers[node.tracker].set_states(self.start[node.tracker])
        if self.in_backward:
            self.features.add("recompute sets streams")
        return h

    def _do_Save(self, statement: Any) -> None:
        self.kept[statement.tracker] = self.trackers[statement.tracker].get_states()

    def _do_Rewind(self, statement: Any) -> None:
        self.trackers[statement.tracker].set_states(self.kept[statement.tracker])
        self.features.add("tracker rewound")

    def after_statement(self) -> None:
        assert not any(self.flags()), f"(recomputing, in region, own) left as {self.flags()}"
        held = [tracker.get_states().items() for tracker in self.trackers]
        self.streams = {(t, name): generator for t, items in enumerate(held) for name, generator in items}
        for t, name in STREAMS:
            # A handle that others hold (a captured graph, the second tracker) must stay the stream's.
            same = self.streams.get((t, name)) is self.start[t][name]
            assert same, f"another object than before is stream {name!r} of tracker {t}"

    def differentiate(self, statement: Any, roots: dict[int, torch.Tensor]) -> None:
        self._note(statement, roots)
        before = self.recomputed.copy()
        while not self._attempt(statement, roots):
            self.clear_gradients()
        needed = Counter(number for batch in roots for number in self.must[batch])
        for number, times in needed.items():
            got = self.recomputed[number] - before[number]
            assert got >= times, f"region {number} recomputed {got} times, needs {times}"

    def _attempt(self, statement: Any, roots: dict[int, torch.Tensor]) -> bool:
        """Run a backward; False if a trap went off in it, which must leave every stream where it was."""
        states = {**self.defaults, **self.streams}
        live = {name: bits(generator.get_state()) for name, generator in states.items()}
        self.in_backward = True
        try:
            with self.forked(statement.fork):
                # A failed backward can only be run again if it was told to keep its graph.
                self.backward(statement.how, roots, statement.retain or bool(self.armed))
        except TrapError:
            moved = [name for name, generator in states.items() if bits(generator.get_state()) != live[name]]
            assert not moved, f"an exception in the recompute moved {moved}"
            return False
        finally:
            self.in_backward = False
            self.after_statement()
        return True

    def _note(self, statement: Any, roots: dict[int, torch.Tensor]) -> None:
        mine = [batch for batch in roots if self.must[batch]]
        if not mine:
            return
        first = [batch for batch in mine if batch in self.pending]
        if first and self.pending[-1] not in first:
            self.features.add("non-LIFO backward")
        if not first:
            self.features.add("second backward after retain_graph")
        self.pending = [batch for batch in self.pending if batch not in first]
        self.features |= {"joint backward"} if len(mine) == 2 else set()
        self.features.add(f"backward by {statement.how}")
        self.features |= {"backward inside a fork"} if statement.fork else set()


def check(program: Program, device: str, engine: Any) -> set[str]:
    """Run `program` both ways; return what took place, or raise an AssertionError that shows the program."""
    expected = Reference(program, device).run()
    machine = Checkpointed(program, device, engine)
    try:
        got = machine.run()
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} in {machine.where()}: {error}\n{program!r}") from error
    finally:
        # Its graph holds the regions' functions, and these the machine: a cycle that Python cannot see, so that every
        # program's trackers would live, and be found by get_all_rng_states(), for as long as the process does.
        machine.outputs.clear()
    if got != expected:
        raise AssertionError(f"{_first_difference(program, expected, got)}\n{program!r}")
    if any(value.strip(b"\0") for _, what, _, value in got if what.startswith("gradient")):
        machine.features.add("gradients not all zero")
    return machine.features


def _first_difference(program: Program, expected: list[Record], got: list[Record]) -> str:
    for right, wrong in zip(expected, got, strict=False):
        if right != wrong:
            index, what, name, _ = right
            where = f"statement {index}, {program.script[index]!r}"
            return f"differs from the run without checkpointing: {what} {name} after {where}"
    return f"{len(got)} records, {len(expected)} without checkpointing"


# The least share of programs in which each must take place, about half of what the fast generator gives.
MINIMUM_SHARES = {
    "gradients not all zero": 0.5,
    "engine: reentrant": 0.3,
    "engine: non-reentrant": 0.3,
    "nesting of two and more": 0.25,
    "nesting of three and more": 0.08,
    "nesting of both engines": 0.14,
    "region inside a fork": 0.25,
    "recompute draws: default": 0.17,
    "recompute draws: tracked": 0.17,
    "recompute draws: alias": 0.05,
    "exception in forward": 0.12,
    "exception in recompute": 0.05,
    "dropped region": 0.1,
    "non-LIFO backward": 0.08,
    "joint backward": 0.04,
    "second backward after retain_graph": 0.14,
    "backward inside a fork": 0.1,
    "backward by thread": 0.05,
    "backward by grad": 0.02,
    "tracker rewound": 0.03,
    "recompute adds a stream": 0.02,
    "recompute sets streams": 0.02,
}


def coverage_report(programs: int, features: Counter[str], device: str) -> str:
    """Return a table of what share of `programs` each thing took place in."""
    rows = [f"  {features[name] / max(programs, 1):6.1%}  {name}" for name in MINIMUM_SHARES]
    return "\n".join((f"\n{programs} random programs on {device}; share of them with", *rows))


def too_rare(programs: int, features: Counter[str]) -> dict[str, float]:
    """Return what took place in fewer programs than it must, with its share."""
    shares = {name: features[name] / programs for name in MINIMUM_SHARES}
    return {name: share for name, share in shares.items() if share < MINIMUM_SHARES[name]}
