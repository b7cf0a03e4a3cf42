# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Libraries that are really compiled, then loaded in another process: a stand-in anywhere, the real one on a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from _helpers import REPO, measured, requires_cuda
from _native import FakeCompiler
from transformer_engine_ext.pytorch.rng import native_build
from transformer_engine_ext.pytorch.rng.native_build import PHILOX, TorchBuild

#: The operator as csrc/philox_state.cpp has it, but for CPU generators: seed 0 stands for one that is not captured,
#: seed 1 for one that is not registered.
STAND_IN = r"""
#include <optional>
#include <tuple>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/library.h>
std::tuple<at::Tensor, at::Tensor, int64_t, bool> stand_in(const std::optional<at::Generator>& generator) {
  const auto seed = static_cast<int64_t>(generator->current_seed());
  TORCH_CHECK(seed != 1, "not in capture mode");
  return {at::full({1}, seed, at::kLong), at::full({1}, 8, at::kLong), 12, seed != 0};
}
TORCH_LIBRARY(transformer_engine_ext, m) { SCHEMA }
"""

USE = """
import contextlib, sys
from pathlib import Path
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_engine_ext.pytorch.rng import native, native_build, native_find

build = native_build.TorchBuild.running()._replace(cuda="13.0", reads_itself=False)
native_build.TorchBuild.running = classmethod(lambda cls: build)
native_find.PACKAGE_FOLDER = Path(sys.argv[1])
torch.cuda.device = lambda device: contextlib.nullcontext()

class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        print("seen by a mode:", function)
        return function(*args, **(kwargs or {}))

native.prepare()
generator = torch.Generator()
for seed in (7, 0, 1):
    generator.manual_seed(seed)
    try:
        with Watch():
            words = native.captured_words(generator)
        print(words[0].tolist(), words[1].tolist(), words[2])
    except native.NotRegistered as error:
        print(error)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a library for the torch that runs, with or without CUDA."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("stand_in")
    source, build = folder / "stand_in.cpp", TorchBuild.running()._replace(cuda="13.0")
    real = PHILOX.source.read_text()
    (schema,) = re.findall(r'm\.def\("([^"]+)"', real)
    source.write_text(STAND_IN.replace("SCHEMA", f'm.def("{schema}", &stand_in);'))
    # Only the information beside the library is the package's own here.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", FakeCompiler(folder).env["CXX"])
        patch.setenv("FAKE_LOG", str(folder / "log"))
        native_build.build(PHILOX, folder, build)
    command = native_build.compile_command(PHILOX._replace(source=source), ["g++"], folder / PHILOX.file, build)
    command = [word.replace("-O2", "-O0") for word in command if word != "-ltorch_cuda"]
    subprocess.run(command, check=True, timeout=170, stdin=subprocess.DEVNULL)
    return folder


def run(*command: object, **env: str) -> list[str]:
    """Run a program in a process of its own, since a library that does not fit may end it; return its lines."""
    paths = [str(REPO), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        env=measured({**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **env}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout.splitlines()


def test_library_is_loaded_and_used(stand_in: Path) -> None:
    assert run("-c", USE, stand_in) == [
        "[7] [8] 12",
        "nothing is being captured on the device's current CUDA stream",
        "not in capture mode",
    ]


def test_real_source_compiles_against_the_headers_of_this_torch() -> None:
    """Its syntax and types, for every build of torch; where there is a GPU it is also linked, below."""
    torch = TorchBuild.running()
    if not (torch.root / "include" / "ATen" / "cuda" / "CUDAGeneratorImpl.h").is_file():
        pytest.skip(f"{torch} has no headers of CUDA generators")
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    command = native_build.compile_command(PHILOX, ["g++"], Path("unused.so"), torch)
    command = [*command[: command.index("-o")], "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=170, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stderr == ""


REAL = Path(__file__).resolve().parent / "_native_capture.py"


@requires_cuda
def test_words_of_a_capture(tmp_path: Path) -> None:
    """The real thing: built on demand where this torch needs it, read in capture, compared with replays."""
    lines = run(REAL, NVTE_EXT_JIT="1", NVTE_EXT_CACHE_DIR=str(tmp_path))
    assert lines[-1] == "OK", lines
    assert bool(list(tmp_path.glob(f"{PHILOX.name}-*"))) != TorchBuild.running().reads_itself


@requires_cuda
def test_operator_tells_the_same_with_every_torch(tmp_path: Path) -> None:
    """Also where the package does not use it, since an installation may be told to build it."""
    native_build.build(PHILOX, tmp_path, TorchBuild.running())
    lines = run(REAL, tmp_path / PHILOX.file)
    assert lines[-1] == "OK", lines
