# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""E2, E3 through those who capture: torch's and Transformer Engine's graphed callables, and graphs made by hand."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from _capture import ORDERS, CudaKit, Outcome, Rig, Split, assert_like_plain, caused_by_us, cuda_kit
from _helpers import requires_cuda
from _noted import note
from _regions import both_engines
from transformer_engine_ext.errors import ReentrantGradError, UnsupportedCaptureError
from transformer_engine_ext.pytorch import te_checkpoint
from transformer_engine_ext.pytorch.rng import registering_streams

__all__ = ["cuda_kit"]

pytestmark = requires_cuda

needs_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)


@pytest.fixture(autouse=True)
def _no_word_of_accumulation() -> Iterator[None]:
    """Graphed callables keep autograd nodes of parameters that remember the stream of the capture, and torch warns."""
    switch = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if switch is not None:
        switch(False)
    yield
    if switch is not None:
        switch(True)


@contextlib.contextmanager
def others_may_warn() -> Iterator[None]:
    """Let other packages warn, and fail on a warning that this package caused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [f"{found.filename}:{found.lineno}: {found.message}" for found in caught if caused_by_us(found)]
    assert ours == []


class Net(torch.nn.Module):
    """A module with a region, or without."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(rig.kit.size, device="cuda"))
        self.rig = rig

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rig.checkpoint(self.rig.body, x, self.w)


def _drive(rig: Rig, callables: Sequence[Callable[..., Any]], nets: Sequence[Net], order: str, rounds: int) -> Outcome:
    """Call graphed callables forward and backward in an order such as ``"f0 f1 b1 b0"``."""
    rig.kit.settle()
    rig.seed(7)
    values: dict[str, torch.Tensor] = {"runs": torch.tensor(rig.proof.runs // (1 if rig.use_reentrant is None else 2))}
    wrong = torch.zeros(len(rig.rows), dtype=torch.int64, device="cuda")
    live: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    for step, (kind, number) in enumerate(rounds * order.split()):
        if kind == "f":
            x = rig.input()
            y = callables[int(number)](x)
            values[f"{step} y"] = kept = y.detach().clone()
            live[number] = kept, y, x
            continue
        kept, y, x = live.pop(number)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        wrong += ((kept != 0) != (x.grad != 0)).sum(1)
        values[f"{step} gx"] = x.grad.clone()
        for index, net in enumerate(nets):
            if net.w.grad is not None:
                values[f"{step} gradient of weight {index}"] = net.w.grad.clone()
                net.w.grad = None
    outputs = [value.cpu().numpy().tobytes() for name, value in values.items() if name.endswith(" y")]
    assert len(set(outputs)) == len(outputs), "replays have the same mask"
    values |= {"next draws": rig.draws(), **rig.positions()}
    rows = {f"{i} {name}": int(wrong[i]) for i, name in enumerate(rig.rows)}
    compared = rounds * order.count("b") * rig.kit.size
    return Outcome(rows, compared, {name: value.cpu() for name, value in values.items()})


def test_e2_torchs_make_graphed_callables(cuda_kit: CudaKit) -> None:
    def scenario(rig: Rig) -> Outcome:
        net = Net(rig)
        with registering_streams():
            graphed = torch.cuda.make_graphed_callables(net, (rig.input(),))
        return _drive(rig, [graphed], [net], "f0 b0", 12)

    assert_like_plain(cuda_kit, False, scenario)


def test_e2_torchs_make_graphed_callables_of_several(cuda_kit: CudaKit) -> None:
    def scenario(rig: Rig) -> Outcome:
        nets = (Net(rig), Net(rig), Net(rig))
        with registering_streams():
            graphed = torch.cuda.make_graphed_callables(nets, tuple((rig.input(),) for _ in nets))
        return _drive(rig, graphed, nets, ORDERS["LIFO"], 5)

    assert_like_plain(cuda_kit, False, scenario)


def test_e2_torchs_make_graphed_callables_and_the_reentrant_engine(cuda_kit: CudaKit) -> None:
    """It differentiates with ``torch.autograd.grad``; the error names the engine that works there."""
    rig = Rig(cuda_kit, True)
    with registering_streams(), pytest.raises(ReentrantGradError, match=r"use_reentrant=False"):
        torch.cuda.make_graphed_callables(Net(rig), (rig.input(),))
    rig = Rig(cuda_kit, True)
    Split(rig).run(ORDERS["LIFO"]).assert_exact("after the error")


def test_e5_graphed_callables_without_registration(cuda_kit: CudaKit) -> None:
    """The graphs are out of the user's reach: the error names what registers streams there, and that works."""
    if not cuda_kit.registers:
        pytest.skip("this torch registers streams by itself")
    rig = Rig(cuda_kit, False)
    with pytest.raises(UnsupportedCaptureError, match=r"stream 'a'[\s\S]*with registering_streams\(\)"):
        torch.cuda.make_graphed_callables(Net(rig), (rig.input(),))
    net = Net(rig)
    with registering_streams():
        graphed = torch.cuda.make_graphed_callables(net, (rig.input(),))
    _drive(rig, [graphed], [net], "f0 b0", 3).assert_exact("with registration")


class ByHandKit(CudaKit):
    """Captures with ``capture_begin`` and ``capture_end``, on one stream of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    @contextlib.contextmanager
    def capturing(self, graph: Any, **options: Any) -> Iterator[None]:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(**options)
            try:
                yield
            finally:
                graph.capture_end()
        self.settle()


@both_engines
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_e2_graphs_made_by_hand(cuda_kit: CudaKit, use_reentrant: bool, mode: str) -> None:
    def scenario(rig: Rig) -> Outcome:
        return Split(rig, capture_error_mode=mode).run(ORDERS["mixed"])

    assert_like_plain(ByHandKit(), use_reentrant, scenario)


@pytest.fixture
def te() -> Any:
    """Transformer Engine; it may warn about itself at import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import transformer_engine.pytorch
        except Exception as error:  # a broken installation raises whatever it likes
            pytest.skip(f"Transformer Engine cannot be imported: {error!r}")
        return transformer_engine.pytorch


@needs_te
@both_engines
def test_e2_tes_make_graphed_callables(cuda_kit: CudaKit, te: Any, use_reentrant: bool) -> None:
    def scenario(rig: Rig) -> Outcome:
        nets = (Net(rig), Net(rig))
        with others_may_warn(), registering_streams():
            graphed = te.make_graphed_callables(nets, tuple((rig.input(),) for _ in nets))
        return _drive(rig, graphed, nets, "f0 f1 b1 b0", 6)

    assert_like_plain(cuda_kit, use_reentrant, scenario)


#: Transformer Engine's ``_order``, its number of model chunks, and the same as calls: one callable for each chunk and
#: micro-batch, those of the first chunk first.
SCHEDULES = {
    "1F1B": ([1, 1, -1, 1, -1, -1], 1, "f0 f1 b0 f2 b1 b2"),
    "interleaved": ([1, 1, 2, 2, -2, 1, -2, 2, -1, -1, -2, -1], 2, "f0 f1 f3 f4 b3 f2 b4 f5 b0 b1 b5 b2"),
}


@needs_te
@both_engines
@pytest.mark.parametrize("reuse", [False, True], ids=["own buffers", "reused buffers"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_e2_e3_tes_make_graphed_callables_for_a_pipeline(
    cuda_kit: CudaKit, te: Any, schedule: tuple[list[int], int, str], reuse: bool, use_reentrant: bool
) -> None:
    order, chunks, calls = schedule

    def scenario(rig: Rig) -> Outcome:
        nets = tuple(Net(rig) for _ in range(chunks))
        batches = len(order) // 2 // chunks
        samples = tuple((rig.input(),) for _ in range(chunks * batches))
        with others_may_warn(), registering_streams():
            graphed = te.make_graphed_callables(
                nets,
                samples,
                sample_kwargs=tuple({} for _ in samples),
                _order=order,
                _reuse_graph_input_output_buffers=reuse,
            )
        return _drive(rig, graphed, nets, calls, 4)

    assert_like_plain(cuda_kit, use_reentrant, scenario)


class Layer(torch.nn.Module):
    """A layer as a region, or called plainly."""

    def __init__(self, layer: torch.nn.Module, tracker: Any, use_reentrant: bool | None) -> None:
        super().__init__()
        self.layer, self.tracker, self.use_reentrant, self.runs = layer, tracker, use_reentrant, 0

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        result: torch.Tensor = self.layer(x)
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return self._run(x)
        result: torch.Tensor = te_checkpoint(
            self._run, x, use_reentrant=self.use_reentrant, get_rng_state_tracker=lambda: self.tracker
        )
        return result


@needs_te
@both_engines
def test_e2_te_layer_under_tes_make_graphed_callables(
    cuda_kit: CudaKit, te: Any, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout of hidden states and of attention, from Transformer Engine's own tracker."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    for fused in ("NVTE_BIAS_GELU_NVFUSION", "NVTE_BIAS_DROPOUT_FUSION"):
        monkeypatch.setenv(fused, "0")  # would be compiled, which takes long
    tracker = te.distributed.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1234)
    options = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "device": "cuda"}
    with others_may_warn():
        layer = te.TransformerLayer(
            256, 512, 4, params_dtype=torch.bfloat16, get_rng_state_tracker=lambda: tracker, **options
        )
    shape = (64, 2, 256)
    data = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def run(engine: bool | None) -> dict[str, torch.Tensor]:
        module = Layer(layer, tracker, engine)
        with others_may_warn(), registering_streams():
            sample = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            graphed = te.make_graphed_callables(module, (sample,))
        assert module.runs == (4 if engine is None else 8)
        cuda_kit.settle()
        torch.manual_seed(5)
        tracker.states_["model-parallel-rng"].manual_seed(6)
        values = {}
        for turn in range(4):
            x = data.clone().requires_grad_()
            y = graphed(x)
            y.backward(torch.ones_like(y))
            assert x.grad is not None
            values |= {f"{turn} y": y.detach().clone(), f"{turn} gradient of x": x.grad.clone()}
            for name, parameter in layer.named_parameters():
                assert parameter.grad is not None, name
                values[f"{turn} gradient of {name}"] = parameter.grad.clone()
                parameter.grad = None
        assert not torch.equal(values["0 y"], values["3 y"]), "two replays have the same mask"
        return values

    actual, expected = run(use_reentrant), run(None)
    bits = {name: int((actual[name] != value).sum()) for name, value in expected.items()}
    off = {
        name: float((actual[name].float() - value.float()).norm() / value.float().norm().clamp(min=1e-6))
        for name, value in expected.items()
    }
    unlike = sum(map(bool, bits.values()))
    note(tensors=len(bits), tensors_that_differ_in_a_bit=unlike, largest_relative_error=max(off.values()))
    # A forward without grad may take other kernels; another mask would be an error of a third and more.
    assert max(off.values()) < 0.02, {name: round(value, 4) for name, value in off.items() if value >= 0.02}
    if not use_reentrant:
        assert not any(bits.values()), {name: count for name, count in bits.items() if count}
