# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Where streams can be saved to and loaded from, and what the errors say where they cannot."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from _helpers import REPO
from transformer_engine_ext.errors import StateFormatError
from transformer_engine_ext.pytorch.distributed import ParallelRNG, atomic_write
from transformer_engine_ext.pytorch.distributed.atomic_write import write_atomically


@pytest.fixture
def rng() -> ParallelRNG:
    made = ParallelRNG(None, device="cpu")
    made.seed(1)
    return made


def unchanged(rng: ParallelRNG, call: Callable[[], object], error: type[BaseException], match: str) -> None:
    before = rng.states()
    with pytest.raises(error, match=match):
        call()
    after = rng.states()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_d5_a_folder_that_does_not_exist(rng: ParallelRNG, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "file"
    unchanged(rng, lambda: rng.save(path), FileNotFoundError, r"there is no folder '.*/missing'; make it first.*/file'")
    unchanged(rng, lambda: rng.load(path), FileNotFoundError, "/missing/file'")


def test_d5_a_folder_as_the_path(rng: ParallelRNG, tmp_path: Path) -> None:
    unchanged(rng, lambda: rng.save(tmp_path), IsADirectoryError, "cannot save the streams: this is a folder; name a f")
    unchanged(rng, lambda: rng.load(tmp_path), IsADirectoryError, "cannot load the streams: this is a folder; name a f")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [None, 3, object()])
def test_d5_no_path_at_all(rng: ParallelRNG, path: object) -> None:
    unchanged(rng, lambda: rng.save(path), TypeError, "os.PathLike")  # type: ignore[arg-type]
    unchanged(rng, lambda: rng.load(path), TypeError, "os.PathLike")  # type: ignore[arg-type]


def test_d5_devices_pipes_and_sockets_are_never_replaced(rng: ParallelRNG, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.fsencode(tmp_path / "socket"))
    places = {"/dev/null": "a character device", tmp_path / "pipe": "a named pipe", tmp_path / "socket": "a socket"}
    for path, kind in places.items():
        mode = os.stat(path).st_mode
        unchanged(rng, lambda path=path: rng.save(path), OSError, f"cannot save the streams: this is {kind}; name an")
        unchanged(rng, lambda path=path: rng.load(path), OSError, f"cannot load the streams: this is {kind}; name an")
        assert os.stat(path).st_mode == mode
    server.close()


def test_a_link_is_followed(rng: ParallelRNG, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for name, before in {"former": b"old", "new": None}.items():
        target, link = tmp_path / "real" / name, tmp_path / f"link-{name}"
        if before is not None:
            target.write_bytes(before)
        link.symlink_to(target)
        rng.save(link)
        assert link.is_symlink()
        assert target.stat().st_size > 5056
        rng.load(link)
    assert sorted(file.name for file in (tmp_path / "real").iterdir()) == ["former", "new"]


def test_the_mode_of_a_file_is_kept(rng: ParallelRNG, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    path = tmp_path / "file"
    rng.save(path)
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    path.chmod(0o640)
    rng.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_f2_what_a_killed_writer_left_behind_goes_away(rng: ParallelRNG, tmp_path: Path) -> None:
    path = tmp_path / "file"
    rng.save(path)
    before = path.read_bytes()
    script = (
        "import os, signal, sys\n"
        "from transformer_engine_ext.pytorch.distributed import atomic_write\n"
        "atomic_write.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)\n"
        "atomic_write.write_atomically(sys.argv[1], b'half a f')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    killed = subprocess.run([sys.executable, "-c", script, path], env=environment, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    (left,) = (file for file in tmp_path.iterdir() if file != path)
    assert left.name.startswith(".file.")
    assert path.read_bytes() == before
    rng.load(path)
    rng.save(path)
    assert left.exists()  # it could belong to a writer that still runs
    an_hour_ago = time.time() - 2 * atomic_write._ABANDONED_SECONDS
    os.utime(left, (an_hour_ago, an_hour_ago))
    (tmp_path / ".other.0.tmp").touch()
    os.utime(tmp_path / ".other.0.tmp", (an_hour_ago, an_hour_ago))
    rng.save(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".other.0.tmp", "file"]


def test_f2_a_disk_that_is_full(rng: ParallelRNG, tmp_path: Path) -> None:
    # A limit on the size of files is as good: the system refuses the write itself.
    path = tmp_path / "file"
    rng.save(path)
    before = path.read_bytes()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot save the streams \(File too large\); the former file.*/file'"):
            rng.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_d5_a_file_that_may_not_be_read(rng: ParallelRNG, tmp_path: Path) -> None:
    path = tmp_path / "file"
    rng.save(path)
    path.chmod(0)
    tmp_path.chmod(0o755)
    script = (
        "import os, sys\n"
        "from transformer_engine_ext.pytorch.distributed import ParallelRNG\n"
        "if os.getuid() == 0:\n"
        "    os.setuid(65534)\n"
        "try:\n"
        "    ParallelRNG(None, device='cpu').load(sys.argv[1])\n"
        "except PermissionError as error:\n"
        "    print('refused:', error)\n"
    )
    for folder in path.parents:  # pytest keeps its folders to their owner
        if "pytest" in folder.name:
            folder.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    output = subprocess.run(
        [sys.executable, "-c", script, path], env=environment, timeout=120, capture_output=True, text=True, check=True
    ).stdout
    assert f"refused: [Errno 13] Permission denied: '{path}'" in output


def test_d5_an_empty_file(rng: ParallelRNG, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unchanged(rng, lambda: rng.load(tmp_path / "file"), StateFormatError, "/file: no safetensors file, or a truncated")


def test_writers_do_not_get_into_each_others_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace = os.replace

    def other_writer_first(source: str, target: str) -> None:
        monkeypatch.setattr(os, "replace", replace)
        write_atomically(path, b"other")
        replace(source, target)

    monkeypatch.setattr(os, "replace", other_writer_first)
    write_atomically(path, b"mine")
    assert path.read_bytes() == b"mine"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
