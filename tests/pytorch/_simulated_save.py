# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_scale_saving.py: the work of rank 0 in a save of 16,384 ranks, and of a rank that loads.

Prints JSON: seconds of each step, the mebibytes that all of them took on top of the imports, and sizes in bytes.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from transformer_engine_ext.pytorch.distributed import megatron_streams
from transformer_engine_ext.pytorch.distributed.atomic_write import write_atomically
from transformer_engine_ext.pytorch.distributed.derivations import derive_table
from transformer_engine_ext.pytorch.distributed.resharding import reshard
from transformer_engine_ext.pytorch.distributed.rng_file import encode, read_header, read_row, read_rows
from transformer_engine_ext.pytorch.distributed.saved_streams import _belief, _pack, _unpack, fresh_state
from transformer_engine_ext.pytorch.distributed.saved_table import Header, Row, state_of
from transformer_engine_ext.pytorch.distributed.topology import Layout

AXES = {"pp": 16, "dp": 64, "tp": 8, "cp": 2}
RANKS = 16384

_T = TypeVar("_T")
seconds: dict[str, float] = {}


def timed(step: str, call: Callable[[], _T]) -> _T:
    started = time.perf_counter()
    result = call()
    seconds[step] = round(time.perf_counter() - started, 3)
    return result


def mebibytes(field: str) -> float:
    """Return a field of this process's status. (ru_maxrss would start from the size of the process that forked it.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def main() -> None:
    path = sys.argv[1]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: importing torch took more than what follows
    before = mebibytes("VmRSS")
    specs = megatron_streams(gtp=True, egtp=True, context_parallel=True, tensor_context_parallel=True)
    streams = [
        {
            "name": spec.name,
            "device": "cuda",
            "varies_over": list(spec.varies_over),
            "lockstep_over": list(spec.lockstep_over),
            "seed_offset": spec.seed_offset,
        }
        for spec in specs
    ]
    streams.append({**streams[0], "name": "default-cpu", "device": "cpu", "lockstep_over": []})
    header = Header(AXES, RANKS, tuple(streams), 1234)
    layout = Layout.of_product(AXES, 0)
    places = layout.places()

    def payloads() -> list[bytes]:
        """Return what rank 0 receives; the states of a rank follow from its place."""
        tables = derive_table("megatron", specs, 1234, AXES, bits=64)
        columns = np.stack([tables[spec.name].over(list(AXES), places) for spec in specs], axis=1).tolist()
        stages = [fresh_state("mt19937", 1234 + 100 * pp) for pp in range(AXES["pp"])]
        belief = _belief(path, header)
        received = []
        for rank, seeds in enumerate(columns):
            here = Layout(AXES, dict(zip(AXES, places[rank].tolist(), strict=True)), rank, RANKS)
            states = {
                spec.name: state_of(struct.pack("<QQ", seed, 4 * rank if "tp" in spec.varies_over else 400))
                for spec, seed in zip(specs, seeds, strict=True)
            }
            states["default-cpu"] = state_of(stages[here.coordinates["pp"]])
            received.append(b"S" + _pack(belief, here, header, states))
        return received

    received = timed("simulate the other ranks", payloads)
    sizes = {len(payload) for payload in received}
    base = mebibytes("VmHWM")
    rows: list[Row] = timed("unpack", lambda: _unpack(received, header))
    timed("encode and write", lambda: write_atomically(path, encode(header, rows)))
    found = timed("read the header", lambda: read_header(path))
    assert timed("read one row", lambda: read_row(path, found, 9999)) == rows[9999]
    assert timed("read all rows", lambda: read_rows(path, found)) == rows
    wide = {**AXES, "dp": 32, "tp": 16}
    running = replace(header, axes=wide)
    others = [dict(zip(wide, place, strict=True)) for place in Layout.of_product(wide, 0).places().tolist()]
    states, report = timed("reshard", lambda: reshard(found, rows, running, others, 77, fresh_state))
    assert report.streams["default"] == report.streams["default-cpu"] == "kept"
    assert report.streams["model-parallel-rng"] == "rederived"
    assert struct.unpack("<QQ", states["model-parallel-rng"])[1] == 4 * (RANKS - 1)
    assert torch.distributed.is_available()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "mebibytes": round(mebibytes("VmHWM") - before),
                "of them simulated": round(base - before),
                "message_bytes": sorted(sizes),
                "file_bytes": os.path.getsize(path),
            }
        )
    )


if __name__ == "__main__":
    main()
