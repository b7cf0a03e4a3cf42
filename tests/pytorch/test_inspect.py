# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``te-ext inspect``: tables, JSON, comparisons and pictures of saved streams."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from _helpers import REPO
from transformer_engine_ext.cli import main
from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec, megatron_streams
from transformer_engine_ext.pytorch.distributed.rng_file import encode
from transformer_engine_ext.pytorch.distributed.saved_table import Header, Row


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


SPECS = (*megatron_streams()[:3], StreamSpec("per-rank", ("dp", "tp"), seed_offset=500_000))
STREAMS = tuple(
    {
        "name": spec.name,
        "device": "cuda",
        "varies_over": list(spec.varies_over),
        "lockstep_over": list(spec.lockstep_over),
        "seed_offset": spec.seed_offset,
    }
    for spec in SPECS
)
PLACES = [(dp, tp) for dp in range(2) for tp in range(2)]
#: Seed and offset per rank and stream: dp 2 x tp 2, as seeded from 50 and drawn from.
STATES = [
    [(50, 480), (50, 480), (2768 + tp, 8 + 40 * dp), (500_050 + 10 * dp + tp, 4 * (2 * dp + tp))] for dp, tp in PLACES
]


def write(path: Path, states: list[list[tuple[int, int]]], streams: Any = STREAMS, **fields: Any) -> Path:
    header = Header({"dp": 2, "tp": 2}, 4, tuple(streams), 50)
    rows = [
        Row(place, tuple(struct.pack("<QQ", *state) for state in row))
        for place, row in zip(PLACES, states, strict=True)
    ]
    path.write_bytes(encode(replace(header, **fields), rows))
    return path


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["inspect", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out, output.err


TABLE = """\
FILE: ParallelRNG file
  4 ranks: dp=2 x tp=2
  seed of the job: 50; derivation: megatron

  stream              varies over    seed  position  ranks
  default             pp               50       480  all
  data-parallel-rng   pp               50       480  all
  model-parallel-rng  pp, tp         2768         8  0
                                     2768        48  2
                                     2769         8  1
                                     2769        48  3
  per-rank            dp, tp       500050         0  0
                                   500051         4  1
                                   500060         8  2
                                   500061        12  3

No collisions, and all ranks agree as declared.
"""


def test_the_table_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "file", STATES)
    code, out, err = inspect(capsys, path)
    assert (code, err) == (0, "")
    lines, expected = out.replace(str(path), "FILE").splitlines(), TABLE.splitlines()
    assert sorted(lines) == sorted(expected)  # groups are in the order of their first ranks
    assert lines[:7] == expected[:7]
    assert all(len(line) <= 80 for line in lines)


def broken(**changes: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Return the states with changes, named like ``s0r3``: stream 0 of rank 3."""
    states = [list(row) for row in STATES]
    for key, state in changes.items():
        stream, rank = map(int, key[1:].split("r"))
        states[rank][stream] = state
    return states


PROBLEMS = {
    "position": ({"s0r3": (50, 484)}, "default: ranks 2-3 stand at different positions, and must be in lockstep"),
    "seed": ({"s1r2": (51, 480)}, "data-parallel-rng: rank 2 started from another seed than ranks 0-1, 3, and the"),
    "repeat": ({"s2r1": (2768, 8), "s2r3": (2768, 8)}, "model-parallel-rng: ranks 0-3 started from one seed, and the"),
    "collision": (
        {"s3r1": (2769, 4)},
        "model-parallel-rng and per-rank on one rank started from one seed (2769): rank 1",
    ),
    "collision elsewhere": ({"s3r1": (2768, 4)}, "model-parallel-rng and per-rank on different ranks started from one"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_wrong_is_marked(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, text = PROBLEMS[name]
    path = write(tmp_path / "file", broken(**changes))
    code, out, _ = inspect(capsys, path)
    assert code == 1
    assert text in " ".join(out.split())
    marked = [line for line in out.splitlines() if line.startswith("!")]
    assert marked
    assert all(len(line) <= 80 for line in out.splitlines()[1:])  # the first has the path
    code, out, _ = inspect(capsys, path, "--json")
    assert code == 1
    (problem,) = json.loads(out)["report"]["problems"]
    assert problem["kind"] == name.split()[0]
    assert text.split(":")[0].split(" on ")[0] in problem["text"]


def test_json_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "file", STATES)
    code, out, err = inspect(capsys, path, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["format"], found["version"], found["error"]) == ("te-ext.inspect", 1, None)
    report = found["report"]
    assert (report["axes"], report["ranks"], report["seed"]) == ({"dp": 2, "tp": 2}, 4, 50)
    groups = {stream["name"]: stream["groups"] for stream in report["streams"]}
    for rank, row in enumerate(STATES):
        for spec, state in zip(SPECS, row, strict=True):
            (group,) = (group for group in groups[spec.name] if rank in group["ranks"])
            assert (group["seed"], group["position"], group["marked"]) == (*state, False)


def test_a_large_table_is_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = 256
    rows = [
        Row((0, rank), (struct.pack("<QQ", 50, 0), struct.pack("<QQ", 1000 + rank, 4 if rank != 200 else 8)))
        for rank in range(ranks)
    ]
    streams = (STREAMS[0], {**STREAMS[3], "lockstep_over": []})
    path = tmp_path / "file"
    path.write_bytes(encode(Header({"dp": 1, "tp": ranks}, ranks, streams, 50), rows))
    code, out, _ = inspect(capsys, path)
    assert code == 0
    assert "... 248 more (--all)" in out
    assert len(out.splitlines()) < 25
    _, out, _ = inspect(capsys, path, "--all")
    assert len(out.splitlines()) > ranks


def test_positions_of_cpu_streams_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = ParallelRNG(None, device="cpu", include=("python", "numpy"))
    rng.seed(7)
    torch.empty(1000, dtype=torch.int64).random_(0, 2)  # one word per element
    rng.save(tmp_path / "file")
    code, out, _ = inspect(capsys, tmp_path / "file")
    assert code == 0
    assert " ".join(next(line for line in out.splitlines() if "default" in line).split()) == "default pp 7 1,000 all"
    python = next(line for line in out.splitlines() if "python-random" in line).split()
    assert python[2] == "-"
    assert python[3].startswith("#")
    assert "#...: digest of a state" in out


def test_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "first", STATES)
    moved = [[(seed, offset + 64) for seed, offset in row] for row in STATES]
    moved[3][2] = (99, 4)
    second = write(tmp_path / "second", moved, seed=51)
    code, out, _ = inspect(capsys, first, second)
    assert code == 1
    assert out.splitlines() == [
        f"{first} -> {second}",
        "  seed: 50 -> 51",
        "  default: offset +64, ranks 0-3",
        "  data-parallel-rng: offset +64, ranks 0-3",
        "  model-parallel-rng: offset +64, ranks 0-2",
        "  model-parallel-rng: seed 2769 -> 99, offset 48 -> 4, rank 3",
        "  per-rank: offset +64, ranks 0-3",
    ]
    code, out, _ = inspect(capsys, first, first)
    assert (code, out.splitlines()[1]) == (0, "No difference: every rank's streams stand where they stood.")
    code, out, _ = inspect(capsys, first, second, "--json")
    difference = json.loads(out)["difference"]
    assert (code, difference["equal"], difference["facts"]) == (1, False, {"seed": [50, 51]})
    assert {"stream": "per-rank", "what": "offset +64", "ranks": [0, 1, 2, 3]} in difference["changes"]


def test_what_changed_between_layouts_and_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "first", STATES)
    rows = [Row((rank,), (*(struct.pack("<QQ", 50, 480),) * 2, struct.pack("<QQ", 7, rank * 4))) for rank in range(3)]
    streams = (*STREAMS[:2], {**STREAMS[2], "name": "new-rng"})
    second = tmp_path / "second"
    second.write_bytes(encode(Header({"tp": 3}, 3, streams, 50, generation=1), rows))
    code, out, _ = inspect(capsys, first, second)
    assert code == 1
    for line in (
        "  axes: dp=2 x tp=2 -> tp=3",
        "  ranks: 4 -> 3",
        "  generation: 0 -> 1",
        "  Another layout, so states are compared as sets, not rank by rank.",
        "  model-parallel-rng: gone, ranks 0-2",
        "  new-rng: new, ranks 0-2",
    ):
        assert line in out.splitlines(), out
    assert "  default" not in out


def test_what_a_cpu_stream_drew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = ParallelRNG(None, device="cpu")
    rng.seed(7)
    rng.save(tmp_path / "first")
    torch.empty(700, dtype=torch.int64).random_(0, 2)
    with rng.tracker.fork():
        torch.manual_seed(99)
    rng.save(tmp_path / "second")
    _, out, _ = inspect(capsys, tmp_path / "first", tmp_path / "second")
    assert out.splitlines()[1:] == [
        "  default: 700 words drawn, rank 0",
        "  model-parallel-rng: seed 2725 -> 99, rank 0",
    ]


@pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint's own, about the missing process group
def test_folders_and_megatrons_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = ParallelRNG(None, device="cpu")
    rng.seed(1234)
    rng.save(tmp_path / "file")
    dcp.save({"rng": rng, "weight": torch.ones(3)}, checkpoint_id=tmp_path / "folder", no_dist=True)
    code, out, _ = inspect(capsys, tmp_path / "folder")
    assert (code, out.splitlines()[0]) == (0, f"{tmp_path / 'folder'}: torch.distributed.checkpoint folder")
    code, out, _ = inspect(capsys, tmp_path / "file", tmp_path / "folder")
    assert out.splitlines()[1:] == ["  kind: ParallelRNG file -> torch.distributed.checkpoint folder"]

    for tp in range(2):
        part = tmp_path / "megatron" / f"mp_rank_{tp:02d}"
        part.mkdir(parents=True)
        state = rng.megatron_rng_state()
        tracked = state[0]["rng_tracker_states"]
        tracked["model-parallel-rng"] = torch.Generator().manual_seed(3952 + tp).get_state()
        tracked["expert-parallel-rng"] = torch.Generator().manual_seed(2258 + 100 * tp).get_state()
        torch.save({"rng_state": state}, part / "model_optim_rng.pt")
    code, out, _ = inspect(capsys, tmp_path / "megatron")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:2] == [f"{tmp_path / 'megatron'}: Megatron checkpoint", "2 ranks: tp=2"]
    assert "seed of the job: not saved; derivation: unknown" in lines
    assert "model-parallel-rng pp, tp 3952 0 0" in lines
    assert "expert-parallel-rng unknown 2258 0 0" in lines  # which ep rank that was is not told
    code, out, _ = inspect(capsys, tmp_path / "megatron" / "mp_rank_00" / "model_optim_rng.pt")
    assert code == 0
    code, _, err = inspect(capsys, tmp_path)
    assert (code, "this folder holds no random-number streams" in err) == (3, True)


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = inspect(capsys, tmp_path / "missing")
    assert (code, out) == (3, "")
    assert "te-ext inspect: [Errno 2] No such file or directory" in err
    (tmp_path / "junk").write_bytes(b"junk")
    code, out, err = inspect(capsys, tmp_path / "junk", "--json")
    assert (code, err) == (3, "")
    assert "no safetensors file, or a truncated one" in json.loads(out)["error"]
    with pytest.raises(SystemExit) as exit_code:
        main(["inspect"])
    assert exit_code.value.code == 2


@pytest.mark.parametrize("kind", ["a named pipe", "a character device"])
def test_what_is_no_ordinary_file_is_not_read(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pipe" if kind == "a named pipe" else Path("/dev/zero")
    if kind == "a named pipe":
        os.mkfifo(path)
    code, out, err = inspect(capsys, path)
    assert (code, out) == (3, "")
    assert f"this is {kind}; name an ordinary file" in err
    saved = write(tmp_path / "file", STATES)
    code, out, err = inspect(capsys, saved, path)
    assert (code, out) == (3, "")
    pytest.importorskip("matplotlib")
    for target, what in ((path, kind), (tmp_path, "a folder")):
        code, _, err = inspect(capsys, saved, "--plot", target)
        assert (code, f"cannot draw the streams: this is {what}" in err) == (3, True), err


def test_an_empty_list_of_megatrons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"rng_state": []}, tmp_path / "empty.pt")
    code, _, err = inspect(capsys, tmp_path / "empty.pt")
    assert (code, "rng_state is Megatron's list of dictionaries" in err) == (3, True), err


def test_control_characters_in_names_are_written_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\nb\x1b[31m\u009b [bold]\xe9"
    streams = (*STREAMS[:3], {**STREAMS[3], "name": name})
    path, other = (
        write(tmp_path / file, states, streams) for file, states in (("f", STATES), ("g", broken(s3r0=(500_051, 4))))
    )
    for arguments in ((path,), (other,), (path, other)):
        _, out, _ = inspect(capsys, *arguments)
        assert "a\\nb\\x1b[31m\\x9b [bold]\xe9" in out
        assert all(character.isprintable() or character == "\n" for character in out)
    _, out, _ = inspect(capsys, path, "--json")
    assert json.loads(out)["report"]["streams"][3]["name"] == name


def test_rich_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "file", STATES)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    _, out, _ = inspect(capsys, path)
    assert "  default             pp               50       480  all" in out
    monkeypatch.delitem(sys.modules, "rich.console")
    pytest.importorskip("rich")
    _, out, _ = inspect(capsys, path)
    assert "data-parallel-rng" in out
    assert "│" in out


def test_d7_without_a_distributed_world(tmp_path: Path) -> None:
    """In a process of its own, in which nothing of Transformer Engine, Megatron or a process group is there."""
    path = write(tmp_path / "file", STATES)
    script = (
        "import sys\n"
        "for name in ('transformer_engine', 'megatron', 'matplotlib', 'rich'):\n"
        "    sys.modules[name] = None\n"
        "from transformer_engine_ext.cli import main\n"
        "code = main(['inspect', sys.argv[1]])\n"
        "import torch\n"
        "assert not torch.distributed.is_initialized()\n"
        "sys.exit(code)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "all ranks agree as declared" in result.stdout


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "file", broken(s0r3=(50, 484)))
    before = "matplotlib.pyplot" in sys.modules  # by a test of this process, perhaps
    for name in ("out.png", "out.svg"):
        code, _, err = inspect(capsys, path, "--plot", tmp_path / name)
        assert (code, err) == (1, f"te-ext inspect: wrote {tmp_path / name}\n")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert before == ("matplotlib.pyplot" in sys.modules)
    text = (tmp_path / "out.svg").read_text()
    for part in ("data-parallel-rng", "dp=2 x tp=2, 4 ranks", "not as declared, or a collision"):
        assert f"<!-- {part} -->" in text, part
    assert text.count("<!-- 484 -->") == 1
    assert text.count("stroke: #ff4538") == 3  # two frames, and the legend's
    with pytest.raises(SystemExit) as exit_code:
        inspect(capsys, path, "--plot", tmp_path / "out.unknown")
    assert exit_code.value.code == 2
    assert "unknown" in capsys.readouterr().err
    code, _, err = inspect(capsys, path, "--plot", tmp_path / "missing" / "out.png")
    assert (code, "missing" in err) == (3, True)


def test_pictures_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "file", STATES)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as exit_code:
        main(["inspect", str(path), "--plot", str(tmp_path / "out.png")])
    assert exit_code.value.code == 2
    assert "--plot needs matplotlib" in (text := capsys.readouterr().err)
    assert "pip install matplotlib" in text
    with pytest.raises(SystemExit):
        main(["inspect", str(path), str(path), "--plot", str(tmp_path / "out.png")])
    assert "--plot draws one PATH" in capsys.readouterr().err
