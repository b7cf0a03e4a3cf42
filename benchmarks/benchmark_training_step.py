# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Step time, peak memory and exactness of a stack of Transformer Engine layers with recompute, without CUDA graphs.

    python benchmarks/benchmark_training_step.py --json OUT.json

A step is forward and backward, without an optimizer; each layer is one region. Besides Transformer Engine's engines,
torch's run too: they rewind the default generators only, so with attention dropout on a tracked stream their gradients
belong to other masks, which the report counts. Without CUDA a stand-in for the layer runs at the tiny size.
"""

from __future__ import annotations

import argparse
import functools
import gc

import torch

from _engines import DIRECT, Engine, engines, transformer_engine
from _harness import Report, Side, Timing, parse, parser, progress, time_sides
from _stack import SIZES, Size, Stack, make_tracker, no_fusions
from benchmark_graph_recompute import Arm, compare, masks


def run_size(size: Size, dropout: float, device: str, report: Report, options: argparse.Namespace) -> None:
    """Measure all engines at one size."""
    tracker = make_tracker(device)
    make = functools.partial(_make, size, dropout, tracker, device, options.layers)
    what = f"{size.name}, dropout {dropout}"
    arms = [Arm("eager", engine) for engine in (DIRECT, *engines(device))]
    built = {arm.engine.name: (arm, *arm.build(make)) for arm in progress(arms, f"{what}: build")}
    plain, plain_step = built[DIRECT.name][1:3]
    found = {}
    for name, (arm, stack, step, _, _) in built.items():
        found[name] = compare(stack, step, plain, plain_step)
        if dropout:
            found[name] |= masks(arm, functools.partial(make, layers=1))
    timings = time_sides([Side(name, step) for name, (_, _, step, _, _) in built.items()], options, what)
    for name, (_, _, _, peak, _) in built.items():
        peak_mib = None if peak is None else round(peak / 2**20, 1)
        row = timings[name].row("ms_", 1e3)
        report.add(size.name, side=name, dropout=dropout, peak_mib=peak_mib, **row, **found[name])
    _targets(what, size, timings, {name: entry[3] for name, entry in built.items()}, report)
    del built, plain, plain_step
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _make(
    size: Size,
    dropout: float,
    tracker: object,
    device: str,
    default: int,
    engine: Engine,
    layers: int = 0,
    probe: int = 0,
) -> Stack:
    return Stack(size, layers or default, engine, tracker, device, dropout, probe)


def _targets(what: str, size: Size, timings: dict[str, Timing], peaks: dict[str, int | None], report: Report) -> None:
    for kind in ("reentrant", "non-reentrant"):
        te = timings.get(f"te {kind}")
        if te is not None:
            limit = 1.0 if size.name == "large" else 0.9
            report.target(f"{what}: step time, ours over te, {kind}", timings[f"ours {kind}"].over(te), limit)
        peak, theirs = peaks[f"ours {kind}"], peaks.get("te reentrant")
        if peak is not None and theirs is not None:
            report.target(f"{what}: peak memory, ours {kind} over te reentrant", peak / theirs, 1.0)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(__doc__, rounds=15)
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "large"])
    options.add_argument("--dropouts", nargs="+", type=float, default=[0.1, 0.0])
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--fusions", action="store_true", help="leave Transformer Engine's compiled fusions on")
    chosen = parse(options, arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if chosen.quick or device == "cpu":
        chosen.sizes, chosen.layers, chosen.rounds = ["tiny"], 2, min(chosen.rounds, 3)
    if not chosen.fusions:
        no_fusions()
    report = Report("training_step", chosen)
    if device == "cpu":
        report.note("no CUDA here: a stand-in for Transformer Engine's layer, at the tiny size, without its sides")
    elif transformer_engine() is None:
        report.note("Transformer Engine is not there: a stand-in for its layer, without its sides")
    for name in chosen.sizes:
        for dropout in chosen.dropouts:
            run_size(SIZES[name], dropout, device, report, chosen)
    report.write()


if __name__ == "__main__":
    main()
