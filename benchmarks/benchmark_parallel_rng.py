# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What seeding, saving and loading the streams of a job costs, by number of ranks (simulated, up to 16,384).

    python benchmarks/benchmark_parallel_rng.py --json OUT.json

One process plays one rank of a large job: torch's fake process group gives it the world and the mesh. ``seed`` is
``ParallelRNG.seed``, which also looks for collisions over the whole mesh. ``save`` and ``load`` are the work of the
rank that does most of it, on the rows of all ranks, without the collectives in between: encoding and writing the
file; reading the header and one row; and for another layout, reading all rows and deriving this rank's streams.
No GPU is needed: CUDA streams are 16 bytes of seed and offset wherever they are kept.
"""

from __future__ import annotations

import argparse
import os
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from _harness import Report, Side, parse, parser, time_sides
from transformer_engine_ext.errors import SeedCollisionWarning
from transformer_engine_ext.pytorch.distributed import ParallelRNG, megatron_streams
from transformer_engine_ext.pytorch.distributed.atomic_write import write_atomically
from transformer_engine_ext.pytorch.distributed.derivations import derive_table
from transformer_engine_ext.pytorch.distributed.resharding import reshard
from transformer_engine_ext.pytorch.distributed.rng_file import encode, read_header, read_row, read_rows
from transformer_engine_ext.pytorch.distributed.saved_streams import fresh_state
from transformer_engine_ext.pytorch.distributed.saved_table import Header, Row
from transformer_engine_ext.pytorch.distributed.topology import Layout

#: Ranks to pp, dp, tp.
MESHES = {8: (1, 2, 4), 64: (2, 4, 8), 512: (8, 8, 8), 4096: (16, 32, 8), 16384: (16, 128, 8)}


@contextmanager
def simulated(ranks: int) -> Iterator[ParallelRNG]:
    """Yield the streams of rank 0 of a job of so many ranks."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", MESHES[ranks], mesh_dim_names=("pp", "dp", "tp"))
        yield ParallelRNG(mesh, derivation="fold_in", device="cpu")
    finally:
        dist.destroy_process_group()


def table(ranks: int, axes: dict[str, int]) -> tuple[Header, list[Row]]:
    """Return what a save of CUDA streams consists of: a header, and a row per rank."""
    specs = megatron_streams()
    seeds = derive_table("fold_in", specs, 1234, axes, bits=64)
    layout = Layout.of_product(axes, 0)
    streams = tuple(
        {
            "name": spec.name,
            "device": "cuda",
            "varies_over": list(spec.varies_over),
            "lockstep_over": list(spec.lockstep_over),
            "seed_offset": spec.seed_offset,
        }
        for spec in specs
    )
    header = Header(axes=axes, world_size=ranks, streams=streams, seed=1234, derivation="fold_in")
    rows = []
    for place in layout.places().tolist():
        here = dict(zip(axes, place, strict=True))
        states = tuple(struct.pack("<QQ", seeds[spec.name].at(here), 4096) for spec in specs)
        rows.append(Row(tuple(place), states))
    return header, rows


def run_ranks(ranks: int, folder: Path, report: Report, options: argparse.Namespace) -> None:
    """Measure at one number of ranks."""
    axes = dict(zip(("pp", "dp", "tp"), MESHES[ranks], strict=True))
    path = folder / f"{ranks}.safetensors"
    header, rows = table(ranks, axes)

    def save() -> None:
        write_atomically(path, encode(header, rows))

    save()
    half = {**axes, "dp": axes["dp"] // 2}
    running = Header(axes=half, world_size=ranks // 2, streams=header.streams, seed=1234, derivation="fold_in")
    places = [dict(zip(half, place, strict=True)) for place in Layout.of_product(half, 0).places().tolist()]

    def load() -> None:
        read_row(path, read_header(path), ranks // 2)

    def load_elsewhere() -> None:
        saved = read_header(path)
        reshard(saved, read_rows(path, saved), running, places, 0, fresh_state)

    with simulated(ranks) as rng, warnings.catch_warnings():
        warnings.simplefilter("ignore", SeedCollisionWarning)
        _time(
            {
                "seed": lambda: rng.seed(1234),
                "save": save,
                "load": load,
                "load, another layout": load_elsewhere,
            },
            ranks,
            os.path.getsize(path),
            report,
            options,
        )


def _time(
    calls: dict[str, Callable[[], object]], ranks: int, size: int, report: Report, options: argparse.Namespace
) -> None:
    sides = [Side(name, call) for name, call in calls.items()]
    timings = time_sides(sides, options, f"{ranks} ranks", single=True)
    for name in calls:
        row = timings[name].row("ms_", 1e3)
        report.add("ranks", ranks=ranks, side=name, file_bytes=size if name == "save" else None, **row)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--ranks", nargs="+", type=int, choices=MESHES, default=list(MESHES))
    chosen = parse(options, arguments)
    if chosen.quick:
        chosen.ranks = [8, 64]
    report = Report("parallel_rng", chosen)
    report.note("ranks are simulated in one process; collectives between them are not part of it")
    if not torch.distributed.is_available():
        raise SystemExit("this build of torch has no torch.distributed")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in chosen.ranks:
            run_ranks(ranks, Path(folder), report, chosen)
    report.write()


if __name__ == "__main__":
    main()
