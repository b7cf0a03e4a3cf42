# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Random programs give the same bits with and without checkpointing.

``NVTE_EXT_TEST_PROGRAMS`` sets how many are tried on each device (default 2,000), ``NVTE_EXT_TEST_SEED`` which ones.
The long run is ``tests/tools/fuzz_programs.py``, which takes its programs from the same generator.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import HealthCheck, given, seed, settings

import _programs
from _program_check import Package, check, coverage_report, too_rare
from _program_strategies import numbered_program, programs
from _programs import ALIAS, SHARED, STREAM_SEEDS, STREAMS, Program, Region
from transformer_engine_ext.pytorch.rng import get_all_rng_states

PROGRAMS = int(os.environ.get("NVTE_EXT_TEST_PROGRAMS") or 2000)
SEED = int(os.environ.get("NVTE_EXT_TEST_SEED") or 0)

pytestmark = pytest.mark.timeout(max(180, PROGRAMS // 5))


def test_random_programs_equal_the_run_without_checkpointing(device: str, tell: Callable[[str], None]) -> None:
    engine = Package()
    features: Counter[str] = Counter()
    for number in range(SEED * 1_000_000, SEED * 1_000_000 + PROGRAMS):
        try:
            features.update(check(numbered_program(number), device, engine))
        except AssertionError as error:
            raise AssertionError(f"program {number}: {error}") from error
    tell(coverage_report(PROGRAMS, features, device))
    # A generator that no longer makes these things would let the test pass for nothing.
    if PROGRAMS >= 500:
        assert too_rare(PROGRAMS, features) == {}


def test_programs_that_hypothesis_chooses(device: str, tell: Callable[[str], None]) -> None:
    """Hypothesis repeats itself more and is slower, but looks where uniform chance does not, and shrinks."""
    engine = Package()
    features: Counter[str] = Counter()
    tried: set[Program] = set()

    @seed(SEED)
    @settings(max_examples=PROGRAMS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs())
    def run(program: Program) -> None:
        if program not in tried:
            features.update(check(program, device, engine))
            tried.add(program)

    run()
    tell(coverage_report(len(tried), features, f"{device}, chosen by hypothesis"))
    assert len(tried) > PROGRAMS // 4
    assert features["nesting of both engines"] > 0
    assert features["recompute draws: tracked"] > 0


class _StandIn:
    """Another engine: torch's, for programs without streams, and the ways to be wrong that `check` must see."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.active: list[bool] = []

    def trackers(self, device: torch.device, default: torch.Generator) -> list[Any]:
        made = {stream: torch.Generator(device).manual_seed(seed) for stream, seed in STREAM_SEEDS.items()}
        made |= {stream: made[also] for stream, also in SHARED.items()} | {ALIAS: default}
        states = [{name: made[t, name] for t, name in STREAMS if t == tracker} for tracker in range(2)]
        return [SimpleNamespace(get_states=lambda mine=mine: mine) for mine in states]

    def recomputing(self) -> bool:
        return any(self.active)

    def in_region(self) -> bool:
        return bool(self.active)

    def own_recompute(self) -> bool:
        return self.active[-1] if self.active else False

    def checkpoint(self, region: Region, function: Any, h: torch.Tensor, trackers: list[Any]) -> torch.Tensor:
        ran = False

        def counted(x: torch.Tensor) -> torch.Tensor:
            nonlocal ran
            self.active.append(ran)
            ran = True
            try:
                return function(x)  # type: ignore[no-any-return]
            finally:
                self.active.pop()

        return self.call(region, counted, h)

    def call(self, region: Region, function: Any, h: torch.Tensor) -> torch.Tensor:
        # torch's reentrant engine gives no gradients where no input needs one, a new tensor without autograd, and adds
        # the zeros of an unused output, which turns -0.0 into 0.0.
        reentrant = region.reentrant and h.requires_grad and torch.is_grad_enabled() and region.how != "pair"
        return torch.utils.checkpoint.checkpoint(function, h, use_reentrant=reentrant, **self.options)  # type: ignore


class _PlainCall(_StandIn):
    def call(self, region: Region, function: Any, h: torch.Tensor) -> torch.Tensor:
        return function(h)  # type: ignore[no-any-return]


class _LeavesLive(_StandIn):
    """Rewinds for the recompute, but does not put the live state back afterwards."""

    def call(self, region: Region, function: Any, h: torch.Tensor) -> torch.Tensor:
        entry, again = torch.get_rng_state(), False

        def rewinding(x: torch.Tensor) -> torch.Tensor:
            nonlocal again
            if again:
                torch.set_rng_state(entry)
            again = True
            return function(x)  # type: ignore[no-any-return]

        return super().call(region, rewinding, h)


def _failures(engine: Any, count: int, streams: bool = False) -> list[str]:
    """Return the first line of every failure among the first `count` programs."""
    found = []
    for number in range(count):
        try:
            check(numbered_program(number, streams), "cpu", engine)
        except AssertionError as error:
            found.append(str(error).partition("\n")[0])
    return found


def test_programs_without_streams_pass_with_torch() -> None:
    """The reference itself is right: an engine known to be right agrees with it."""
    assert _failures(_StandIn(preserve_rng_state=True), 300) == []


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (_PlainCall(), "recomputed 0 times, needs 1"),
        (_StandIn(preserve_rng_state=False), "without checkpointing: gradient of input"),
        (_StandIn(preserve_rng_state=False), "without checkpointing: state of default cpu"),
        (_LeavesLive(preserve_rng_state=False), "an exception in the recompute moved ['default cpu', (1, 'default')]"),
        (_LeavesLive(preserve_rng_state=False), "without checkpointing: state of default cpu"),
    ],
    ids=["plain call", "other numbers", "stream moved", "stream moved by an exception", "nothing restored"],
)
def test_wrong_engine_is_caught(engine: Any, message: str) -> None:
    found = _failures(engine, 100)
    assert len(found) > 25
    assert any(message in failure for failure in found), found


def test_untracked_streams_are_caught() -> None:
    """Real trackers and forks under torch's checkpoint, which knows of the default generators only."""

    class Half(Package):
        def checkpoint(self, region: Region, function: Any, h: torch.Tensor, trackers: list[Any]) -> torch.Tensor:
            return stand_in.checkpoint(region, function, h, trackers)

    stand_in = _StandIn(preserve_rng_state=True)
    engine = Half()
    engine.recomputing, engine.in_region = stand_in.recomputing, stand_in.in_region
    engine.own_recompute = stand_in.own_recompute
    found = _failures(engine, 100, streams=True)
    assert any("without checkpointing: gradient of input" in failure for failure in found), found
    assert any("without checkpointing: state of (0, 'a')" in failure for failure in found), found


def test_nothing_of_a_program_lives_on() -> None:
    gc.collect()
    before, engine = set(get_all_rng_states()), Package()
    for number in range(100):
        check(numbered_program(number), "cpu", engine)
    gc.collect()
    assert set(get_all_rng_states()) == before


def test_repr_of_a_program_builds_it_again() -> None:
    for number in range(50):
        program = numbered_program(number)
        assert eval(repr(program), vars(_programs)) == program
