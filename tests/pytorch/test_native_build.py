# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The native library's compiler command, what is written beside the library, and which torch it fits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from _native import FakeCompiler, alive, torch_build, wait_until
from transformer_engine_ext.pytorch.rng import native_build, native_fit
from transformer_engine_ext.pytorch.rng.native_build import PHILOX, NativeBuildError, TorchBuild


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[FakeCompiler]:
    fake = FakeCompiler(tmp_path)
    yield fake
    fake.end()


@pytest.fixture
def built(tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a library for `torch_build()`."""
    compiler.use(monkeypatch)
    native_build.build(PHILOX, tmp_path / "built", torch_build(tmp_path))
    return tmp_path / "built"


def test_build_writes_library_and_information(built: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in built.iterdir()) == [PHILOX.info, PHILOX.file], "nothing temporary is left"
    assert (built / PHILOX.file).stat().st_mode & 0o777 == 0o755
    assert (built / PHILOX.info).stat().st_mode & 0o777 == 0o644
    info = json.loads((built / PHILOX.info).read_text())
    assert (info["torch"], info["cuda"], info["cxx11_abi"]) == ("2.11.0+cu130", "13.0", True)
    assert info["source_sha256"] == native_build.source_hash(PHILOX)
    assert native_fit.misfit(PHILOX, built, torch_build(tmp_path)) is None


def test_failed_build_says_why_and_keeps_what_was_there(
    built: Path, tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.use(monkeypatch, fail="no such header")
    before = {path.name: path.read_bytes() for path in built.iterdir()}
    with pytest.raises(NativeBuildError) as caught:
        native_build.build(PHILOX, built, torch_build(tmp_path, version="2.10.0+cu130"))
    assert "exit code 1" in str(caught.value)
    assert "error: no such header" in str(caught.value)
    assert str(PHILOX.source) in str(caught.value), "the command, to be tried by hand"
    assert {path.name: path.read_bytes() for path in built.iterdir()} == before


def test_compiler_that_hangs_is_ended_with_its_children(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.use(monkeypatch, until=tmp_path / "never")
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f'{compiler.env["CXX"]} "$@"\nexit $?\n')  # a driver that starts the real compiler, as g++ does
    monkeypatch.setenv("CXX", f"sh {wrapper}")
    for timeout in (2, 8, 32):  # longer on a busy machine, where the compiler starts late
        with pytest.raises(NativeBuildError, match=rf"not finished after {timeout} s: sh "):
            native_build.build(PHILOX, tmp_path / "built", torch_build(tmp_path), timeout=timeout)
        if compiler.runs:
            break
    (pid,) = compiler.runs
    wait_until(lambda: not alive(pid))
    assert list((tmp_path / "built").iterdir()) == []


def test_folder_that_cannot_be_written(tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.use(monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(NativeBuildError, match="cannot build in "):
        native_build.build(PHILOX, tmp_path / "file", torch_build(tmp_path))
    assert compiler.runs == []


@pytest.mark.parametrize(
    ("version", "standard"), [("2.8.0+cu126", 17), ("2.11.0", 17), ("2.12.0a0+5228986c39.nv25.06", 20), ("3.0.0", 20)]
)
def test_command(tmp_path: Path, version: str, standard: int) -> None:
    torch = torch_build(tmp_path, version=version, cxx11_abi=False)
    command = native_build.compile_command(PHILOX, ["ccache", "g++"], Path("out.so"), torch)
    assert command[:3] == ["ccache", "g++", f"-std=c++{standard}"]
    assert "-D_GLIBCXX_USE_CXX11_ABI=0" in command
    assert command[command.index("-isystem") + 1] == str(tmp_path / "include")
    assert command[command.index("-o") + 1] == "out.so"
    assert {f"-L{tmp_path / 'lib'}", "-ltorch_cuda", str(PHILOX.source)} <= set(command)


def test_compiler_is_cxx_or_the_first_of_the_usual_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler \(g\+\+, c\+\+, clang\+\+, or set CXX\)"):
        native_build.find_compiler()
    for name in ("clang++", "c++"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
        assert native_build.find_compiler() == [name]
    monkeypatch.setenv("CXX", "clang++ --target=x86_64-linux-gnu")
    assert native_build.find_compiler() == ["clang++", "--target=x86_64-linux-gnu"]
    monkeypatch.setenv("CXX", "absent++ -v")
    with pytest.raises(NativeBuildError, match=r"CXX='absent\+\+ -v' names no program"):
        native_build.find_compiler()


FITS: list[dict[str, Any]] = [
    {"version": "2.11.1+cu130"},  # patch releases keep the interface
    {"version": "2.11.0"},
    {"cuda": "13.2"},
]
MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"version": "2.12.0+cu130"}, "built for torch 2.11.0+cu130, this is torch 2.12.0+cu130"),
    ({"version": "2.1.0"}, "this is torch 2.1.0"),
    ({"version": "2.11.0a0+git1234"}, "this is torch 2.11.0a0"),  # an alpha is not the release
    ({"version": "2.11.0.dev20260101+cu130"}, "this is torch 2.11.0.dev"),
    ({"cuda": "12.8"}, "built for CUDA 13.0, this torch has 12.8"),
    ({"cuda": None}, "this torch has no CUDA"),
    ({"cxx11_abi": False}, "other C++ ABI"),
]


@pytest.mark.parametrize("change", FITS, ids=str)
def test_library_fits(built: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    assert native_fit.misfit(PHILOX, built, torch_build(tmp_path, **change)) is None


@pytest.mark.parametrize(("change", "reason"), MISFITS, ids=str)
def test_library_does_not_fit(built: Path, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    found = native_fit.misfit(PHILOX, built, torch_build(tmp_path, **change))
    assert found is not None
    assert reason in found


def test_two_builds_of_one_alpha_fit_only_when_equal(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.use(monkeypatch)
    alpha = torch_build(tmp_path, version="2.12.0a0+aaaa.nv26.01")
    native_build.build(PHILOX, tmp_path / "built", alpha)
    assert native_fit.misfit(PHILOX, tmp_path / "built", alpha) is None
    assert "nv26.02" in str(
        native_fit.misfit(PHILOX, tmp_path / "built", alpha._replace(version="2.12.0a0+bbbb.nv26.02"))
    )


DAMAGED: list[tuple[str, str]] = [
    ("", "damaged"),
    ("[]", "damaged"),
    ("{}", "damaged"),
    ('{"torch": 2}', "damaged"),
    ('{"torch": "x", "cuda": 13, "cxx11_abi": true, "format": 1, "machine": "m", "source_sha256": ""}', "damaged"),
    ('{"torch": "2.11.0", "cuda": 13, "cxx11_abi": 1, "format": 2, "machine": "m", "source_sha256": ""}', "format 2"),
]


@pytest.mark.parametrize(("text", "reason"), DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_information(built: Path, tmp_path: Path, text: str, reason: str) -> None:
    (built / PHILOX.info).write_text(text)
    assert reason in str(native_fit.misfit(PHILOX, built, torch_build(tmp_path)))


def test_missing_files_other_machine_other_source(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_build(tmp_path)
    other = PHILOX._replace(source=tmp_path / "philox_state.cpp")
    assert native_fit.misfit(other, built, torch) is None, "an installation may leave the source out"
    other.source.write_text("// newer")
    assert "another version of philox_state.cpp" in str(native_fit.misfit(other, built, torch))
    monkeypatch.setattr(native_build.platform, "machine", lambda: "riscv64")
    assert "this machine is riscv64" in str(native_fit.misfit(PHILOX, built, torch))
    (built / PHILOX.info).unlink()
    assert "nobody knows which torch" in str(native_fit.misfit(PHILOX, built, torch))
    (built / PHILOX.file).unlink()
    assert f"there is no {PHILOX.file} in {built}" == native_fit.misfit(PHILOX, built, torch)


def test_obstacles(tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.use(monkeypatch)
    assert PHILOX.obstacle() is None
    monkeypatch.setenv("CXX", "absent++")
    assert "absent++" in str(PHILOX.obstacle())
    monkeypatch.setattr(native_build.sys, "platform", "win32")
    assert "Linux only, this is win32" in str(PHILOX.obstacle())


def test_which_torch_has_a_use_for_it(tmp_path: Path) -> None:
    assert PHILOX.unused(torch_build(tmp_path)) is None
    assert "(without CUDA): there is no CUDA generator" in str(PHILOX.unused(torch_build(tmp_path, cuda=None)))
    assert str(PHILOX.unused(torch_build(tmp_path, reads_itself=True))).endswith("needs none")


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> str:
        return native_build.switch("NVTE_EXT_SOMETHING", "auto", ["auto", "0", "1"])

    monkeypatch.delenv("NVTE_EXT_SOMETHING", raising=False)
    assert read() == "auto"
    for text, value in {"": "auto", " 1 ": "1", "0": "0", "auto": "auto"}.items():
        monkeypatch.setenv("NVTE_EXT_SOMETHING", text)
        assert read() == value
    monkeypatch.setenv("NVTE_EXT_SOMETHING", "yes")
    with pytest.raises(
        NativeBuildError, match=r"NVTE_EXT_SOMETHING='yes' is unknown: expected one of auto, 0, 1 \(default auto\)"
    ):
        read()


def test_running_torch_is_described() -> None:
    import torch

    build = TorchBuild.running()
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda)
    assert build.reads_itself == hasattr(torch.Generator, "philox_state")
    assert (build.root / "version.py").is_file()
    assert torch.__version__.startswith(".".join(map(str, build.minor)) + ".")


def test_it_needs_the_standard_library_only() -> None:
    """``setup.py`` runs the file where there is no torch."""
    program = f"""
import runpy, sys
sys.modules["torch"] = sys.modules["transformer_engine_ext"] = None  # importing either is an error
runpy.run_path({native_build.__file__!r})
"""
    subprocess.run([sys.executable, "-S", "-c", program], check=True, timeout=60, stdin=subprocess.DEVNULL)
