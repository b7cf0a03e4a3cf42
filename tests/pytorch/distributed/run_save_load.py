# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_save_load_ranks.py: four ranks save, fail, load, and load on another layout."""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import run_cases
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from transformer_engine_ext.errors import LayoutMismatchError, StateFormatError, UnknownStreamError
from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec, megatron_streams
from transformer_engine_ext.pytorch.distributed.sources import open_saved

FOLDER = Path(sys.argv[1])
STREAMS = (
    *megatron_streams(),
    StreamSpec("per-replica", ("dp",), seed_offset=7777),
    StreamSpec("per-rank", ("dp", "tp"), seed_offset=500_000),
)


def job(axes: dict[str, int], streams: tuple[StreamSpec, ...] = STREAMS, **options: object) -> ParallelRNG:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    groups = {axis: mesh.get_group(axis) for axis in axes}
    if "dp" in axes:
        groups["ep"] = groups["dp"]  # folded over the data-parallel ranks
    return ParallelRNG(groups, streams, device="cpu", **options)  # type: ignore[arg-type]


def seeded(axes: dict[str, int]) -> ParallelRNG:
    rng = job(axes)
    rng.seed(50)
    return rng


def draw(rng: ParallelRNG) -> dict[str, Tensor]:
    drawn = {"default": torch.rand(9)}
    for name in rng.tracker.states_:
        with rng.tracker.fork(name):
            drawn[name] = torch.rand(9)
    return drawn


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def on_all_ranks(value: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value)
    return gathered


def fails(
    rng: ParallelRNG, call: Callable[[], object], error: type[BaseException], *texts: str, elsewhere: int | None = None
) -> None:
    """Assert that this rank raises, soon and with these texts, and changes nothing; `elsewhere` is the failing rank."""
    before, started = rng.states(), time.monotonic()
    with pytest.raises(error) as caught:
        call()
    assert time.monotonic() - started < 10
    if elsewhere is not None and dist.get_rank() != elsewhere:
        texts = (*texts, f"rank {elsewhere}: ", "the streams")
    missing = [text for text in texts if text not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert same(rng.states(), before)


def case_a_rank_that_cannot_read_its_streams() -> None:
    rng = seeded({"dp": 2, "tp": 2})
    path = FOLDER / "unread"
    rng.save(path)
    before = path.read_bytes()
    dist.barrier()
    if dist.get_rank() == 2:
        with rng.tracker.fork("per-rank"), pytest.raises(RuntimeError, match="cannot save the streams inside"):
            rng.save(path)
        with rng.tracker.fork("per-rank"), pytest.raises(RuntimeError, match="cannot load the streams inside"):
            rng.load(path)
    else:
        fails(rng, lambda: rng.save(path), RuntimeError, "cannot save the streams inside", elsewhere=2)
        fails(rng, lambda: rng.load(path), RuntimeError, "cannot load the streams inside", elsewhere=2)
    fresh = job({"dp": 2, "tp": 2})
    if dist.get_rank() != 1:
        fresh.seed(50)
    with pytest.raises(UnknownStreamError, match="there is no stream 'data-parallel-rng' to save"):
        fresh.save(path)
    assert path.read_bytes() == before


def case_arguments_that_only_one_rank_gets_wrong() -> None:
    rng = seeded({"dp": 2, "tp": 2})
    rank, path = dist.get_rank(), FOLDER / "arguments"
    rng.save(path)
    wrong = [None, path][rank != 1]
    fails(rng, lambda: rng.save(wrong), TypeError, "os.PathLike", elsewhere=1)  # type: ignore[arg-type]
    fails(rng, lambda: rng.load(wrong), TypeError, "os.PathLike", elsewhere=1)  # type: ignore[arg-type]
    policy = "guess" if rank == 3 else "error"
    fails(rng, lambda: rng.load(path, on_layout_change=policy), ValueError, "'guess' is not available", elsewhere=3)
    other = "rederive" if rank == 3 else "error"
    fails(rng, lambda: rng.load(path, on_stream_change=other), LayoutMismatchError, "the same way as rank 0")


def case_paths_that_only_rank_0_fails_at() -> None:
    rng = seeded({"dp": 2, "tp": 2})
    missing = FOLDER / "missing" / "file"
    fails(rng, lambda: rng.save(missing), FileNotFoundError, "/missing'; make it first", elsewhere=0)
    fails(rng, lambda: rng.save(FOLDER), IsADirectoryError, "this is a folder", elsewhere=0)
    fails(rng, lambda: rng.save("/dev/null"), OSError, "this is a character device", elsewhere=0)


def case_files_that_differ() -> None:
    rng = seeded({"dp": 2, "tp": 2})
    rank = dist.get_rank()
    rng.save(FOLDER / "first")
    torch.rand(3)
    rng.save(FOLDER / "second")
    path = FOLDER / ("second" if rank == 2 else "first")
    fails(rng, lambda: rng.load(path), LayoutMismatchError, "is another file on rank 2 than on rank 0", "checksums")
    path = FOLDER if rank == 1 else FOLDER / "first"
    fails(rng, lambda: rng.load(path), IsADirectoryError, "this is a folder", elsewhere=1)


def case_ranks_that_do_not_save_the_same_job() -> None:
    rng = seeded({"dp": 2, "tp": 2})
    rng.seed(51 if dist.get_rank() == 3 else 50)
    path = FOLDER / "never"
    fails(rng, lambda: rng.save(path), LayoutMismatchError, "seed: rank 0 has 50, rank 3 has 51", "Nothing was written")
    rng.seed(50)
    mine = FOLDER / f"never-{dist.get_rank() // 2}"
    texts = (f"path: rank 0 has {FOLDER}/never-0, rank 2 has {FOLDER}/never-1", "give all one path")
    fails(rng, lambda: rng.save(mine), LayoutMismatchError, *texts)
    assert not mine.exists()
    other = job({"dp": 2, "tp": 2}, STREAMS[:-1] if dist.get_rank() == 1 else STREAMS)
    other.seed(50)
    fails(other, lambda: other.save(path), LayoutMismatchError, "streams: rank 0 has", "rank 1 has")
    assert not path.exists()


def case_the_axes_in_another_order() -> None:
    rng = seeded({"dp": 2, "tp": 2})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {axis: mesh.get_group(axis) for axis in ("dp", "tp")}
    groups["ep"] = groups["dp"]
    turned = dict(reversed(groups.items())) if dist.get_rank() == 3 else groups
    other = ParallelRNG(turned, STREAMS, device="cpu")
    other.seed(50)
    torch.rand(3)
    other.save(FOLDER / "turned")
    expected = draw(other)
    for reader in (rng, other):
        assert set(reader.load(FOLDER / "turned").streams.values()) == {"kept"}
        assert same(draw(reader), expected)
    assert [row.coordinates for row in open_saved(FOLDER / "turned").rows()] == [
        (rank // 2, rank % 2, rank // 2) for rank in range(4)
    ]
    wide = job({"tp": 4})
    wide.load(FOLDER / "turned", on_layout_change="rederive")
    cp = init_device_mesh("cpu", (4, 1), mesh_dim_names=("all", "cp")).get_group("cp")
    more = ParallelRNG({**groups, "cp": cp} if dist.get_rank() == 3 else groups, STREAMS, device="cpu")
    more.seed(50)
    fails(more, lambda: more.save(FOLDER / "never"), LayoutMismatchError, "axes: rank 0 has {'dp': 2,", "has {'cp': 1,")


def case_d5_another_layout() -> None:
    rng = seeded({"dp": 2, "tp": 2})
    rank = dist.get_rank()
    if rank == 1:  # positions of streams that are no copies may differ
        with rng.tracker.fork("per-rank"):
            torch.rand(7)
    path = FOLDER / "two-by-two"
    rng.save(path)
    source = open_saved(path)
    saved = [dict(zip(source.header.names(), row.states, strict=True)) for row in source.rows()]

    wide = job({"tp": 4})
    wide.seed(1)
    handles = dict(wide.tracker.states_)
    names = ("saved dp=2 x tp=2 x ep=2 (world size 4), running tp=4 (world size 4)", "on_layout_change='rederive'")
    fails(wide, lambda: wide.load(path), LayoutMismatchError, *names)
    report = wide.load(path, on_layout_change="rederive")
    assert all(wide.tracker.states_[name] is handle for name, handle in handles.items())
    assert report.generation == 1
    assert [name for name, what in report.streams.items() if what == "kept"] == ["default", "data-parallel-rng"]
    first = wide.states()
    for name in ("default", "data-parallel-rng"):
        assert {bytes(first[name].tolist())} == {states[name] for states in saved}
    wide.verify()
    drawn = draw(wide)
    for name, value in drawn.items():
        distinct = {tuple(other.tolist()) for other in on_all_ranks(value)}
        # Nothing of the new layout varies over dp or ep, so those streams are alike on all ranks.
        assert len(distinct) == (4 if name in ("model-parallel-rng", "per-rank") else 1), name

    again = job({"tp": 4}, on_layout_change="rederive")  # reproducible, also without a seed before
    again.load(path)
    assert same(draw(again), drawn)
    wide.save(FOLDER / "four")
    back = job({"dp": 2, "tp": 2})
    assert back.load(FOLDER / "four", on_layout_change="rederive").generation == 2
    assert not same({"x": back.states()["model-parallel-rng"]}, {"x": rng.states()["model-parallel-rng"]})
    with_one = job({"dp": 2, "tp": 2, "cp": 1})  # an axis of size 1 is no other layout
    with_one.load(path)
    assert bytes(with_one.states()["per-rank"].tolist()) == saved[rank]["per-rank"]


def case_d4_generators_of_the_host() -> None:
    rng = job({"dp": 2, "tp": 2}, include=("python", "numpy"))
    rng.seed(50)
    path = FOLDER / "host"
    for _ in range(dist.get_rank()):  # a data loader may have run further on one rank
        random.random(), np.random.rand()
    rng.save(path)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    rng.load(path)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    rng.seed(50)
    rng.save(path)
    stages = job({"pp": 4}, include=("python", "numpy"))
    drawn = []
    for _ in range(2):
        report = stages.load(path, on_layout_change="rederive")
        assert {report.streams[name] for name in ("default", "python-random", "numpy-random")} == {"rederived"}
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
    for value in torch.tensor(drawn[0], dtype=torch.float64):
        assert len({other.item() for other in on_all_ranks(value)}) == 4  # a stage of its own on every rank
    with pytest.raises(LayoutMismatchError, match=r"'numpy-random': only in the file"):
        seeded({"dp": 2, "tp": 2}).load(path)


def case_d5_streams_that_came_and_went() -> None:
    rng = seeded({"dp": 2, "tp": 2})
    draw(rng)
    rng.save(FOLDER / "six")
    streams = (*STREAMS[:-1], StreamSpec("late", ("tp",), seed_offset=900_000))
    other = job({"dp": 2, "tp": 2}, streams)
    other.seed(3)
    texts = ("'per-rank': only in the file", "'late': not in the file", "on_stream_change='rederive'")
    fails(other, lambda: other.load(FOLDER / "six"), LayoutMismatchError, *texts)
    report = other.load(FOLDER / "six", on_stream_change="rederive")
    assert report.streams["late"] == "added"
    assert report.dropped == ("per-rank",)
    other.verify()
    expected = rng.states()
    assert all(torch.equal(state, expected[name]) for name, state in other.states().items() if name != "late")
    late = [tuple(value.tolist()) for value in on_all_ranks(draw(other)["late"])]
    assert late[0] == late[2] != late[1] == late[3]
    changed = (*STREAMS[:-1], StreamSpec("per-rank", ("dp",), seed_offset=500_000))
    fails(
        rng,
        lambda: job({"dp": 2, "tp": 2}, changed, tracker=rng.tracker).load(FOLDER / "six"),
        LayoutMismatchError,
        "'per-rank': saved as mt19937 that varies over dp, tp with seed offset 500000, declared as mt19937 that varies",
    )
    folded = job({"dp": 2, "tp": 2}, derivation="fold_in")
    with pytest.raises(LayoutMismatchError, match="saved with derivation='megatron', and this job has 'fold_in'"):
        folded.load(FOLDER / "six")


def case_d5_ranks_out_of_step_are_reported() -> None:
    rng = seeded({"dp": 2, "tp": 2})
    if dist.get_rank() == 3:
        torch.rand(5)
    rng.save(FOLDER / "drifted")
    alone = job({"tp": 4})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = alone.load(FOLDER / "drifted", on_layout_change="rederive")
    assert report.drifted == ("default",)
    texts = [str(warning.message) for warning in caught]
    assert (len(texts) == 1 and "default stood at different positions" in texts[0]) == (dist.get_rank() == 0)
    first = on_all_ranks(torch.rand(9))
    assert all(torch.equal(value, first[0]) for value in first)


def case_dcp_save_async_save_and_load() -> None:
    rng = seeded({"dp": 2, "tp": 2})
    if dist.get_rank() == 2:
        with rng.tracker.fork("per-rank"):
            torch.rand(4)
    before = rng.states()
    expected = draw(rng)
    rng.load_state_dict(rng.state_dict())
    for name in ("sync", "async"):
        later = job({"dp": 2, "tp": 2})
        later.seed(50)
        for stream, state in before.items():
            rng.tracker.states_.get(stream, torch.default_generator).set_state(state)
        contents = {"rng": rng, "weights": torch.ones(3)}
        folder = FOLDER / name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of gloo and of its planner
            if name == "sync":
                dcp.save(contents, checkpoint_id=folder)
            else:
                handle = dcp.async_save(contents, checkpoint_id=folder)
                draw(rng)  # what is drawn meanwhile does not get into the checkpoint
                handle.result()
            handles = dict(later.tracker.states_)
            dcp.load({"rng": later}, checkpoint_id=folder)
        assert all(later.tracker.states_[stream] is handle for stream, handle in handles.items())
        assert same(later.states(), before)
        assert same(draw(later), expected)
        later.verify()
        later.load(folder)  # the folder itself is as good as a file of save()
        assert same(draw(later), expected)


def case_dcp_changed_layout_points_to_load() -> None:
    rng = seeded({"dp": 2, "tp": 2})
    folder = FOLDER / "changed"
    wide = job({"tp": 4})
    wide.seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"rng": rng}, checkpoint_id=folder)
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.load({"rng": wide}, checkpoint_id=folder)
    assert "use ParallelRNG.load(path, on_layout_change='rederive')" in str(caught.value)
    fails(wide, lambda: wide.load(folder), LayoutMismatchError, "saved dp=2 x tp=2 x ep=2", "running tp=4")
    rng.save(FOLDER / "same-as-folder")
    wide.load(folder, on_layout_change="rederive")
    from_folder = draw(wide)
    wide.load(FOLDER / "same-as-folder", on_layout_change="rederive")
    assert same(draw(wide), from_folder)
    if dist.get_rank() == 0:
        with pytest.raises(LayoutMismatchError, match=r"taken by rank 0 of 4 with axes.*ParallelRNG\.load"):
            wide.load_state_dict(rng.state_dict())
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "__1_0.distcp").write_bytes(b"damaged")
    dist.barrier()
    fails(wide, lambda: wide.load(folder), StateFormatError, "changed: item")


CASES = {
    "a rank that cannot read its streams": case_a_rank_that_cannot_read_its_streams,
    "arguments that only one rank gets wrong": case_arguments_that_only_one_rank_gets_wrong,
    "paths that only rank 0 fails at": case_paths_that_only_rank_0_fails_at,
    "files that differ": case_files_that_differ,
    "ranks that do not save the same job": case_ranks_that_do_not_save_the_same_job,
    "the axes in another order": case_the_axes_in_another_order,
    "d4 generators of the host": case_d4_generators_of_the_host,
    "d5 another layout": case_d5_another_layout,
    "d5 streams that came and went": case_d5_streams_that_came_and_went,
    "d5 ranks out of step are reported": case_d5_ranks_out_of_step_are_reported,
    "dcp save, async_save and load": case_dcp_save_async_save_and_load,
    "dcp changed layout points to load": case_dcp_changed_layout_points_to_load,
}

if __name__ == "__main__":
    run_cases(CASES)
