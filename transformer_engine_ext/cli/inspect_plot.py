# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The positions of saved streams as a picture: ranks x streams."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from transformer_engine_ext.cli.inspect_report import Report
from transformer_engine_ext.pytorch.distributed.atomic_write import check_target
from transformer_engine_ext.pytorch.distributed.saved_table import MT19937, PHILOX

__all__ = ["draw"]

#: With more ranks than this, cells have no numbers and no frames.
_MOST_LABELLED = 32
_GREY = "#b8b8b8"
_RED = "#ff4538"


def draw(report: Report, path: str) -> None:
    """Write the picture; the file's ending says in which format.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If matplotlib does not know the format.
    OSError
        If the file cannot be written, or is a folder or a device.
    """
    check_target(path, "draw")
    # Neither pyplot nor a display: only a figure, and what turns it into bytes.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    positions = _positions(report)
    labelled = report.ranks <= _MOST_LABELLED
    size = (3.2 + 1.25 * len(report.streams), 2.6 + (0.34 * report.ranks if labelled else 5.4))
    figure: Any = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=_GREY)
    norm = _norm(positions)
    cells = np.ma.masked_invalid(positions)
    image = axes.imshow(cells, aspect="auto", interpolation="nearest", cmap="viridis", norm=norm)
    axes.set_xticks(range(len(report.streams)), [stream.name for stream in report.streams], rotation=30, ha="right")
    axes.set_ylabel("rank")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(report.ranks, 16)))
    axes.set_title(f"{os.path.basename(os.path.normpath(report.path))}: where streams stand", loc="left", pad=18)
    sizes = " x ".join(f"{axis}={size}" for axis, size in report.axes.items()) or "no axes"
    axes.text(0, 1.01, f"{sizes}, {report.ranks} ranks", transform=axes.transAxes, fontsize=9, va="bottom")
    figure.colorbar(image, ax=axes, label=_unit(report))
    if labelled:
        for (rank, column), value in np.ndenumerate(positions):
            text = "?" if np.isnan(value) else f"{int(value):,}"
            dark = np.isnan(value) or norm(value) > 0.6
            axes.text(column, rank, text, ha="center", va="center", fontsize=7, color="black" if dark else "white")
    keys: list[Any] = []
    if _mark_problems(report, axes, framed=labelled):
        text = "not as declared, or a collision"
        frame = Patch(fill=False, edgecolor=_RED, linewidth=2, label=text)
        keys.append(frame if labelled else Line2D([], [], linestyle="", marker=">", color=_RED, label=text))
    if np.isnan(positions).any():
        keys.append(Patch(facecolor=_GREY, label="a state that tells no position, or too many to count"))
    if keys:
        figure.legend(handles=keys, loc="outside lower left", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path)


def _positions(report: Report) -> Any:
    """Return ``float64 [ranks, streams]``; NaN where a position is not known."""
    positions = np.full((report.ranks, len(report.streams)), np.nan)
    for column, stream in enumerate(report.streams):
        for group in stream.groups:
            if group.position is not None:
                positions[group.ranks, column] = group.position
    return positions


def _norm(positions: Any) -> Any:
    """Return a linear scale; a logarithmic one where a linear one would show only the largest positions."""
    from matplotlib.colors import Normalize, SymLogNorm

    known = positions[~np.isnan(positions)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    if high <= 100 * max(low, 1.0):
        return Normalize(low, max(high, low + 1.0))
    return SymLogNorm(linthresh=max(1.0, high / 10_000), vmin=0.0, vmax=high)


def _mark_problems(report: Report, axes: Any, *, framed: bool) -> bool:
    """Mark the cells that problems concern: with frames, or in a large picture at their left edge."""
    from matplotlib.patches import Rectangle

    column = {stream.name: index for index, stream in enumerate(report.streams)}
    cells = {(rank, column[name]) for problem in report.problems for name in problem.streams for rank in problem.ranks}
    for rank, at in sorted(cells):
        if framed:
            frame = Rectangle((at - 0.47, rank - 0.46), 0.94, 0.92, fill=False, edgecolor=_RED, linewidth=2)
            axes.add_patch(frame)
    if cells and not framed:
        ranks, places = zip(*cells, strict=True)
        axes.scatter([at - 0.44 for at in places], ranks, marker=">", color=_RED, s=30, zorder=3)
    return bool(cells)


def _unit(report: Report) -> str:
    engines = {stream.engine for stream in report.streams}
    on_cuda = "CUDA: numbers per thread" if PHILOX in engines else ""
    on_cpu = "CPU: 32-bit words" if MT19937 in engines else ""
    return f"position since the seed ({', '.join(filter(None, (on_cuda, on_cpu)))})"
