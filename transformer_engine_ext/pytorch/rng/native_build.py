# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""How ``csrc/philox_state.cpp`` becomes a library, and how to tell whether a library fits the torch that runs.

This is the only place that knows the compiler's command line. ``setup.py`` runs this file by its path, in environments
where there may be no torch, so it imports the standard library only and raises :class:`NativeBuildError` throughout;
``native.py`` turns that into the package's own errors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

__all__ = [
    "INFO",
    "LIBRARY",
    "SOURCE",
    "NativeBuildError",
    "TorchBuild",
    "build",
    "compile_command",
    "find_compiler",
    "misfit",
    "obstacle",
    "source_hash",
    "switch",
]

SOURCE = Path(__file__).resolve().parents[2] / "csrc" / "philox_state.cpp"
LIBRARY = "philox_state.so"
INFO = "build_info.json"

#: Version of the fields of :data:`INFO`.
INFO_FORMAT = 1

#: Seconds; one file without nvcc takes about 15 on a slow machine.
COMPILE_TIMEOUT = 300.0


class NativeBuildError(RuntimeError):
    """The library cannot be built, or a setting about it is wrong; never leaves the package."""


class TorchBuild(NamedTuple):
    """What of an installed torch decides whether a library fits it."""

    version: str  #: ``torch.__version__``, for example ``"2.11.0+cu130"``
    cuda: str | None  #: the CUDA version that it was built with; None without CUDA
    cxx11_abi: bool
    root: Path  #: folder of the package ``torch``
    reads_itself: bool  #: ``torch.Generator.philox_state`` exists (torch >= 2.14), so no library is needed

    @classmethod
    def running(cls) -> TorchBuild:
        """Describe the torch that ``import torch`` gives."""
        import torch

        return cls(
            version=str(torch.__version__),
            cuda=torch.version.cuda,
            cxx11_abi=bool(torch.compiled_with_cxx11_abi()),
            root=Path(torch.__file__).resolve().parent,
            reads_itself=hasattr(torch.Generator, "philox_state"),
        )

    @property
    def minor(self) -> tuple[int, int]:
        """Major and minor version; those of NVIDIA's containers (``2.12.0a0+...``) count like releases."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        if found is None:
            raise NativeBuildError(f"cannot read torch's version {self.version!r}")
        return int(found[1]), int(found[2])

    def __str__(self) -> str:
        return f"torch {self.version} ({f'CUDA {self.cuda}' if self.cuda else 'without CUDA'})"


def switch(name: str, default: str, allowed: Sequence[str]) -> str:
    """Return the value of an environment variable; unset and empty mean the default.

    Raises
    ------
    NativeBuildError
        If it holds anything but one of `allowed`.
    """
    value = os.environ.get(name, "").strip() or default
    if value not in allowed:
        raise NativeBuildError(f"{name}={value!r} is unknown: expected one of {', '.join(allowed)} (default {default})")
    return value


def source_hash(source: Path = SOURCE) -> str:
    """Return the SHA-256 of the source, in hexadecimal digits."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


def find_compiler() -> list[str]:
    """Return the C++ compiler as the start of a command line: ``$CXX``, else the first of the usual names."""
    asked = os.environ.get("CXX", "").strip()
    for candidate in [asked] if asked else ["g++", "c++", "clang++"]:
        command = shlex.split(candidate)
        if shutil.which(command[0]):
            return command
    raise NativeBuildError(
        f"CXX={asked!r} names no program" if asked else "there is no C++ compiler (g++, c++, clang++, or set CXX)"
    )


def obstacle(torch: TorchBuild) -> str | None:
    """Return why no library can be built for this torch, or None."""
    if torch.cuda is None:
        return f"{torch}: there is no CUDA generator to read"
    if not sys.platform.startswith("linux"):
        return f"the native library is built on Linux only, this is {sys.platform}"
    try:
        find_compiler()
    except NativeBuildError as error:
        return str(error)
    return None


def compile_command(compiler: Sequence[str], source: Path, output: Path, torch: TorchBuild) -> list[str]:
    """Return the command that makes `output`, a shared library, from `source`."""
    # No nvcc, and no headers of CUDA or Python: the source needs only torch's.
    return [
        *compiler,
        # torch's own headers ask for C++20 from 2.12 on; before, compilers without it must still do.
        f"-std=c++{20 if torch.minor >= (2, 12) else 17}",
        "-O2",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}",
        "-isystem",
        str(torch.root / "include"),
        str(source),
        "-o",
        str(output),
        f"-L{torch.root / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        "-ltorch_cuda",
        "-Wl,--no-undefined",  # what is missing shows here and not in the middle of a training run
    ]


def build(folder: Path, torch: TorchBuild, source: Path = SOURCE, *, timeout: float = COMPILE_TIMEOUT) -> Path:
    """Compile `source` and put library and build information into `folder`; returns the library's path.

    The library appears last and whole, so whoever finds it also finds its build information.

    Raises
    ------
    NativeBuildError
        If there is no compiler, or it fails; with the end of its output.
    """
    compiler = find_compiler()
    library = folder / LIBRARY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        info = {
            "format": INFO_FORMAT,
            "torch": torch.version,
            "cuda": torch.cuda,
            "cxx11_abi": torch.cxx11_abi,
            "machine": platform.machine(),
            "source_sha256": source_hash(source),
            "compiler": shlex.join(compiler),
        }
        with _temporary(library) as unfinished, _temporary(folder / INFO) as unfinished_info:
            _run(compile_command(compiler, source, unfinished, torch), timeout)
            unfinished_info.write_text(json.dumps(info, indent=2) + "\n")
            _publish(unfinished_info, folder / INFO, 0o644)
            _publish(unfinished, library, 0o755)
    except OSError as error:
        raise NativeBuildError(f"cannot build in {folder}: {error}") from error
    return library


def misfit(folder: Path, torch: TorchBuild, source: Path = SOURCE) -> str | None:
    """Return why the library in `folder` must not be loaded into this torch, or None; loads nothing.

    A library that was built for another torch may crash the process when it is loaded, so nobody loads one before this
    function returned None.
    """
    if not (folder / LIBRARY).is_file():
        return f"there is no {LIBRARY} in {folder}"
    try:
        info: Any = json.loads((folder / INFO).read_text())
        cuda = None if info["cuda"] is None else str(info["cuda"])
        built = TorchBuild(str(info["torch"]), cuda, info["cxx11_abi"], folder, False)
        built_minor, built_format = built.minor, info["format"]
        machine, digest = info["machine"], info["source_sha256"]
    except FileNotFoundError:
        return f"there is no {INFO} beside {folder / LIBRARY}, so nobody knows which torch it was built for"
    except (OSError, ValueError, KeyError, TypeError, NativeBuildError) as error:
        return f"{folder / INFO} is damaged ({type(error).__name__}: {error})"
    if built_format != INFO_FORMAT:
        return f"{folder / INFO} has format {built_format!r}, expected {INFO_FORMAT}"
    if built_minor != torch.minor or (_unreleased(built, torch) and built.version != torch.version):
        return f"{folder / LIBRARY} was built for torch {built.version}, this is torch {torch.version}"
    if _major(built.cuda) != _major(torch.cuda):
        return f"{folder / LIBRARY} was built for CUDA {built.cuda}, this torch has {torch.cuda or 'no CUDA'}"
    if built.cxx11_abi != torch.cxx11_abi:
        return f"{folder / LIBRARY} was built with the other C++ ABI of libstdc++ than this torch"
    if machine != platform.machine():
        return f"{folder / LIBRARY} was built for {machine}, this machine is {platform.machine()}"
    if source.is_file() and digest != source_hash(source):
        return f"{folder / LIBRARY} was built from another version of {source.name}"
    return None


def _unreleased(*builds: TorchBuild) -> bool:
    """Tell whether one of the versions is a nightly or an alpha: two of one minor version may differ inside."""
    return any(re.match(r"\d+\.\d+\.\d+(\+|$)", build.version) is None for build in builds)


def _major(version: str | None) -> str | None:
    return None if version is None else version.split(".")[0]


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Yield a new file beside `target`, which is gone at the end unless it was moved meanwhile."""
    descriptor, name = tempfile.mkstemp(prefix="tmp-", suffix=target.suffix, dir=target.parent)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _publish(unfinished: Path, target: Path, mode: int) -> None:
    unfinished.chmod(mode)  # mkstemp's files are their owner's alone, installed ones everybody's
    os.replace(unfinished, target)


def _run(command: Sequence[str], timeout: float) -> None:
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # A file, not a pipe, and a session of its own: a compiler is several processes, and one that outlives the first
        # would keep a pipe open.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise NativeBuildError(f"not finished after {timeout:g} s: {shlex.join(command)}") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0:
            raise NativeBuildError(f"exit code {code} of: {shlex.join(command)}\n{_tail(output)}")


def _tail(output: IO[str], characters: int = 2000) -> str:
    output.seek(0)
    return output.read()[-characters:].strip()
