# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The file of all ranks' streams: what is in it, and what is refused without changing anything."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from transformer_engine_ext.errors import StateFormatError
from transformer_engine_ext.pytorch.distributed import ParallelRNG
from transformer_engine_ext.pytorch.distributed.atomic_write import write_atomically
from transformer_engine_ext.pytorch.distributed.rng_file import (
    encode,
    read_coordinates,
    read_header,
    read_row,
    read_rows,
)
from transformer_engine_ext.pytorch.distributed.saved_table import Header, Row
from transformer_engine_ext.pytorch.rng import PhiloxState

AXES = {"pp": 1, "tp": 2}
STREAMS = tuple(
    {"name": name, "device": device, "varies_over": ["tp"], "lockstep_over": [], "seed_offset": 0}
    for name, device in (("default", "cuda"), ("model-parallel-rng", "cuda"), ("default-cpu", "cpu"))
)


def philox(seed: int, offset: int) -> bytes:
    return bytes(PhiloxState(seed, offset).to_tensor().tolist())


def twister(seed: int) -> bytes:
    return bytes(torch.Generator().manual_seed(seed).get_state().tolist())


ROWS = [
    Row((0, 0), (philox(1, 4), philox(2**64 - 1, 8), twister(5))),
    Row((0, 1), (philox(1, 4), philox(3, 2**40), twister(6))),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "streams.safetensors"
    write_atomically(target, encode(Header(AXES, 2, STREAMS, seed=7), ROWS))
    return target


def rewrite(path: Path, tensors: Callable[[dict[str, Tensor]], object], metadata: dict[str, str] | None = None) -> None:
    """Change a file's tensors and metadata, leaving a whole safetensors file."""
    with safetensors.safe_open(path, framework="pt") as file:
        old = dict(file.metadata())
    contents = safetensors.torch.load_file(path)
    tensors(contents)
    path.write_bytes(safetensors.torch.save(contents, metadata={**old, **(metadata or {})}))


def read_all(path: Path) -> None:
    header = read_header(path)
    for rank in range(header.world_size):
        read_row(path, header, rank)


def test_round_trip(path: Path) -> None:
    header = read_header(path)
    assert (header.axes, header.world_size, header.seed) == (AXES, 2, 7)
    assert [stream["name"] for stream in header.streams] == ["default", "model-parallel-rng", "default-cpu"]
    assert read_coordinates(path) == [(0, 0), (0, 1)]
    assert [read_row(path, header, rank) for rank in range(2)] == ROWS
    assert read_rows(path, header) == ROWS


def test_d7_integers_that_anyone_can_read(path: Path) -> None:
    # Another process, with safetensors and numpy alone.
    script = (
        "import json, sys, safetensors\n"
        "with safetensors.safe_open(sys.argv[1], framework='numpy') as file:\n"
        "    print(json.dumps([json.loads(file.metadata()['header'])['axes'], file.get_tensor('philox').tolist(),\n"
        "                      list(file.get_tensor('mt19937').shape)]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    output = subprocess.run([sys.executable, "-c", script, path], check=True, capture_output=True, text=True).stdout
    assert json.loads(output) == [AXES, [[[1, 4], [2**64 - 1, 8]], [[1, 4], [3, 2**40]]], [2, 5056]]


def test_no_axes(tmp_path: Path) -> None:
    row = Row((), (twister(1),))
    write_atomically(tmp_path / "file", encode(Header({}, 1, (STREAMS[2],)), [row]))
    header = read_header(tmp_path / "file")
    assert read_row(tmp_path / "file", header, 0) == row
    assert read_rows(tmp_path / "file", header) == [row]


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_d5_truncated(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StateFormatError, match=r"truncated.*nothing was loaded"):
        read_header(path)


def test_d5_older_and_newer_version(path: Path) -> None:
    for version in ("0", "2"):
        rewrite(path, lambda tensors: None, {"version": version})
        with pytest.raises(StateFormatError, match=f"written in version {version} .* reads version 1"):
            read_header(path)


def test_foreign_files(path: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(StateFormatError, match=r"not of random-number streams.*got None"):
        read_header(tmp_path / "weights.safetensors")
    torch.save({"weight": torch.ones(3)}, tmp_path / "weights.pt")
    with pytest.raises(StateFormatError, match="no safetensors file"):
        read_header(tmp_path / "weights.pt")
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "missing")


def swap_rows(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.numpy()[::-1].copy()
        tensors[name] = torch.from_numpy(tensors[name])


def flip_philox_bit(tensors: dict[str, Tensor]) -> None:
    tensors["philox"].view(torch.uint8)[1, 0, 3] ^= 1


def flip_twister_bit(tensors: dict[str, Tensor]) -> None:
    tensors["mt19937"][1, 2000] ^= 1


def move_rank(tensors: dict[str, Tensor]) -> None:
    tensors["coordinates"][1, 1] = 5


@pytest.mark.parametrize("damage", [swap_rows, flip_philox_bit, flip_twister_bit, move_rank])
def test_damaged_rows(path: Path, damage: Callable[[dict[str, Tensor]], None]) -> None:
    rewrite(path, damage)
    header = read_header(path)
    with pytest.raises(StateFormatError, match="row of rank 1 does not match its checksum"):
        read_row(path, header, 1)


def test_damaged_header(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(b'\\"tp\\": 2') == 1
    path.write_bytes(data.replace(b'\\"tp\\": 2', b'\\"tp\\": 3'))
    with pytest.raises(StateFormatError, match="header does not match its own checksum"):
        read_header(path)


@settings(max_examples=150, deadline=None)
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_d5_no_damage_goes_unnoticed(flips: list[tuple[float, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    data = bytearray(encode(Header(AXES, 2, STREAMS, seed=7), ROWS))
    for place, value in flips:
        data[int(place * len(data))] = value
    damaged = tmp_path_factory.mktemp("damaged") / "file"
    damaged.write_bytes(data)
    try:
        header = read_header(damaged)
        rows = read_rows(damaged, header)
        single = [read_row(damaged, header, rank) for rank in range(2)]
    except StateFormatError:
        return
    assert rows == single == ROWS  # bytes that mean nothing, or that were what they became


def test_header_and_tensors_disagree(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.pop("mt19937"))
    with pytest.raises(StateFormatError, match=r"promises tensors .*mt19937"):
        read_header(path)


def test_a_failed_write_leaves_the_former_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_file_is_complete_before_it_has_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    replace = os.replace

    def check(source: str, target: str) -> None:
        seen.append((Path(source).read_bytes(), Path(target).read_bytes(), os.path.dirname(source)))
        replace(source, target)

    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", check)
    write_atomically(path, b"new")
    assert seen == [(b"new", before, str(path.parent))]
    assert path.read_bytes() == b"new"


def test_the_file_has_ordinary_permissions(path: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    modes = [stat.S_IMODE(file.stat().st_mode) for file in (path, tmp_path / "plain")]
    assert modes[0] == modes[1]


def test_a_refused_file_changes_no_stream(tmp_path: Path) -> None:
    rng = ParallelRNG(None, device="cpu")
    rng.seed(1)
    path = tmp_path / "file"
    rng.save(path)
    torch.rand(3)
    before = rng.states()
    rewrite(path, lambda tensors: tensors["mt19937"][-1, 100:108].fill_(7))  # the last column only
    with pytest.raises(StateFormatError, match="checksum"):
        rng.load(path)
    after = rng.states()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    rng = ParallelRNG(None, device="cpu")
    rng.seed(1)
    with pytest.raises(FileNotFoundError, match="missing"):
        rng.save(tmp_path / "missing" / "file")
