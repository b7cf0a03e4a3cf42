# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Further rows of the table of messages: CUDA graphs, the native library, the whole job, older arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import transformer_engine_ext
from _capture import FakeKit
from _messages import Around, case, ones
from _native import FakeCompiler, torch_build
from _regions import new_tracker
from transformer_engine_ext import errors
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec, megatron_streams
from transformer_engine_ext.pytorch.distributed.arguments import warn_of_unknown_axes
from transformer_engine_ext.pytorch.distributed.collisions import audit_seeds
from transformer_engine_ext.pytorch.distributed.derivations import derive_table
from transformer_engine_ext.pytorch.distributed.topology import Layout
from transformer_engine_ext.pytorch.rng import native, native_find, native_streams
from transformer_engine_ext.pytorch.rng.native_build import TorchBuild

# ---------------------------------------------------------------- CUDA graphs and the native library


def fake_torch_211(around: Around) -> None:
    """Make this process look like one with torch 2.11 and CUDA, whose native library was not built."""
    around.monkeypatch.setattr(TorchBuild, "running", classmethod(lambda cls: torch_build(around.folder)))
    around.monkeypatch.setattr(native_find, "PACKAGE_FOLDER", around.folder)
    around.monkeypatch.setattr(native, "_reader", None)
    around.monkeypatch.setattr(native, "_warm", False)
    around.monkeypatch.setattr(native_streams, "prepare", lambda: None)
    around.monkeypatch.setattr(native_find, "capturing", lambda: False)
    around.monkeypatch.setenv("NVTE_EXT_CACHE_DIR", str(around.folder / "cache"))


@case(
    errors.UnsupportedCaptureError,
    "backward of a checkpointed region is being captured",
    "its forward ran outside of any graph",
    "Capture the forward too",
)
def captured_backward_of_an_eager_forward(around: Around) -> None:
    kit = FakeKit(registers=True)
    kit.machine.install(around.monkeypatch)
    x = kit.ones(8).requires_grad_()
    y = te_checkpoint(kit.drop, x)
    with kit.capturing(kit.graph()):
        y.backward(torch.ones_like(y))


@case(errors.UnsupportedCaptureError, "is not registered with the graph", "stream 'a'", r"register_streams\(graph\)")
def unregistered_stream(around: Around) -> None:
    kit = FakeKit(registers=True)
    kit.machine.install(around.monkeypatch)
    tracker = CudaRNGStatesTracker("cuda")
    tracker.add("a", 1)

    def region(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork("a"):
            return kit.drop(x)

    with kit.capturing(kit.graph(register=False)):
        te_checkpoint(region, kit.ones(8).requires_grad_())


@case(errors.NativeUnavailableError, "there is no philox_state.so", r"torch 2.11.0\+cu130", "install torch >= 2.14")
def no_native_library(around: Around) -> None:
    fake_torch_211(around)
    native.prepare()


@case(errors.SettingError, "'yes' is unknown", "NVTE_EXT_NATIVE", "expected one of auto, 0, 1")
def setting_of_no_value(around: Around) -> None:
    around.monkeypatch.setenv("NVTE_EXT_NATIVE", "yes")
    native.prepare()


@case(
    RuntimeWarning,
    "no such header",
    r"torch 2.11.0\+cu130",
    "Training without capture is not affected",
    site="warm_up",
)
def native_library_cannot_be_built(around: Around) -> None:
    fake_torch_211(around)
    around.monkeypatch.setenv("NVTE_EXT_JIT", "1")
    FakeCompiler(around.folder).use(around.monkeypatch, fail="no such header")
    native.warm_up()


@case(
    RuntimeWarning,
    "no such header",
    "streams.so, which moves streams faster",
    "NVTE_EXT_NATIVE=0 does without",
    site="prepare",
)
def fast_streams_cannot_be_built(around: Around) -> None:
    around.monkeypatch.setattr(native_find, "PACKAGE_FOLDER", around.folder)
    around.monkeypatch.setattr(native_streams, "_loaded", None)
    around.monkeypatch.setattr(native_streams, "_settled", False)
    around.monkeypatch.setenv("NVTE_EXT_CACHE_DIR", str(around.folder / "cache"))
    around.monkeypatch.setenv("NVTE_EXT_JIT", "1")
    FakeCompiler(around.folder).use(around.monkeypatch, fail="no such header")
    assert native_streams.load() is None


# ---------------------------------------------------------------- the whole job


def job(*names: str) -> ParallelRNG:
    streams = [StreamSpec("default", (), seed_offset=0, is_default=True)]
    return ParallelRNG(None, streams + [StreamSpec(name, (), seed_offset=7) for name in names], device="cpu")


@case(
    errors.SeedCollisionError,
    "would draw the same numbers",
    "'one' .* and 'two' .* the only rank",
    "another seed_offset",
)
def two_streams_on_one_seed(around: Around) -> None:
    job("one", "two").seed(1)


@case(
    errors.SeedCollisionWarning,
    "start from one seed",
    "expert-parallel-rng at pp 1",
    "derivation='fold_in' never meet",
    site="audit_seeds",
)
def two_ranks_on_one_seed(around: Around) -> None:
    layout = Layout.of_product({"pp": 2, "ep": 2}, 0)
    audit_seeds(
        derive_table("megatron", megatron_streams(), 0, layout.axes, bits=64), layout, bits=64, derivation="megatron"
    )


@case(
    errors.UnknownAxisWarning,
    "no stream names the axes 'data', 'tensor'",
    "data=2 x tensor=2 x one=1 (world size 4)",
    "rename it",
    site="warn_of_unknown_axes",
)
def axes_that_no_stream_names(around: Around) -> None:
    warn_of_unknown_axes(megatron_streams(), Layout.of_product({"data": 2, "tensor": 2, "one": 1}, 0), level=1)


def saved(around: Around) -> Path:
    path = around.folder / "streams.safetensors"
    rng = job("a")
    rng.seed(1)
    rng.save(path)
    return path


@case(
    errors.LayoutMismatchError,
    "holds other streams",
    "Saved ['default', 'a'], running ['default', 'b']",
    "on_stream_change='rederive'",
)
def file_of_other_streams(around: Around) -> None:
    job("b").load(saved(around))


@case(errors.StateFormatError, "a truncated one", "streams.safetensors", "Use an earlier save")
def truncated_file(around: Around) -> None:
    path = saved(around)
    path.write_bytes(path.read_bytes()[:-9])
    job("a").load(path)


@case(errors.PatchError, "could not replace everything", "transformer_engine: not installed", "unpatch()")
def strict_patch(around: Around) -> None:
    around.monkeypatch.setitem(sys.modules, "transformer_engine", None)
    try:
        transformer_engine_ext.patch(strict=True)
    finally:
        transformer_engine_ext.unpatch()


@case(UserWarning, "was not tested", "transformer-engine 9.9", "Run te-ext doctor", site="patch")
def unknown_version(around: Around) -> None:
    from transformer_engine_ext.integrations import patching

    around.monkeypatch.setitem(sys.modules, "transformer_engine", None)
    version = {"transformer-engine": "9.9"}.get
    around.monkeypatch.setattr(patching, "installed_version", version)
    try:
        transformer_engine_ext.patch()
    finally:
        transformer_engine_ext.unpatch()


# ---------------------------------------------------------------- arguments of older releases


@case(DeprecationWarning, "deprecated", "tp_group to te_checkpoint", "as keyword arg", site="take_positional_options")
def positional_options(around: Around) -> None:
    te_checkpoint(torch.exp, False, lambda: new_tracker("a"), None, ones())


@case(
    DeprecationWarning, "get_cuda_rng_tracker", "te_checkpoint", "pass get_rng_state_tracker", site="take_old_keyword"
)
def old_keyword(around: Around) -> None:
    te_checkpoint(torch.exp, ones(), get_cuda_rng_tracker=lambda: new_tracker("a"))


@case(UserWarning, "has no effect", "distribute_saved_activations=True", "use the reentrant engine", site="_checkpoint")
def distribute_on_the_other_engine(around: Around) -> None:
    te_checkpoint(torch.exp, ones(), distribute_saved_activations=True, use_reentrant=False)
