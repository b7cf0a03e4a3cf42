# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""From the ranks' measurements to one table, and to the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformer_engine_ext.cli.demo_config import CONTRAST, REFERENCE

__all__ = ["HEADINGS", "ArmResult", "format_table", "judge", "merge", "table_rows"]


@dataclass
class ArmResult:
    """One arm, over all ranks and launches.

    Attributes
    ----------
    name, title : str
        Key, and what the table calls it.
    final_loss, max_loss_difference : float
        Loss of the last step; largest absolute difference to the reference over all steps and ranks.
    gradient_elements, mismatching_elements : int
        Over all steps and ranks; how many of them differ from the reference in any bit.
    first_mismatching_step : int or None
        Counted from 0.
    recomputes, regions : int
        Executions of a block during backward and during forward, over all ranks.
    streams_equal : bool
        Whether every stream of every rank ended where it ended in the reference.
    problem : str
        Empty if the arm came out as it must.
    """

    name: str
    title: str
    final_loss: float
    max_loss_difference: float
    gradient_elements: int
    mismatching_elements: int
    first_mismatching_step: int | None
    recomputes: int
    regions: int
    streams_equal: bool
    problem: str = ""

    @property
    def verdict(self) -> str:
        """Return the last column of the table."""
        if self.problem:
            return f"FAIL: {self.problem}"
        return "wrong gradients, as expected" if self.name == CONTRAST else "exact"

    def to_json(self) -> dict[str, Any]:
        """Return JSON types."""
        fields = {**asdict(self), "verdict": self.verdict}
        # JSON has no NaN and no infinity.
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }


def merge(launches: Sequence[Sequence[Mapping[str, Any]]], titles: Mapping[str, str]) -> list[ArmResult]:
    """Put the ranks' results together.

    Parameters
    ----------
    launches : sequence of sequence of mapping
        Per launch, per rank: arm name to what ``demo_arms.compare`` returned. An arm that spans launches has a part
        in each.
    titles : mapping of str to str
        The arms, in the order of the table.
    """
    results = []
    for name, title in titles.items():
        parts = [rank[name] for launch in launches for rank in launch if name in rank]
        steps = [part["first_mismatching_step"] for part in parts if part["first_mismatching_step"] is not None]
        # A part that stops before the end says None; at least one part must reach it.
        ends = [part["streams_equal"] for part in parts if part["streams_equal"] is not None]
        results.append(
            ArmResult(
                name=name,
                title=title,
                final_loss=parts[-1]["losses"][-1],
                max_loss_difference=max(part["max_loss_difference"] for part in parts),
                gradient_elements=sum(part["gradient_elements"] for part in parts),
                mismatching_elements=sum(part["mismatching_elements"] for part in parts),
                first_mismatching_step=min(steps, default=None),
                recomputes=sum(part["recomputes"] for part in parts),
                regions=sum(part["regions"] for part in parts),
                streams_equal=bool(ends) and all(ends),
            )
        )
    return results


def judge(results: Sequence[ArmResult]) -> bool:
    """Set each arm's ``problem``; returns whether there is none.

    The arm without checkpointing must not recompute anything. Every other arm must recompute every region exactly
    once. All arms but the contrast must agree with the reference in every bit of every gradient, in every loss and in
    where the streams end; the contrast must not, or the comparison would not see a wrong mask at all.
    """
    elements = next(result.gradient_elements for result in results if result.name == REFERENCE)
    for result in results:
        expected = 0 if result.name == REFERENCE else result.regions
        wrong = result.mismatching_elements
        if result.gradient_elements != elements or not elements:
            result.problem = f"compared {result.gradient_elements:,} gradient elements instead of {elements:,}"
        elif result.recomputes != expected or not result.regions:
            result.problem = f"{result.recomputes} recomputes instead of {expected}"
        elif result.name == CONTRAST:
            result.problem = "" if wrong else "no mismatch, so this run proves nothing"
        elif wrong:
            result.problem = f"gradients differ from step {result.first_mismatching_step} on"
        elif result.max_loss_difference != 0.0:
            result.problem = "losses differ"
        elif not result.streams_equal:
            result.problem = "the random-number streams end elsewhere"
        else:
            result.problem = ""
    return not any(result.problem for result in results)


HEADINGS = ("arm", "final loss", "largest loss difference", "mismatching gradient elements", "recomputes", "verdict")


def table_rows(results: Sequence[ArmResult]) -> list[tuple[str, ...]]:
    """Return the table's cells, one tuple per arm, in the order of ``HEADINGS``."""
    return [
        (
            result.title,
            f"{result.final_loss:.6f}",
            f"{result.max_loss_difference:.3g}",
            f"{result.mismatching_elements:,} of {result.gradient_elements:,}",
            f"{result.recomputes} of {0 if result.name == REFERENCE else result.regions}",
            result.verdict,
        )
        for result in results
    ]


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table as plain text."""
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (headings, *rows)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
