# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""E1, E2, E4: eager regions beside graphs, whole regions in one graph, several, nested, aliased and forked ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from _capture import ORDERS, Kit, Leg, Outcome, Program, Rig, Split, assert_like_plain, by_backward, kit, simple
from _regions import both_engines

__all__ = ["kit"]


def _two_regions(rig: Rig, x: torch.Tensor) -> torch.Tensor:
    return rig.checkpoint(rig.body, rig.checkpoint(rig.body, x))


def _with_draws_between(rig: Rig, x: torch.Tensor) -> torch.Tensor:
    """Regions among draws of the graph's own, so that each region starts elsewhere in the streams."""
    x = x + 0 * rig.draws().sum()
    x = rig.checkpoint(rig.body, x)
    with rig.on("b"):
        x = rig.kit.drop(x)
    x = rig.checkpoint(rig.body, x)
    return x + 0 * rig.draws().sum()


def _aliased(rig: Rig, x: torch.Tensor) -> torch.Tensor:
    return rig.checkpoint(rig.body, x)


def _inside_fork(rig: Rig, x: torch.Tensor) -> torch.Tensor:
    """What the region calls the default stream is "a"; it forks the same stream again, and another one."""
    with rig.on("a"):
        return rig.checkpoint(rig.body, x)


def _inside_two_forks(rig: Rig, x: torch.Tensor) -> torch.Tensor:
    with rig.on("b"), rig.on("a"):
        inner = rig.checkpoint(rig.body, x)
        with rig.on("b"):
            return rig.checkpoint(rig.body, inner)


def _unused_streams(rig: Rig, x: torch.Tensor) -> torch.Tensor:
    """The region draws from one stream only, while the others move around it."""
    x = x + 0 * rig.draws().sum()

    def function(x: torch.Tensor) -> torch.Tensor:
        rig.proof.ran()
        with rig.on("b"):
            return rig.proof.watch(rig.kit.drop(x)) * rig.w

    return rig.checkpoint(function, x)


PROGRAMS: dict[str, Program] = {
    "two regions": _two_regions,
    "draws between": _with_draws_between,
    "inside a fork": _inside_fork,
    "inside two forks": _inside_two_forks,
    "unused streams": _unused_streams,
}

each_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


@both_engines
@each_program
def test_e4_split(kit: Kit, program: Program, use_reentrant: bool) -> None:
    assert_like_plain(kit, use_reentrant, lambda rig: Split(rig, program).run(ORDERS["mixed"]))


@both_engines
@each_program
def test_e4_backward_captured_inside_another_fork(kit: Kit, program: Program, use_reentrant: bool) -> None:
    def differentiate(rig: Rig, leg: Leg) -> Any:
        with rig.on("b"):
            rig.kit.drop(rig.ones)
            return by_backward(rig, leg)

    def scenario(rig: Rig) -> Outcome:
        return Split(rig, program, 2, differentiate).run("f0 f1 b0 b1")

    assert_like_plain(kit, use_reentrant, scenario)


class AliasedRig(Rig):
    """Streams "a" and "default" each have a second name."""

    def __init__(self, kit: Kit, use_reentrant: bool | None) -> None:
        super().__init__(kit, use_reentrant, ("default", "a"))
        states = dict(self.tracker.get_states())
        states["second a"] = states["a"].graphsafe_get_state()
        states["second default"] = kit.default().graphsafe_get_state()
        self.tracker.states_ = states
        self.names = tuple(states)
        self.rows = ("a", "second default", "second a", "default", "second a", "a", "default")

    def twin(self) -> Rig:
        return AliasedRig(self.kit, self.use_reentrant)


@both_engines
def test_e4_aliased_streams(kit: Kit, use_reentrant: bool) -> None:
    assert_like_plain(kit, use_reentrant, lambda rig: Split(rig).run(ORDERS["mixed"]), AliasedRig)


@both_engines
def test_e4_aliased_streams_inside_a_fork_of_one(kit: Kit, use_reentrant: bool) -> None:
    def program(rig: Rig, x: torch.Tensor) -> torch.Tensor:
        with rig.on("second a"):
            rig.kit.drop(rig.ones)
            return rig.checkpoint(rig.body, x)

    assert_like_plain(kit, use_reentrant, lambda rig: Split(rig, program).run(ORDERS["FIFO"]), AliasedRig)


@pytest.mark.parametrize("inner", [True, False], ids=["reentrant inner", "nonreentrant inner"])
@pytest.mark.parametrize("outer", [True, False], ids=["reentrant outer", "nonreentrant outer"])
@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
def test_e4_nested(kit: Kit, outer: bool, inner: bool, whole: bool) -> None:
    def program(rig: Rig, x: torch.Tensor) -> torch.Tensor:
        def function(x: torch.Tensor) -> torch.Tensor:
            with rig.on("a"):
                x = rig.kit.drop(x)
            x = rig.checkpoint(rig.body, x, use_reentrant=inner)
            with rig.on("b"):
                return rig.kit.drop(x)

        return rig.checkpoint(function, x, use_reentrant=outer)

    def scenario(rig: Rig) -> Outcome:
        return _run_whole(rig, program) if whole else Split(rig, program).run(ORDERS["mixed"])

    assert_like_plain(kit, outer, scenario)


def _run_whole(rig: Rig, program: Program, replays: int = 4, around: Callable[[Rig], Any] | None = None) -> Outcome:
    """Capture forward and backward of a program in one graph, among draws, and replay it."""
    kit = rig.kit
    twin = rig.twin()
    kit.aside(lambda: program(twin, twin.input()).sum().backward())
    x, grad, graph = rig.input(), kit.ones(len(rig.rows), kit.size), kit.graph()
    with kit.capturing(graph):
        before = rig.draws()
        y = program(rig, x)
        forwards = rig.proof.runs
        between = rig.draws()
        y.backward(grad)
        after = rig.draws()
    if rig.use_reentrant is not None:
        assert rig.proof.runs > forwards, "the function did not run again in backward"
    gx, gw, y = x.grad, rig.w.grad, y.detach()
    assert gx is not None
    assert gw is not None
    rig.seed(11)
    values: dict[str, torch.Tensor] = {}
    wrong = torch.zeros(len(rig.rows), dtype=torch.int64, device=y.device)
    for turn in range(replays):
        graph.replay()
        wrong += ((y != 0) != (gx != 0)).sum(1)
        static = {"y": y, "gx": gx, "gw": gw, "before": before, "between": between, "after": after}
        values |= {f"{turn} {name}": value.clone() for name, value in static.items()}
        if around is not None:
            around(rig)
    assert not torch.equal(values["0 y"], values["1 y"]), "two replays drew the same masks"
    values |= {"next draws": rig.draws(), **rig.positions()}
    rows = {f"{i} {name}": int(wrong[i]) for i, name in enumerate(rig.rows)}
    return Outcome(rows, replays * kit.size, {name: value.cpu() for name, value in values.items()})


@both_engines
@pytest.mark.parametrize("program", [simple, *PROGRAMS.values()], ids=["one region", *PROGRAMS])
def test_e2_whole_region_in_one_graph(kit: Kit, program: Program, use_reentrant: bool) -> None:
    assert_like_plain(kit, use_reentrant, lambda rig: _run_whole(rig, program))


@both_engines
def test_e2_whole_region_with_reseeding_and_eager_draws(kit: Kit, use_reentrant: bool) -> None:
    def around(rig: Rig) -> None:
        rig.draws()
        rig.seed(int(rig.positions()["position of a"][1]) + 1)

    assert_like_plain(kit, use_reentrant, lambda rig: _run_whole(rig, simple, around=around))


#: f and b replay a forward and a backward graph, e and d run an eager region's forward and backward.
_REPLAYS_AND_REGIONS = "f0 e0 f1 e1 b0 d1 b1 d0 f1 e2 b1 f0 d2 b0"


@both_engines
def test_e1_eager_regions_between_replays(kit: Kit, use_reentrant: bool) -> None:
    """Eager forwards and backwards lie across replays of both graphs; then the graphs replay again."""

    def scenario(rig: Rig) -> Outcome:
        split = Split(rig, micro_batches=2)
        rig.seed(7)
        handles = rig.tracker.get_states()
        values: dict[str, torch.Tensor] = {}
        wrong: dict[str, int] = {}
        eager: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        forward: dict[str, torch.Tensor] = {}
        for step, (what, number) in enumerate(_REPLAYS_AND_REGIONS.split()):
            if what in "fb":
                leg = split.legs[int(number)]
                (leg.fwd if what == "f" else leg.bwd).replay()
                y, gx = leg.y, leg.gx
            elif what == "e":
                x = rig.input()
                # A weight of its own: the graphs' one belongs to the stream of the capture.
                y = rig.checkpoint(rig.body, x, rig.kit.ones(rig.kit.size).requires_grad_())
                eager[number] = y, x
            else:
                y, x = eager[number]
                y.sum().backward()
                assert x.grad is not None
                gx = x.grad
            kind = "eager" if what in "ed" else "graph"
            if what in "fe":
                values[f"{step} y"] = forward[kind + number] = y.detach().clone()
            else:
                values[f"{step} gx"] = gx.detach().clone()
                wrong[f"{step} {kind} {number}"] = int(((forward[kind + number] != 0) != (gx != 0)).sum())
        assert all(rig.tracker.get_states()[name] is handle for name, handle in handles.items())
        values |= {"next draws": rig.draws(), **rig.positions()}
        return Outcome(wrong, rig.kit.size, {name: value.cpu() for name, value in values.items()})

    assert_like_plain(kit, use_reentrant, scenario)


@both_engines
def test_e4_capture_begun_inside_a_fork(kit: Kit, use_reentrant: bool) -> None:
    """As Megatron does around Transformer Engine's graphed callables: the stream is bound before the capture begins."""

    def scenario(rig: Rig) -> Outcome:
        with rig.on("a"):
            split = Split(rig, micro_batches=2)
        return split.run("f0 f1 b0 b1")

    rows = functools.partial(Rig, rows=("a", "b", "a"))
    assert_like_plain(kit, use_reentrant, scenario, rows)
