# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The native libraries: what each is made of, where it is of use, and how its source becomes a library.

This is the only place that knows the compiler's command line. ``setup.py`` runs this file by its path, in environments
where there may be no torch, so it imports the standard library only and raises :class:`NativeBuildError` throughout;
``native.py`` and ``native_streams.py`` turn that into the package's own errors. Whether a library fits the torch that
runs is ``native_fit.py``'s question, and where one lies ``native_find.py``'s.
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
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

__all__ = [
    "INFO_FORMAT",
    "LIBRARIES",
    "LIMITED_API",
    "PHILOX",
    "STREAMS",
    "Library",
    "NativeBuildError",
    "TorchBuild",
    "build",
    "compile_command",
    "find_compiler",
    "python_misfit",
    "source_hash",
    "switch",
]

#: Version of the fields of a library's build information.
INFO_FORMAT = 1

#: The first CPython whose limited API an extension module is compiled for: the package's own floor.
LIMITED_API = (3, 10)

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


class Library(NamedTuple):
    """One native library."""

    purpose: str  #: what it does, as a verb with its object
    source: Path  #: headers of its own lie beside it, by the same name with more after an underscore
    file: str  #: name of the library
    info: str  #: name of the file beside it that says what it was built for
    links: tuple[str, ...]  #: torch's libraries that it is linked with
    extension: bool  #: an extension module of CPython's limited API, so it needs Python's headers
    unused: Callable[[TorchBuild], str | None]  #: why a torch has no use for it, or None

    @property
    def name(self) -> str:
        """What folders and messages call it."""
        return Path(self.file).stem

    @property
    def headers(self) -> list[Path]:
        """Headers that belong to the source: ``streams_cpu.h`` to ``streams.cpp``."""
        return sorted(self.source.parent.glob(f"{self.source.stem}_*.h"))

    @property
    def files(self) -> tuple[str, str]:
        """Names of what a build leaves behind."""
        return self.file, self.info

    @property
    def uses_cuda(self) -> bool:
        """Whether the version of CUDA matters to it."""
        return "torch_cuda" in self.links

    def obstacle(self) -> str | None:
        """Return why it cannot be built here, or None."""
        if not sys.platform.startswith("linux"):
            return f"the native libraries are built on Linux only, this is {sys.platform}"
        if self.extension:
            reason = python_misfit()
            if reason is not None:
                return reason
            include = _python_include()
            if not (include / "Python.h").is_file():
                return f"there is no Python.h in {include}: install Python's headers (python3-dev or python3-devel)"
        try:
            find_compiler()
        except NativeBuildError as error:
            return str(error)
        return None


def _philox_unused(torch: TorchBuild) -> str | None:
    if torch.cuda is None:
        return f"{torch}: there is no CUDA generator to read"
    return f"{torch} needs none" if torch.reads_itself else None


_CSRC = Path(__file__).resolve().parents[2] / "csrc"

#: An operator, which torch loads. See ``native.py``.
PHILOX = Library(
    purpose="reads streams while CUDA graphs are captured",
    source=_CSRC / "philox_state.cpp",
    file="philox_state.so",
    info="build_info.json",
    links=("c10", "torch_cpu", "torch_cuda"),
    extension=False,
    unused=_philox_unused,
)

#: An extension module, which Python loads. See ``native_streams.py``.
STREAMS = Library(
    purpose="moves streams faster",
    source=_CSRC / "streams.cpp",
    file="streams.so",
    info="streams_build_info.json",
    links=("c10", "torch_cpu", "torch_python"),
    extension=True,
    unused=lambda torch: None,
)

LIBRARIES = (PHILOX, STREAMS)


def python_misfit() -> str | None:
    """Return why this Python can load no extension module of the limited API, or None."""
    if sys.implementation.name != "cpython":
        return f"only CPython loads modules of its limited API, this is {sys.implementation.name}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "a free-threaded build of CPython loads no modules of the limited API"
    return None


def _python_include() -> Path:
    return Path(sysconfig.get_paths()["include"])


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


def source_hash(library: Library) -> str:
    """Return the SHA-256 of the source and its headers, in hexadecimal digits."""
    digest = hashlib.sha256(library.source.read_bytes())
    for header in library.headers:
        digest.update(f"\0{header.name}\0".encode() + header.read_bytes())
    return digest.hexdigest()


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


def compile_command(library: Library, compiler: Sequence[str], output: Path, torch: TorchBuild) -> list[str]:
    """Return the command that makes `output`, a shared library, from the library's source."""
    # No nvcc, and no headers of CUDA: the sources need only torch's and Python's.
    include = torch.root / "include"
    if library.extension:
        own = [
            f"-DPy_LIMITED_API=0x{LIMITED_API[0]:02X}{LIMITED_API[1]:02X}0000",
            "-isystem",
            str(include / "torch" / "csrc" / "api" / "include"),
            "-isystem",
            str(_python_include()),
        ]
        checks = []  # Python's own names are missing until the interpreter loads it
    else:
        own = []
        checks = ["-Wl,--no-undefined"]  # what is missing shows here and not in the middle of a training run
    return [
        *compiler,
        # torch's own headers ask for C++20 from 2.12 on; before, compilers without it must still do.
        f"-std=c++{20 if torch.minor >= (2, 12) else 17}",
        "-O2",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}",
        "-isystem",
        str(include),
        *own,
        str(library.source),
        "-o",
        str(output),
        f"-L{torch.root / 'lib'}",
        *[f"-l{name}" for name in library.links],
        *checks,
    ]


def build(library: Library, folder: Path, torch: TorchBuild, *, timeout: float = COMPILE_TIMEOUT) -> Path:
    """Compile a library and put it and its build information into `folder`; returns the library's path.

    The library appears last and whole, so whoever finds it also finds its build information.

    Raises
    ------
    NativeBuildError
        If there is no compiler, or it fails; with the end of its output.
    """
    compiler = find_compiler()
    target, target_info = (folder / name for name in library.files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        info = {
            "format": INFO_FORMAT,
            "torch": torch.version,
            "cuda": torch.cuda,
            "cxx11_abi": torch.cxx11_abi,
            "machine": platform.machine(),
            "source_sha256": source_hash(library),
            "compiler": shlex.join(compiler),
        }
        if library.extension:
            info |= {"python": sys.implementation.name, "limited_api": ".".join(map(str, LIMITED_API))}
        with _temporary(target) as unfinished, _temporary(target_info) as unfinished_info:
            _run(compile_command(library, compiler, unfinished, torch), timeout)
            unfinished_info.write_text(json.dumps(info, indent=2) + "\n")
            _publish(unfinished_info, target_info, 0o644)
            _publish(unfinished, target, 0o755)
    except OSError as error:
        raise NativeBuildError(f"cannot build in {folder}: {error}") from error
    return target


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
