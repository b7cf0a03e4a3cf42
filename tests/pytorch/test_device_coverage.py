# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Which devices' default generators a region saves: several CUDA devices, other device types, none at all.

Where the machine lacks the device, a stand-in takes its place: tensors that only *claim* to live there (they carry the
device and nothing else), and generators that the test draws from by hand. Real second GPUs are tested in A5.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from _helpers import requires_cuda
from _proof import ENGINE_IDS, ENGINES, Proof, assert_one_mask, differing
from _twins import STREAM_SEEDS, Bench, compare, drop
from transformer_engine_ext.errors import UnsupportedDeviceError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.rng import capture, coverage, devices

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)
SIZE = 256


class Claims(torch.Tensor):
    """A tensor without memory that says it lives on some device; no operation on it is needed."""

    @staticmethod
    def __new__(cls, device: str) -> Claims:
        return torch.Tensor._make_wrapper_subclass(cls, (1,), dtype=torch.float32, device=device)

    def __init__(self, device: str) -> None:
        self.claimed = device

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].claimed)  # detach and alias, at most


class Machine:
    """Default generators of devices that are not there."""

    def __init__(self, *names: str) -> None:
        self.generators = {torch.device(name): torch.Generator().manual_seed(9) for name in names}

    def mask(self, device: str) -> torch.Tensor:
        """Draw a mask from a device's default generator, as a kernel there would."""
        generator = self.generators[torch.device(device)]
        return (torch.rand(SIZE, generator=generator) < 0.5).float() * 2


class FakeCUDA(devices.CPUBackend):
    """A backend for CUDA devices that are not there, with streams that the CPU can draw from."""

    device_type = "cuda"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def default(self, index: int = 0) -> torch.Generator:
        return self._machine.generators[torch.device("cuda", index)]

    def read(self, handle: torch.Generator) -> torch.Tensor:
        return handle.get_state()

    def write(self, handle: torch.Generator, value: torch.Tensor) -> None:
        handle.set_state(value)

    take = position = read
    put = write

    def bind(self, handle: torch.Generator) -> None:  # type: ignore[override]
        return None

    def unbind(self, token: object) -> None:
        return None


class Handle:
    """What torch itself holds for the default generator of a CUDA device that is not there."""

    def __init__(self, stream: torch.Generator) -> None:
        self._stream = stream

    def get_offset(self) -> int:
        """A number that differs wherever the stream stands elsewhere."""
        return zlib.crc32(self._stream.get_state().numpy().tobytes())


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Three CUDA devices, of which number 0 is the current one."""
    machine = Machine("cuda:0", "cuda:1", "cuda:2")
    monkeypatch.setitem(devices.BACKENDS, "cuda", FakeCUDA(machine))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(capture, "stream_captures", lambda: False)
    monkeypatch.setattr(coverage, "alone", ())
    handles = tuple(Handle(stream) for stream in machine.generators.values())
    monkeypatch.setattr(torch.cuda, "default_generators", handles)
    return machine


def _check_region(
    machine: Machine, drawn: str, use_reentrant: bool, make: Callable[[], object], module: bool = False
) -> None:
    """Run a region that draws on a device and compare masks, and where its generator stands, with a plain run."""
    proof = Proof()

    def body(x: torch.Tensor, w: torch.Tensor, passenger: object) -> torch.Tensor:
        proof.ran()
        return proof.watch(x * machine.mask(drawn)) * w

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("there", make())  # type: ignore[arg-type]

        def forward(self, x: torch.Tensor, w: torch.Tensor, passenger: object) -> torch.Tensor:
            return body(x, w, passenger)

    function, passenger = (Net(), None) if module else (body, make())
    before = {where: generator.get_state() for where, generator in machine.generators.items()}
    x, w = (torch.ones(SIZE, requires_grad=True) for _ in range(2))
    y = te_checkpoint(function, x, w, passenger, use_reentrant=use_reentrant)
    proof.after_forward()
    machine.mask(drawn)  # moves on between forward and backward
    y.sum().backward()
    proof.after_backward()
    assert_one_mask(y, x.grad)
    for where, generator in machine.generators.items():
        twin = torch.Generator()
        twin.set_state(before[where])
        if where == torch.device(drawn):
            torch.rand(SIZE, generator=twin)
            torch.rand(SIZE, generator=twin)
        assert torch.equal(generator.get_state(), twin.get_state()), f"the generator of {where} stands elsewhere"


@engines
def test_current_cuda_device_needs_no_argument(three_gpus: Machine, use_reentrant: bool) -> None:
    _check_region(three_gpus, "cuda:0", use_reentrant, lambda: None)


PASSENGERS: dict[str, Callable[[], object]] = {
    "argument": lambda: Claims("cuda:1"),
    "list": lambda: [3, Claims("cuda:0"), Claims("cuda:1")],
    "dict": lambda: {"deep": ({"er": Claims("cuda:1")},)},
}


@engines
@pytest.mark.parametrize("where", PASSENGERS)
def test_device_of_a_tensor_argument(three_gpus: Machine, use_reentrant: bool, where: str) -> None:
    _check_region(three_gpus, "cuda:1", use_reentrant, PASSENGERS[where])


@engines
def test_device_of_a_keyword_argument(three_gpus: Machine, use_reentrant: bool) -> None:
    proof = Proof()

    def region(x: torch.Tensor, *, passenger: object) -> torch.Tensor:
        proof.ran()
        return proof.watch(x * three_gpus.mask("cuda:2")) * x

    x = torch.ones(SIZE, requires_grad=True)
    y = te_checkpoint(region, x, passenger=[Claims("cuda:2")], use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert x.grad is not None
    assert differing(x.grad, 2 * y.detach()) == 0  # y = x * mask * x


@engines
def test_device_of_a_module(three_gpus: Machine, use_reentrant: bool) -> None:
    _check_region(three_gpus, "cuda:2", use_reentrant, lambda: Claims("cuda:2"), module=True)


@engines
def test_device_that_the_region_touches_first_is_exact_or_refused(
    three_gpus: Machine, monkeypatch: pytest.MonkeyPatch, use_reentrant: bool
) -> None:
    """No argument and no parameter names the device, and the process had not used it before the region."""
    in_use = {0}
    monkeypatch.setattr(coverage, "_has_context", lambda index: index in in_use)
    proof = Proof()

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        in_use.add(2)
        return proof.watch(x * three_gpus.mask("cuda:2")) * x

    x = torch.ones(SIZE, requires_grad=True)
    refused: str | None = None
    try:
        y = te_checkpoint(region, x, use_reentrant=use_reentrant)
        proof.after_forward()
        y.sum().backward()
        proof.after_backward()
    except UnsupportedDeviceError as error:
        refused = str(error)
    if refused is None:
        assert x.grad is not None
        wrong = differing(x.grad, 2 * y.detach())
        assert wrong == 0, f"silently, {wrong} of {SIZE} gradient elements belong to another mask"
    else:
        assert "cuda:2" in refused


# ---------------------------------------------------------------- other device types


def _pretend_accelerator(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    """A build of torch whose tensors can live on a device type also names it as its accelerator."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device(device_type))
    # Asked once in a process, in which the accelerator stays the same.
    monkeypatch.setattr(coverage, "_other_types", coverage._other_types.__wrapped__)


@engines
@pytest.mark.parametrize("module", [False, True], ids=["argument", "module"])
def test_other_type_that_torch_can_read_and_write_is_exact(
    monkeypatch: pytest.MonkeyPatch, use_reentrant: bool, module: bool
) -> None:
    """A device type without a backend of ours, whose torch module has get_rng_state and set_rng_state."""
    machine = Machine("xpu:0", "xpu:1")
    _pretend_accelerator(monkeypatch, "xpu")

    def find(device: Any = "xpu") -> torch.Generator:
        place = torch.device("xpu", device) if isinstance(device, int) else torch.device(device)
        return machine.generators[torch.device("xpu", place.index or 0)]

    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda device="xpu": find(device).get_state())
    monkeypatch.setattr(torch.xpu, "set_rng_state", lambda state, device="xpu": find(device).set_state(state))
    _check_region(machine, "xpu:1", use_reentrant, lambda: Claims("xpu:1"), module=module)


@engines
@pytest.mark.parametrize("device_type", ["hpu", "maia", "ipu"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_type_without_a_generator_is_an_error_never_silent(use_reentrant: bool, device_type: str, nested: bool) -> None:
    runs = 0

    def region(x: torch.Tensor, passenger: object) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return drop(x) * x

    claim = Claims(f"{device_type}:0")
    x = torch.ones(SIZE, requires_grad=True)
    with pytest.raises(UnsupportedDeviceError, match=device_type) as caught:
        te_checkpoint(region, x, [claim] if nested else claim, use_reentrant=use_reentrant)
    assert runs == 0, "the function had run before the error"
    assert "preserve_rng_state" in str(caught.value), "the message does not say what to do"


@engines
def test_module_on_a_type_without_a_generator_is_an_error_too(
    monkeypatch: pytest.MonkeyPatch, use_reentrant: bool
) -> None:
    _pretend_accelerator(monkeypatch, "hpu")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("there", Claims("hpu:0"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the function ran before the error")

    with pytest.raises(UnsupportedDeviceError, match="hpu"):
        te_checkpoint(Net(), torch.ones(SIZE, requires_grad=True), use_reentrant=use_reentrant)


@engines
def test_type_without_a_generator_passes_when_nothing_is_kept(use_reentrant: bool) -> None:
    proof = Proof()

    def region(x: torch.Tensor, passenger: object) -> torch.Tensor:
        proof.ran()
        return proof.watch(x * 3) * x

    x = torch.ones(SIZE, requires_grad=True)
    y = te_checkpoint(region, x, Claims("hpu:0"), use_reentrant=use_reentrant, preserve_rng_state=False)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert torch.equal(x.grad, torch.full((SIZE,), 6.0))


@engines
def test_meta_tensors_draw_nothing_and_pass(use_reentrant: bool) -> None:
    proof = Proof()

    def region(x: torch.Tensor, passenger: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(drop(x)) * x * passenger.numel()

    x = torch.ones(SIZE, requires_grad=True)
    y = te_checkpoint(region, x, torch.ones(1, device="meta"), use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert x.grad is not None
    assert differing(x.grad, 2 * y.detach()) == 0


# ---------------------------------------------------------------- streams of one device, data of another


@requires_cuda
@engines
def test_cpu_streams_over_cuda_data(use_reentrant: bool) -> None:
    def make_tracker(device: str) -> CudaRNGStatesTracker:
        tracker = CudaRNGStatesTracker(device="cpu")
        for name, seed in STREAM_SEEDS.items():
            tracker.add(name, seed)
        return tracker

    def program(bench: Bench) -> torch.Tensor:
        bench.skip_streams = True  # next_draws would draw on the GPU; drawn below instead

        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            with bench.tracker.fork("a"):
                keep = (torch.rand(x.shape) < 0.5).to(x.device)
                return bench.gate(drop(x * keep))

        return bench.checkpoint(region, bench.x)

    bench = compare(program, "cuda", use_reentrant, make_tracker=make_tracker)
    with bench.tracker.fork("a"):
        drawn = torch.rand(5)
    generator = torch.Generator().manual_seed(STREAM_SEEDS["a"])
    torch.rand(bench.x.shape, generator=generator)
    assert torch.equal(drawn, torch.rand(5, generator=generator))


FIRST_TOUCH_SCRIPT = """
import os
import sys
if "NVTE_EXT_TEST_PLAIN_CHECKPOINT" in os.environ:
    import _plain_checkpoint
import torch
from _proof import Proof, differing
from transformer_engine_ext.errors import UnsupportedDeviceError
from transformer_engine_ext.pytorch import te_checkpoint

proof = Proof()

def region(x):
    proof.ran()
    return proof.watch(torch.nn.functional.dropout(x.cuda(), 0.5).cpu()) * x

x = torch.ones(512, requires_grad=True)
try:
    y = te_checkpoint(region, x, use_reentrant=sys.argv[1] == "True")
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    print("DIFFERING", differing(x.grad, 2 * y.detach()))
except UnsupportedDeviceError as error:
    print("REFUSED", error)
"""


@requires_cuda
@engines
def test_region_that_touches_cuda_first_is_exact_or_refused(use_reentrant: bool) -> None:
    here = Path(__file__).resolve().parent
    paths = [str(here.parents[1]), str(here), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-c", FIRST_TOUCH_SCRIPT, str(use_reentrant)]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "DIFFERING 0" in done.stdout or ("REFUSED" in done.stdout and "torch.cuda.init" in done.stdout), done.stdout
