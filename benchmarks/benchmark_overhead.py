# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What a checkpointed region costs beyond the work it must do, by engine, streams, saved tensors, regions and depth.

    python benchmarks/benchmark_overhead.py --json OUT.json [--devices cuda cpu] [--sections engines streams ...]

Overhead is a side's time minus that of its bare twin in the same round: forward under ``no_grad``, forward, backward,
which any checkpoint must do. The body forks as the side's does, on a tracker of the same class, so the cost of a fork
itself is in neither (see benchmark_fork.py). Everything is at its default: the audit is on.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from _engines import Engine, engines, transformer_engine
from _harness import Report, Side, Timing, parse, parser, time_sides
from transformer_engine_ext.pytorch import CudaRNGStatesTracker
from transformer_engine_ext.pytorch.rng import Snapshot, moves

Body = Callable[[Tensor], Tensor]

SECTIONS = ("engines", "streams", "audit", "saved", "regions", "nesting", "import")


class Bench:
    """Trackers and measuring on one device."""

    def __init__(self, device: str, report: Report, options: argparse.Namespace) -> None:
        self.device, self.report, self.options = device, report, options
        self.engines = engines(device, without_rng=True)
        self.x = torch.ones(8, device=device, requires_grad=True)

    def tracker(self, family: str, streams: int) -> Any:
        """Return a tracker of the family's class; torch's engines know none, so their bodies fork ours."""
        te = transformer_engine() if family == "te" else None
        tracker = CudaRNGStatesTracker(self.device) if te is None else te.distributed.CudaRNGStatesTracker()
        for number in range(streams):
            tracker.add(f"stream {number}", 100 + number)
        return tracker

    def choose(self, *names: str) -> list[Engine]:
        """Return the engines whose names begin so."""
        return [engine for engine in self.engines if not names or engine.name in names]

    def step(self, run: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        """Return forward and backward of one run."""

        def step() -> None:
            self.x.grad = None
            run(self.x).backward(torch.ones_like(self.x))

        return step

    def bare(self, body: Body, times: int = 1) -> Callable[[], object]:
        """Return what any checkpoint must do: forward without a graph, forward, backward."""

        def run(x: Tensor) -> Tensor:
            with torch.no_grad():
                for _ in range(times):
                    body(x)
            return body(x)

        return self.step(run)

    def measure(
        self,
        section: str,
        chosen: Sequence[Engine],
        make_body: Callable[[Any], Body],
        streams: int = 0,
        wrap: Callable[[Engine, Any, Body], Body] | None = None,
        per: int = 1,
        bare_times: int = 1,
        **fields: Any,
    ) -> dict[str, Timing]:
        """Time engines against their bare twins; return the overheads by engine.

        ``make_body`` takes the tracker; ``wrap`` returns what a step runs, by default one region of the body; ``per``
        divides the result; ``bare_times`` is how often the body must run without a graph.
        """
        sides, twins = [], {}
        for family in dict.fromkeys("te" if engine.family == "te" else "ours" for engine in chosen):
            tracker = self.tracker(family, streams)
            body = make_body(tracker)
            sides.append(Side(f"bare {family}", self.bare(body, bare_times)))
            for engine in chosen:
                if (engine.family == "te") == (family == "te"):
                    run = (wrap or _one_region)(engine, _getter(engine, tracker, streams), body)
                    sides.append(Side(engine.name, self.step(run)))
                    twins[engine.name] = f"bare {family}"
        fields = {"streams": streams, **fields}
        what = f"{self.device}: {section} " + " ".join(f"{key}={value}" for key, value in fields.items())
        timings = time_sides(sides, self.options, what)
        overheads = {}
        for name, twin in twins.items():
            overheads[name] = Timing([sample / per for sample in timings[name].minus(timings[twin]).samples])
            row = timings[name].row("us_") | overheads[name].row("overhead_us_")
            bare = round(timings[twin].median * 1e6, 3)
            self.report.add(section, device=self.device, side=name, **fields, per=per, bare_us=bare, **row)
        return overheads


def _getter(engine: Engine, tracker: Any, streams: int) -> Callable[[], Any] | None:
    return (lambda: tracker) if streams and engine.family != "torch" else None


def _one_region(engine: Engine, getter: Any, body: Body) -> Body:
    return lambda x: engine.call(getter, body, x)


def drops(tracker: Any, used: int) -> Body:
    """Return a body that draws once from each of ``used`` streams and once from the default one."""
    names = [f"stream {number}" for number in range(used)]

    def body(v: Tensor) -> Tensor:
        for name in names:
            with tracker.fork(name):
                v = F.dropout(v, 0.1)
        return (v * v) * v

    return body


def _plain(tracker: Any) -> Body:
    return lambda v: (v * v) * v


def by_engine(bench: Bench) -> None:
    """Measure all engines, without streams and with some used ones."""
    for streams in (0, 1, 3, 8):
        found = bench.measure("engines", bench.choose(), functools.partial(drops, used=streams), streams, used=streams)
        if streams == 3:
            _engine_targets(bench, found)


def _engine_targets(bench: Bench, found: dict[str, Timing]) -> None:
    device, target = bench.device, bench.report.target
    limits = {"reentrant": (0.4, 0.4), "non-reentrant": (0.5, 0.35)}
    if device == "cpu":
        limits = {"reentrant": (0.4, 0.6), "non-reentrant": (0.5, 0.4)}
    for kind, (te, torch_) in limits.items():
        ours = found[f"ours {kind}"]
        what = f"{device}: overhead, 3 used streams, {kind}, ours over"
        if f"te {kind}" in found:
            target(f"{what} te", ours.over(found[f"te {kind}"]), te)
        target(f"{what} torch", ours.over(found[f"torch {kind}"]), torch_)
        preserving = {
            family: found[f"{family} {kind}"].median - found[f"{family} {kind} no rng"].median
            for family in ("ours", "torch")
        }
        what = f"{device}: preserving RNG, {kind}, ours (3 used streams) over torch"
        if device == "cuda":
            target(what, preserving["ours"] / preserving["torch"], 0.15)


def by_streams(bench: Bench) -> None:
    """Measure growth over streams: used in the region, and only held by the tracker."""
    chosen = bench.choose("ours reentrant", "ours non-reentrant", "te reentrant", "te non-reentrant")
    counts = (1, 2, 4, 8, 16, 32) if not bench.options.quick else (1, 32)
    for idle in (False, True):
        medians: dict[str, list[float]] = {}
        for streams in counts:
            used = 0 if idle else streams
            found = bench.measure("streams", chosen, functools.partial(drops, used=used), streams, used=used)
            for name, timing in found.items():
                medians.setdefault(name, []).append(timing.median * 1e6)
        for kind in ("reentrant", "non-reentrant"):
            curve = medians[f"ours {kind}"]
            each = (curve[-1] - curve[0]) / (counts[-1] - counts[0])
            what = f"{bench.device}: microseconds for each further {'unused' if idle else 'used'} stream, {kind}"
            bench.report.target(what, each, 0.5 if idle else 4)  # test_work_counts.py counts exactly


def of_audit(bench: Bench) -> None:
    """Measure the audit by itself, for each stream that a region used, beside what torch's own reads cost here."""
    streams = 33  # one more than the tracker's: the default stream is among them
    tracker = bench.tracker("ours", streams - 1)
    snapshot = Snapshot([bench.x])
    opened = snapshot.open()
    for number in range(streams - 1):
        with tracker.fork(f"stream {number}"):
            pass
    opened.remove(snapshot)
    used = [stream for stream in snapshot.streams if stream[1].device_type == bench.device]
    handles = [handle for _, _, handle, _ in used]

    def audit() -> object:
        # What forward's end and the recompute's end do.
        ends = [backend.position(handle) for _, backend, handle, _ in used]
        reached = [backend.position(handle) for _, backend, handle, _ in used]
        return moves.stand_where(used, ends, reached)

    sides = [Side("audit", audit), Side("get_state", lambda: [handle.get_state() for handle in handles])]
    if bench.device == "cuda":
        sides.append(Side("get_offset", lambda: [handle.get_offset() for handle in handles]))
    timings = time_sides(sides, bench.options, f"{bench.device}: audit")
    for side in sides:
        row = timings[side.name].row("us_", 1e6 / len(used))
        bench.report.add("audit", device=bench.device, side=side.name, streams=len(used), **row)
    if bench.device == "cuda":
        each = timings["audit"].median * 1e6 / len(used)
        bench.report.target("cuda: microseconds of audit for each used stream", each, 2)


def by_saved_tensors(bench: Bench) -> None:
    """Measure growth over the number of tensors that a region saves."""

    def chain(tracker: Any, length: int) -> Body:
        def body(v: Tensor) -> Tensor:
            for _ in range(length):
                v = v.sin()  # saves its input, and nothing else
            return v

        return body

    names = [f"{family} {kind}" for kind in ("reentrant", "non-reentrant") for family in ("ours", "te", "torch")]
    for saved in (4, 16, 64, 256) if not bench.options.quick else (4, 256):
        found = bench.measure("saved", bench.choose(*names), functools.partial(chain, length=saved), saved=saved)
    ratio = found["ours non-reentrant"].over(found["torch non-reentrant"])
    bench.report.target(f"{bench.device}: overhead, 256 saved tensors, non-reentrant, ours over torch", ratio, 0.45)


def by_regions(bench: Bench) -> None:
    """Measure the overhead of each of many regions in a row."""
    names = [f"{family} {kind}" for kind in ("reentrant", "non-reentrant") for family in ("ours", "te", "torch")]
    for regions in (1, 4, 16, 64, 256) if not bench.options.quick else (1, 16):

        def wrap(engine: Engine, getter: Any, body: Body, regions: int = regions) -> Body:
            def run(x: Tensor) -> Tensor:
                for _ in range(regions):
                    x = engine.call(getter, _cube, x)
                return x

            return run

        def body(tracker: Any, regions: int = regions) -> Body:
            def run(x: Tensor) -> Tensor:
                for _ in range(regions):
                    x = _cube(x)
                return x

            return run

        bench.measure("regions", bench.choose(*names), body, wrap=wrap, per=regions, regions=regions)


def _cube(v: Tensor) -> Tensor:
    return (v * v) * v


def by_depth(bench: Bench) -> None:
    """Measure the overhead of a step whose regions are nested."""
    names = [f"{family} {kind}" for kind in ("reentrant", "non-reentrant") for family in ("ours", "torch")]
    for depth in (1, 2, 4, 8) if not bench.options.quick else (1, 2):

        def wrap(engine: Engine, getter: Any, body: Body, depth: int = depth) -> Body:
            def nest(level: int, x: Tensor) -> Tensor:
                return body(x) if level == 0 else engine.call(getter, functools.partial(nest, level - 1), x)

            return functools.partial(nest, depth)

        bench.measure("nesting", bench.choose(*names), _plain, wrap=wrap, bare_times=depth, depth=depth)


def of_import(report: Report, options: argparse.Namespace) -> None:
    """Time fresh interpreters that import the package, and that import torch only."""

    def fresh(code: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)

    sides = [
        Side("torch", fresh("import torch")),
        Side("package", fresh("import torch, transformer_engine_ext.pytorch")),
    ]
    timings = time_sides(sides, options, "import", single=True)
    for side in sides:
        report.add("import", side=side.name, **timings[side.name].row("s_", 1))
    ratio = timings["package"].over(timings["torch"])
    report.target("import of the package over import of torch", ratio, 1.1)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(__doc__, rounds=25)
    options.add_argument("--devices", nargs="+", choices=("cuda", "cpu"), default=["cuda", "cpu"])
    options.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    chosen = parse(options, arguments)
    report = Report("overhead", chosen)
    if "cuda" in chosen.devices and not torch.cuda.is_available():
        report.note("no CUDA here: only the CPU sides, without Transformer Engine's")
        chosen.devices = ["cpu"]
    runs = {
        "engines": by_engine,
        "streams": by_streams,
        "audit": of_audit,
        "saved": by_saved_tensors,
        "regions": by_regions,
        "nesting": by_depth,
    }
    for device in chosen.devices:
        bench = Bench(device, report, chosen)
        if device == "cuda" and transformer_engine() is None:
            report.note("Transformer Engine is not there: without its sides")
        for name, run in runs.items():
            if name in chosen.sections:
                run(bench)
    if "import" in chosen.sections:
        of_import(
            report, argparse.Namespace(**{**vars(chosen), "rounds": 1 if chosen.quick else min(chosen.rounds, 9)})
        )
    report.write()


if __name__ == "__main__":
    main()
