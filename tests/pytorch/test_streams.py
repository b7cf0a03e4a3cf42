# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Declarations of streams, Megatron's seeds, and which seeds may not meet."""

from __future__ import annotations

import re

import pytest
import torch

from transformer_engine_ext.errors import SeedCollisionError
from transformer_engine_ext.pytorch import distributed
from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec, megatron_streams
from transformer_engine_ext.pytorch.distributed.streams import check_collisions
from transformer_engine_ext.pytorch.distributed.topology import Layout


def test_spec_must_say_where_it_varies() -> None:
    with pytest.raises(TypeError, match="varies_over"):
        StreamSpec("a")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"name": "", "varies_over": ()}, ValueError, "needs a name"),
        ({"name": "a", "varies_over": "tp"}, TypeError, r"got the string 'tp'; write \('tp',\)"),
        ({"name": "a", "varies_over": ("tp", "tp")}, ValueError, "names an axis twice"),
        ({"name": "a", "varies_over": ("tp",), "lockstep_over": ("tp",)}, ValueError, "'tp' is in varies_over and in"),
        ({"name": "default", "varies_over": ()}, ValueError, "only that one has is_default=True"),
        ({"name": "a", "varies_over": (), "is_default": True}, ValueError, "only that one has is_default=True"),
    ],
)
def test_spec_refused(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        StreamSpec(**arguments)  # type: ignore[arg-type]


def test_two_tracked_streams_on_one_seed_collide() -> None:
    specs = [StreamSpec("default", (), seed_offset=0, is_default=True)]
    specs += [StreamSpec(name, (), seed_offset=7) for name in ("first", "second")]
    with pytest.raises(SeedCollisionError) as caught:
        check_collisions(specs, {"default": 0, "first": 7, "second": 7}, bits=64, where="rank 3")
    for part in ("'first' (seed 7)", "'second' (seed 7)", "rank 3", "64 bits", "another seed_offset"):
        assert part in str(caught.value)


def test_only_an_equal_declaration_may_share_the_defaults_seed() -> None:
    default = StreamSpec("default", ("pp",), seed_offset=0, is_default=True)
    seeds = {"default": 5, "data-parallel-rng": 5, "model-parallel-rng": 6, "expert-parallel-rng": 7}
    check_collisions(megatron_streams(), seeds, bits=64, where="rank 0")
    meets_it_on_tp_0 = StreamSpec("other", ("pp", "tp"), seed_offset=0)
    with pytest.raises(SeedCollisionError, match=r"'default' \(seed 5\) and 'other' \(seed 5\)"):
        check_collisions([default, meets_it_on_tp_0], {"default": 5, "other": 5}, bits=64, where="rank 0")
    twins = [StreamSpec(name, ("pp",), seed_offset=0) for name in ("one", "two")]
    with pytest.raises(SeedCollisionError, match=r"'one' .* and 'two' "):
        check_collisions([default, *twins], dict.fromkeys(("default", "one", "two"), 5), bits=64, where="rank 0")


def test_the_cpu_uses_32_bits_of_a_seed() -> None:
    specs = [StreamSpec("default", (), seed_offset=0, is_default=True), StreamSpec("far", (), seed_offset=2**32)]
    draws = [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + 2**32)]
    assert torch.equal(*draws)  # what the rule rests on
    rng = ParallelRNG(None, specs, device="cpu")
    with pytest.raises(SeedCollisionError, match="low 32 bits"):
        rng.seed(5)
    assert rng.tracker.states_ == {}
    check_collisions(specs, {"default": 5, "far": 5 + 2**32}, bits=64, where="rank 0")


def test_a_collision_anywhere_is_found_on_every_rank() -> None:
    # d2: on tp 6, ep 17 of a full product, the model-parallel and the expert-parallel family meet.
    layout = Layout({"tp": 8, "ep": 18}, {"tp": 0, "ep": 0}, rank=0, world_size=8 * 18)
    rng = ParallelRNG(None, device="cpu")
    rng.layout = layout
    with pytest.raises(SeedCollisionError) as caught:
        rng.seed(0)
    for part in ("'model-parallel-rng' (seed 2724)", "'expert-parallel-rng' (seed 2724)", "tp 6, ep 17"):
        assert part in str(caught.value)
    # With folded axes the product has no such rank, and this one has no collision.
    rng.layout = Layout({"tp": 8, "ep": 18}, {"tp": 0, "ep": 0}, rank=0, world_size=24)
    rng.seed(0)


@pytest.mark.parametrize(
    ("topology", "error", "text"),
    [
        ({"tp": None}, TypeError, "axis 'tp' needs a torch.distributed.ProcessGroup, got NoneType"),
        ({0: None}, TypeError, "axis name is a non-empty string"),
        (["tp"], TypeError, "got list"),
    ],
)
def test_topology_refused(topology: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ParallelRNG(topology, device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"derivation": "hash"}, "derivation='hash' is not available; this release accepts 'megatron', 'deepspeed'"),
        (
            {"on_layout_change": "rederive"},
            "on_layout_change='rederive' is not available; this release accepts 'error'",
        ),
        ({"streams": [StreamSpec("a", (), seed_offset=1)]}, "no stream named 'default'"),
        ({"streams": [*megatron_streams(), megatron_streams()[1]]}, "'data-parallel-rng' is declared twice"),
        ({"streams": [*megatron_streams(), StreamSpec("a", ("pt",), seed_offset=1)]}, "names the axis 'pt'"),
        ({"streams": [*megatron_streams(), StreamSpec("default-cpu", (), seed_offset=1)]}, "is taken"),
    ],
)
def test_parallel_rng_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        ParallelRNG(None, **arguments, device="cpu")  # type: ignore[arg-type]


def test_without_process_group() -> None:
    assert distributed.get_distributed_world_size() == 1
    with pytest.raises(RuntimeError, match="not initialized"):
        distributed.get_distributed_rank()


def test_initialize_affine_weight_draws_from_the_model_parallel_stream(device: str) -> None:
    rng = ParallelRNG(None, device=device)
    rng.seed(3)
    weight = torch.nn.Parameter(torch.empty(4, 6, device=device))
    before = rng.state_dict()["streams"]
    distributed.initialize_affine_weight_gpu(weight, torch.nn.init.normal_, lambda: rng.tracker, partition_dim=1)
    after = rng.state_dict()["streams"]
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["model-parallel-rng"]
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, 1, 1)
    rng.seed(3)
    with rng.tracker.fork():
        expected = torch.nn.init.normal_(torch.empty(4, 6, device=device))
    assert torch.equal(weight, expected)
    with pytest.raises(RuntimeError, match="already has the tensor-parallel attribute 'tensor_model_parallel'"):
        distributed.initialize_affine_weight_gpu(weight, torch.nn.init.zeros_, lambda: rng.tracker)
    assert torch.equal(weight, expected)
    distributed.initialize_affine_weight_gpu(weight, torch.nn.init.zeros_, None, set_tp_attributes=False)
    assert not weight.any()


# The functions and classes of transformer_engine/pytorch/distributed.py (2.20.2) about streams and checkpoints.
TE_NAMES = [
    "checkpoint",
    "CudaRNGStatesTracker",
    "get_all_rng_states",
    "set_all_rng_states",
    "graph_safe_rng_available",
    "is_graph_safe_rng_state",
    "_get_cuda_rng_state",
    "_set_cuda_rng_state",
    "get_distributed_world_size",
    "get_distributed_rank",
    "initialize_affine_weight_gpu",
    "split_tensor_into_1d_equal_chunks",
    "gather_split_1d_tensor",
    "activation_recompute_forward",
    "is_fp8_activation_recompute_enabled",
    "in_fp8_activation_recompute_phase",
    "get_activation_recompute_contexts",
    "use_reentrant_activation_recompute",
]


@pytest.mark.parametrize("name", TE_NAMES)
def test_te_name_is_offered(name: str) -> None:
    assert callable(getattr(distributed, name))
    assert name in distributed.__all__
