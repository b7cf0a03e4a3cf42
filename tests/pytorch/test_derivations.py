# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The seeds that follow from a job's seed: golden vectors of every formula, and what the hashing one promises."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_engine_ext.pytorch.distributed import (
    StreamSpec,
    colossalai_streams,
    deepspeed_streams,
    derive_seed,
    derive_seeds,
    megatron_streams,
)
from transformer_engine_ext.pytorch.distributed.derivations import DERIVATIONS, derive_table
from transformer_engine_ext.pytorch.distributed.threefry import threefry2x32

EVERY_AXIS = {"pp": 8, "dp": 8, "cp": 4, "tp": 8, "ep": 18, "etp": 4, "gtp": 4, "egtp": 4}

# Worked out by hand from _set_random_seed (megatron/training/initialize.py) and model_parallel_cuda_manual_seed
# (megatron/core/tensor_parallel/random.py): base = seed + 100*pp (+ 10*dp), model = base + 2718 + tp,
# expert = base + 1024 + 100*ep + etp, gtp = model + 65536*(1 + gtp), egtp = expert + 32768 + 65536*(1 + egtp).
MEGATRON = [
    # seed, coordinates, default and data, model, expert, gtp, egtp
    (1234, {}, 1234, 3952, 2258, 69488, 100562),
    (1234, {"tp": 1}, 1234, 3953, 2258, 69489, 100562),
    (1234, {"pp": 3, "tp": 5, "gtp": 2}, 1534, 4257, 2558, 200865, 100862),
    (42, {"pp": 1, "tp": 7, "ep": 2, "etp": 3, "dp": 4, "cp": 1, "egtp": 1}, 142, 2867, 1369, 68403, 165209),
    (0, {"ep": 17}, 0, 2718, 2724, 68254, 101028),
]


@pytest.mark.parametrize(("seed", "coordinates", "data", "model", "expert", "gtp", "egtp"), MEGATRON)
def test_megatron_seeds(
    seed: int, coordinates: dict[str, int], data: int, model: int, expert: int, gtp: int, egtp: int
) -> None:
    seeds = derive_seeds("megatron", megatron_streams(gtp=True, egtp=True), seed, coordinates, EVERY_AXIS, bits=64)
    assert seeds == {
        "default": data,
        "data-parallel-rng": data,
        "model-parallel-rng": model,
        "expert-parallel-rng": expert,
        "gtp-remat-rng": gtp,
        "egtp-remat-rng": egtp,
    }


def test_megatron_seeds_with_data_parallel_random_init() -> None:
    place = {"pp": 1, "dp": 4, "tp": 7, "ep": 2, "etp": 3}
    specs = megatron_streams(data_parallel_random_init=True)
    assert list(derive_seeds("megatron", specs, 42, place, EVERY_AXIS, bits=64).values()) == [182, 182, 2907, 1409]


def test_streams_over_cp_meet_no_other_family() -> None:
    specs = megatron_streams(context_parallel=True, tensor_context_parallel=True)
    names = [spec.name for spec in specs]
    assert names[4:] == ["context-parallel-rng", "tensor-context-parallel-rng"]
    assert (specs[4].varies_over, specs[4].lockstep_over) == (("pp", "cp"), ("tp",))
    assert (specs[5].varies_over, specs[5].lockstep_over) == (("pp", "tp", "cp"), ())
    place = {"pp": 2, "tp": 3, "cp": 1}
    seeds = derive_seeds("megatron", specs, 5, place, EVERY_AXIS, bits=64)
    assert seeds["context-parallel-rng"] == 5 + 2**28 + 200 + 2**20
    assert seeds["tensor-context-parallel-rng"] == 5 + 2**29 + 200 + 3 + 2**20
    table = derive_table("megatron", specs, 5, {"pp": 16, "dp": 128, "cp": 64, "tp": 16}, bits=32)
    cells = np.concatenate([table[name].seeds.ravel() for name in names[2:]])
    assert len(np.unique(cells % 2**32)) == len(cells)


def test_deepspeed_seeds() -> None:
    # deepspeed/runtime/activation_checkpointing/checkpointing.py: data = seed, model parallel = seed + 2718 + tp.
    seeds = derive_seeds("deepspeed", deepspeed_streams(), 1234, {"pp": 3, "tp": 5}, EVERY_AXIS, bits=64)
    assert seeds == {"default": 1234, "model-parallel-rng": 3957}


def test_colossalai_seeds() -> None:
    # colossalai/legacy/context/parallel_context.py: DATA = seed, TENSOR = seed + tp + 1024*pp.
    seeds = derive_seeds("colossalai", colossalai_streams(), 1234, {"pp": 3, "tp": 5}, EVERY_AXIS, bits=64)
    assert seeds == {"default": 1234, "model-parallel-rng": 1234 + 5 + 3072}


@pytest.mark.parametrize(
    ("key", "counter", "result"),
    [
        # The known-answer vectors "threefry2x32 20" of Random123 (tests/kat_vectors).
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_vectors(
    key: tuple[int, int], counter: tuple[int, int], result: tuple[int, int]
) -> None:
    words = [np.array([word], np.uint32) for word in (*key, *counter)]
    first, second = threefry2x32((words[0], words[1]), (words[2], words[3]))
    assert (int(first[0]), int(second[0])) == result


# Pinned: a change here is a change of everybody's random numbers, and needs the line "Streams changed" in CHANGELOG.md.
FAR = {"pp": 3, "tp": 5, "ep": 17, "etp": 1}
FOLD_IN = [
    # coordinates, bits, generation, default, data, model, expert
    ({}, 64, 0, 6194759769203632128, 6129783408373467236, 729874785087741083, 1009292445931894280),
    ({}, 32, 0, 1480812544, 1848576100, 4289420443, 3527505416),
    (FAR, 64, 0, 166740795737450161, 6207519066271654919, 3580914714708757501, 4858075834402396684),
    (FAR, 64, 2, 9124929912846732459, 7798606700540760173, 5639308921467319283, 7225289713794326701),
]


@pytest.mark.parametrize(("coordinates", "bits", "generation", "default", "data", "model", "expert"), FOLD_IN)
def test_fold_in_seeds(
    coordinates: dict[str, int], bits: int, generation: int, default: int, data: int, model: int, expert: int
) -> None:
    seeds = derive_seeds("fold_in", megatron_streams(), 1234, coordinates, EVERY_AXIS, bits=bits, generation=generation)
    assert list(seeds.values()) == [default, data, model, expert]


def plain_threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds, written once more with Python's integers."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    first, second = (counter[0] + keys[0]) % 2**32, (counter[1] + keys[1]) % 2**32
    for number in range(20):
        distance = (13, 15, 26, 6, 17, 29, 16, 24)[number % 8]
        first = (first + second) % 2**32
        second = ((second << distance | second >> (32 - distance)) % 2**32) ^ first
        if number % 4 == 3:
            step = number // 4 + 1
            first = (first + keys[step % 3]) % 2**32
            second = (second + keys[(step + 1) % 3] + step) % 2**32
    return first, second


def blake(text: str, words: int) -> list[int]:
    digest = hashlib.blake2b(text.encode(), digest_size=4 * words).digest()
    return [int.from_bytes(digest[4 * word : 4 * word + 4], "little") for word in range(words)]


@pytest.mark.parametrize(("seed", "generation"), [(1234, 0), (2**40 + 5, 0), (1234, 3)])
def test_fold_in_is_threefry_of_name_and_coordinates(seed: int, generation: int) -> None:
    # The definition, step by step, for one stream on one rank.
    key = plain_threefry((seed % 2**32, seed >> 32), tuple(blake("model-parallel-rng", 2)))
    for axis, position in (("pp", 0), ("tp", 3)):
        key = plain_threefry(key, (*blake(axis, 1), position))
    if generation:
        key = plain_threefry(key, (*blake("\0generation", 1), generation))
    spec, options = megatron_streams()[2], {"generation": generation}
    assert derive_seed("fold_in", spec, seed, {"tp": 3}, {"tp": 4}, bits=32, **options) == key[0]
    expected = key[0] + ((key[1] % 2**31) << 32)
    assert derive_seed("fold_in", spec, seed, {"tp": 3}, {"tp": 4}, bits=64, **options) == expected


def test_fold_in_does_not_depend_on_order_or_on_axes_without_choice() -> None:
    specs = megatron_streams(data_parallel_random_init=True)
    expected = derive_seeds("fold_in", specs, 9, {"tp": 1, "dp": 2}, {"tp": 2, "dp": 3}, bits=64)
    for order in itertools.permutations(specs):
        turned = [
            StreamSpec(spec.name, reversed(spec.varies_over), is_default=spec.is_default) for spec in order
        ]  # without offsets too: a hash needs none
        assert derive_seeds("fold_in", turned, 9, {"dp": 2, "tp": 1}, {"dp": 3, "tp": 2}, bits=64) == expected
    wider = {"tp": 2, "dp": 3, "pp": 1, "cp": 4}
    assert derive_seeds("fold_in", specs, 9, {"tp": 1, "dp": 2, "cp": 3}, wider, bits=64) == expected
    alone = derive_seed("fold_in", specs[2], 9, {"tp": 1, "dp": 2}, {"tp": 2, "dp": 3}, bits=64)
    assert alone == expected["model-parallel-rng"]


def test_d2_fold_in_salts_what_meets_in_32_bits() -> None:
    axes = {"pp": 16, "dp": 64, "tp": 8, "cp": 2}
    specs = [StreamSpec(f"stream {number}", tuple(axes)) for number in range(8)]
    table = derive_table("fold_in", specs, 1, axes, bits=32)
    hashes = [derive_table("fold_in", [spec], 1, axes, bits=32)[spec.name].seeds for spec in specs]
    seeds = np.stack([table[spec.name].seeds for spec in specs])
    assert len(np.unique(hashes)) < seeds.size  # some meet, or this test would show nothing
    assert len(np.unique(seeds)) == seeds.size
    assert seeds.max() < 2**32
    moved = seeds != np.stack(hashes)
    assert 0 < moved.sum() < 40  # only those that met
    turned = derive_table("fold_in", specs[::-1], 1, axes, bits=32)
    assert all(np.array_equal(turned[name].seeds, table[name].seeds) for name in table)


def test_fold_in_avoids_seeds_that_are_taken() -> None:
    first = derive_seeds("fold_in", megatron_streams(), 3, {}, {}, bits=32)
    taken = [first["default"], first["model-parallel-rng"] + (1 << 32)]  # the device sees 32 bits of the second
    other = derive_seeds("fold_in", megatron_streams(), 3, {}, {}, bits=32, taken=taken)
    assert [name for name in first if first[name] != other[name]] == ["default", "model-parallel-rng"]


@pytest.mark.parametrize("derivation", DERIVATIONS)
def test_a_later_generation_is_a_hash(derivation: str) -> None:
    specs = deepspeed_streams()
    first, second, third = (
        set(derive_seeds(derivation, specs, 5, {}, {}, bits=64, generation=number).values()) for number in range(3)
    )
    assert not first & second
    assert not second & third
    assert second == set(derive_seeds("fold_in", specs, 5, {}, {}, bits=64, generation=1).values())


@given(
    sizes=st.dictionaries(st.sampled_from(["pp", "dp", "tp", "ep", "etp"]), st.integers(1, 5)),
    seed=st.integers(0, 2**62),
    derivation=st.sampled_from(["megatron", "fold_in"]),
    bits=st.sampled_from([32, 64]),
)
@settings(max_examples=50, deadline=None)
def test_table_and_single_seeds_agree(sizes: dict[str, int], seed: int, derivation: str, bits: int) -> None:
    specs = megatron_streams(data_parallel_random_init=True)
    table = derive_table(derivation, specs, seed, sizes, bits=bits)
    places = np.indices(list(sizes.values())).reshape(len(sizes), math.prod(sizes.values()))
    for row in places.T[::7]:
        place = dict(zip(sizes, row.tolist(), strict=True))
        seeds = derive_seeds(derivation, specs, seed, place, sizes, bits=bits)
        for name, stream in table.items():
            assert stream.over(list(sizes), row[None]).tolist() == [seeds[name]]
    if derivation == "megatron":
        return
    cells = np.concatenate([stream.seeds.ravel() for stream in table.values()])
    assert len(np.unique(cells)) == len(cells)


def test_any_integer_is_a_seed() -> None:
    spec = megatron_streams()[2]
    for seed in (7, np.int64(7), np.uint8(7), torch.tensor(7)):
        assert derive_seed("megatron", spec, seed, {}, {}, bits=64) == 2725  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("derivation", "spec", "seed", "error", "text"),
    [
        ("megatron", StreamSpec("a", ()), 1, ValueError, "no seed_offset, and the 'megatron' derivation"),
        (
            "megatron",
            StreamSpec("a", ("x",), seed_offset=1),
            1,
            ValueError,
            "varies over 'x', for which the 'megatron'",
        ),
        ("deepspeed", megatron_streams()[0], 1, ValueError, "varies over 'pp', for which the 'deepspeed'"),
        ("megatron", StreamSpec("a", (), seed_offset=1), -1, ValueError, "must lie in 0"),
        ("megatron", StreamSpec("a", (), seed_offset=-2), 1, ValueError, "gives seeds -1"),
        ("megatron", StreamSpec("a", (), seed_offset=1), 2**63 - 1, ValueError, "must lie in 0"),
        ("megatron", StreamSpec("a", (), seed_offset=1), 2**63, ValueError, "must lie in 0"),
        ("megatron", StreamSpec("a", (), seed_offset=1), 1.0, TypeError, "must be an int, got float"),
        ("fold_in", StreamSpec("a", (), seed_offset=1), True, TypeError, "must be an int, got bool"),
        ("hash", StreamSpec("a", ()), 1, ValueError, "derivation='hash' is not available; choose from 'megatron'"),
    ],
)
def test_seed_refused(derivation: str, spec: StreamSpec, seed: int, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        derive_seed(derivation, spec, seed, {}, {}, bits=64)


def test_fold_in_refuses_more_combinations_than_it_can_check() -> None:
    with pytest.raises(ValueError, match="'a' varies over dp=2048 x ep=2048, more than"):
        derive_seed("fold_in", StreamSpec("a", ("dp", "ep")), 1, {}, {"dp": 2048, "ep": 2048}, bits=64)
