# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""F6: errors of several lines are printed as lines, though ``KeyError`` by itself escapes them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback

import pytest
import torch

import transformer_engine_ext.errors
from _helpers import REPO
from _regions import new_tracker
from transformer_engine_ext.errors import TEExtError, UnknownStreamError
from transformer_engine_ext.pytorch import te_checkpoint

_CLASSES = [getattr(transformer_engine_ext.errors, name) for name in transformer_engine_ext.errors.__all__]
_TEXT = "what happened\n  expected: a\n  got: 'b'"


def test_f6_every_error_class_is_listed() -> None:
    found = {
        value
        for value in vars(transformer_engine_ext.errors).values()
        if isinstance(value, type) and issubclass(value, TEExtError)
    }
    assert found == set(_CLASSES)


@pytest.mark.parametrize("kind", _CLASSES, ids=lambda kind: kind.__name__)
def test_f6_lines_stay_lines(kind: type[TEExtError]) -> None:
    """In ``str``, in the traceback that Python prints, and after a trip through pickle (worker processes do that)."""
    error = kind(_TEXT)
    assert str(error) == _TEXT
    printed = "".join(traceback.format_exception_only(kind, error))
    assert printed.endswith(f"{kind.__name__}: {_TEXT}\n")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == _TEXT


@pytest.mark.parametrize("kind", _CLASSES, ids=lambda kind: kind.__name__)
def test_f6_no_message_and_two_arguments(kind: type[TEExtError]) -> None:
    """``str`` of an error must not itself fail."""
    assert str(kind()) == ""
    assert "first" in str(kind("first", "second"))


def test_f6_unknown_stream_names_the_known_ones_in_readable_lines() -> None:
    tracker = new_tracker("a", "b")
    with pytest.raises(UnknownStreamError) as caught, tracker.fork("c"):
        pass
    text = str(caught.value)
    assert isinstance(caught.value, KeyError)
    assert "\\n" not in text
    assert not text.startswith(("'", '"')), "a KeyError's repr"
    for name in ("'c'", "'a'", "'b'"):
        assert name in text


def test_f6_uncaught_error_of_a_region_prints_its_lines() -> None:
    """The whole way: raised in a region's recompute, through autograd, uncaught, to the terminal."""
    program = """
import torch
from transformer_engine_ext import te_checkpoint
runs = []
def region(x):
    runs.append(1)
    return x.sin().cos() if len(runs) == 1 else x.sin()
te_checkpoint(region, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    last = result.stderr[result.stderr.index("SavedTensorMismatchError:") :]
    assert "\\n" not in last
    assert len(last.splitlines()) >= 3, last


def test_f6_same_error_inside_a_region() -> None:
    """Raised by a fork inside a region's forward, the error arrives as it was raised: same class, same lines."""
    tracker = new_tracker("a")

    def region(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork("c"):
            return x.sin()

    for use_reentrant in (True, False):
        with pytest.raises(UnknownStreamError, match="'a'"):
            te_checkpoint(region, torch.ones(3, requires_grad=True), use_reentrant=use_reentrant)
