# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``NVTE_EXT_DEBUG=1`` remembers the last runs of regions and lists them in a mismatch."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from _helpers import REPO
from _regions import new_tracker
from transformer_engine_ext.errors import RecomputeMismatchError, SavedTensorMismatchError
from transformer_engine_ext.pytorch import te_checkpoint
from transformer_engine_ext.pytorch.recompute import debug, history

Region = Callable[[torch.Tensor], torch.Tensor]

engines = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])


@pytest.fixture
def debugging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the variable does at import, for one test: the fork watcher has a test of its own."""
    history.forget()
    monkeypatch.setattr(debug, "ENABLED", True)
    yield
    history.forget()
    assert not debug._runs, "a run that has ended still counts as open"


def ones(count: int = 8) -> torch.Tensor:
    return torch.ones(count, requires_grad=True)


def listed(text: str) -> list[str]:
    """Return the runs that an error's text lists, without file names."""
    assert text.count("NVTE_EXT_DEBUG=1") == 1, text
    _, _, tail = text.partition("runs of regions")
    return [re.sub(r"<locals>\.| \(/[^)]*\)", "", line).strip() for line in tail.splitlines()[1:]]


def drawing(extra_run: int, saves: bool = False) -> Region:
    """A region that draws from a tracked stream, and does more in the run of that number."""
    tracker = new_tracker("noise")
    runs: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        with tracker.fork("noise"):
            x = torch.nn.functional.dropout(x)
        if len(runs) == extra_run:
            torch.rand(4) if not saves else x.sin().cos().sum()
        return x.exp()

    return block


@engines
def test_a9_mismatch_lists_what_each_run_drew(debugging: None, use_reentrant: bool) -> None:
    te_checkpoint(torch.nn.Dropout(0.5), ones(), use_reentrant=use_reentrant).sum().backward()
    region = drawing(extra_run=2)
    with pytest.raises(RecomputeMismatchError) as caught:
        te_checkpoint(region, ones(), use_reentrant=use_reentrant).sum().backward()
    engine = "reentrant" if use_reentrant else "non-reentrant"
    first, again, forward, recompute = listed(str(caught.value))
    assert re.fullmatch(
        rf"region \d+, forward of Dropout.*, {engine}: drew \d+ 32-bit words from 'default \(cpu\)', by aten.*", first
    )
    assert first.replace("forward", "recompute") == again
    assert ", forward of drawing.block" in forward
    assert re.search(rf", {engine}: drew \d+ 32-bit words from 'noise', by aten\.bernoulli_\.float x1$", forward)
    assert "drew 4 32-bit words from 'default (cpu)'" in recompute
    assert "aten.rand.default x1" in recompute
    assert forward.split(",")[0] == recompute.split(",")[0] != first.split(",")[0], "numbers tell which belong together"


def test_saved_tensor_mismatch_lists_them_too(debugging: None) -> None:
    with pytest.raises(SavedTensorMismatchError) as caught:
        te_checkpoint(drawing(extra_run=2, saves=True), ones(), use_reentrant=False).sum().backward()
    assert [line.split(" of ")[0].partition(", ")[2] for line in listed(str(caught.value))] == ["forward", "recompute"]


def test_outputs_that_are_missing_list_them_too(debugging: None) -> None:
    runs: list[int] = []

    def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        runs.append(1)
        return tuple(x.exp() for _ in runs)

    with pytest.raises(SavedTensorMismatchError) as caught:
        te_checkpoint(region, ones())[0].sum().backward()
    assert len(listed(str(caught.value))) == 2


@engines
def test_a9_nested_mismatch_is_reported_once_and_as_itself(debugging: None, use_reentrant: bool) -> None:
    """Counting words for the text draws from a generator of its own, under the outer region's watch."""
    inner = drawing(extra_run=2)

    def outer(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            te_checkpoint(inner, ones(), use_reentrant=use_reentrant).sum().backward()
        return x.exp()

    with pytest.raises(RecomputeMismatchError) as caught:
        te_checkpoint(outer, ones(), use_reentrant=use_reentrant)
    assert "drew 4 32-bit words" in str(caught.value)
    assert ", recompute of drawing.block" in listed(str(caught.value))[-1]


def test_a9_mismatch_that_passes_through_two_regions_has_one_list(debugging: None) -> None:
    inner = drawing(extra_run=3)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return te_checkpoint(inner, x.sin(), use_reentrant=False).cos()

    with pytest.raises(RecomputeMismatchError) as caught:
        te_checkpoint(outer, ones(), use_reentrant=True).sum().backward()
    assert len(listed(str(caught.value))) == 4


@engines
def test_only_the_last_runs_are_kept_and_no_tensor(debugging: None, use_reentrant: bool) -> None:
    watched: list[weakref.ref[torch.Tensor]] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        watched.append(weakref.ref(y))
        return y * y

    ended = history._count
    for _ in range(history.LENGTH):
        te_checkpoint(region, ones(), use_reentrant=use_reentrant).sum().backward()
    assert history._count == ended + 2 * history.LENGTH
    assert not any(run._before for run in history._runs), "values of streams are kept for runs that have ended"
    gc.collect()
    assert len(watched) == 2 * history.LENGTH
    assert not [reference for reference in watched if reference() is not None]
    with pytest.raises(RecomputeMismatchError, match=rf"last {history.LENGTH} of \d+ runs") as caught:
        te_checkpoint(drawing(extra_run=2), ones(), use_reentrant=use_reentrant).sum().backward()
    assert len(listed(str(caught.value))) == history.LENGTH


def test_ends_that_are_none(debugging: None) -> None:
    def stops(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + x.sum()  # work behind the last saved tensor: the recompute is stopped

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError

    te_checkpoint(stops, ones(), use_reentrant=False).sum().backward()
    with pytest.raises(ValueError, match=r"^$"):
        te_checkpoint(fails, ones())
    te_checkpoint(torch.nn.Dropout(0.5), ones(), preserve_rng_state=False).sum().backward()
    with pytest.raises(RecomputeMismatchError) as caught:
        te_checkpoint(drawing(extra_run=2), ones()).sum().backward()
    lines = listed(str(caught.value))
    assert "drew nothing (stopped early)" in lines[1]
    assert "drew nothing (raised ValueError)" in lines[2]
    # Not rewound, so nothing is known of streams; the operator still is.
    assert "drew nothing, by aten" in lines[3]


def test_off_by_default() -> None:
    assert not debug.ENABLED, "these tests need NVTE_EXT_DEBUG unset"
    history.forget()
    with pytest.raises(RecomputeMismatchError) as caught:
        te_checkpoint(drawing(extra_run=2), ones()).sum().backward()
    assert "NVTE_EXT_DEBUG" not in str(caught.value)
    assert not history._runs


def test_the_variable_turns_it_on() -> None:
    program = """
import torch
from transformer_engine_ext import te_checkpoint
runs = []
def region(x):
    runs.append(torch.rand(len(runs) + 1))
    return x.exp()
te_checkpoint(region, torch.ones(3, requires_grad=True)).sum().backward()
"""
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "NVTE_EXT_DEBUG": "1"}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "  region 1, recompute of region (<string>:5), reentrant: drew 2 32-bit words" in result.stderr
