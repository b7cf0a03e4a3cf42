# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of section E share: regions captured with forward and backward in separate graphs, replayed, compared.

Everything runs on a *kit*: the CUDA device, or one of the two devices of :mod:`_fake_graphs` that are not there. Input
is ones, so an output is the forward's mask and an input gradient the recompute's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import transformer_engine_ext
from _fake_graphs import FakeGraph, Machine
from _helpers import requires_cuda
from _noted import note
from _proof import Proof, assert_same_tensors, plain_checkpoint
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.rng import native, register_streams
from transformer_engine_ext.pytorch.rng.registration import registration_needed

#: Which stream each row of the input is dropped by, in this order.
ROWS = ("default", "a", "b", "a", "default")

#: Replays of forwards and backwards of three micro-batches.
ORDERS = {
    "LIFO": "f0 f1 f2 b2 b1 b0",
    "FIFO": "f0 f1 f2 b0 b1 b2",
    "mixed": "f0 f1 b1 f2 b0 b2",
    "repeated": "f0 f1 b0 b0 f2 b2 b1 b0",
}


class CudaKit:
    """The current CUDA device."""

    device, real, size = "cuda", True, 4096

    @property
    def registers(self) -> bool:
        return registration_needed()

    def graph(self, register: bool = True, **options: Any) -> Any:
        graph = torch.cuda.CUDAGraph(**options)
        if register:
            register_streams(graph)
        return graph

    @contextlib.contextmanager
    def capturing(self, graph: Any, **options: Any) -> Iterator[None]:
        with torch.cuda.graph(graph, **options):
            yield
        self.settle()

    def settle(self) -> None:
        """Wait for what a capture began with: before torch 2.14 it fills the words of all graphs, on its own stream.

        A first replay on another stream could be overtaken by that, with or without regions, and draw by the seed
        under which the capture began.
        """
        torch.cuda.synchronize()

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def default(self) -> Any:
        return torch.cuda.default_generators[torch.cuda.current_device()]

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device="cuda")

    def aside(self, function: Callable[[], Any]) -> None:
        """Run on a stream of its own, as torch asks of what warms up a capture, and forget the result."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream().wait_stream(side)


class FakeKit:
    """A device that is not there, with torch's graphs from before or since 2.14."""

    device, real, size = "cuda", False, 256

    def __init__(self, registers: bool) -> None:
        self.registers = registers
        self.machine = Machine(registers)

    def graph(self, register: bool = True, **options: Any) -> Any:
        graph = FakeGraph(self.machine)
        if register:
            register_streams(graph)  # type: ignore[arg-type]
        return graph

    def capturing(self, graph: FakeGraph, **options: Any) -> contextlib.AbstractContextManager[Any]:
        return graph.capturing()

    def drop(self, x: Tensor) -> Tensor:
        return x * self.machine.mask(x)

    def seed(self, seed: int) -> None:
        self.machine.default.manual_seed(seed)

    def default(self) -> Any:
        return self.machine.default

    def ones(self, *shape: int) -> Tensor:
        return self.machine.own(torch.ones(shape))

    def aside(self, function: Callable[[], Any]) -> None:
        function()


Kit = CudaKit | FakeKit


@pytest.fixture(params=["before 2.14", "since 2.14", pytest.param("cuda", marks=requires_cuda)])
def kit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kit]:
    """Run the test on both devices that are not there, and on the current CUDA device."""
    if request.param == "cuda":
        yield from real_kit()
        return
    fake = FakeKit(request.param == "before 2.14")
    fake.machine.install(monkeypatch)
    yield fake  # noqa: PT022


def real_kit() -> Iterator[CudaKit]:
    """Yield the CUDA device with the collector off: it could free a graph of an earlier test during a capture."""
    native.prepare()
    # Gives autograd's own thread its context: cuBLAS warns if it is the first there.
    (torch.ones(1, device="cuda", requires_grad=True) * 2).backward()
    gc.collect()
    gc.disable()
    try:
        yield CudaKit()
        torch.cuda.synchronize()
    finally:
        gc.enable()


@pytest.fixture
def cuda_kit() -> Iterator[CudaKit]:
    """The current CUDA device; the test bears the mark."""
    yield from real_kit()


def caused_by_us(found: warnings.WarningMessage) -> bool:
    """Tell whether a line of this package warned, or torch about what this package called."""
    package = Path(transformer_engine_ext.__file__).resolve().parent
    return package in Path(found.filename).resolve().parents


class Rig:
    """Streams, a weight and an engine: what a program works with. ``use_reentrant=None`` is the run without regions."""

    def __init__(
        self,
        kit: Kit,
        use_reentrant: bool | None,
        rows: Sequence[str] = ROWS,
        names: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.kit, self.use_reentrant, self.rows, self.options = kit, use_reentrant, tuple(rows), options
        self.names = tuple(names) or tuple(dict.fromkeys(name for name in rows if name != "default"))
        self.tracker = CudaRNGStatesTracker(device="cuda")
        for number, name in enumerate(self.names):
            self.tracker.add(name, 100 + number)
        self.proof = Proof()
        self.w = kit.ones(kit.size).requires_grad_()
        self.ones = kit.ones(kit.size)

    def twin(self) -> Rig:
        """Return another one with streams and a weight of its own."""
        return Rig(self.kit, self.use_reentrant, self.rows, self.names, **self.options)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call ``te_checkpoint``, or the function itself in the run without regions."""
        options = {"use_reentrant": self.use_reentrant, **self.options, **options}
        return (plain_checkpoint if self.use_reentrant is None else te_checkpoint)(function, *args, **options)

    def on(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if name == "default" else self.tracker.fork(name)

    def dropped(self, x: Tensor) -> Tensor:
        """Drop each row by its stream."""
        parts = []
        for name, row in zip(self.rows, x.unbind(0), strict=True):
            with self.on(name):
                parts.append(self.kit.drop(row))
        return torch.stack(parts)

    def body(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        """The function of most regions: drops, and a product that saves what was dropped."""
        self.proof.ran()
        return self.proof.watch(self.dropped(x)) * (self.w if w is None else w)

    def input(self) -> Tensor:
        return self.kit.ones(len(self.rows), self.kit.size).requires_grad_()

    def draws(self) -> Tensor:
        """Draw once from every stream, outside of any region."""
        drawn = []
        for name in ("default", *self.names):
            with self.on(name):
                drawn.append(self.kit.drop(self.ones))
        return torch.stack(drawn)

    def seed(self, seed: int) -> None:
        self.kit.seed(seed)
        for number, name in enumerate(self.names):
            self.tracker.get_states()[name].manual_seed(1000 * seed + 501 + number)

    def positions(self) -> dict[str, Tensor]:
        """Return seed and offset of every stream."""
        handles = {"default": self.kit.default(), **self.tracker.get_states()}
        return {f"position of {name}": handle.get_state().view(torch.int64) for name, handle in handles.items()}


Program = Callable[[Rig, Tensor], Tensor]


def simple(rig: Rig, x: Tensor) -> Tensor:
    """One region."""
    return rig.checkpoint(rig.body, x)


@dataclasses.dataclass
class Leg:
    """One micro-batch: its graphs and their static tensors."""

    x: Tensor
    grad: Tensor
    fwd: Any
    bwd: Any
    y: Tensor = None  # type: ignore[assignment]
    gx: Tensor = None  # type: ignore[assignment]
    gw: Tensor = None  # type: ignore[assignment]
    around: tuple[Tensor, ...] = ()


def by_backward(rig: Rig, leg: Leg) -> tuple[Tensor, Tensor]:
    """Differentiate as ``.backward()`` does; the gradients become static tensors of the graph."""
    leg.y.backward(leg.grad)
    assert leg.x.grad is not None
    assert rig.w.grad is not None
    gradients = leg.x.grad, rig.w.grad
    leg.x.grad = rig.w.grad = None
    return gradients


def by_grad(rig: Rig, leg: Leg) -> tuple[Tensor, ...]:
    """Differentiate as ``torch.autograd.grad`` does."""
    return torch.autograd.grad(leg.y, (leg.x, rig.w), leg.grad)


@dataclasses.dataclass
class Outcome:
    """What some replays gave: wrong elements a row, and every value that the run without regions must share."""

    wrong: dict[str, int]
    compared: int
    values: dict[str, Tensor]

    def assert_exact(self, what: str) -> None:
        assert self.compared, f"{what}: nothing was compared"
        note(wrong=sum(self.wrong.values()), elements=self.compared * len(self.wrong))
        assert not any(self.wrong.values()), f"{what}: wrong elements a row, of {self.compared}: {self.wrong}"


class Split:
    """A program captured with forward and backward in separate graphs, a pair for each micro-batch.

    Parameters
    ----------
    differentiate
        Runs under the capture of a backward; returns the gradients of input and weight.
    keep
        Keep the autograd graphs, and with them the regions, after the capture.
    around
        Draw in the backward graphs too, before and after the backward itself.
    halfway
        Called between the captures of forwards and backwards.
    options
        For ``torch.cuda.graph``.
    """

    def __init__(
        self,
        rig: Rig,
        program: Program = simple,
        micro_batches: int = 3,
        differentiate: Callable[[Rig, Leg], Any] = by_backward,
        keep: bool = False,
        around: bool = True,
        halfway: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        kit, self.rig = rig.kit, rig
        # A twin: what a warm-up leaves in the autograd graph of a leaf would remember the stream that it ran on.
        kit.aside(functools.partial(_warm, rig.twin(), program, differentiate))
        shape = (len(rig.rows), kit.size)
        self.legs = [Leg(rig.input(), kit.ones(*shape), kit.graph(), kit.graph()) for _ in range(micro_batches)]
        for leg in self.legs:
            with kit.capturing(leg.fwd, **options):
                leg.y = program(rig, leg.x)
        forwards = rig.proof.runs
        if kit.real and rig.use_reentrant is not None:
            rig.proof.after_forward(forwards)
        if halfway is not None:
            halfway()
        for leg in reversed(self.legs):
            with kit.capturing(leg.bwd, **options):
                before = rig.draws() if around else None
                leg.gx, leg.gw = differentiate(rig, leg)
                if before is not None:
                    leg.around = (before, rig.draws())
            if not keep:
                leg.y = leg.y.detach()
        if rig.use_reentrant is not None:
            assert rig.proof.runs > forwards, f"the function ran {forwards} times in forward and never in backward"

    def run(
        self, order: str, rounds: int = 2, seed: int | None = 7, between: Callable[[int], None] | None = None
    ) -> Outcome:
        """Replay in an order such as ``"f0 f1 b1 b0"`` and compare every backward with its own forward."""
        rig = self.rig
        if seed is not None:
            rig.seed(seed)
        wrong = torch.zeros(len(rig.rows), dtype=torch.int64, device=self.legs[0].x.device)
        values: dict[str, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        for step, (kind, number) in enumerate(rounds * order.split()):
            leg = self.legs[int(number)]
            if kind == "f":
                leg.fwd.replay()
                outputs[int(number)] = values[f"{step} output"] = leg.y.detach().clone()
            else:
                leg.bwd.replay()
                output = outputs[int(number)]
                wrong += ((output != 0) != (leg.gx != 0)).sum(1)
                values |= {f"{step} gx": leg.gx.clone(), f"{step} gw": leg.gw.clone()}
                values |= {f"{step} around {i}": drawn.clone() for i, drawn in enumerate(leg.around)}
            if between is not None:
                between(step)
        _assert_masks([value for name, value in values.items() if name.endswith("output")])
        values |= {"next draws": rig.draws(), **rig.positions()}
        compared = rounds * order.count("b") * rig.kit.size
        rows = {f"{i} {name}": int(wrong[i]) for i, name in enumerate(rig.rows)}
        return Outcome(rows, compared, {name: value.cpu() for name, value in values.items()})


def _warm(rig: Rig, program: Program, differentiate: Callable[[Rig, Leg], Any]) -> None:
    leg = Leg(rig.input(), rig.kit.ones(len(rig.rows), rig.kit.size), None, None)
    leg.y = program(rig, leg.x)
    differentiate(rig, leg)
    rig.draws()


def _assert_masks(outputs: list[Tensor]) -> None:
    """Assert that outputs hold zeros and others, and that no two rows of any are equal."""
    dropped = torch.stack([(output == 0).double().mean(1) for output in outputs])
    assert float(dropped.min()) > 0.2, "a row is hardly dropped at all"
    assert float(dropped.max()) < 0.95, "a row is dropped nearly whole"
    rows = [row.cpu().numpy().tobytes() for output in outputs for row in output]
    assert len(set(rows)) == len(rows), "replays, or rows, have the same mask"


Scenario = Callable[[Rig], Outcome]


def assert_like_plain(
    kit: Kit, use_reentrant: bool, scenario: Scenario, make: Callable[..., Rig] = Rig, **options: Any
) -> None:
    """Run a scenario with regions and without: masks exact, all values and positions equal, bit for bit."""
    actual = scenario(make(kit, use_reentrant, **options))
    actual.assert_exact("with regions")
    expected = scenario(make(kit, None, **options))
    assert_same_tensors(actual.values, expected.values, "values")
