# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""A job of 16,384 ranks: time and memory of what one process computes for all, and sizes that must not grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from _helpers import REPO, TESTS
from transformer_engine_ext.pytorch.distributed import ParallelRNG, megatron_streams
from transformer_engine_ext.pytorch.distributed.derivations import derive_table
from transformer_engine_ext.pytorch.distributed.fingerprints import (
    agreement_word,
    differ,
    lockstep_word,
    pack_report,
    standing_of,
)
from transformer_engine_ext.pytorch.distributed.rng_file import encode
from transformer_engine_ext.pytorch.distributed.saved_table import Header, Row
from transformer_engine_ext.pytorch.distributed.topology import Layout
from transformer_engine_ext.pytorch.rng.state import PhiloxState

#: Ranks to mesh.
MESHES = {
    2: {"pp": 1, "dp": 1, "tp": 2, "cp": 1},
    128: {"pp": 2, "dp": 4, "tp": 8, "cp": 2},
    2048: {"pp": 4, "dp": 32, "tp": 8, "cp": 2},
    16384: {"pp": 16, "dp": 64, "tp": 8, "cp": 2},
}
#: What the issue asks for, and how much slower a shared machine may be.
SECONDS, MEBIBYTES, MARGIN = 2.0, 200.0, 3.0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux reports it")
def test_seeding_audit_and_table_of_16384_ranks(tell: Callable[[str], None]) -> None:
    result = subprocess.run(
        [sys.executable, str(TESTS / "_simulated_mesh.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), str(TESTS)]), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    for derivation in ("megatron", "fold_in"):
        times = {key: value for key, value in found[derivation].items() if key != "text"}
        tell(f"16384 ranks, {derivation}: {times}, {found['mebibytes']:.0f} MiB")
        assert sum(times.values()) < SECONDS * MARGIN
        text = found[derivation]["text"]
        assert "default: rank 777 (pp 0, dp 48, tp 4, cp 1) stands elsewhere than rank 769, and must be" in text
        assert len(text) < 6000
    assert 0 < found["mebibytes"] < MEBIBYTES


def test_what_a_rank_sends_does_not_grow() -> None:
    sizes = {}
    for ranks, axes in MESHES.items():
        rng = ParallelRNG(None, device="cpu")
        rng.layout = Layout.of_product(axes, ranks - 1)
        rng.seed(1)
        standings = {name: standing_of(state) for name, state in rng.states().items()}
        belief = json.dumps({"axes": dict.fromkeys(axes), "streams": rng._held.describe()})
        words = [
            agreement_word(belief, ranks - 1, ranks),
            lockstep_word(standings, {"default": ("tp",)}, rng.layout, None),
        ]
        assert all(0 <= word < 2**44 for word in words)
        sizes[ranks] = (len(pack_report(belief, rng.layout, standings)), sum(map(len, rng.states().values())))
    assert len(set(sizes.values())) == 1, sizes
    print(f"bytes of a report and of the states, per rank: {sizes}")


def test_a_row_of_the_file_does_not_grow() -> None:
    per_rank = {}
    for ranks, axes in MESHES.items():
        specs = megatron_streams()
        tables = derive_table("megatron", specs, 1, axes, bits=64)
        layout = Layout.of_product(axes, 0)
        columns = [tables[spec.name].over(list(axes), layout.everyone).tolist() for spec in specs]
        states = [[PhiloxState(seed, 64).to_tensor().numpy().tobytes() for seed in row] for row in zip(*columns)]  # noqa: B905
        rows = [Row(tuple(place), tuple(state)) for place, state in zip(layout.everyone.tolist(), states, strict=True)]
        streams = tuple({**stream, "device": "cuda"} for stream in ParallelRNG(None, device="cpu")._held.describe())
        per_rank[ranks] = len(encode(Header(axes=axes, world_size=ranks, streams=streams, seed=1), rows)) / ranks
    print(f"bytes of the file per rank: {per_rank}")
    assert per_rank[16384] < per_rank[2048] * 1.02
    assert per_rank[16384] < 120


def test_the_sum_of_all_contributions() -> None:
    # 16,384 ranks in 2048 tp groups: 0 if all agree, something else if one rank does not.
    axes, ranks = MESHES[16384], 16384
    rng = ParallelRNG(None, device="cpu")
    rng.seed(1)
    standing = standing_of(rng.states()["default"])
    other = standing_of(rng.states()["model-parallel-rng"])
    for odd in (None, 0, 9000):
        total = agreed = 0
        for rank in range(ranks):
            first, position = rank // 16 * 16 + rank % 2, rank // 2 % 8
            layout = Layout({}, {"tp": position}, rank, ranks, {"tp": tuple(first + 2 * step for step in range(8))})
            standings = {"default": other if rank == odd else standing}
            total += lockstep_word(standings, {"default": ("tp", "nowhere")}, layout, None)
            agreed += agreement_word("other" if rank == odd else "same", rank, ranks)
        assert max(total, agreed) < 2**63
        assert differ(total) == differ(agreed) == (odd is not None)
    assert list(axes) == ["pp", "dp", "tp", "cp"]
