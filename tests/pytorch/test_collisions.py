# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Which seeds may not meet, on one rank and across ranks, found over the whole mesh without communication."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from transformer_engine_ext.errors import SeedCollisionError, SeedCollisionWarning
from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec, megatron_streams
from transformer_engine_ext.pytorch.distributed.collisions import audit_seeds
from transformer_engine_ext.pytorch.distributed.derivations import derive_table
from transformer_engine_ext.pytorch.distributed.topology import Layout

DEFAULT = StreamSpec("default", ("pp",), seed_offset=0, is_default=True)
ALONE = Layout({}, {})


def audit(
    specs: Sequence[StreamSpec], layout: Layout, seed: int = 0, bits: int = 64, derivation: str = "megatron"
) -> None:
    tables = derive_table(derivation, specs, seed, layout.axes, bits=bits)
    audit_seeds(tables, layout, bits=bits, derivation=derivation)


def warned(specs: Sequence[StreamSpec], layout: Layout, **options: object) -> str:
    with pytest.warns(SeedCollisionWarning) as caught:
        audit(specs, layout, **options)  # type: ignore[arg-type]
    (warning,) = caught
    assert warning.filename == __file__  # the caller's line
    return str(warning.message)


def test_two_tracked_streams_on_one_seed_collide() -> None:
    specs = [DEFAULT, *(StreamSpec(name, (), seed_offset=7) for name in ("first", "second"))]
    with pytest.raises(SeedCollisionError) as caught:
        audit(specs, ALONE)
    for part in ("'first' (seed 7)", "'second' (seed 7)", "the only rank", "64 bits", "another seed_offset", "fold_in"):
        assert part in str(caught.value)
    audit(specs, ALONE, derivation="fold_in")


def test_only_data_parallel_rng_may_share_the_defaults_seed_if_declared_alike() -> None:
    audit(megatron_streams(), Layout.of_product({"pp": 4, "tp": 2}, 0), seed=5)
    meets_it_on_tp_0 = StreamSpec("other", ("pp", "tp"), seed_offset=0)
    with pytest.raises(SeedCollisionError, match=r"'default' \(seed 5\) and 'other' \(seed 5\) on the rank at tp 0 "):
        audit([DEFAULT, meets_it_on_tp_0], Layout.of_product({"tp": 2}, 1), seed=5)
    for name in ("other", "model-parallel-rng"):
        with pytest.raises(SeedCollisionError, match=f"'default' .* and '{name}' "):
            audit([DEFAULT, StreamSpec(name, ("pp",), seed_offset=0)], ALONE, seed=5)
    audit([DEFAULT, StreamSpec("data-parallel-rng", ("pp",), seed_offset=0)], ALONE, seed=5)
    twins = [StreamSpec(name, ("pp",), seed_offset=0) for name in ("data-parallel-rng", "two")]
    with pytest.raises(SeedCollisionError, match=r"'two' "):
        audit([DEFAULT, *twins], ALONE, seed=5)


def test_the_cpu_uses_32_bits_of_a_seed() -> None:
    specs = [DEFAULT, StreamSpec("far", (), seed_offset=2**32)]
    draws = [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + 2**32)]
    assert torch.equal(*draws)  # what the rule rests on
    rng = ParallelRNG(None, specs, device="cpu")
    with pytest.raises(SeedCollisionError, match="low 32 bits"):
        rng.seed(5)
    assert rng.tracker.states_ == {}
    audit(specs, ALONE, seed=5, bits=64)
    with pytest.raises(SeedCollisionError, match=r"'default' \(seed 5\) and 'far' \(seed 4294967301\)"):
        audit(specs, ALONE, seed=5, bits=32)


def test_d2_a_collision_on_any_rank_is_found_on_every_rank() -> None:
    # On tp 6, ep 17 of a full product, the model-parallel and the expert-parallel family meet.
    for rank in (0, 143):
        with pytest.raises(SeedCollisionError) as caught:
            audit(megatron_streams(), Layout.of_product({"tp": 8, "ep": 18}, rank))
        for part in ("'model-parallel-rng' (seed 2724)", "'expert-parallel-rng' (seed 2724)", "tp 6, ep 17"):
            assert part in str(caught.value)
    audit(megatron_streams(), Layout.of_product({"tp": 8, "ep": 18}, 0), derivation="fold_in", bits=32)


def test_d2_families_that_meet_across_ranks_are_a_warning_with_a_table() -> None:
    # Folded: no rank stands at tp 6 and ep 17, but two ranks draw the same numbers.
    ranks = np.stack([np.arange(72) % 8, np.arange(72) % 18], axis=1)  # tp and ep over the same ranks
    ranks = ranks[~((ranks[:, 0] == 6) & (ranks[:, 1] == 17))]
    folded = Layout({"tp": 8, "ep": 18}, {"tp": 0, "ep": 0}, 0, len(ranks), everyone=ranks)
    text = warned(megatron_streams(), folded)
    assert text.startswith("1 pair(s) of streams")
    (line,) = [line for line in text.splitlines() if line.startswith("  2724")]
    assert line.split("  ")[-1].strip() == "expert-parallel-rng at ep 17"
    assert "model-parallel-rng at tp 6" in line
    assert "derivation='fold_in' never meet" in text

    stages = Layout.of_product({"pp": 2, "ep": 2}, 0)
    (line,) = [line for line in warned(megatron_streams(), stages).splitlines() if line.startswith("  1124")]
    assert "expert-parallel-rng at pp 0, ep 1" in line
    assert "expert-parallel-rng at pp 1, ep 0" in line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layout in (folded, stages):
            for bits in (32, 64):
                audit(megatron_streams(), layout, derivation="fold_in", bits=bits)
        audit(megatron_streams(), Layout(folded.axes, {"tp": 3, "ep": 3}, 3, folded.world_size, everyone=ranks))


def test_a_long_table_is_cut() -> None:
    text = warned(megatron_streams(), Layout.of_product({"pp": 40, "ep": 30}, 0))
    assert "... and " in text
    assert len(text.splitlines()) < 20


def test_cells_where_no_rank_stands_do_not_count() -> None:
    places = np.array([[0, 0], [1, 1]])  # pp and ep in step: no rank has pp 0, ep 1
    audit(megatron_streams(), Layout({"pp": 2, "ep": 2}, {"pp": 0, "ep": 0}, 0, 2, everyone=places))


def test_colossalai_starts_one_rank_on_the_data_seed() -> None:
    rng = ParallelRNG(None, derivation="colossalai", device="cpu")
    with pytest.warns(SeedCollisionWarning, match="model-parallel-rng at the only rank, the same rank"):
        rng.seed(5)
    assert rng.tracker.states_["model-parallel-rng"].initial_seed() == 5
    rng = ParallelRNG(None, derivation="deepspeed", device="cpu")
    rng.seed(5)
    assert list(rng.tracker.states_) == ["model-parallel-rng"]
