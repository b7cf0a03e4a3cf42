# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""A native library built on demand (``NVTE_EXT_JIT=1``), once for all processes that share a cache folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from transformer_engine_ext.pytorch.rng import native_build
from transformer_engine_ext.pytorch.rng.native_build import COMPILE_TIMEOUT, Library, NativeBuildError, TorchBuild

__all__ = ["build_once", "cached_folder", "distrust", "ensure_built", "last_failure"]

#: Seconds that a process waits for another one's build: longer than the builder lets its compiler run.
WAIT_TIMEOUT = COMPILE_TIMEOUT + 60.0

_POLL = 0.1  # seconds between two looks at the lock

# Note [One builds, the others wait]
# The ranks of a job ask for the library at the same moment. The one that gets the lock compiles; the others wait for
# the lock, then find the library. It is flock's lock on an open file, not a file that exists: the kernel releases it
# with its holder, so a builder that is killed holds up nobody, and the next one builds. A library appears by a rename,
# whole or not at all. A failed build leaves its text behind, and whoever waited meanwhile takes that for an answer:
# otherwise each of N ranks would fail in turn. Whoever comes later tries again.
_LOCK, _FAILURE = "lock", "failure.txt"


def cached_folder(library: Library, torch: TorchBuild) -> Path:
    """Return the folder for the library that fits this torch, below ``NVTE_EXT_CACHE_DIR`` or the user's cache."""
    root = os.environ.get("NVTE_EXT_CACHE_DIR", "").strip()
    if root:
        base = Path(root).expanduser()
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache").expanduser() / "transformer_engine_ext"
    # All that the result depends on, so that a cache in a shared home serves different machines and environments.
    command = native_build.compile_command(library, [], Path(library.file), torch)
    digest = hashlib.sha256("\0".join([native_build.source_hash(library), *command]).encode()).hexdigest()[:16]
    tag = f"{sys.implementation.name}{sys.version_info[0]}{sys.version_info[1]}"
    key = f"torch{torch.version}-cuda{torch.cuda}-{tag}-abi{int(torch.cxx11_abi)}-{platform.machine()}-{digest}"
    return base / re.sub(r"[^\w.+-]", "_", f"{library.name}-{key}")


def ensure_built(library: Library, torch: TorchBuild) -> Path:
    """Return the folder with the library for this torch; compiles it if nobody has, or waits while somebody does.

    Raises
    ------
    NativeBuildError
        If it cannot be built, or the process that builds it does not finish.
    """
    folder = cached_folder(library, torch)
    build_once(folder / library.file, lambda: native_build.build(library, folder, torch))
    return folder


def distrust(library: Path) -> str | None:
    """Return why a library in the cache must not be loaded whatever it holds, or None."""
    owner = library.stat().st_uid
    if owner not in (0, os.getuid()):
        return f"{library} belongs to another user (uid {owner})"
    return None


def last_failure(folder: Path) -> str | None:
    """Return why the last build in a cache folder failed, or None if it did not."""
    try:
        failure = _failure(folder)
    except OSError:
        return None  # a folder that can't be used; whoever builds in it says so
    return None if failure is None else failure[1]


def build_once(library: Path, build: Callable[[], object], timeout: float = WAIT_TIMEOUT) -> None:
    """Call `build` unless the library is there; one process at a time, and none again after a success.

    Raises
    ------
    NativeBuildError
        What `build` raised, here or in the process that this one waited for; or no answer within `timeout` seconds.
    """
    # See Note [One builds, the others wait]
    folder = library.parent
    if library.is_file():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        earlier = _failure(folder)
        with _locked(folder, timeout, library.is_file):
            if library.is_file():
                return
            failure = _failure(folder)
            if failure is not None and failure != earlier:
                raise NativeBuildError(f"another process failed: {failure[1]}")
            _build_here(folder, build)
    except OSError as error:
        raise NativeBuildError(
            f"cannot use the cache folder {folder}: {error}. Set NVTE_EXT_CACHE_DIR to a folder that can be written"
        ) from error


def _build_here(folder: Path, build: Callable[[], object]) -> None:
    for leftover in folder.glob("tmp-*"):
        leftover.unlink(missing_ok=True)  # of builders that were killed: nobody else builds while this one has the lock
    try:
        build()
    except NativeBuildError as error:
        unfinished = folder / "tmp-failure"
        unfinished.write_text(str(error))
        os.replace(unfinished, folder / _FAILURE)
        raise
    (folder / _FAILURE).unlink(missing_ok=True)


def _failure(folder: Path) -> tuple[tuple[int, int], str] | None:
    """Return what identifies the last failed build, and its text."""
    path = folder / _FAILURE
    try:
        status = path.stat()
        return (status.st_ino, status.st_mtime_ns), path.read_text(errors="replace")
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _locked(folder: Path, timeout: float, done: Callable[[], bool]) -> Iterator[None]:
    """Hold the folder's lock; also returns, without it, once `done()` says that there is nothing left to do."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if _acquire(descriptor, folder, timeout, done):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        _release(descriptor)


def _release(descriptor: int) -> None:
    import fcntl

    with contextlib.suppress(OSError):
        # Closing alone would leave the lock with a process that was forked off meanwhile.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _acquire(descriptor: int, folder: Path, timeout: float, done: Callable[[], bool]) -> bool:
    import fcntl  # not on every system that the package can be imported on

    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                return False  # a file system without locks: several may compile, and the last rename wins
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                raise
        if done():
            return False
        if time.monotonic() >= deadline:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace")
            raise NativeBuildError(
                f"waited {timeout:g} s for {holder or 'another process'}, which holds {folder / _LOCK} while it "
                "compiles. Look what it does; once it ends, the lock is free. To build apart from it, set "
                "NVTE_EXT_CACHE_DIR to another folder"
            )
        time.sleep(_POLL)
