# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Regions with the native library: the settings that it reads, and programs that it runs, whole or by halves."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from _moves import use, using
from _program_check import Package, check
from _program_strategies import numbered_program
from _proof import ENGINE_IDS, ENGINES, Proof, assert_one_mask
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.recompute import ambient
from transformer_engine_ext.pytorch.rng import moves

PROGRAMS = 300


def other(value: Any) -> list[Any]:
    """Return values that a setting may have instead."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, torch.dtype):
        return [kind for kind in (torch.float16, torch.bfloat16, torch.float64, torch.float32) if kind != value]
    return [value[place:] + value[:place] for place in range(1, len(value))]


def test_key_differs_for_each_setting_and_is_decoded(native_moves: ModuleType) -> None:
    """One setting at a time, all of its values: another key, from which the same context is made as from Python."""
    base, keys = ambient._now(), {ambient.key(): "none"}
    assert ambient.key() == native_moves.ambient()
    assert type(ambient.key()) is bytes
    ambient._known.clear()
    for number, (read, write) in enumerate(ambient._settings):
        usual = read()
        for value in other(usual):
            try:
                write(value)
                assert read() == value
                wanted, key, there = ambient._now(), ambient.key(), ambient.Ambient()
                with using(None):
                    plain = ambient.Ambient()
            finally:
                write(usual)
            assert ambient._now() == base
            assert wanted != base
            assert key == there.key
            assert keys.setdefault(key, f"{wanted}") == f"{wanted}", "one key for several settings"
            assert plain.key == wanted
            assert plain.casts == there.casts
            for saved in (there, plain):
                with saved.again():
                    assert ambient._now() == wanted, f"setting {number} as {value}"
                    assert native_moves.ambient() == key
                assert ambient._now() == base
    assert ambient.key() in keys
    assert len(keys) > len(ambient._settings) - 2  # where the accelerator is the CPU, two are the same as two others


def test_casts(native_moves: ModuleType) -> None:
    assert not ambient.Ambient().casts
    with torch.autocast("cpu", torch.bfloat16):
        assert ambient.Ambient().casts
        with torch.autocast("cpu", enabled=False):
            assert not ambient.Ambient().casts


def test_settings_of_another_thread_are_its_own(native_moves: ModuleType) -> None:
    found: list[Any] = []
    before = ambient.key()
    with torch.autocast("cpu", torch.bfloat16):
        thread = threading.Thread(target=lambda: found.append((ambient.key(), ambient._now())))
        thread.start()
        thread.join()
        assert ambient.key() != before
    assert found == [(before, ambient._now())]


def test_accelerator_is_another_device(native_moves: ModuleType) -> None:
    """The settings of both device types count, each by itself."""
    try:
        native_moves.set_accelerator("cuda")
        keys = []
        for kind, enabled in itertools.product(("cpu", "cuda"), (False, True)):
            torch.set_autocast_enabled(kind, enabled)
            keys.append(native_moves.ambient())
            torch.set_autocast_enabled(kind, False)
        assert len(set(keys)) == 3
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        assert native_moves.ambient() not in keys
    finally:
        torch.set_autocast_dtype("cuda", torch.float16)
        use(native_moves)


def test_mark_is_autograds_number(native_moves: ModuleType) -> None:
    x = torch.ones(3, requires_grad=True)
    kept = []
    for _ in range(5):
        assert native_moves.mark(None) == (torch._C._autograd._get_sequence_nr(), 0)
        kept.append(x.sin())
    assert native_moves.mark(SimpleNamespace(get_offset=lambda: 2**40 + 4))[1] == 2**40 + 4
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append((native_moves.mark(None)[0], torch._C._autograd._get_sequence_nr()))
    )
    thread.start()
    thread.join()
    assert found[0][0] == found[0][1]


def test_programs(native_moves: ModuleType) -> None:
    """See test_fuzz_programs.py."""
    run_programs(Package())


class Halves(Package):
    """Calls of te_checkpoint with one kind of moves, all else, and so every backward, with another."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.choose = choose

    def checkpoint(self, *args: Any) -> torch.Tensor:
        with using(self.choose()):
            return super().checkpoint(*args)


@pytest.mark.parametrize("forward", ["native", "python"])
def test_programs_with_one_kind_in_forward_and_the_other_in_backward(native_library: ModuleType, forward: str) -> None:
    native, python = (native_library, None) if forward == "native" else (None, native_library)
    with using(python):
        run_programs(Halves(lambda: native))


@pytest.mark.parametrize("around", ["native", "python"])
def test_programs_in_which_any_call_may_switch(native_library: ModuleType, around: str) -> None:
    choose = random.Random(5)
    with using(native_library if around == "native" else None):
        run_programs(Halves(lambda: choose.choice([None, native_library])))


def run_programs(engine: Package) -> None:
    features: Counter[str] = Counter()
    for number in range(PROGRAMS):
        try:
            features.update(check(numbered_program(number), "cpu", engine))
        except AssertionError as error:
            raise AssertionError(f"program {number}: {error}") from error
    for feature in ("recompute draws: tracked", "region inside a fork", "nesting of both engines", "dropped region"):
        assert features[feature] > 0


@pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)
@pytest.mark.parametrize("forward", ["native", "python"])
@pytest.mark.parametrize("backward", ["native", "python"])
def test_forward_and_backward_apart(
    native_library: ModuleType, use_reentrant: bool, forward: str, backward: str
) -> None:
    """One region, with half a pair of normals waiting, inside of a fork that has ended by the time of the backward."""
    kinds = {"native": native_library, "python": None}
    tracker, proof = CudaRNGStatesTracker(device="cpu"), Proof()
    tracker.add("a", 1)
    tracker.add("b", 2)
    x = torch.ones(64, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        torch.randn(3)
        x = F.dropout(x, 0.5)
        with tracker.fork("b"):
            torch.randn(1)
            return proof.watch(F.dropout(x, 0.5)) * x

    with using(kinds[forward]), tracker.fork("a"):
        torch.randn(1)
        y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    with using(kinds[backward]):
        y.sum().backward()
        assert (moves.used() is None) == (backward == "python")
    proof.after_backward()
    assert x.grad is not None
    assert_one_mask(y, x.grad / 2)  # the product of one mask with itself and another one
