# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Step time, peak memory and exactness of a stack of Transformer Engine layers with recompute, eager and captured.

    python benchmarks/benchmark_graph_recompute.py --json OUT.json

A step is forward and backward, without an optimizer; each layer is one region; dropout 0.1 of hidden states (default
stream) and of attention (tracked stream). Captured: forward and backward of all layers in one CUDA graph; graphed
callables: Transformer Engine's ``make_graphed_callables``, a pair of graphs for each layer. Without CUDA only the eager
sides run, on a stand-in for the layer.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from _engines import DIRECT, Engine, engines, transformer_engine
from _graphs import capture_callables, capture_step, warm_up
from _harness import Report, Side, Timing, parse, parser, peak_memory, progress, time_sides
from _stack import SIZES, Size, Stack, make_tracker, no_fusions
from transformer_engine_ext.pytorch.rng import native

MODES = ("eager", "captured", "graphed callables")


@dataclass(frozen=True)
class Arm:
    """An engine, and how its step runs."""

    mode: str
    engine: Engine

    @property
    def name(self) -> str:
        """For rows and labels."""
        return f"{self.mode}, {self.engine.name}"

    def build(self, make: Callable[[Engine], Stack]) -> tuple[Stack, Callable[[], object], int | None, int | None]:
        """Return the stack, its step, the peak of one step's memory, and what a capture keeps between steps (bytes)."""
        stack = make(self.engine)
        device = stack.x.device.type
        if self.mode == "eager":
            stack.step()
            stack.clear()
            return stack, stack.step, peak_memory(stack.step, device), None
        if self.mode == "captured":
            warm_up(stack)
            stack.clear()
        capture = capture_step if self.mode == "captured" else capture_callables
        steps: list[Callable[[], object]] = []
        gc.collect()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        peak = peak_memory(lambda: steps.append(capture(stack)), device)
        torch.cuda.empty_cache()
        return stack, steps[0], peak, torch.cuda.memory_reserved() - reserved


def arms(device: str, te_captured: bool) -> Iterable[Arm]:
    """Return what is compared on a device."""
    known = [engine for engine in engines(device) if engine.family != "torch"]
    yield Arm("eager", DIRECT)
    yield from (Arm("eager", engine) for engine in known)
    if device != "cuda":
        return
    yield Arm("captured", DIRECT)
    yield from (Arm("captured", engine) for engine in known if engine.family == "ours" or te_captured)
    if transformer_engine() is not None:
        yield Arm("graphed callables", DIRECT)
        yield from (Arm("graphed callables", engine) for engine in known if engine.family == "ours")


def compare(
    stack: Stack, step: Callable[[], object], reference: Stack, reference_step: Callable[[], object]
) -> dict[str, float]:
    """Run both from the same seeds; return how far outputs and gradients of the last of three steps are apart.

    For the reference itself this is how far two runs of it are apart: attention's backward need not be deterministic.
    """
    expected = {name: tensor.clone() for name, tensor in _third(reference, reference_step)}
    wrong, of, squares, scale = 0, 0, 0.0, 0.0
    for name, tensor in _third(stack, step):
        wrong += int((tensor != expected[name]).sum())
        of += tensor.numel()
        squares += float((tensor.float() - expected[name].float()).square().sum())
        scale += float(expected[name].float().square().sum())
    return {"unequal_elements": wrong, "of_elements": of, "relative_error": (squares / scale) ** 0.5}


def _third(stack: Stack, step: Callable[[], object]) -> Iterable[tuple[str, torch.Tensor]]:
    stack.seed(7)
    for _ in range(3):
        step()
    return stack.results()


def masks(arm: Arm, make: Callable[..., Stack], steps: int = 4) -> dict[str, int]:
    """Return how many elements of the dropout masks differ between forward and recompute."""
    stack, step, _, _ = arm.build(functools.partial(make, probe=1 << 16))
    wrong, of = 0, 0
    for _ in range(steps):
        step()
        found = stack.mismatches()
        wrong, of = wrong + found[0], of + found[1]
    return {"mask_mismatches": wrong, "mask_elements": of}


def run_size(size: Size, device: str, report: Report, options: argparse.Namespace) -> None:
    """Measure all arms at one size."""
    tracker = make_tracker(device)

    def make(engine: Engine, layers: int = options.layers, probe: int = 0) -> Stack:
        return Stack(size, layers, engine, tracker, device, probe=probe)

    built, start = {}, time.perf_counter()
    for arm in progress(list(arms(device, options.te_captured)), f"{size.name}: build and capture"):
        try:
            built[arm.name] = arm, *arm.build(make)
        except Exception as error:  # one side that cannot run must not hide the others
            report.note(f"{size.name}, {arm.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    print(f"{size.name}: {len(built)} sides built and captured in {time.perf_counter() - start:.1f} s", flush=True)
    found, start = {}, time.perf_counter()
    for name, (arm, stack, step, _, _) in progress(list(built.items()), f"{size.name}: compare"):
        plain = built.get(f"{arm.mode}, {DIRECT.name}")
        found[name] = compare(stack, step, plain[1], plain[2]) if plain is not None else {}
        if options.masks:
            found[name] |= masks(arm, functools.partial(make, layers=1))
    print(f"{size.name}: compared in {time.perf_counter() - start:.1f} s", flush=True)
    sides = [Side(name, step) for name, (_, _, step, _, _) in built.items()]
    timings = time_sides(sides, options, size.name)
    for name, (arm, _, _, peak, kept) in built.items():
        row = timings[name].row("ms_", 1e3)
        memory = {
            "peak_mib": None if peak is None else round(peak / 2**20, 1),
            "kept_mib": None if kept is None else round(kept / 2**20, 1),
        }
        report.add(size.name, side=name, mode=arm.mode, engine=arm.engine.name, **row, **memory, **found[name])
    _targets(size.name, timings, report)
    del built, sides
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _targets(size: str, timings: dict[str, Timing], report: Report) -> None:
    te, plain = timings.get("eager, te reentrant"), timings.get("captured, no checkpointing")
    eager = timings["eager, ours reentrant"]
    if te is None or plain is None:
        return
    report.target(f"{size}: eager, ours over TE, reentrant", eager.over(te), 0.9 if size == "small" else 1.0)
    for kind in ("reentrant", "non-reentrant"):
        ours = timings.get(f"captured, ours {kind}")
        if ours is not None:
            limit = 0.1 if size == "small" else 1.0
            report.target(f"{size}: captured, ours {kind} over TE's eager reentrant", ours.over(te), limit)
            report.target(f"{size}: captured, ours {kind} over captured without checkpointing", ours.over(plain), 4 / 3)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(__doc__, rounds=15)
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "large"])
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--fusions", action="store_true", help="leave Transformer Engine's compiled fusions on")
    options.add_argument("--no-masks", dest="masks", action="store_false", help="do not count mask elements")
    options.add_argument("--deterministic", action="store_true", help="only deterministic attention, for bit equality")
    options.add_argument("--te-captured", action="store_true", help="capture Transformer Engine's checkpoint too")
    chosen = parse(options, arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if chosen.quick or device == "cpu":
        chosen.sizes, chosen.layers, chosen.rounds = ["tiny"], 2, min(chosen.rounds, 3)
    if not chosen.fusions:
        no_fusions()
    if chosen.deterministic:
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    report = Report("graph_recompute", chosen)
    if device == "cpu":
        report.note(
            "no CUDA here: only the eager sides, on a stand-in for Transformer Engine's layer, at the tiny size"
        )
    else:
        native.prepare()  # before torch 2.14: see benchmarks/README.md
        if transformer_engine() is None:
            report.note("Transformer Engine is not there: a stand-in for its layer, without its sides")
    for name in chosen.sizes:
        run_size(SIZES[name], device, report, chosen)
        report.write()


if __name__ == "__main__":
    main()
