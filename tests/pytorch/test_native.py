# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""How a captured stream's words are found: torch's method, the installed library, one built on demand, or why not."""

from __future__ import annotations

import contextlib
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from _native import FakeCompiler, torch_build
from transformer_engine_ext.errors import NativeUnavailableError, SettingError, UnsupportedCaptureError
from transformer_engine_ext.pytorch.rng import native, native_build, native_find, native_jit, native_streams
from transformer_engine_ext.pytorch.rng.native_build import PHILOX, TorchBuild


@pytest.fixture(autouse=True)
def as_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what this process found and read so far; give it back afterwards."""
    for name in ("NVTE_EXT_NATIVE", "NVTE_EXT_JIT", "NVTE_EXT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(native, "_reader", None)
    monkeypatch.setattr(native, "_warm", False)
    monkeypatch.setattr(native_streams, "prepare", lambda: None)  # see test_native_streams.py
    settings = native_find.settings
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def torch_211(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process look like one with torch 2.11 and CUDA; returns the folder for the installed library."""
    build = torch_build(tmp_path / "torch")
    monkeypatch.setattr(TorchBuild, "running", classmethod(lambda cls: build))
    monkeypatch.setattr(native_find, "PACKAGE_FOLDER", tmp_path / "csrc")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setenv("NVTE_EXT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "csrc"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCompiler]:
    fake = FakeCompiler(tmp_path)
    fake.use(monkeypatch)
    yield fake
    fake.end()


def reason() -> str:
    available, text = native.native_status()
    assert not available
    return text


@pytest.mark.parametrize(
    ("name", "value", "allowed"), [("NVTE_EXT_NATIVE", "yes", "auto, 0, 1"), ("NVTE_EXT_JIT", "auto", "0, 1")]
)
def test_unknown_setting(monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str) -> None:
    monkeypatch.setenv(name, value)
    for use in (native.native_status, native.prepare, native.warm_up):
        with pytest.raises(SettingError, match=f"{name}='{value}' is unknown: expected one of {allowed} "):
            use()


def test_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_EXT_NATIVE", "0")
    before = native_find.settings()
    monkeypatch.setenv("NVTE_EXT_NATIVE", "yes")
    assert native_find.settings() is before


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for reads_itself in (False, True):
        build = torch_build(tmp_path, version="2.11.0+cpu", cuda=None, reads_itself=reads_itself)
        monkeypatch.setattr(TorchBuild, "running", classmethod(lambda cls, build=build: build))
        assert reason().startswith("torch 2.11.0+cpu (without CUDA) has no CUDA graphs")
        with pytest.raises(NativeUnavailableError, match="has no CUDA graphs"):
            native.prepare()
        with pytest.raises(UnsupportedCaptureError, match="has no CUDA graphs"):
            native.captured_words(torch.Generator())


def test_missing_library_says_what_to_do(torch_211: Path) -> None:
    text = reason()
    for part in (
        "torch 2.11.0+cu130 (CUDA 13.0)",
        f"there is no {PHILOX.file} in {torch_211}",
        "install torch >= 2.14",
        "NVTE_EXT_WITH_CSRC=1 pip install --no-build-isolation --no-deps --force-reinstall",
        "NVTE_EXT_JIT=1",
        "transformer_engine_ext.pytorch.rng.native.prepare()",
    ):
        assert part in text
    with pytest.raises(UnsupportedCaptureError, match=re.escape(text)):
        native.captured_words(torch.Generator())
    with pytest.raises(ImportError, match=re.escape(text)):
        native.prepare()


def test_library_for_another_torch_is_not_loaded(
    torch_211: Path, tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_build.build(PHILOX, torch_211, torch_build(tmp_path, version="2.10.0+cu130"))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail(f"loaded {path}"))
    assert "was built for torch 2.10.0+cu130, this is torch 2.11.0+cu130" in reason()


def test_library_that_cannot_be_loaded(torch_211: Path, tmp_path: Path, compiler: FakeCompiler) -> None:
    native_build.build(PHILOX, torch_211, torch_build(tmp_path))
    assert f"{torch_211 / PHILOX.file} cannot be loaded: " in reason()


def test_native_0_forbids_the_library(
    torch_211: Path, tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_build.build(PHILOX, torch_211, torch_build(tmp_path))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail(f"loaded {path}"))
    monkeypatch.setenv("NVTE_EXT_NATIVE", "0")
    monkeypatch.setenv("NVTE_EXT_JIT", "1")
    assert "NVTE_EXT_NATIVE=0 forbids it" in reason()
    with pytest.raises(NativeUnavailableError):
        native.prepare()
    assert len(compiler.runs) == 1


# See Note [Successes are kept, failures are not]


def test_failure_is_tried_again_and_success_is_kept(
    torch_211: Path, tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert "there is no" in reason()
    native_build.build(PHILOX, torch_211, torch_build(tmp_path))
    expected = (True, f"{torch_211 / PHILOX.file}, built for torch 2.11.0+cu130 (CUDA 13.0)")
    assert native.native_status() == expected
    shutil.rmtree(torch_211)
    assert native.native_status() == expected
    native.prepare()
    assert loaded == [str(torch_211 / PHILOX.file)]


def test_jit_builds_in_prepare_only(
    torch_211: Path, tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setenv("NVTE_EXT_JIT", "1")
    assert "NVTE_EXT_JIT=1, but the library was not built before it was needed" in reason()
    with pytest.raises(UnsupportedCaptureError, match="was not built before it was needed"):
        native.captured_words(torch.Generator())
    assert compiler.runs == []
    native.prepare()
    assert len(compiler.runs) == 1
    (library,) = loaded
    assert Path(library).parent.parent == tmp_path / "cache"
    monkeypatch.setattr(native, "_reader", None)
    assert native.native_status()[0], "the next process finds it without asking for a build"
    assert len(compiler.runs) == 1


def test_jit_does_not_build_during_capture(
    torch_211: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_EXT_JIT", "1")
    monkeypatch.setattr(native_find, "capturing", lambda: True)
    with pytest.raises(UnsupportedCaptureError, match=r"native\.prepare\(\) before the capture starts"):
        native.prepare()
    native.warm_up()
    assert compiler.runs == []
    monkeypatch.setattr(native_find, "capturing", lambda: False)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    native.warm_up()
    assert len(compiler.runs) == 1, "a warm-up that came too early is made up for"


def test_jit_that_fails(torch_211: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_EXT_JIT", "1")
    compiler.use(monkeypatch, fail="no such header")
    with pytest.raises(NativeUnavailableError, match=r"building it failed: (.|\n)*error: no such header"):
        native.prepare()
    monkeypatch.setenv("CXX", "absent++")
    with pytest.raises(NativeUnavailableError, match=r"NVTE_EXT_JIT=1, but CXX='absent\+\+' names no program"):
        native.prepare()


def test_jit_library_that_is_damaged(
    torch_211: Path, tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_EXT_JIT", "1")
    with pytest.raises(NativeUnavailableError, match="cannot be loaded"):
        native.prepare()
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / PHILOX.info).write_text("")
    assert f"is damaged (JSONDecodeError: Expecting value: line 1 column 1 (char 0)); delete {folder}" in reason()
    monkeypatch.setattr(native_jit, "distrust", lambda library: "it is another user's")
    assert f"it is another user's; delete {folder}" in reason()


def test_warm_up_without_a_request_looks_for_nothing(torch_211: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_find", lambda **_: pytest.fail("looked"))
    native.warm_up()
    monkeypatch.setattr(native_find, "settings", lambda: pytest.fail("asked again"))
    native.warm_up()


def test_native_1_fails_at_the_first_region(torch_211: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_EXT_NATIVE", "1")
    for _ in range(2):
        with pytest.raises(NativeUnavailableError, match="there is no"):
            native.warm_up()


def test_jit_failure_is_a_warning_once(
    torch_211: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_EXT_JIT", "1")
    compiler.use(monkeypatch, fail="no such header")
    with pytest.warns(RuntimeWarning, match=r"no such header(.|\n)*Training without capture is not affected"):
        native.warm_up()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        native.warm_up()
    assert len(compiler.runs) == 1


class Stream(SimpleNamespace):
    """A generator of torch >= 2.14, as far as reading goes."""

    device = torch.device("cuda:0")

    def philox_state(self, increment: int) -> Any:
        assert increment == 0
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def torch_214(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build = torch_build(tmp_path, version="2.14.1+cu130", reads_itself=True)
    monkeypatch.setattr(TorchBuild, "running", classmethod(lambda cls: build))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def test_torch_214_reads_itself(torch_214: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_EXT_NATIVE", "0")  # forbids the library, not torch
    assert native.native_status() == (True, "torch.Generator.philox_state of torch 2.14.1+cu130 (CUDA 13.0)")
    native.prepare()
    words = SimpleNamespace(device=torch.device("cuda:0")), SimpleNamespace(device=torch.device("cuda:0"))
    read = native.captured_words(Stream(answer=(*words, torch.tensor([24]))))
    assert read == (*words, 24)
    assert type(read[2]) is int


def test_torch_214_outside_capture(torch_214: None) -> None:
    values = torch.tensor([1]), torch.tensor([2]), torch.tensor([0])  # then torch answers with values on the host
    with pytest.raises(native.NotRegistered, match="nothing is being captured on the device's current CUDA stream"):
        native.captured_words(Stream(answer=values))


def test_only_errors_of_cuda_are_passed_on(torch_214: None) -> None:
    with pytest.raises(native.NotRegistered, match=r"^no graph of torch's$") as caught:
        native.captured_words(Stream(answer=RuntimeError("no graph of torch's\nException raised from f at g.cpp:1")))
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(torch.AcceleratorError, match="capture was invalidated"):
        native.captured_words(Stream(answer=torch.AcceleratorError("capture was invalidated")))
