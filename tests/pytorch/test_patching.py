# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""patch() and unpatch() on small packages that bind names as Transformer Engine and Megatron-core do (F4, F5, F6)."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import transformer_engine_ext
from _patched import stand_ins
from transformer_engine_ext import patch, patched, unpatch
from transformer_engine_ext.errors import PatchError
from transformer_engine_ext.integrations.patching import patch_report

TE = "transformer_engine.pytorch"
RANDOM = "megatron.core.tensor_parallel.random"
CONFIG = "megatron.core.transformer.transformer_config"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with stand_ins(tmp_path, monkeypatch):
        yield tmp_path


def load(name: str) -> Any:
    return importlib.import_module(name)


def wrong(checkpoint: Callable[..., torch.Tensor], tracker: Any = None, fork: Any = None) -> int:
    """Return how many gradient elements belong to another mask than the output."""

    def region(x: torch.Tensor) -> torch.Tensor:
        if tracker is None:
            return F.dropout(x, 0.5)
        with (fork or tracker.fork)():
            return F.dropout(x, 0.5)

    x = torch.ones(512, requires_grad=True)
    y = checkpoint(region, x)
    torch.rand(3)
    y.sum().backward()
    assert x.grad is not None
    return int((y.detach() != x.grad).sum())


def everything(module: Any) -> dict[str, Any]:
    """What a module and its classes hold, functions with their code, so that any trace shows."""
    found: dict[str, Any] = {}

    def note(path: str, value: Any) -> None:
        found[path] = value
        inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        inner = getattr(inner, "__wrapped__", inner)
        if isinstance(inner, types.FunctionType):
            found[f"{path} code"] = inner.__code__
            found[f"{path} more"] = dict(vars(inner))

    for name, value in vars(module).items():
        note(name, value)
        if isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, held in vars(value).items():
                note(f"{name}.{attribute}", held)
    return found


CHANGING = {"_ALL_ACTIVE_RNG_STATES", "__builtins__"}


def test_f4_unpatch_leaves_no_trace(folder: Path) -> None:
    load(TE), load(RANDOM), load(CONFIG), load("megatron.core.transformer.cuda_graphs")
    names = [f"{TE}.distributed", f"{TE}.quantization", f"{TE}.attention", TE, RANDOM, CONFIG]
    before = {name: everything(sys.modules[name]) for name in names}
    finders = list(sys.meta_path)
    for _ in range(2):
        report = patch(strict=True)
        assert wrong(sys.modules[TE].checkpoint) == 0
        assert len(report.replaced) > 15
        assert unpatch() == []
    for name in names:
        after = everything(sys.modules[name])
        changed = [key for key in before[name] if key not in CHANGING and before[name][key] != after.get(key)]
        assert changed == []
        assert set(after) == set(before[name])
    assert sys.meta_path == finders


def test_every_bound_copy_is_reached(folder: Path) -> None:
    te = load(TE)
    bound = te.checkpoint  # a user's own `from ... import checkpoint`
    partial = functools.partial(te.distributed.checkpoint)
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    attention = te.attention.Attention(tracker)
    ways: list[Callable[..., torch.Tensor]] = [bound, partial, attention.checkpointed, te.checkpoint]
    for way in ways:
        assert wrong(way, tracker, attention.fork) > 100
    report = patch()
    for way in ways:
        assert wrong(way, tracker, attention.fork) == 0, "the fork that was kept before patch()"
        assert wrong(way, tracker) == 0
    copies = next(r.copies for r in report.replaced if r.target == f"{TE}.distributed.checkpoint")
    assert copies == (f"{TE}.attention.checkpoint", f"{TE}.checkpoint")
    assert [r for r in report.replaced if f"{TE}.attention.states_of_all" in r.copies]
    unpatch()
    for way in ways:
        assert wrong(way, tracker, attention.fork) > 100


@pytest.mark.parametrize("order", ["patch, TE, Megatron", "TE, patch, Megatron", "TE, Megatron, patch"])
def test_f4_imports_in_any_order(folder: Path, order: str) -> None:
    for step in order.split(", "):
        if step == "patch":
            patch()
        else:
            load(TE if step == "TE" else RANDOM)
    load(CONFIG)
    random = sys.modules[RANDOM]
    assert patch_report().waiting == []
    tracker = random.get_cuda_rng_tracker()
    assert isinstance(tracker, load(TE).CudaRNGStatesTracker)
    assert wrong(lambda region, x: random.checkpoint(region, False, x), tracker) == 0
    unpatch()
    assert wrong(lambda region, x: random.checkpoint(region, False, x), tracker) > 100


def test_b15_positional_options_are_understood_and_warned_of_at_the_callers_line(folder: Path) -> None:
    te = load(TE)
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    patch()
    x, seen = torch.ones(8, requires_grad=True), []
    with pytest.warns(DeprecationWarning, match="positional") as caught:
        y = te.checkpoint(lambda *args: seen.append(args) or args[0] * 1, False, lambda: tracker, None, x, None)
    assert caught[0].filename == __file__
    y.sum().backward()
    assert [len(args) for args in seen] == [2, 2]


def test_the_class_stays_and_so_do_instances_of_before_and_of_meanwhile(folder: Path) -> None:
    te, random = load(TE), load(RANDOM)
    cls, singleton = te.CudaRNGStatesTracker, random.get_cuda_rng_tracker()
    handle = singleton.states_["model-parallel-rng"]
    patch()
    assert te.CudaRNGStatesTracker is cls
    assert type(singleton).__mro__[1] is cls
    assert singleton.states_["model-parallel-rng"] is handle
    assert wrong(te.checkpoint, singleton) == 0
    meanwhile = random.TECudaRNGStatesTracker()
    assert meanwhile._is_initialized is False
    meanwhile.add("model-parallel-rng", 5)
    assert meanwhile._is_initialized is True
    with pytest.raises(RuntimeError, match="seed 5 already exists"):
        meanwhile.add("other", 5)
    registered = {id(handle) for handle in te.distributed.get_all_rng_states().values()}
    mine = {id(handle) for tracker in (singleton, meanwhile) for handle in tracker.states_.values()}
    assert mine
    assert not mine & registered, "streams of the CPU are registered with no graph"
    unpatch()
    for tracker in (singleton, meanwhile):
        with tracker.fork():
            torch.rand(2)
        assert list(tracker.get_states()) == ["model-parallel-rng"]
        assert type(tracker.get_states()) is dict
    assert te.distributed.get_all_rng_states() is meanwhile.states_


def test_saved_states_are_values_while_patched(folder: Path) -> None:
    patch()
    tracker = load(TE).CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    saved = tracker.get_states()
    written = pickle.dumps(saved)
    copied = copy.deepcopy(tracker)

    def draw(which: Any) -> torch.Tensor:
        with which.fork():
            return torch.rand(4)

    first = draw(tracker)
    tracker.set_states(saved)
    assert torch.equal(draw(tracker), first)
    read = pickle.loads(written)
    assert type(read) is dict, "a checkpoint file holds no class of this package"
    tracker.set_states(read)
    assert torch.equal(draw(tracker), first)
    assert torch.equal(draw(copied), first)


def test_a_subclass_with_a_fork_of_its_own_is_reported(folder: Path) -> None:
    te = load(TE)

    class Own(te.CudaRNGStatesTracker):  # type: ignore[misc, name-defined]
        def fork(self, name: str = "model-parallel-rng") -> Any:
            return super().fork(name)

    report = patch()
    assert any("Own overrides fork" in note for note in report.notes)
    assert "to know:" in str(report)


def test_patched_nests_and_gives_back_what_it_found(folder: Path) -> None:
    te = load(TE)
    code = te.distributed.checkpoint.__wrapped__.__code__
    with patched(megatron=False) as outer:
        assert te.distributed.checkpoint.__wrapped__.__code__ is not code
        assert not any("megatron" in r.target for r in outer.replaced)
        load(RANDOM)
        with patched() as inner:
            assert any("megatron" in r.target for r in inner.replaced)
            assert patch().replaced == inner.replaced
        assert not any("megatron" in r.target for r in patch_report().replaced)
        assert wrong(te.checkpoint) == 0
    assert te.distributed.checkpoint.__wrapped__.__code__ is code
    assert str(patch_report()).count("replaced") == 0
    patch()
    with pytest.raises(KeyError), patched():
        raise KeyError
    assert wrong(te.checkpoint) == 0, "patch() outlives `with patched()`"


def test_what_somebody_else_replaced_meanwhile_is_left_alone(folder: Path) -> None:
    te = load(TE)
    patch()
    function = te.distributed.get_all_rng_states
    ours, theirs = function.__code__, (lambda: {"theirs": 1}).__code__
    function.__code__ = theirs
    (trouble,) = unpatch()
    assert "get_all_rng_states" in trouble
    assert "left alone" in trouble
    assert te.distributed.get_all_rng_states() == {"theirs": 1}
    assert ours is not theirs


FAULTS = {
    "not there": None,
    "missing native part": "raise ImportError('libtransformer_engine.so: cannot open shared object file')",
    "wrong NCCL": "raise OSError('libnccl.so.2: undefined symbol')",
    "half removed": "raise FileNotFoundError('Could not find shared object file')",
    "version mismatch": "raise AssertionError('Found inconsistent versions')",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_f5_a_broken_install_is_a_reason(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = FAULTS[fault]
    if text is not None:
        package = tmp_path / "transformer_engine"
        (package / "pytorch").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "pytorch" / "__init__.py").write_text(text)
    monkeypatch.setitem(sys.modules, "transformer_engine", None) if text is None else None
    with stand_ins(tmp_path, monkeypatch, install=False):
        if text is None:
            monkeypatch.setitem(sys.modules, "transformer_engine", None)
        report = patch()
        assert report.replaced == []
        (skipped,) = report.skipped
        assert skipped.target == "transformer_engine"
        expected = "" if text is None else text.partition("'")[2].partition("'")[0]
        assert expected in skipped.reason
        with pytest.raises(PatchError, match="could not replace everything") as error:
            patch(strict=True)
        assert len(str(error.value).splitlines()) >= 3, "F6: lines are lines"
        assert "unpatch()" in str(error.value)


def test_names_that_a_version_lacks_are_reported(folder: Path) -> None:
    distributed = load(f"{TE}.distributed")
    del distributed.get_all_rng_states, distributed.activation_recompute_forward
    distributed.set_all_rng_states = len  # no Python function: it has no code to replace
    report = patch()
    reasons = {skipped.target.rpartition(".")[2]: skipped.reason for skipped in report.skipped}
    assert reasons["get_all_rng_states"] == "this version has no such name"
    assert reasons["activation_recompute_forward"] == "this version has no such class"
    assert "not a Python function" in reasons["set_all_rng_states"]
    assert wrong(load(TE).checkpoint) == 0


def test_an_unknown_version_warns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_engine_ext.integrations import patching, versions

    assert versions.version_note("transformer-engine", "2.20.2") is None
    assert versions.version_note("transformer-engine", "2.3.0+abc") is None
    assert "not known" in str(versions.version_note("megatron-core", "built-by-hand"))
    note = versions.version_note("transformer-engine", "3.1")
    assert "te-ext doctor" in str(note)
    monkeypatch.setattr(patching, "_version_notes", lambda te, megatron: [note])
    with pytest.warns(UserWarning, match="was not tested") as caught:
        report = patch()
    assert caught[0].filename == __file__
    assert note in report.notes
    assert wrong(load(TE).checkpoint) == 0


def test_contexts_put_flags_back_and_keep_pairs_apart(folder: Path) -> None:
    patch()
    distributed = load(f"{TE}.distributed")
    forward, recompute = distributed.get_activation_recompute_contexts()

    def flags() -> tuple[bool, bool]:
        return distributed._IN_ACTIVATION_RECOMPUTE_REGION, distributed.in_fp8_activation_recompute_phase()

    with forward:
        assert flags() == (True, False)
        with recompute:
            assert flags() == (True, True)
            with distributed.activation_recompute_forward():
                assert flags() == (False, False)
            assert flags() == (True, True)
        assert flags() == (True, False)
    assert flags() == (False, False)
    for context in (distributed.activation_recompute_forward(True, False), forward):
        with pytest.raises(ValueError, match="x"), context:
            raise ValueError("x")
        assert flags() == (False, False)
    with distributed.activation_recompute_forward(True, True):  # built apart from any forward
        assert flags() == (True, True)
    assert transformer_engine_ext.pytorch.in_checkpoint_region() is False
