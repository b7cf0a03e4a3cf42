# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: paired timing, statistics, peak memory, and the report that goes to a JSON file."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer
from tqdm import tqdm

from _environment import environment

__all__ = ["Report", "Side", "Timing", "parse", "parser", "peak_memory", "synchronize", "time_sides"]


@dataclass(frozen=True)
class Side:
    """One of the things that are compared: a name, and a call without arguments."""

    name: str
    run: Callable[[], object]


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


@dataclass
class Timing:
    """Seconds per call of one side, one sample a round; sample ``i`` of all sides is of the same round."""

    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return quartiles(self.samples)[1]

    def minus(self, other: Timing) -> Timing:
        """Return the differences, round by round."""
        return Timing([mine - theirs for mine, theirs in zip(self.samples, other.samples, strict=True)])

    def over(self, other: Timing) -> float:
        """Return the ratio of the medians."""
        return self.median / other.median

    def row(self, prefix: str = "", scale: float = 1e6) -> dict[str, float]:
        """Return median and quartiles for a report, in microseconds unless scaled otherwise."""
        low, middle, high = (round(value * scale, 4) for value in quartiles(self.samples))
        return {f"{prefix}median": middle, f"{prefix}q1": low, f"{prefix}q3": high}


def synchronize() -> None:
    """Wait for the GPU, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# Note [Sides are compared within a round]
# A machine's speed drifts: clocks, neighbours, the allocator. So all sides run in one process, in short blocks that
# take turns, each round in another order, and a difference is taken between blocks of the same round. A block ends with
# a synchronisation (torch.utils.benchmark's timer does that), so that work in flight counts. The garbage collector is
# off within blocks and runs between them; what was there before is frozen, so that this costs little.
def time_sides(
    sides: Sequence[Side], options: argparse.Namespace, what: str = "", *, single: bool = False
) -> dict[str, Timing]:
    """Time several sides in turns.

    Parameters
    ----------
    sides : sequence of Side
        What to time.
    options : argparse.Namespace
        ``rounds``, blocks per side; ``block``, seconds that one should last; ``warmup``, seconds before the first one.
    what : str
        Shown beside the progress bar.
    single : bool
        One call per block and none before: for sides that take long.

    Returns
    -------
    dict of str to Timing
        By the sides' names.
    """
    # See Note [Sides are compared within a round]
    timers = {side.name: Timer("run()", globals={"run": side.run}) for side in sides}
    numbers = {side.name: 1 if single else _warm(side.run, options.warmup, options.block) for side in sides}
    timings = {side.name: Timing() for side in sides}
    runs = {side.name: side.run for side in sides}
    names = list(runs)
    gc.collect()
    gc.freeze()
    try:
        for turn in progress(range(options.rounds), what):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                gc.collect()
                timings[name].samples.append(
                    _once(runs[name]) if single else timers[name].timeit(numbers[name]).raw_times[0] / numbers[name]
                )
    finally:
        gc.unfreeze()
    return timings


def _once(run: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def _warm(run: Callable[[], object], seconds: float, block: float) -> int:
    """Run until warm; return how many calls fill a block."""
    run()  # what is compiled, built or filled at first use does not count
    synchronize()
    calls, start = 0, time.perf_counter()
    while calls < 1 or time.perf_counter() - start < seconds:
        run()
        calls += 1
        if calls % 8 == 0 or seconds == 0:
            synchronize()
    synchronize()
    return max(1, round(block * calls / (time.perf_counter() - start)))


def progress(items: Iterable[Any], what: str) -> Iterable[Any]:
    """Show a progress bar on standard error, where that is a terminal."""
    return tqdm(items, desc=what, leave=False, file=sys.stderr, disable=None)


def peak_memory(run: Callable[[], object], device: str) -> int | None:
    """Return how many bytes of GPU memory are in use at most while ``run`` runs, above what is in use before."""
    if device != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Report:
    """Rows of one benchmark, with what they were measured on.

    Parameters
    ----------
    benchmark : str
        Its name.
    arguments : argparse.Namespace
        Its command line, as parsed.
    """

    def __init__(self, benchmark: str, arguments: argparse.Namespace) -> None:
        self._json: Path | None = arguments.json
        options = {name: value for name, value in vars(arguments).items() if name not in ("json", "commit")}
        self.content: dict[str, Any] = {
            "benchmark": benchmark,
            "options": {name: value if _plain(value) else str(value) for name, value in options.items()},
            "environment": environment(arguments.commit),
            "notes": [],
            "rows": [],
            "targets": [],
        }

    def note(self, text: str) -> None:
        """Say something that belongs to the result: what was skipped, and why."""
        print(f"note: {text}")
        self.content["notes"].append(text)

    def add(self, section: str, **fields: Any) -> None:
        """Add a row, and print it without its quartiles."""
        self.content["rows"].append({"section": section, **fields})
        shown = {
            name: value for name, value in fields.items() if value is not None and not name.endswith(("_q1", "_q3"))
        }
        print(f"{section:12s} " + "  ".join(f"{name}={_short(value)}" for name, value in shown.items()))
        sys.stdout.flush()

    def target(self, what: str, measured: float, limit: float) -> None:
        """Compare a measured figure with what it should be at most."""
        row = {"what": what, "measured": round(measured, 4), "limit": limit, "met": measured <= limit}
        self.content["targets"].append(row)
        print(f"{'target':12s} {what}: {measured:.3g} of at most {limit:g}{'' if row['met'] else '  NOT MET'}")

    def rows(self, **fields: Any) -> list[Mapping[str, Any]]:
        """Return the rows that have these fields."""
        return [row for row in self.content["rows"] if all(row.get(key) == value for key, value in fields.items())]

    def write(self) -> None:
        """Write the JSON file, if one was asked for."""
        if self._json is not None:
            self._json.parent.mkdir(parents=True, exist_ok=True)
            self._json.write_text(json.dumps(self.content, indent=1) + "\n")
            print(f"written: {self._json}")


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse(options: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line that ``parser`` made."""
    chosen = options.parse_args(arguments)
    if chosen.quick:
        chosen.rounds, chosen.block, chosen.warmup = min(chosen.rounds, 3), 0.0, 0.0
    return chosen


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a command line with the options that all benchmarks have."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--json", type=Path, help="write the result to this file")
    result.add_argument("--rounds", type=int, default=rounds, help="blocks per side (default: %(default)s)")
    result.add_argument("--block", type=float, default=0.02, help="seconds per block (default: %(default)s)")
    result.add_argument("--warmup", type=float, default=0.05, help="seconds before the first block")
    result.add_argument("--quick", action="store_true", help="smallest sizes and counts: does it run at all?")
    result.add_argument("--commit", help="commit to name in the result, where there is no git")
    return result
