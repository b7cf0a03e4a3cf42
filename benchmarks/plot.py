# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Draw the committed results into one picture.

    pip install -e '.[plot]' && python benchmarks/plot.py

A panel for each result that is there: step times of a layer stack, overhead of a region by engine and by the number of
streams, and what a job of many ranks costs. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

RESULTS = Path(__file__).resolve().parent / "results"

# Told apart without red and green too: they differ in lightness.
COLOURS = {"ours": "#1f4e9c", "te": "#76b900", "torch": "#ee6c4d", "plain": "#999999"}
NAMES = {"ours": "this package", "te": "TE", "torch": "torch"}
#: What is written on the axis, and in the title, for what a section varies.
GROWTH = {
    "streams": ("streams used", "One region, by streams used"),
    "saved": ("tensors saved", "One region, by tensors saved"),
    "regions": ("regions per step", "A step, by its regions"),
}
# At the width of a README page its letters are about as large as the page's.
WIDTH, HEIGHT, DPI = 11.0, 3.3, 110
Result = Mapping[str, Any]


def load(folder: Path) -> dict[str, Result]:
    """Return the results of a folder by benchmark; a later file of one benchmark wins."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        found[content["benchmark"]] = content
    return found


def family(side: str) -> str:
    """Return whose side it is."""
    words = side.replace(",", " ").split()
    return next((word for word in ("ours", "te", "torch") if word in words), "plain")


def rows(result: Result, **fields: Any) -> list[Mapping[str, Any]]:
    """Return the rows that have these fields."""
    return [row for row in result["rows"] if all(row.get(key) == value for key, value in fields.items())]


def label(side: str) -> str:
    """Return a side's name as the picture says it."""
    words = [NAMES.get(word, word) for word in side.split()]
    return " ".join(words).replace("non-reentrant", "non-reentr.")


def errors(found: Sequence[Mapping[str, Any]], unit: str) -> list[list[float]]:
    """Return the distances of the quartiles from the median."""
    low = [max(0.0, row[f"{unit}median"] - row[f"{unit}q1"]) for row in found]
    return [low, [max(0.0, row[f"{unit}q3"] - row[f"{unit}median"]) for row in found]]


def draw_steps(axes: Any, result: Result, size: str) -> None:
    """Draw step times; sides whose recompute drew other masks are hatched."""
    found = rows(result, section=size)[::-1]
    bars = axes.barh(
        [label(row["side"]) for row in found],
        [row["ms_median"] for row in found],
        xerr=errors(found, "ms_"),
        color=[COLOURS[family(row["side"])] for row in found],
        height=0.7,
    )
    for bar, row in zip(bars, found, strict=True):
        wrong, of = row.get("mask_mismatches", 0), row.get("mask_elements", 0)
        text = f" {row['ms_median']:.3g} ms"
        if wrong:
            bar.set_hatch("///")
            bar.set_edgecolor("white")
            text += f", masks wrong: {wrong / of:.0%}"
        axes.text(
            max(row["ms_median"], row["ms_q3"]), bar.get_y() + bar.get_height() / 2, text, va="center", fontsize=8
        )
    axes.set_xlabel("ms per step (forward and backward)")
    # Room for what is written behind the bars, which is longer where masks are wrong.
    any_wrong = any(row.get("mask_mismatches") for row in found)
    axes.set_xlim(right=(2.7 if any_wrong else 1.3) * max(row["ms_median"] for row in found))
    axes.set_title(f"{result['options']['layers']} transformer layers, {size}")


def draw_engines(axes: Any, result: Result, device: str) -> None:
    """Draw the overhead of a region that draws from three streams."""
    found = [row for row in rows(result, section="engines", device=device, used=3) if "no rng" not in row["side"]]
    found = found[::-1]
    bars = axes.barh(
        [label(row["side"]) for row in found],
        [row["overhead_us_median"] for row in found],
        xerr=errors(found, "overhead_us_"),
        color=[COLOURS[family(row["side"])] for row in found],
        height=0.7,
    )
    for bar, row in zip(bars, found, strict=True):
        end = max(row["overhead_us_median"], row["overhead_us_q3"])
        text = f" {row['overhead_us_median']:,.0f} µs"
        axes.text(end, bar.get_y() + bar.get_height() / 2, text, va="center", fontsize=8)
    axes.set_xlabel("µs over the bare work (forward and backward)")
    axes.set_xlim(right=1.25 * max(row["overhead_us_q3"] for row in found))
    axes.set_title(f"One region, 3 streams used, {device.upper()}")


def draw_growth(axes: Any, result: Result, section: str, over: str, device: str, **fields: Any) -> None:
    """Draw the overhead over something that grows."""
    found = rows(result, section=section, device=device, **fields)
    if section == "streams":
        found = [row for row in found if row["used"]]
    for side in dict.fromkeys(row["side"] for row in found):
        points = [row for row in found if row["side"] == side]
        style = "-" if "non-" not in side else "--"
        x, y = [row[over] for row in points], [row["overhead_us_median"] for row in points]
        axes.plot(x, y, style, marker=".", color=COLOURS[family(side)], label=label(side))
    name, title = GROWTH[section]
    powers(axes, [row[over] for row in found])
    axes.set_ylim(bottom=min(0.0, *(1.1 * row["overhead_us_median"] for row in found)))
    axes.set_xlabel(name)
    axes.set_ylabel("µs over the bare work" + (",\nper region" if section == "regions" else ""))
    axes.set_title(f"{title}, {device.upper()}")
    axes.legend(fontsize=8, frameon=False)


def powers(axes: Any, values: Sequence[int]) -> None:
    """Scale the x axis by powers of two, and write what was measured as plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(values)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def draw_ranks(axes: Any, result: Result) -> None:
    """Draw the cost of seeding, saving and loading over the number of ranks."""
    found = rows(result, section="ranks")
    for side in dict.fromkeys(row["side"] for row in found):
        points = [row for row in found if row["side"] == side]
        axes.plot([row["ranks"] for row in points], [row["ms_median"] for row in points], marker=".", label=side)
    powers(axes, [row["ranks"] for row in found])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ranks (simulated)")
    axes.set_ylabel("ms")
    axes.set_title("Streams of a job, by its ranks")
    axes.legend(fontsize=8, framealpha=0.8)


def panels(results: Mapping[str, Result]) -> list[Callable[[Any], None]]:
    """Return what can be drawn from these results."""
    drawn: list[Callable[[Any], None]] = []
    graph, overhead = results.get("graph_recompute"), results.get("overhead")
    if graph is not None:
        for size in dict.fromkeys(row["section"] for row in graph["rows"]):
            drawn.append(lambda axes, size=size: draw_steps(axes, graph, size))
    if overhead is not None:
        for device in dict.fromkeys(row["device"] for row in rows(overhead, section="engines")):
            drawn.append(lambda axes, device=device: draw_engines(axes, overhead, device))
        for section, over in (("streams", "streams"), ("saved", "saved"), ("regions", "regions")):
            devices = dict.fromkeys(row["device"] for row in rows(overhead, section=section))
            if devices:
                device = next(iter(devices))
                drawn.append(lambda axes, s=section, o=over, d=device: draw_growth(axes, overhead, s, o, d))
    if "parallel_rng" in results:
        drawn.append(lambda axes: draw_ranks(axes, results["parallel_rng"]))
    return drawn


def main(arguments: list[str] | None = None) -> None:
    """Draw the picture."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files")
    options.add_argument("--out", type=Path, default=RESULTS / "benchmarks.png", help="the picture")
    chosen = options.parse_args(arguments)
    results = load(chosen.results)
    drawn = panels(results)
    if not drawn:
        raise SystemExit(
            f"no results to draw in {chosen.results}: run a benchmark with --json {chosen.results}/NAME.json"
        )
    lines = -(-len(drawn) // 2)
    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10})
    figure = plt.figure(figsize=(WIDTH, HEIGHT * lines), layout="constrained")
    # Each line is laid out by itself: long names in one leave the axes of another as wide as they can be.
    for number, part in enumerate(figure.subfigures(lines, 1, squeeze=False)[:, 0]):
        here = drawn[2 * number : 2 * number + 2]
        for axes, draw in zip(part.subplots(1, len(here), squeeze=False)[0], here, strict=True):
            draw(axes)
            axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(dict.fromkeys(source(result) for result in results.values())), fontsize=8)
    figure.savefig(chosen.out, dpi=DPI)
    print(f"written: {chosen.out}")


def source(result: Result) -> str:
    """Return what a result was measured on, in a line."""
    here = result["environment"]
    parts = [here["gpu"] or here["cpu"], f"torch {here['torch']}"]
    if here["driver"]:
        parts.append(f"driver {here['driver']}")
    if here["transformer_engine"]:
        parts.append(f"Transformer Engine {here['transformer_engine']}")
    return ", ".join((*parts, f"commit {here['commit']}"))


if __name__ == "__main__":
    main()
