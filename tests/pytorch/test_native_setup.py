# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``setup.py``: which native libraries are built, what happens when one can't be, and what the wheel then is."""

from __future__ import annotations

import fnmatch
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
from transformer_engine_ext.pytorch.rng.native_build import LIBRARIES, PHILOX, STREAMS, TorchBuild

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

    def run(self) -> list[str]:
        """Run the command; return the names of the libraries that it built."""
        self.command.ensure_finalized()
        self.command.run()
        files = {path.name for path in self.target.glob("*")} if self.target.exists() else set()
        built = [library for library in LIBRARIES if library.file in files]
        assert files == {name for library in built for name in library.files}, "each with its information"
        assert [library for library in LIBRARIES if self.command.has(library)] == built
        assert self.command.has(*LIBRARIES) == bool(built)
        assert self.command.get_outputs() == [str(self.target / name) for library in built for name in library.files]
        return [library.name for library in built]

    def tag(self) -> tuple[str, str, str]:
        return self.command.get_finalized_command("bdist_wheel").get_tag()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.delenv("NVTE_EXT_WITH_CSRC", raising=False)
    monkeypatch.chdir(tmp_path)
    bench = Bench(tmp_path, monkeypatch)
    yield bench
    bench.compiler.end()


BOTH = ["philox_state", "streams"]

#: What the torch at hand is, and the libraries that it has a use for.
OF_USE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "CUDA before 2.14": ({}, BOTH),
    "CUDA from 2.14 on": ({"version": "2.14.1+cu130", "reads_itself": True}, ["streams"]),
    "no CUDA": ({"version": "2.11.0+cpu", "cuda": None}, ["streams"]),
}


@pytest.mark.parametrize("case", OF_USE)
@pytest.mark.parametrize("setting", ["", "auto", "1"])
def test_what_is_of_use_is_built(bench: Bench, setting: str, case: str) -> None:
    changes, expected = OF_USE[case]
    bench.setting(setting)
    bench.torch(torch_build(bench.root, **changes))
    assert bench.run() == expected
    assert (bench.warnings, len(bench.compiler.runs)) == ([], len(expected))


def test_never_means_that_torch_is_not_even_imported(bench: Bench) -> None:
    bench.setting("0")
    bench.torch(AssertionError("imported"))
    assert bench.run() == []
    assert (bench.warnings, bench.compiler.runs) == ([], [])


NO_TORCH = {
    "no torch": ImportError("No module named 'torch'"),
    "broken torch": OSError("libcudart.so.13: cannot open"),
}


@pytest.mark.parametrize("case", NO_TORCH)
def test_without_torch_the_advice_is_to_build_without_isolation(bench: Bench, case: str) -> None:
    bench.torch(NO_TORCH[case])
    assert bench.run() == []
    (warning,) = bench.warnings
    assert warning.startswith("going on without the native libraries: ")
    assert bench.tag() == ("py3", "none", "any")
    bench.setting("1")
    with pytest.raises(
        setuptools.errors.CompileError, match="NVTE_EXT_WITH_CSRC=1, but the native libraries can't be built"
    ) as caught:
        bench.run()
    for text in (warning, str(caught.value)):
        assert str(NO_TORCH[case]) in text
        assert "--no-build-isolation" in text
    assert bench.compiler.runs == []


def test_failing_compiler(bench: Bench) -> None:
    bench.compiler.use(bench.monkeypatch, fail="no such header")
    assert bench.run() == []
    first, second = bench.warnings
    assert first.startswith(
        "going on without philox_state.so (reads streams while CUDA graphs are captured): exit code"
    )
    assert second.startswith("going on without streams.so (moves streams faster): exit code")
    for warning in bench.warnings:
        assert "error: no such header" in warning
    bench.setting("1")
    with pytest.raises(setuptools.errors.CompileError, match=r"but philox_state.so (.|\n)*error: no such header"):
        bench.run()
    assert list(bench.target.iterdir()) == []


def test_one_that_is_not_possible_does_not_hinder_the_other(bench: Bench) -> None:
    bench.monkeypatch.setattr(bench.module.native, "python_misfit", lambda: "this Python loads none")
    assert bench.run() == ["philox_state"]
    assert bench.warnings == ["going on without streams.so (moves streams faster): this Python loads none"]
    bench.setting("1")
    with pytest.raises(
        setuptools.errors.CompileError,
        match=r"^NVTE_EXT_WITH_CSRC=1, but streams.so \(moves streams faster\) can't be built: this Python loads none",
    ):
        bench.run()


def test_unknown_setting(bench: Bench) -> None:
    bench.setting("yes")
    with pytest.raises(setuptools.errors.OptionError, match="NVTE_EXT_WITH_CSRC='yes' is unknown"):
        bench.run()


def test_libraries_of_an_earlier_build_do_not_stay(bench: Bench) -> None:
    """``build/lib`` outlives a build, and everything in it gets into the next wheel."""
    assert bench.run() == BOTH
    bench.torch(torch_build(bench.root, cuda=None))
    assert bench.run() == ["streams"]
    bench.setting("0")
    assert bench.run() == []
    assert bench.tag() == ("py3", "none", "any")


@pytest.mark.parametrize(
    ("without", "expected"),
    [((), ("cp310", "abi3")), (("philox_state",), ("cp310", "abi3")), (("streams",), ("py3", "none"))],
)
def test_tag_says_which_pythons_can_load_what_is_in(
    bench: Bench, without: tuple[str, ...], expected: tuple[str, str]
) -> None:
    assert bench.run() == BOTH
    for library in LIBRARIES:
        if library.name in without:
            (bench.target / library.file).unlink()
    python, abi, platform = bench.tag()
    assert (python, abi) == expected
    assert platform.startswith("linux_")


def test_editable_installation_keeps_them_beside_their_sources(bench: Bench, tmp_path: Path) -> None:
    bench.monkeypatch.setattr(bench.module, "ROOT", tmp_path)
    bench.command.ensure_finalized()
    bench.command.editable_mode = True
    bench.command.run()
    here = tmp_path / FOLDER
    names = [*PHILOX.files, *STREAMS.files]
    assert sorted(path.name for path in here.iterdir()) == sorted(names)
    assert not bench.target.exists()
    assert not bench.command.has(*LIBRARIES), "not a part of the wheel"
    expected = {str(bench.target / name): f"{FOLDER}/{name}" for name in names}
    assert bench.command.get_output_mapping() == expected
    assert bench.command.get_outputs() == list(expected)
    (here / STREAMS.file).unlink()
    assert str(bench.target / STREAMS.file) not in bench.command.get_output_mapping()


def test_source_distribution_has_the_sources(bench: Bench) -> None:
    sources = bench.command.get_source_files()
    assert {f"{FOLDER}/{library.source.name}" for library in LIBRARIES} <= set(sources)
    assert {f"{FOLDER}/{path.name}" for path in (REPO / FOLDER).iterdir() if path.suffix in (".cpp", ".h")} == set(
        sources
    )
    assert [source for source in sources if not (REPO / source).is_file()] == []
    assert ("build_native", None) in bench.module.Build.sub_commands


#: Says too where Python's headers lie, which not every machine has.
FAKE_TORCH = """
import sysconfig
paths = {**sysconfig.get_paths(), "include": HEADERS}
sysconfig.get_paths = lambda *_, **__: paths
__version__ = "2.11.0+cu130"
class version: cuda = CUDA
class Generator: pass
def compiled_with_cxx11_abi(): return True
"""


@pytest.mark.parametrize(
    ("setting", "cuda", "built", "tag"),
    [
        ("auto", "13.0", LIBRARIES, "cp310-abi3-linux_*"),
        ("1", None, (STREAMS,), "cp310-abi3-linux_*"),
        ("0", "13.0", (), "py3-none-any"),
    ],
)
def test_wheel_from_a_to_z(tmp_path: Path, setting: str, cuda: str | None, built: tuple[Any, ...], tag: str) -> None:
    """setuptools asks for the tag after it has built and put everything in place; if that changes, this fails."""
    project = tmp_path / "project"
    for name in ("setup.py", "pyproject.toml", "LICENSE", "transformer_engine_ext/__init__.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, project / name)
    for name in (FOLDER, "transformer_engine_ext/pytorch"):
        shutil.copytree(REPO / name, project / name, ignore=shutil.ignore_patterns("*.so", "*.json", "__pycache__"))
    (project / "README.md").write_text("readme")
    (tmp_path / "fake" / "torch").mkdir(parents=True)
    compiler = FakeCompiler(tmp_path)
    fake = FAKE_TORCH.replace("CUDA", repr(cuda)).replace("HEADERS", repr(str(compiler.headers)))
    (tmp_path / "fake" / "torch" / "__init__.py").write_text(fake)
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
    assert {f"{FOLDER}/{path.name}" for path in (REPO / FOLDER).iterdir() if path.suffix in (".cpp", ".h")} <= names
    for library in LIBRARIES:
        found = {f"{FOLDER}/{name}" for name in library.files} & names
        assert len(found) == (2 if library in built else 0)
    assert not [name for name in names if ".data/" in name], "everything lies at the top of the wheel"
    assert fnmatch.fnmatch(wheel.name, f"*-{tag}.whl")
    assert f"Root-Is-Purelib: {str(not built).lower()}" in metadata
    assert len(compiler.runs) == len(built)
