# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What entering and leaving ``tracker.fork`` costs: against Transformer Engine's, and on CPU against the state moves.

    python benchmarks/benchmark_fork.py --json OUT.json

A CPU stream has no second handle on one state, so a fork moves values. The floor is those four moves done by hand: the
default generator's value out and the stream's in on entry, the stream's out and the default generator's in on exit. On
CUDA the floor is a handle on the default generator's state, and setting it twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from _engines import transformer_engine
from _harness import Report, Side, parse, parser, time_sides
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

#: Forks per call, so that the call itself does not count.
REPEAT = 16

STREAM = "model-parallel-rng"


def forks(tracker: Any, depth: int = 1) -> Callable[[], object]:
    """Return what enters and leaves a stream's fork ``REPEAT`` times, each nested so deep."""

    def once() -> None:
        for _ in range(REPEAT):
            with tracker.fork(STREAM):
                pass

    def nested() -> None:
        for _ in range(REPEAT):
            with tracker.fork(STREAM), tracker.fork("other"):
                pass

    return once if depth == 1 else nested


def moves() -> Callable[[], object]:
    """Return the state moves that a CPU fork cannot do without, ``REPEAT`` times."""
    default, stream = torch.default_generator, torch.Generator()

    def run() -> None:
        for _ in range(REPEAT):
            parked = default.get_state()
            default.set_state(stream.get_state())
            stream.set_state(default.get_state())
            default.set_state(parked)

    return run


def handles() -> Callable[[], object]:
    """Return the calls that a CUDA fork cannot do without, ``REPEAT`` times."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    stream = default.clone_state()

    def run() -> None:
        for _ in range(REPEAT):
            outer = default.graphsafe_get_state()
            default.graphsafe_set_state(stream)
            default.graphsafe_set_state(outer)

    return run


def run_device(device: str, report: Report, options: argparse.Namespace) -> None:
    """Measure on one device."""
    te = transformer_engine() if device == "cuda" else None
    trackers = {"ours": CudaRNGStatesTracker(device)}
    if te is not None:
        trackers["te"] = te.distributed.CudaRNGStatesTracker()
    for tracker in trackers.values():
        tracker.add(STREAM, 1)
        tracker.add("other", 2)
    sides = [Side(f"{name}, depth {d}", forks(tracker, d)) for name, tracker in trackers.items() for d in (1, 2)]
    sides.append(Side("floor", handles() if device == "cuda" else moves()))
    timings = time_sides(sides, options, f"{device}: fork")
    for side in sides:
        report.add("fork", device=device, side=side.name, **timings[side.name].row("us_", 1e6 / REPEAT))
    ours = timings["ours, depth 1"]
    if device == "cpu":
        report.target("cpu: fork, ours over the state moves", ours.over(timings["floor"]), 1.1)
    elif te is not None:
        report.target("cuda: fork, ours over te", ours.over(timings["te, depth 1"]), 1.0)
    _inside_region(device, trackers["ours"], report, options)


def _inside_region(device: str, tracker: CudaRNGStatesTracker, report: Report, options: argparse.Namespace) -> None:
    """Measure a fork inside a region, where the first one of a stream also notes its value."""
    x = torch.ones(8, device=device, requires_grad=True)

    def region(run: Callable[[], object]) -> Callable[[], object]:
        def body(v: torch.Tensor) -> torch.Tensor:
            run()
            return v * v

        return lambda: te_checkpoint(body, x, use_reentrant=False)

    def one() -> None:
        with tracker.fork(STREAM):
            pass

    sides = [Side("none", region(lambda: None)), Side("one", region(one)), Side("many", region(forks(tracker)))]
    timings = time_sides(sides, options, f"{device}: fork in a region")
    first = timings["one"].minus(timings["none"])
    later = timings["many"].minus(timings["one"])
    report.add("fork", device=device, side="ours, first in a region", **first.row("us_"))
    report.add("fork", device=device, side="ours, later in a region", **later.row("us_", 1e6 / (REPEAT - 1)))


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    chosen = parse(parser(__doc__, rounds=50), arguments)
    report = Report("fork", chosen)
    if torch.cuda.is_available():
        run_device("cuda", report, chosen)
        if transformer_engine() is None:
            report.note("Transformer Engine is not there: without its side")
    else:
        report.note("no CUDA here: only the CPU sides")
    run_device("cpu", report, chosen)
    report.write()


if __name__ == "__main__":
    main()
