# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The native library that is an extension module: how it is compiled, what it fits; and one compiled for real."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from _helpers import REPO, measured
from _native import FakeCompiler, torch_build
from transformer_engine_ext.pytorch.rng import native_build, native_fit
from transformer_engine_ext.pytorch.rng.native_build import PHILOX, STREAMS, NativeBuildError, TorchBuild


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCompiler]:
    fake = FakeCompiler(tmp_path)
    fake.use(monkeypatch)
    yield fake
    fake.end()


@pytest.fixture
def built(tmp_path: Path, compiler: FakeCompiler) -> Path:
    """A folder with both libraries for `torch_build()`."""
    for library in (PHILOX, STREAMS):
        native_build.build(library, tmp_path / "built", torch_build(tmp_path))
    return tmp_path / "built"


def misfit(folder: Path, **torch: Any) -> str:
    return native_fit.misfit(STREAMS, folder, torch_build(folder, **torch)) or ""


def test_command(tmp_path: Path, compiler: FakeCompiler) -> None:
    torch = torch_build(tmp_path, version="2.12.0")
    command = native_build.compile_command(STREAMS, ["g++"], Path("out.so"), torch)
    includes = [word for before, word in itertools.pairwise(command) if before == "-isystem"]
    torch_include = tmp_path / "include"
    api = torch_include / "torch" / "csrc" / "api" / "include"
    assert includes == [str(torch_include), str(api), str(compiler.headers)]
    assert {"-std=c++20", "-O2", "-DPy_LIMITED_API=0x030A0000", str(STREAMS.source)} <= set(command)
    assert [word for word in command if word.startswith("-l")] == ["-lc10", "-ltorch_cpu", "-ltorch_python"]
    assert "-Wl,--no-undefined" not in command, "Python's own names are the interpreter's"
    other = native_build.compile_command(PHILOX, ["g++"], Path("out.so"), torch)
    assert [word for word in other if "LIMITED" in word or "python" in word] == []


def test_it_is_of_use_with_every_torch(tmp_path: Path) -> None:
    for change in ({}, {"cuda": None}, {"reads_itself": True}):
        assert STREAMS.unused(torch_build(tmp_path, **change)) is None


def test_obstacles(tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert STREAMS.obstacle() is None
    monkeypatch.setenv("CXX", "absent++")
    assert "absent++" in str(STREAMS.obstacle())
    (compiler.headers / "Python.h").unlink()
    assert STREAMS.obstacle() == (
        f"there is no Python.h in {compiler.headers}: install Python's headers (python3-dev or python3-devel)"
    )
    assert "absent++" in str(PHILOX.obstacle()), "the other needs no headers of Python"
    with monkeypatch.context() as patch:
        patch.setattr(native_build.sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else None)
        assert str(STREAMS.obstacle()).startswith("a free-threaded build of CPython")
        assert "absent++" in str(PHILOX.obstacle())
        patch.setattr(native_build.sys, "implementation", SimpleNamespace(name="pypy"))
        assert str(STREAMS.obstacle()).endswith("this is pypy")
        patch.setattr(native_build.sys, "platform", "darwin")
        assert str(STREAMS.obstacle()).endswith("Linux only, this is darwin")


def test_information(built: Path) -> None:
    info = json.loads((built / STREAMS.info).read_text())
    assert (info["python"], info["limited_api"]) == (sys.implementation.name, "3.10")
    assert info["source_sha256"] == native_build.source_hash(STREAMS)
    assert sorted(path.name for path in built.iterdir()) == sorted([*PHILOX.files, *STREAMS.files])
    assert "python" not in json.loads((built / PHILOX.info).read_text())


def test_headers_count_as_source(tmp_path: Path, compiler: FakeCompiler) -> None:
    library, torch = STREAMS._replace(source=tmp_path / "streams.cpp"), torch_build(tmp_path)
    library.source.write_text('#include "streams_cpu.h"')
    for name in ("streams_cpu.h", "streams_cuda.h", "philox_state.h"):
        (tmp_path / name).write_text("// old")
    assert [path.name for path in library.headers] == ["streams_cpu.h", "streams_cuda.h"]
    native_build.build(library, tmp_path / "built", torch)
    (tmp_path / "philox_state.h").write_text("// new")
    assert native_fit.misfit(library, tmp_path / "built", torch) is None
    (tmp_path / "streams_cuda.h").write_text("// new")
    assert "another version of streams.cpp" in str(native_fit.misfit(library, tmp_path / "built", torch))
    (tmp_path / "streams_cuda.h").write_text("// old")
    (tmp_path / "streams_cuda.h").rename(tmp_path / "streams_gpu.h")
    assert "another version of streams.cpp" in str(native_fit.misfit(library, tmp_path / "built", torch))


def test_cuda_does_not_matter_to_it(built: Path) -> None:
    for cuda in ("13.0", "12.8", None):
        assert misfit(built, cuda=cuda) == ""
    assert native_fit.misfit(PHILOX, built, torch_build(built, cuda="12.8")) is not None


def test_each_is_judged_by_its_own_information(built: Path, tmp_path: Path) -> None:
    native_build.build(PHILOX, built, torch_build(tmp_path, version="2.12.0+cu130"))
    assert misfit(built) == ""
    assert "built for torch 2.12.0" in str(native_fit.misfit(PHILOX, built, torch_build(tmp_path)))
    (built / PHILOX.info).unlink()
    assert misfit(built) == ""


def test_it_does_not_fit(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for change, reason in (
        ({"version": "2.12.0+cu130"}, "was built for torch 2.11.0+cu130, this is torch 2.12.0+cu130"),
        ({"version": "2.11.0a0+git1"}, "this is torch 2.11.0a0+git1"),
        ({"cxx11_abi": False}, "other C++ ABI"),
    ):
        assert reason in misfit(built, **change)
    with monkeypatch.context() as patch:
        patch.setattr(native_build.sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else None)
        assert f"{built / STREAMS.file} cannot be loaded: a free-threaded build" in misfit(built)
        patch.setattr(native_build.sys, "implementation", SimpleNamespace(name="graalpy"))
        assert "this is graalpy" in misfit(built)
    info = json.loads((built / STREAMS.info).read_text())
    (built / STREAMS.info).write_text(json.dumps(info | {"python": "pypy"}))
    assert f"was built for pypy, this is {sys.implementation.name}" in misfit(built)
    del info["python"]
    (built / STREAMS.info).write_text(json.dumps(info))
    assert "is damaged (KeyError: 'python')" in misfit(built)


SOURCE = r"""
#include <torch/csrc/Generator.h>
static_assert(Py_LIMITED_API == 0x030A0000, "or one build would not serve every CPython from 3.10 on");
static PyObject* seed_of(PyObject*, PyObject* handle) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(handle)) != THPGeneratorClass) return PyErr_Format(PyExc_TypeError, "none");
  return PyLong_FromUnsignedLongLong(reinterpret_cast<THPGenerator*>(handle)->cdata.current_seed());
}
static PyMethodDef methods[] = {{"seed_of", seed_of, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "transformer_engine_ext_streams", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_transformer_engine_ext_streams() { return PyModule_Create(&module); }
"""

#: What a module that is compiled in the package's way does when it is loaded in the package's way.
USE = """
import sys
from pathlib import Path
import torch
import transformer_engine_ext.pytorch
from transformer_engine_ext.pytorch.rng import native_find, native_streams

def mapped():
    return str(native_find.PACKAGE_FOLDER / "streams.so") in Path("/proc/self/maps").read_text()

native_find.PACKAGE_FOLDER = Path(sys.argv[1])
native_streams.STREAMS = native_streams.STREAMS._replace(source=Path(sys.argv[1], "streams.cpp"))
print("loaded by the import:", mapped())
module = native_streams.load()
print(module.__name__, mapped(), native_streams.load() is module)
print(module.seed_of(torch.Generator().manual_seed(77)))
try:
    module.seed_of("no generator")
except TypeError as error:
    print("TypeError:", error)
print(native_streams.streams_status())
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a library that was compiled for the torch that runs."""
    folder = tmp_path_factory.mktemp("real")
    library = STREAMS._replace(source=folder / "streams.cpp")
    library.source.write_text(SOURCE)
    try:
        reason = library.obstacle()
        if reason is not None:
            pytest.skip(reason)
        native_build.build(library, folder, TorchBuild.running(), timeout=170)
    except NativeBuildError as error:
        pytest.fail(str(error))
    return folder


def test_what_is_compiled_can_be_loaded_and_used(real: Path) -> None:
    paths = [str(REPO), os.environ.get("PYTHONPATH", "")]
    env = {name: value for name, value in os.environ.items() if name not in ("NVTE_EXT_NATIVE", "NVTE_EXT_JIT")}
    result = subprocess.run(
        [sys.executable, "-c", USE, str(real)],  # of its own, since a library that does not fit may end it
        env=measured({**env, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout.splitlines() == [
        "loaded by the import: False",
        "transformer_engine_ext_streams True True",
        "77",
        "TypeError: none",
        str((True, f"{real / STREAMS.file}, built for {TorchBuild.running()}")),
    ]


def test_headers_of_this_python_are_found() -> None:
    include = Path(sysconfig.get_paths()["include"])
    if not include.is_dir():
        pytest.skip(f"no headers in {include}")
    command = native_build.compile_command(STREAMS, ["g++"], Path("out.so"), TorchBuild.running())
    assert (Path(command[command.index(str(STREAMS.source)) - 1]) / "Python.h").is_file()
