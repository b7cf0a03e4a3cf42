# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""A native library built on demand by several processes: one builds, the others wait, a killed one blocks nobody."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from _helpers import REPO, measured
from _native import FakeCompiler, alive, torch_build, wait_until
from transformer_engine_ext.pytorch.rng import native_jit
from transformer_engine_ext.pytorch.rng.native_build import PHILOX, STREAMS, NativeBuildError

#: A rank: asks for the library and prints what it got. It stands in for the packages around the module, so that torch,
#: which the module does not need, is not imported.
RANK = f"""
import sys, types
from pathlib import Path

for name in ("transformer_engine_ext.pytorch", "transformer_engine_ext.pytorch.rng"):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [str(Path({str(REPO)!r}, *name.split(".")))]
from transformer_engine_ext.pytorch.rng import native_build, native_fit, native_jit

library = getattr(native_build, sys.argv[1])
torch = native_build.TorchBuild("2.11.0+cu130", "13.0", True, Path("/nowhere"), False)
try:
    folder = native_jit.ensure_built(library, torch)
except native_build.NativeBuildError as error:
    print("failed:", error)
else:
    print("built:", (folder / library.file).read_text(), native_fit.misfit(library, folder, torch))
assert "torch" not in sys.modules
"""


class Ranks:
    """Starts ranks that share a cache folder and a compiler."""

    def __init__(self, folder: Path) -> None:
        self.compiler = FakeCompiler(folder)
        self.cache = folder / "cache"
        self._started: list[subprocess.Popen[str]] = []

    def wait_for(self, *ranks: subprocess.Popen[str]) -> None:
        """Return when each of the ranks has the lock or waits for it."""
        wait_until(lambda: all(self._at_lock(rank.pid) for rank in ranks))

    def _at_lock(self, pid: int) -> bool:
        try:
            return any(os.readlink(file).endswith("/lock") for file in Path(f"/proc/{pid}/fd").iterdir())
        except FileNotFoundError:  # closed meanwhile
            return False

    def start(self, library: str = "PHILOX", **behaviour: Any) -> subprocess.Popen[str]:
        paths = [str(REPO), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "NVTE_EXT_CACHE_DIR": str(self.cache)}
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, library],
            env=measured(env | self.compiler.env | self.compiler.behaviour(**behaviour)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    @property
    def folder(self) -> Path:
        (folder,) = self.cache.iterdir()
        return folder

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        self.compiler.end()


def output(process: subprocess.Popen[str], timeout: float = 60.0) -> str:
    text, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, text
    return text.strip()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.end()


# See Note [One builds, the others wait]


def test_one_of_many_ranks_builds(ranks: Ranks, tmp_path: Path) -> None:
    started = [ranks.start(until=tmp_path / "go") for _ in range(6)]
    ranks.wait_for(*started)
    (tmp_path / "go").touch()
    assert [output(rank) for rank in started] == ["built: a library None"] * 6
    assert len(ranks.compiler.runs) == 1
    assert output(ranks.start(fail="must not run")) == "built: a library None"
    assert sorted(path.name for path in ranks.folder.iterdir()) == sorted([*PHILOX.files, "lock"])


def test_each_library_is_built_apart(ranks: Ranks, tmp_path: Path) -> None:
    started = [ranks.start(library, until=tmp_path / "go") for library in ("PHILOX", "STREAMS", "PHILOX", "STREAMS")]
    ranks.wait_for(*started)
    wait_until(lambda: len(ranks.compiler.runs) == 2)  # at the same time: neither waits for the other
    (tmp_path / "go").touch()
    assert [output(rank) for rank in started] == ["built: a library None"] * 4
    assert len(ranks.compiler.runs) == 2
    names = sorted(sorted(path.name for path in folder.iterdir()) for folder in ranks.cache.iterdir())
    assert names == sorted(sorted([*library.files, "lock"]) for library in (PHILOX, STREAMS))


def test_killed_builder_blocks_nobody(ranks: Ranks, tmp_path: Path) -> None:
    builder = ranks.start(until=tmp_path / "never")
    wait_until(lambda: len(ranks.compiler.runs) == 1)
    waiting = [ranks.start(output="second") for _ in range(2)]
    ranks.wait_for(*waiting)
    time.sleep(0.3)
    assert [rank.poll() for rank in waiting] == [None, None], "they wait while the builder lives"
    assert len(ranks.compiler.runs) == 1
    builder.send_signal(signal.SIGKILL)
    assert [output(rank, timeout=20) for rank in waiting] == ["built: second None"] * 2
    assert len(ranks.compiler.runs) == 2
    assert alive(ranks.compiler.runs[0]), "though the killed one's compiler still runs"
    assert [path.name for path in ranks.folder.glob("tmp-*")] == [], "what it left behind is gone"


def test_failure_is_the_answer_for_those_who_waited_and_no_one_else(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks.start(until=tmp_path / "go", fail="no such header")
    wait_until(lambda: len(ranks.compiler.runs) == 1)
    waiting = [ranks.start() for _ in range(2)]
    ranks.wait_for(*waiting)
    (tmp_path / "go").touch()
    assert "error: no such header" in output(first)
    assert "error: no such header" in str(native_jit.last_failure(ranks.folder))
    for rank in waiting:
        assert output(rank).startswith("failed: another process failed: exit code 1 of: ")
    assert len(ranks.compiler.runs) == 1, "they would have succeeded, but did not try"
    assert output(ranks.start()) == "built: a library None"
    assert not (ranks.folder / "failure.txt").exists()
    assert native_jit.last_failure(ranks.folder) is None


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A folder whose lock somebody holds."""
    folder = tmp_path / "held"
    folder.mkdir()
    with open(folder / "lock", "w") as lock:
        lock.write("process 4711 on elsewhere")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def never() -> None:
    raise AssertionError("built, though another process holds the lock")


def test_waiting_ends(held: Path) -> None:
    with pytest.raises(NativeBuildError) as caught:
        native_jit.build_once(held / PHILOX.file, never, timeout=0.3)
    for part in ("waited 0.3 s for process 4711 on elsewhere", str(held / "lock"), "NVTE_EXT_CACHE_DIR"):
        assert part in str(caught.value)


def test_waiting_ends_as_soon_as_the_library_is_there(held: Path) -> None:
    timer = threading.Timer(0.3, (held / PHILOX.file).touch)
    timer.start()
    native_jit.build_once(held / PHILOX.file, never, timeout=30)
    timer.join()


def test_two_threads_exclude_each_other_too(tmp_path: Path) -> None:
    calls = []

    def build() -> None:
        calls.append(threading.get_ident())
        time.sleep(0.3)
        (tmp_path / PHILOX.file).touch()

    threads = [threading.Thread(target=native_jit.build_once, args=(tmp_path / PHILOX.file, build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    native_jit.build_once(tmp_path / "cache" / PHILOX.file, (tmp_path / "cache" / PHILOX.file).touch)
    assert (tmp_path / "cache" / PHILOX.file).is_file()


def test_unexpected_error_of_the_lock_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(NativeBuildError, match="Input/output error"):
        native_jit.build_once(tmp_path / "cache" / PHILOX.file, never)


def test_cache_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NativeBuildError, match=r"cannot use the cache folder .*Set NVTE_EXT_CACHE_DIR"):
        native_jit.build_once(tmp_path / "file" / "cache" / PHILOX.file, never)


def test_leftovers_go_only_while_the_lock_is_held(held: Path) -> None:
    (held / "tmp-of-the-builder.so").touch()
    with pytest.raises(NativeBuildError):
        native_jit.build_once(held / PHILOX.file, never, timeout=0.2)
    assert (held / "tmp-of-the-builder.so").exists()


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_build(tmp_path)
    for name in ("NVTE_EXT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert native_jit.cached_folder(PHILOX, torch).parent == tmp_path / "home" / ".cache" / "transformer_engine_ext"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert native_jit.cached_folder(PHILOX, torch).parent == tmp_path / "xdg" / "transformer_engine_ext"
    monkeypatch.setenv("NVTE_EXT_CACHE_DIR", "~/here")
    assert native_jit.cached_folder(PHILOX, torch).parent == tmp_path / "home" / "here"


def test_cache_folder_depends_on_all_that_the_library_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = torch_build(tmp_path)
    source = tmp_path / "other.cpp"
    source.write_text("// other")
    folders = [
        native_jit.cached_folder(PHILOX, torch),
        native_jit.cached_folder(STREAMS, torch),
        native_jit.cached_folder(PHILOX._replace(source=source), torch),
        *[
            native_jit.cached_folder(PHILOX, torch._replace(**change))
            for change in (
                {"version": "2.11.0+cu128"},
                {"cuda": "12.8"},
                {"cxx11_abi": False},
                {"root": tmp_path / "venv" / "torch"},
            )
        ],
    ]
    monkeypatch.setattr(native_jit.platform, "machine", lambda: "aarch64")
    folders.append(native_jit.cached_folder(PHILOX, torch))
    assert len(set(folders)) == len(folders)
    assert native_jit.cached_folder(PHILOX, torch._replace(version="2.12/../0")).parent == folders[0].parent


def test_library_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / PHILOX.file
    library.touch()
    assert native_jit.distrust(library) is None
    if os.getuid() == 0:
        os.chown(library, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert f"{library} belongs to another user" in str(native_jit.distrust(library))
