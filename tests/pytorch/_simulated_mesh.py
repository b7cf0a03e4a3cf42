# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Program of test_scale.py: seeds, audit, check and table of a mesh of 16,384 ranks, timed, in one process.

The other ranks are a fake: their coordinates and reports are arrays that this process fills in. Nothing else is.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec, megatron_streams
from transformer_engine_ext.pytorch.distributed.derivations import derive_table
from transformer_engine_ext.pytorch.distributed.fingerprints import UNKNOWN, pack_report, standing_of
from transformer_engine_ext.pytorch.distributed.topology import Layout
from transformer_engine_ext.pytorch.distributed.verify import judge

AXES = {"pp": 16, "dp": 64, "tp": 8, "cp": 2}


def kibibytes(field: str) -> int:
    """Return a field of this process's status. (ru_maxrss would start from the size of the process that forked it.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def report_of(rng: ParallelRNG, belief: str) -> bytes:
    return pack_report(belief, rng.layout, {name: standing_of(state) for name, state in rng.states().items()})


def other_reports(rng: ParallelRNG, belief: str, odd: int) -> list[bytes]:
    """Return what every rank of the mesh would report, one of which stands elsewhere on its default stream."""
    mine = report_of(rng, belief)
    start = 8 + len(belief)
    ranks, axes = rng.layout.world_size, list(rng.layout.axes)
    table = np.tile(np.frombuffer(mine[start:], np.int64), (ranks, 1))
    table[:, : len(axes)] = rng.layout.everyone
    for index, axis in enumerate(axes):
        stride = int(np.prod([AXES[name] for name in axes[index + 1 :]]))
        table[:, len(axes) + index] = np.arange(ranks) - rng.layout.everyone[:, axes.index(axis)] * stride
    seeds = derive_table(rng.derivation, rng.streams, 1234, rng.layout.axes, bits=32)
    for index, spec in enumerate(rng.streams):
        column = 2 * len(axes) + 3 * index
        table[:, column] = seeds[spec.name].over(axes, rng.layout.everyone)
        table[:, column + 1] = 7 * table[:, column]
        table[:, column + 2] = UNKNOWN
    table[odd, 2 * len(axes) + 1] += 1
    return [mine[:start] + row.tobytes() for row in table]


def main() -> None:
    warnings.simplefilter("error")
    found: dict[str, object] = {}
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: importing torch took more than what follows
    baseline = kibibytes("VmRSS")
    for derivation in ("megatron", "fold_in"):
        streams = [
            *megatron_streams(data_parallel_random_init=derivation == "fold_in"),
            StreamSpec("per rank", ("pp", "dp", "tp", "cp"), seed_offset=1 << 24),
        ]
        if derivation == "megatron":
            streams = streams[:-1]  # a linear formula cannot keep 16,384 ranks apart on one stream
        rng = ParallelRNG(None, streams, derivation=derivation, device="cpu")
        started = time.perf_counter()
        layout = Layout.of_product(AXES, 5000)
        rng.layout = layout
        rng._verifier._layout = layout
        rng.seed(1234)
        seeded = time.perf_counter() - started
        belief = json.dumps({"axes": layout.axes, "streams": rng._held.describe()})
        reports = other_reports(rng, belief, odd=777)
        started = time.perf_counter()
        verdict = judge(reports, rng._held.describe(), None)
        judged = time.perf_counter() - started
        text = json.loads(verdict)["text"]
        found[derivation] = {"seed and audit": seeded, "check and table": judged, "text": text}
    found["mebibytes"] = (kibibytes("VmHWM") - baseline) / 1024
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
