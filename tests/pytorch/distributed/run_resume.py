# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_save_load_ranks.py: the demo's training stops, and goes on with as many ranks or with others.

``run_resume.py FOLDER first`` trains on two tensor-parallel ranks, whole and stopped half-way, and resumes on them;
``run_resume.py FOLDER again NEXT`` goes on with the number of ranks that it is started with, and saves in NEXT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from _helpers import PASS_TOKEN
from transformer_engine_ext.cli.demo_arms import Training
from transformer_engine_ext.cli.demo_config import ModelSize
from transformer_engine_ext.cli.demo_text import load_corpus
from transformer_engine_ext.pytorch.distributed import ParallelRNG
from transformer_engine_ext.pytorch.distributed.sources import open_saved

HALF, END = 3, 6
CPU = torch.device("cpu")
KEPT = ("default", "data-parallel-rng", "expert-parallel-rng")  # not over tp


def on_all_ranks(value: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value)
    return gathered


def draw(rng: ParallelRNG) -> dict[str, Tensor]:
    drawn = {"default": torch.rand(9)}
    for name in rng.tracker.states_:
        with rng.tracker.fork(name):
            drawn[name] = torch.rand(9)
    return drawn


def training(engine: str) -> Training:
    rng = ParallelRNG({"tp": dist.group.WORLD}, device="cpu")
    return Training(engine, rng, load_corpus(), ModelSize(layers=1, length=16), CPU, 1234)


def first(folder: Path) -> None:
    whole = training("reentrant").run(0, END, lambda step: None)
    stopped = training("reentrant")
    losses = stopped.run(0, HALF, lambda step: None).losses
    stopped.save(folder)
    torch.save([whole.losses, whole.streams, losses], folder / f"whole-{dist.get_rank()}.pt")


def with_as_many_ranks(folder: Path) -> None:
    losses, streams, half = torch.load(folder / f"whole-{dist.get_rank()}.pt", weights_only=True)
    resumed = training("non-reentrant")
    resumed.load(folder)
    trace = resumed.run(HALF, END, lambda step: None)
    assert half + trace.losses == losses  # bit for bit: the same floats
    assert all(torch.equal(trace.streams[name], streams[name]) for name in streams)


def with_other_ranks(folder: Path, following: Path) -> None:
    source = open_saved(folder / "streams.safetensors")
    saved = dict(zip(source.header.names(), source.row(0).states, strict=True))

    def resume() -> tuple[Training, dict[str, Tensor], list[float], dict[str, Tensor]]:
        job = training("reentrant")
        report = job.rng.load(folder / "streams.safetensors", on_layout_change="rederive")
        assert [name for name, what in report.streams.items() if what == "kept"] == list(KEPT)
        assert report.drifted == ()
        states = job.rng.states()
        assert all(bytes(states[name].tolist()) == saved[name] for name in KEPT)
        return job, states, job.run(HALF, END, lambda step: None).losses, draw(job.rng)

    _, states, losses, drawn = resume()
    job, *again = resume()
    assert losses == again[1]
    assert all(torch.equal(states[name], again[0][name]) for name in states)
    assert all(torch.equal(drawn[name], again[2][name]) for name in drawn)
    job.save(following)
    everyone = {name: {tuple(value.tolist()) for value in on_all_ranks(drawn[name])} for name in drawn}
    assert len(everyone["model-parallel-rng"]) == dist.get_world_size()
    assert all(len(everyone[name]) == 1 for name in KEPT)
    former = {row.states[source.header.names().index("model-parallel-rng")] for row in source.rows()}
    assert bytes(states["model-parallel-rng"].tolist()) not in former


def main() -> None:
    folder, part = Path(sys.argv[1]), sys.argv[2]
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    if part == "first":
        first(folder)
        dist.barrier()
        with_as_many_ranks(folder)
    else:
        with_other_ranks(folder, Path(sys.argv[3]))
    dist.destroy_process_group()
    print(PASS_TOKEN, flush=True)


if __name__ == "__main__":
    main()
