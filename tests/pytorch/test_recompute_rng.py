# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Section A of the case list: the recompute must draw what its forward drew, and leave every stream as if it never ran.

An input of ones goes through dropout, so the output shows forward's mask and the input's gradient the recompute's.
A6 has a file of its own (test_recompute_rng_states.py), and so have A7 and A9 (test_recompute_rng_limits.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from _helpers import requires_cuda, requires_cuda_devices
from _proof import ENGINE_IDS, ENGINES, Proof, assert_one_mask, assert_same_tensors
from _twins import SEED, Bench, compare, drop
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)


# ---------------------------------------------------------------- A1


def _linear_dropout(device: str, use_reentrant: bool | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)
    first, last = torch.nn.Linear(24, 32, device=device), torch.nn.Linear(32, 8, device=device)
    x = torch.randn(16, 24, device=device, requires_grad=True)
    proof = Proof()

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return last(proof.watch(drop(proof.watch(torch.tanh(first(x))))))

    if use_reentrant is None:
        y = region(x)
        y.square().sum().backward()
    else:
        y = te_checkpoint(region, x, use_reentrant=use_reentrant)
        proof.after_forward()
        y.square().sum().backward()
        proof.after_backward()
    assert x.grad is not None
    outcome = {"output": y.detach(), "input gradient": x.grad, "next draw": torch.randn(9, device=device)}
    for layer in (first, last):
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            outcome[f"{layer} {name} gradient"] = parameter.grad
    return outcome


@engines
def test_a1_linear_and_dropout_as_without_checkpointing(device: str, use_reentrant: bool) -> None:
    assert_same_tensors(_linear_dropout(device, use_reentrant), _linear_dropout(device, None), "values")


# ---------------------------------------------------------------- A2


def _tracked(bench: Bench) -> torch.Tensor:
    def region(x: torch.Tensor) -> torch.Tensor:
        bench.proof.ran()
        with bench.tracker.fork("a"):
            return bench.gate(drop(x))

    return bench.checkpoint(region, bench.x)


def _default(bench: Bench) -> torch.Tensor:
    def region(x: torch.Tensor) -> torch.Tensor:
        bench.proof.ran()
        return bench.gate(drop(x))

    return bench.checkpoint(region, bench.x)


def share_default(tracker: CudaRNGStatesTracker, device: str, name: str = "shared") -> None:
    """Give the device's default generator a second name in the tracker."""
    if device == "cpu":  # CPU generators have no second handle on one state: the object itself is the alias
        alias = torch.default_generator
    else:
        torch.cuda.init()
        alias = torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_get_state()
    tracker.set_states({**tracker.get_states(), name: alias})


def _shared_default(bench: Bench) -> torch.Tensor:
    share_default(bench.tracker, bench.device)

    def region(x: torch.Tensor) -> torch.Tensor:
        bench.proof.ran()
        with bench.tracker.fork("shared"):
            h = drop(x)
        return bench.gate(drop(h))  # the same state under its other name

    return bench.checkpoint(region, bench.x)


def _shared_streams(bench: Bench) -> torch.Tensor:
    states = bench.tracker.get_states()
    bench.tracker.set_states({**states, "also a": states["a"]})

    def region(x: torch.Tensor) -> torch.Tensor:
        bench.proof.ran()
        with bench.tracker.fork("a"):
            h = drop(x)
        with bench.tracker.fork("also a"):
            return bench.gate(drop(h))

    return bench.checkpoint(region, bench.x)


@engines
@pytest.mark.parametrize("pass_tracker", [True, False], ids=["passed", "not_passed"])
@pytest.mark.parametrize("program", [_tracked, _default, _shared_default, _shared_streams])
def test_a2_tracked_default_and_shared_streams(
    device: str, use_reentrant: bool, program: Callable[[Bench], torch.Tensor], pass_tracker: bool
) -> None:
    compare(program, device, use_reentrant, pass_tracker=pass_tracker)


# ---------------------------------------------------------------- A3


class ParallelDropout(torch.nn.Module):
    """A module without anything of Transformer Engine in it, which forks the tracker it was given."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench
        self.weight = torch.nn.Parameter(torch.ones_like(bench.x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bench.proof.ran()
        with self.bench.tracker.fork("b"):
            h = drop(x)
        return self.bench.proof.watch(h) * self.weight


@engines
@pytest.mark.parametrize("pass_tracker", [True, False], ids=["passed", "not_passed"])
def test_a3_plain_module_that_forks_the_tracker(device: str, use_reentrant: bool, pass_tracker: bool) -> None:
    def program(bench: Bench) -> torch.Tensor:
        module = ParallelDropout(bench)
        bench.leaves["weight"] = module.weight
        return bench.checkpoint(module, bench.x)

    compare(program, device, use_reentrant, pass_tracker=pass_tracker)


# ---------------------------------------------------------------- A4


@engines
@pytest.mark.parametrize("backward_in", [None, "a", "b"])
def test_a4_region_inside_a_fork_that_forks_again(device: str, use_reentrant: bool, backward_in: str | None) -> None:
    def program(bench: Bench) -> list[torch.Tensor]:
        tracker = bench.tracker

        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            h = drop(x)  # "a", opened by the caller
            with tracker.fork("a"):
                h = drop(h)
                with tracker.fork("b"):
                    h = drop(h)
                    with tracker.fork("a"):
                        h = drop(h)
                h = drop(h)
            return bench.gate(h)

        with tracker.fork("a"):
            before = torch.rand(7, device=bench.device)
            y = bench.checkpoint(region, bench.x)
            after = torch.rand(7, device=bench.device)  # still "a": the forks were closed in order
        return [y, before, after]

    def run(bench: Bench, program: Callable[[Bench], Sequence[torch.Tensor]], regions: int) -> dict[str, torch.Tensor]:
        outputs = list(program(bench))
        bench.forward_done()
        # The stream that backward is called in is bound over the one that forward ran in.
        if backward_in is None:
            outputs[0].sum().backward()
        else:
            with bench.tracker.fork(backward_in):
                torch.rand(3, device=bench.device)
                outputs[0].sum().backward()
                outputs.append(torch.rand(3, device=bench.device))
        bench.backward_done()
        return bench.outcome(outputs)

    compare(program, device, use_reentrant, run=run)


# ---------------------------------------------------------------- A5


@dataclasses.dataclass
class Batch:
    """A container of the user's own."""

    values: torch.Tensor
    scale: float = 1.0


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], object], Callable[..., torch.Tensor]]] = {
    "list": (lambda t: [t, None], lambda c: c[0]),
    "dict": (lambda t: {"deep": {"values": (t, 3)}}, lambda c: c["deep"]["values"][0]),
    "dataclass": (lambda t: Batch(t), lambda c: c.values),
}


@pytest.mark.parametrize("container", CONTAINERS)
@engines
def test_a5_tensor_inside_a_container(device: str, use_reentrant: bool, container: str) -> None:
    pack, unpack = CONTAINERS[container]

    def program(bench: Bench) -> torch.Tensor:
        def region(argument: object) -> torch.Tensor:
            bench.proof.ran()
            return bench.gate(drop(unpack(argument)))

        return bench.checkpoint(region, pack(bench.x))

    compare(program, device, use_reentrant)


@requires_cuda_devices(2)
@pytest.mark.parametrize("container", CONTAINERS)
@engines
def test_a5_tensor_of_another_device_inside_a_container(use_reentrant: bool, container: str) -> None:
    pack, unpack = CONTAINERS[container]

    def program(bench: Bench) -> torch.Tensor:
        def region(argument: object) -> torch.Tensor:
            bench.proof.ran()
            return bench.gate(drop(unpack(argument)))

        return bench.checkpoint(region, pack(bench.x))

    with torch.cuda.device(0):
        compare(program, "cuda:1", use_reentrant)


class NoisyOnOwnDevice(torch.nn.Module):
    """Moves its input to where its weight lives and drops it there."""

    def __init__(self, bench: Bench, where: str) -> None:
        super().__init__()
        self.bench = bench
        self.weight = torch.nn.Parameter(torch.ones_like(bench.x, device=where))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bench.proof.ran()
        return (self.bench.proof.watch(drop(x.to(self.weight.device))) * self.weight).to(x.device)


@requires_cuda
@engines
def test_a5_cuda_module_with_a_cpu_argument(use_reentrant: bool) -> None:
    compare(lambda bench: bench.checkpoint(NoisyOnOwnDevice(bench, "cuda"), bench.x), "cpu", use_reentrant)


@requires_cuda_devices(2)
@engines
def test_a5_module_on_another_device_than_the_current_one(use_reentrant: bool) -> None:
    with torch.cuda.device(0):
        compare(lambda bench: bench.checkpoint(NoisyOnOwnDevice(bench, "cuda:1"), bench.x), "cuda:0", use_reentrant)


# ---------------------------------------------------------------- A8

# F0 F1 F2, then backward in each order, and the one-forward-one-backward schedule of a pipeline stage.
SCHEDULES = ["F0 F1 F2 " + " ".join(f"B{i}" for i in order) for order in itertools.permutations(range(3))]
SCHEDULES += ["F0 F1 B0 F2 B1 B2", "F0 F1 B1 F2 B0 B2"]


@engines
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a8_micro_batches_in_any_order(device: str, use_reentrant: bool, schedule: str) -> None:
    def run_schedule(engine: bool | None) -> dict[str, torch.Tensor]:
        bench = Bench(device, engine)

        def region(x: torch.Tensor) -> torch.Tensor:
            bench.proof.ran()
            h = drop(x)
            with bench.tracker.fork("a"):
                h = drop(h)
            return bench.gate(h)

        inputs = {str(i): torch.ones_like(bench.x, requires_grad=True) for i in range(3)}
        outputs: dict[str, torch.Tensor] = {}
        extra = []
        for step, (kind, index) in enumerate(schedule.split()):
            if kind == "F":
                outputs[index] = bench.checkpoint(region, inputs[index])
                if bench.checkpointed:
                    assert bench.proof.survivors() == []
            else:
                outputs[index].sum().backward()
                # The recompute of one batch must not be seen by a forward that comes after it.
                extra.append(torch.rand(5, device=device))
            bench.backward_done(step + 1)  # each forward and each backward executed the function once
        for index, y in outputs.items():
            assert_one_mask(y, inputs[index].grad)
        bench.leaves |= {f"x{index}": x for index, x in inputs.items()}
        return bench.outcome([*outputs.values(), *extra])

    assert_same_tensors(run_schedule(use_reentrant), run_schedule(None), "values")
