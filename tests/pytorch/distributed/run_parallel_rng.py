# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_parallel_rng_ranks.py: four ranks, data-parallel 2 x tensor-parallel 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import dropout

from _helpers import PASS_TOKEN
from transformer_engine_ext.errors import LayoutMismatchError, StateFormatError
from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec, megatron_streams
from transformer_engine_ext.pytorch.distributed.rng_file import read_header
from transformer_engine_ext.pytorch.distributed.rng_file import read_row as read_saved_row
from transformer_engine_ext.pytorch.distributed.saved_table import Header, state_of
from transformer_engine_ext.pytorch.rng import decode_state

STREAMS = (*megatron_streams(), StreamSpec("per-replica", ("dp",), seed_offset=7777))
#: Seed of each stream on dp, tp; the expert axis lies over the data-parallel one.
SEEDS = {
    "default": lambda dp, tp: 50,
    "data-parallel-rng": lambda dp, tp: 50,
    "model-parallel-rng": lambda dp, tp: 50 + 2718 + tp,
    "expert-parallel-rng": lambda dp, tp: 50 + 1024 + 100 * dp,
    "per-replica": lambda dp, tp: 50 + 7777 + 10 * dp,
}


def read_row(path: Path, header: Header, rank: int) -> dict[str, Tensor]:
    states = read_saved_row(path, header, rank).states
    return {name: state_of(state) for name, state in zip(header.names(), states, strict=True)}


def draw(rng: ParallelRNG, device: str) -> dict[str, Tensor]:
    drawn = {"default": torch.rand(9, device=device)}
    for name in rng.tracker.states_:
        with rng.tracker.fork(name):
            drawn[name] = torch.rand(9, device=device)
    return drawn


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def on_all_ranks(value: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value)
    return gathered


def fails(call: Callable[[], object], error: type[Exception], *texts: str) -> None:
    with pytest.raises(error) as caught:
        call()
    missing = [text for text in texts if text not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def groups_of(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    # Expert parallelism folded over the data-parallel ranks: no mesh has tp, dp and ep side by side.
    return {"dp": mesh.get_group("dp"), "tp": mesh.get_group("tp"), "ep": mesh.get_group("dp")}


def masks_differ_where_declared(rng: ParallelRNG, device: str) -> None:
    ones = torch.ones(400, device=device)
    masks = {"default": on_all_ranks(dropout(ones, 0.5))}
    for name in ("model-parallel-rng", "per-replica"):
        with rng.tracker.fork(name):
            masks[name] = on_all_ranks(dropout(ones, 0.5))
    for name, (over_dp, over_tp) in {
        "default": (True, True), "model-parallel-rng": (True, False), "per-replica": (False, True),
    }.items():  # fmt: skip
        for dp, tp in ((0, 0), (0, 1), (1, 0), (1, 1)):
            mine = masks[name][2 * dp + tp]
            assert torch.equal(mine, masks[name][2 * (1 - dp) + tp]) == over_dp, (name, dp, tp)
            assert torch.equal(mine, masks[name][2 * dp + 1 - tp]) == over_tp, (name, dp, tp)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    device, folder = arguments.device, arguments.folder
    dist.init_process_group(arguments.backend)
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = divmod(rank, 2)

    rng = ParallelRNG(groups_of(mesh), STREAMS, device=device)
    assert rng.layout.coordinates == {"dp": dp, "tp": tp, "ep": dp}
    rng.seed(50)
    for name, handle in rng.tracker.states_.items():
        assert handle.initial_seed() == SEEDS[name](dp, tp), name
    masks_differ_where_declared(rng, device)  # d3

    # d4: every rank gets its own row back, also of streams that differ over every axis.
    if rank == 3:
        torch.rand(5, device=device)  # positions may differ between ranks as well as seeds
    path = folder / "streams.safetensors"
    rng.save(path)
    saved = rng.states()
    expected = draw(rng, device)
    handles = dict(rng.tracker.states_)
    rng.load(path)
    assert all(rng.tracker.states_[name] is handle for name, handle in handles.items())
    assert same(draw(rng, device), expected)
    fresh = ParallelRNG(groups_of(mesh), STREAMS, device=device)
    fresh.load(path)
    assert same(draw(fresh, device), expected)
    header = read_header(path)
    for other in range(4):
        row = read_row(path, header, other)
        assert other != rank or same(row, saved)
        for name, seed in SEEDS.items():
            assert decode_state(row[name]).seed == seed(*divmod(other, 2)), (other, name)

    # Ranks numbered in another order: the row goes with the coordinates.
    turned = DeviceMesh(device, [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    moved = ParallelRNG(groups_of(turned), STREAMS, device=device)
    moved.load(path)
    assert same(moved.states(), read_row(path, header, 2 * tp + dp))
    rng.load(path)

    # d5 and worse: refused on every rank, and nothing changed on any.
    before = rng.states()
    other = ParallelRNG(mesh, STREAMS, tracker=rng.tracker, device=device)
    fails(
        lambda: other.load(path), LayoutMismatchError, "saved dp=2 x tp=2 x ep=2", "running dp=2 x tp=2 (world size 4)"
    )
    four = ParallelRNG(groups_of(mesh), tracker=rng.tracker, device=device)
    fails(lambda: four.load(path), LayoutMismatchError, "per-replica")
    elsewhere = path if rank != 3 else folder / "missing"
    fails(lambda: rng.load(elsewhere), FileNotFoundError, "missing", *([] if rank == 3 else ["rank 3: "]))
    damaged = folder / "damaged"
    if rank == 0:
        tensors = safetensors.torch.load_file(path)
        if device == "cuda":
            tensors["philox"].view(torch.uint8)[2, 0, 8] ^= 1
        else:  # equal states are stored once, so damage to one of them could be damage to several ranks
            tensors["mt19937_rows"][2, 0] = tensors["mt19937_rows"][2, 2]
        with safetensors.safe_open(path, framework="pt") as file:
            damaged.write_bytes(safetensors.torch.save(tensors, file.metadata()))
    dist.barrier()
    fails(lambda: rng.load(damaged), StateFormatError, "row of rank 2", *([] if rank == 2 else ["rank 2: "]))
    assert same(rng.states(), before)

    # Rank 0 cannot write, or not all ranks save the same streams: every rank learns it, the former file stays.
    contents = path.read_bytes()
    fails(lambda: rng.save(folder / "missing" / "file"), FileNotFoundError, "missing")
    uneven = four if rank == 1 else rng
    fails(lambda: uneven.save(path), LayoutMismatchError, "ranks do not save the same things")
    assert path.read_bytes() == contents
    assert sorted(file.name for file in folder.iterdir()) == ["damaged", "streams.safetensors"]
    dist.destroy_process_group()
    print(PASS_TOKEN, flush=True)


if __name__ == "__main__":
    main()
