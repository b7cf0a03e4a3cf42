# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``setup.py``: when the native library is built, what happens when it can't be, and what the wheel then is."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from _helpers import REPO
from _native import FakeCompiler, torch_build
from transformer_engine_ext.pytorch.rng.native_build import INFO, LIBRARY, TorchBuild

setuptools = pytest.importorskip(
    "setuptools", minversion="77", reason="setup.py needs setuptools 77, as pyproject says"
)

FOLDER = "transformer_engine_ext/csrc"


class Bench:
    """``setup.py`` as a module, a command that it defines, and a torch and a compiler that are made up."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = importlib.util.spec_from_file_location("setup_under_test", REPO / "setup.py")
        assert spec is not None
        assert spec.loader is not None
        self.module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.compiler = FakeCompiler(folder)
        self.compiler.use(monkeypatch)
        self.root = folder / "torch"
        self.lib = folder / "build" / "lib"
        self.target = self.lib / FOLDER
        self.monkeypatch = monkeypatch
        self.warnings: list[str] = []
        self.torch(torch_build(self.root))
        self.distribution = setuptools.Distribution(
            {
                "name": "sample",
                "version": "1",
                "cmdclass": {"build_native": self.module.BuildNative, "bdist_wheel": self.module.BdistWheel},
            }
        )
        self.command = self.distribution.get_command_obj("build_native")
        self.command.build_lib = str(self.lib)
        monkeypatch.setattr(self.command, "warn", self.warnings.append)

    def torch(self, found: TorchBuild | Exception) -> None:
        """Say what importing torch gives."""

        def running(cls: type) -> TorchBuild:
            if isinstance(found, Exception):
                raise found
            return found

        self.monkeypatch.setattr(self.module.native.TorchBuild, "running", classmethod(running))

    def setting(self, value: str) -> None:
        self.monkeypatch.setenv("NVTE_EXT_WITH_CSRC", value)

    def run(self) -> bool:
        """Run the command; return whether it built."""
        self.command.ensure_finalized()
        self.command.run()
        files = sorted(path.name for path in self.target.glob("*")) if self.target.exists() else []
        assert files in ([], [INFO, LIBRARY])
        assert self.command.has_library() == bool(files)
        assert self.command.get_outputs() == [str(self.target / name) for name in reversed(files)]
        return bool(files)

    def tag(self) -> tuple[str, str, str]:
        return self.command.get_finalized_command("bdist_wheel").get_tag()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.delenv("NVTE_EXT_WITH_CSRC", raising=False)
    monkeypatch.chdir(tmp_path)
    bench = Bench(tmp_path, monkeypatch)
    yield bench
    bench.compiler.end()


@pytest.mark.parametrize("setting", ["", "auto", "1"])
def test_built_where_it_is_possible(bench: Bench, setting: str) -> None:
    bench.setting(setting)
    assert bench.run()
    assert bench.warnings == []


def test_never_means_that_torch_is_not_even_imported(bench: Bench) -> None:
    bench.setting("0")
    bench.torch(AssertionError("imported"))
    assert not bench.run()
    assert (bench.warnings, bench.compiler.runs) == ([], [])


NOT_POSSIBLE = {
    "no torch": (ImportError("No module named 'torch'"), "No module named 'torch'"),
    "broken torch": (OSError("libcudart.so.13: cannot open"), "libcudart.so.13"),
    "no CUDA": (torch_build(Path(), version="2.11.0+cpu", cuda=None), "torch 2.11.0+cpu (without CUDA)"),
}


@pytest.mark.parametrize("case", NOT_POSSIBLE)
def test_not_possible(bench: Bench, case: str) -> None:
    found, reason = NOT_POSSIBLE[case]
    bench.torch(found)
    assert not bench.run()
    (warning,) = bench.warnings
    assert warning.startswith("going on without the native library: ")
    assert reason in warning
    assert bench.tag() == ("py3", "none", "any")
    bench.setting("1")
    with pytest.raises(setuptools.errors.CompileError, match="NVTE_EXT_WITH_CSRC=1, but the native library") as caught:
        bench.run()
    assert reason in str(caught.value)
    assert bench.compiler.runs == []


def test_without_torch_the_advice_is_to_build_without_isolation(bench: Bench) -> None:
    bench.setting("1")
    bench.torch(ImportError("No module named 'torch'"))
    with pytest.raises(setuptools.errors.CompileError, match="--no-build-isolation"):
        bench.run()


def test_failing_compiler(bench: Bench) -> None:
    bench.compiler.use(bench.monkeypatch, fail="no such header")
    assert not bench.run()
    assert "error: no such header" in bench.warnings[0]
    bench.setting("1")
    with pytest.raises(setuptools.errors.CompileError, match="error: no such header"):
        bench.run()
    assert list(bench.target.iterdir()) == []


def test_torch_that_needs_no_library_gets_one_on_demand_only(bench: Bench) -> None:
    bench.torch(torch_build(bench.root, version="2.14.1+cu130", reads_itself=True))
    assert not bench.run()
    assert "torch 2.14.1+cu130 (CUDA 13.0) needs none" in bench.warnings[0]
    bench.setting("1")
    assert bench.run()


def test_unknown_setting(bench: Bench) -> None:
    bench.setting("yes")
    with pytest.raises(setuptools.errors.OptionError, match="NVTE_EXT_WITH_CSRC='yes' is unknown"):
        bench.run()


def test_library_of_an_earlier_build_does_not_stay(bench: Bench) -> None:
    """``build/lib`` outlives a build, and everything in it gets into the next wheel."""
    assert bench.run()
    bench.setting("0")
    assert not bench.run()
    assert bench.tag() == ("py3", "none", "any")


def test_tag_with_a_library(bench: Bench) -> None:
    assert bench.run()
    python, abi, platform = bench.tag()
    assert (python, abi) == ("py3", "none")
    assert platform.startswith("linux_")


def test_editable_installation_keeps_it_beside_the_source(bench: Bench, tmp_path: Path) -> None:
    bench.monkeypatch.setattr(bench.module, "ROOT", tmp_path)
    bench.command.ensure_finalized()
    bench.command.editable_mode = True
    bench.command.run()
    here = tmp_path / FOLDER
    assert sorted(path.name for path in here.iterdir()) == [INFO, LIBRARY]
    assert not bench.target.exists()
    assert not bench.command.has_library(), "not a part of the wheel"
    expected = {str(bench.target / name): f"{FOLDER}/{name}" for name in (LIBRARY, INFO)}
    assert bench.command.get_output_mapping() == expected
    assert bench.command.get_outputs() == list(expected)


def test_source_distribution_has_the_source(bench: Bench) -> None:
    (source,) = bench.command.get_source_files()
    assert (REPO / source).is_file()
    assert ("build_native", None) in bench.module.Build.sub_commands


FAKE_TORCH = """
__version__ = "2.11.0+cu130"
class version: cuda = "13.0"
class Generator: pass
def compiled_with_cxx11_abi(): return True
"""


@pytest.mark.parametrize(("setting", "pure"), [("auto", False), ("0", True)])
def test_wheel_from_a_to_z(tmp_path: Path, setting: str, pure: bool) -> None:
    """setuptools asks for the tag after it has built and put everything in place; if that changes, this fails."""
    project = tmp_path / "project"
    for name in ("setup.py", "pyproject.toml", "LICENSE", "transformer_engine_ext/__init__.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, project / name)
    for name in (FOLDER, "transformer_engine_ext/pytorch"):
        shutil.copytree(REPO / name, project / name, ignore=shutil.ignore_patterns("*.so", "*.json", "__pycache__"))
    (project / "README.md").write_text("readme")
    (tmp_path / "fake" / "torch").mkdir(parents=True)
    (tmp_path / "fake" / "torch" / "__init__.py").write_text(FAKE_TORCH)
    compiler = FakeCompiler(tmp_path)
    result = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path / "dist")],
        cwd=project,
        env={
            **os.environ,
            **compiler.env,
            "NVTE_EXT_WITH_CSRC": setting,
            "PYTHONPATH": str(tmp_path / "fake"),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL"))
    assert f"{FOLDER}/philox_state.cpp" in names
    assert ({f"{FOLDER}/{LIBRARY}", f"{FOLDER}/{INFO}"} <= names) == (not pure)
    assert not [name for name in names if ".data/" in name], "everything lies at the top of the wheel"
    assert wheel.name.endswith("-py3-none-any.whl") == pure
    assert f"Root-Is-Purelib: {str(pure).lower()}" in metadata
    assert len(compiler.runs) == (not pure)
