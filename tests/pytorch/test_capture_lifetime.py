# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""E8, E9: graphs, regions and streams that go while others still need what they used, and captures of an odd shape."""

from __future__ import annotations

import functools
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from _capture import CudaKit, Kit, Rig, Split, cuda_kit, kit
from _helpers import REPO, TESTS, requires_cuda
from _proof import ENGINE_IDS
from _regions import both_engines

__all__ = ["cuda_kit", "kit"]


@both_engines
def test_e8_regions_and_streams_dropped_before_the_replays(kit: Kit, use_reentrant: bool) -> None:
    """Nothing is left but the graphs and their static tensors."""
    rig = Rig(kit, use_reentrant)
    static_inputs = rig.w, rig.ones
    legs = Split(rig).legs
    del rig
    gc.collect()
    wrong, outputs = [], {}
    order = "f0 f1 b0 f2 b2 b1 f1 f2 b1 b2 f0 b0"
    for kind, number in order.split():
        leg = legs[int(number)]
        (leg.fwd if kind == "f" else leg.bwd).replay()
        if kind == "f":
            outputs[number] = leg.y.clone()
        else:
            wrong.append(int(((outputs[number] != 0) != (leg.gx != 0)).sum()))
    assert wrong == [0] * 6, f"wrong elements of {legs[0].y.numel()}, by backward: {wrong}"
    del static_inputs


@requires_cuda
@both_engines
def test_e8_graphs_deleted_while_their_replays_are_in_flight(cuda_kit: CudaKit, use_reentrant: bool) -> None:
    rig = Rig(cuda_kit, use_reentrant)
    wrong = []
    for turn in range(4):
        legs = Split(rig, micro_batches=2).legs
        rig.seed(turn)
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # some 50 ms, in which everything below is queued
        for leg in legs:
            leg.fwd.replay()
        for leg in legs:
            leg.bwd.replay()
        pairs = [(leg.y, leg.gx) for leg in legs]
        del legs, leg
        # Whoever asks next gets the memory that the graphs gave back, and writes into it.
        rubbish = [torch.full((count,), 7, device="cuda") for count in (1, 64, 4096, 20480) for _ in range(50)]
        wrong += [int(((y != 0) != (gradient != 0)).sum()) for y, gradient in pairs]
        del rubbish
    assert wrong == [0] * 8, f"wrong elements of {rig.kit.size * len(rig.rows)}, by micro-batch: {wrong}"


@requires_cuda
@both_engines
def test_e8_one_graph_of_a_pair_deleted(cuda_kit: CudaKit, use_reentrant: bool) -> None:
    """The forward's graph goes, in flight; its backward's replay still reads what the forward kept."""
    rig = Rig(cuda_kit, use_reentrant)
    split = Split(rig, keep=True, pool=torch.cuda.graph_pool_handle())
    rig.seed(1)
    torch.cuda._sleep(100_000_000)
    for leg in split.legs:
        leg.fwd.replay()
        leg.fwd = None
    wrong = []
    for leg in reversed(split.legs):
        leg.bwd.replay()
        wrong.append(int(((leg.y != 0) != (leg.gx != 0)).sum()))
    assert wrong == [0, 0, 0], f"wrong elements of {rig.kit.size * len(rig.rows)}, by micro-batch: {wrong}"


_SCENARIOS = ("conditional", "conditional-backward", "nested")


@functools.cache
def _processes() -> dict[tuple[str, str], subprocess.Popen[str]]:
    """Start all scenarios at once: nearly all of their time is the import of torch."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), str(TESTS), os.environ.get("PYTHONPATH", "")])}
    return {
        (scenario, engine): subprocess.Popen(
            [sys.executable, str(TESTS / "_odd_captures.py"), scenario, engine],
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for scenario in _SCENARIOS
        for engine in ENGINE_IDS
    }


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[tuple[str, str], subprocess.Popen[str]]]:
    yield _processes()
    for process in _processes().values():
        process.kill()
        process.communicate()


@requires_cuda
@pytest.mark.parametrize("engine", ENGINE_IDS)
@pytest.mark.parametrize("scenario", _SCENARIOS)
def test_e9_right_or_refused(
    processes: dict[tuple[str, str], subprocess.Popen[str]], scenario: str, engine: str
) -> None:
    process = processes[scenario, engine]
    output, _ = process.communicate(timeout=150)
    verdicts = re.findall(r"(?ms)^(?:RIGHT|WRONG|REFUSED|ABSENT).*", output)
    verdict = verdicts[-1] if verdicts else "none"
    print(f"{scenario}, {engine}: {verdict[:300]}")
    if verdict.startswith("ABSENT"):
        pytest.skip("this torch has no conditional nodes")
    assert process.returncode == 0, output[-2000:]
    assert verdict.startswith(("RIGHT", "REFUSED")), output[-2000:]
    if verdict.startswith("REFUSED"):
        assert any(word in verdict.lower() for word in ("captur", "graph", "conditional")), verdict
