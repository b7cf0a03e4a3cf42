# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What ParallelRNG and StreamSpec take, and what they say to what they do not take."""

from __future__ import annotations

import re
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from transformer_engine_ext.errors import UnknownAxisWarning, UnsupportedDeviceError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker
from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec, from_megatron, megatron_streams
from transformer_engine_ext.pytorch.distributed.arguments import (
    check_axes,
    check_device,
    check_timeout,
    warn_of_unknown_axes,
)
from transformer_engine_ext.pytorch.distributed.streams import standard_streams
from transformer_engine_ext.pytorch.distributed.topology import Layout, effective_axes

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is said where there is no GPU")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"name": "", "varies_over": ()}, ValueError, "needs a name"),
        ({"name": 3, "varies_over": ()}, TypeError, "name is a string, got int"),
        ({"name": "a", "varies_over": "tp"}, TypeError, r"got the string 'tp'; write \('tp',\)"),
        ({"name": "a", "varies_over": 3}, TypeError, r"varies_over takes a sequence of axis names .* got 3"),
        ({"name": "a", "varies_over": (), "lockstep_over": [1]}, TypeError, r"lockstep_over takes a sequence .*\[1\]"),
        ({"name": "a", "varies_over": ("tp", "tp")}, ValueError, "names an axis twice"),
        ({"name": "a", "varies_over": ("tp",), "lockstep_over": ("tp",)}, ValueError, "'tp' is in varies_over and in"),
        ({"name": "a", "varies_over": (), "seed_offset": "1"}, TypeError, "seed_offset is an int, got str"),
        ({"name": "a", "varies_over": (), "seed_offset": 1.5}, TypeError, "seed_offset is an int, got float"),
        ({"name": "default", "varies_over": ()}, ValueError, "only that one has is_default=True"),
        ({"name": "a", "varies_over": (), "is_default": True}, ValueError, "only that one has is_default=True"),
    ],
)
def test_spec_refused(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        StreamSpec(**arguments)  # type: ignore[arg-type]


def test_spec_must_say_where_it_varies() -> None:
    with pytest.raises(TypeError, match="varies_over"):
        StreamSpec("a")  # type: ignore[call-arg]


def test_axes_that_streams_name_or_that_have_a_meaning_are_known() -> None:
    streams = [*megatron_streams(), StreamSpec("a", ("data",), lockstep_over=("fsdp",), seed_offset=1 << 20)]
    warn_of_unknown_axes(streams, Layout.of_product({"data": 2, "fsdp": 2, "cp": 2, "x": 1}, 0))
    warn_of_unknown_axes(streams, Layout.of_product({"x": 2}, 1))  # on rank 0 only
    with pytest.warns(UnknownAxisWarning, match=r"the axes 'x' of .* \(pp, dp, cp, tp, ep, etp, gtp, egtp\)"):
        warn_of_unknown_axes(streams, Layout.of_product({"tp": 2, "x": 2}, 0))


def test_spec_takes_other_integers() -> None:
    spec = StreamSpec("a", [], seed_offset=np.int64(4))  # type: ignore[arg-type]
    assert type(spec.seed_offset) is int
    assert spec == StreamSpec("a", (), seed_offset=4)


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        ({"tp": None}, "axis 'tp' needs a torch.distributed.ProcessGroup, got NoneType"),
        ({0: None}, "axis name is a non-empty string"),
        (["tp"], "a list of them, or a mapping from axis name to process group, got list of str"),
        (3, "got int"),
        ("tp", "got str"),
    ],
)
def test_topology_refused(topology: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ParallelRNG(topology, device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"derivation": "hash"},
            ValueError,
            "derivation='hash' is not available; this release accepts 'megatron', 'deepspeed', 'colossalai', 'fold_in'",
        ),
        ({"on_layout_change": "guess"}, ValueError, "on_layout_change='guess' is not available"),
        ({"streams": [StreamSpec("a", (), seed_offset=1)]}, ValueError, "no stream named 'default'"),
        (
            {"streams": [*megatron_streams(), megatron_streams()[1]]},
            ValueError,
            "'data-parallel-rng' is declared twice",
        ),
        (
            {"streams": [*megatron_streams(), StreamSpec("a", ("pt",), seed_offset=1)]},
            ValueError,
            "names the axis 'pt'",
        ),
        ({"streams": [*megatron_streams(), StreamSpec("default-cpu", (), seed_offset=1)]}, ValueError, "is taken"),
        ({"streams": megatron_streams()[0]}, TypeError, "sequence of StreamSpec, got StreamSpec; put it in a list"),
        ({"streams": 4}, TypeError, "sequence of StreamSpec, got int"),
        ({"streams": ["default"]}, TypeError, "StreamSpec objects, got str at position 0"),
        ({"tracker": 3}, TypeError, "tracker is a CudaRNGStatesTracker or None, got int, which has no states_"),
        ({"tracker": lambda: None}, TypeError, "pass the tracker itself, not the function that returns it"),
        ({"tracker": CudaRNGStatesTracker}, TypeError, "pass the tracker itself"),
        ({"timeout": 0}, ValueError, "leaves no time"),
        ({"timeout": "5"}, TypeError, "timeout is a datetime.timedelta or a finite number of seconds, got '5'"),
        ({"timeout": float("inf")}, TypeError, "finite number"),
        ({"device": 1.5}, TypeError, "device is a torch.device, a string such as 'cuda:0' or an index, got float"),
        ({"device": "gpu"}, ValueError, "device='gpu' is no device"),
        ({"device": "meta"}, UnsupportedDeviceError, "device type 'meta'"),
    ],
)
def test_parallel_rng_refused(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        ParallelRNG(None, **{"device": "cpu", **arguments})  # type: ignore[arg-type]


@no_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda")])
def test_a_cuda_device_on_a_machine_without_one(device: object) -> None:
    with pytest.raises(ValueError, match=r"is a CUDA device, and torch.cuda.is_available\(\) is False here"):
        ParallelRNG(None, device=device)  # type: ignore[arg-type]


def test_device_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_device(1) == torch.device("cuda", 1)
    assert check_device(None) == torch.device("cuda")
    with pytest.raises(ValueError, match="device=2 does not exist: this process sees 2 of type 'cuda'"):
        check_device(2)


def test_timeout_takes_seconds() -> None:
    assert check_timeout(np.int64(5)) == check_timeout(np.float32(5)) == timedelta(seconds=5)
    assert check_timeout(1e30) > timedelta(days=300)
    assert check_timeout(5) == check_timeout(5.0) == check_timeout(timedelta(seconds=5)) == timedelta(seconds=5)


def test_numpy_and_torch_integers_are_seeds() -> None:
    rng = ParallelRNG(None, device="cpu")
    for seed in (np.int64(7), np.uint32(7), torch.tensor(7)):
        rng.seed(seed)  # type: ignore[arg-type]
        assert rng.tracker.seeds_ == {7, 2725, 1031}
    with pytest.raises(TypeError, match="the seed must be an int, got float"):
        rng.seed(7.0)  # type: ignore[arg-type]


def test_a_generalised_axis_brings_its_stream() -> None:
    for axes, names in {
        (("tp", 2), ("gtp", 1)): [],
        (("tp", 2), ("gtp", 2)): ["gtp-remat-rng"],
        (("egtp", 4),): ["egtp-remat-rng"],
        (("egtp", 2), ("gtp", 2)): ["gtp-remat-rng", "egtp-remat-rng"],
    }.items():
        for derivation in ("megatron", "fold_in"):
            streams = standard_streams(derivation, dict(axes))
            assert [spec.name for spec in streams] == [*(spec.name for spec in megatron_streams()), *names]
    assert [spec.name for spec in ParallelRNG(None, device="cpu").streams][4:] == []


def test_axis_of_size_one_is_no_axis() -> None:
    assert effective_axes({"tp": 2, "dp": 1}) == effective_axes({"tp": 2}) == {"tp": 2}
    assert list(effective_axes({"tp": 2, "dp": 2})) == list(effective_axes({"dp": 2, "tp": 2}))


def test_axes_of_verify() -> None:
    layout = Layout({"tp": 2, "mine": 3}, {"tp": 0, "mine": 0})
    assert check_axes(None, layout) is None
    assert check_axes(["tp", "mine", "cp"], layout) == ("cp", "mine", "tp")
    with pytest.raises(TypeError, match="got 'tp'"):
        check_axes("tp", layout)
    with pytest.raises(ValueError, match="axes names 'pt', which the topology does not have"):
        check_axes(["pt"], layout)


def test_from_megatron_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"megatron.core.parallel_state is not imported"):
        from_megatron()
    state = SimpleNamespace(model_parallel_is_initialized=lambda: False)
    with pytest.raises(RuntimeError, match="not initialised, so its groups do not exist yet"):
        from_megatron(state)
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_group=lambda: "group",
        get_expert_tensor_parallel_group=lambda: None,
    )
    assert from_megatron(state) == {"tp": "group"}
