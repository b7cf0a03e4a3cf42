# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""CUDA generators and CUDA graphs that are not there: capture and replay of tensor programs on the CPU.

While a :class:`FakeGraph` captures, operators on *device* tensors (those that a :class:`Machine` owns, and whatever is
computed from them) are noted instead of executed, and their results hold garbage; a replay executes them. Operators on
other tensors are the host's and run at once. Generators follow torch's: during capture a draw reads two words, which a
replay fills, and a position within the graph, which the host counts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from transformer_engine_ext.pytorch.rng import capture, coverage, registration
from transformer_engine_ext.pytorch.rng.native import NotRegistered

#: How much one draw moves a stream.
STEP = 4
_GARBAGE = itertools.count(0x5A5A5A5A5A)
_SYNCHRONISES = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


class _Words:
    """Device words of one state, for one graph (since torch 2.14) or for all (before)."""

    def __init__(self, machine: Machine) -> None:
        self.seed, self.offset = (machine.own(torch.tensor([next(_GARBAGE)])) for _ in range(2))
        self.within = 0

    def fill(self, seed: int, offset: int) -> None:
        self.seed[0] = _signed(seed)
        self.offset[0] = offset


class _State:
    def __init__(self, machine: Machine, seed: int, offset: int = 0) -> None:
        self.machine, self.seed, self.offset = machine, seed, offset
        self.words: dict[FakeGraph | None, _Words] = {}
        self.registered: set[FakeGraph] = set()

    def captured(self) -> _Words:
        """Words in the graph under capture."""
        graph = self.machine.graph
        assert graph is not None, "the words of a stream were asked for outside of any capture"
        if self.machine.registers and graph not in self.registered:
            raise NotRegistered
        graph.states.setdefault(self)
        key = None if self.machine.registers else graph
        if key not in self.words:
            self.words[key] = _Words(self.machine)
        return self.words[key]


class FakeGenerator:
    """A handle on a state, with the methods that a CUDA ``torch.Generator`` offers, refused where it refuses them."""

    device = torch.device("cuda", 0)

    def __init__(self, state: _State) -> None:
        self.state = state

    def _refuse(self, what: str) -> None:
        if self.state.machine.graph is not None:
            raise RuntimeError(f"Cannot call CUDAGeneratorImpl::{what} during CUDA graph capture")

    def get_state(self) -> Tensor:
        state = self.state
        offset = state.offset
        if state.machine.graph is not None:
            try:
                offset = state.captured().within
            except NotRegistered:
                offset = 0
        with _disable_current_modes():  # torch's own is no tensor program either
            return torch.tensor([_signed(state.seed), offset]).view(torch.uint8)

    def set_state(self, value: Tensor) -> FakeGenerator:
        with _disable_current_modes():
            seed, offset = value.view(torch.int64).tolist()
        seed %= 1 << 64
        if self.state.machine.graph is None:
            self.state.seed, self.state.offset = seed, offset
            return self
        if seed != self.state.seed:
            raise RuntimeError("set_current_seed can be called during stream capture only if new seed is the same")
        with contextlib.suppress(NotRegistered):
            self.state.captured().within = offset
        return self

    def get_offset(self) -> int:
        self._refuse("get_offset")
        return self.state.offset

    def set_offset(self, offset: int) -> FakeGenerator:
        self._refuse("set_offset")
        self.state.offset = offset
        return self

    def clone_state(self) -> FakeGenerator:
        self._refuse("clone_state")
        return type(self)(_State(self.state.machine, self.state.seed, self.state.offset))

    def manual_seed(self, seed: int) -> FakeGenerator:
        self._refuse("manual_seed")
        self.state.seed, self.state.offset = seed, 0
        return self

    def initial_seed(self) -> int:
        return self.state.seed

    def graphsafe_get_state(self) -> FakeGenerator:
        return type(self)(self.state)

    def graphsafe_set_state(self, other: FakeGenerator) -> FakeGenerator:
        self.state = other.state
        return self


class LazyGenerator(FakeGenerator):
    """A handle as torch has it since 2.14."""

    def philox_state(self, increment: int) -> tuple[Tensor, Tensor, Tensor]:
        words = self.state.captured()
        within, words.within = words.within, words.within + increment
        return words.seed, words.offset, torch.tensor(within)


class FakeGraph:
    """A graph: nodes to execute at every replay, and how far each replay moves the streams."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.nodes: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.states: dict[_State, None] = {}
        self.increments: dict[_State, int] = {}

    def register_generator_state(self, handle: FakeGenerator) -> None:
        assert self.machine.graph is None, "registered during capture"
        assert self.machine.registers, "registered where torch needs no registration: it would warn"
        if handle.state.machine is not self.machine:  # of an earlier test, not collected yet
            return
        handle.state.registered.add(self)
        self.states.setdefault(handle.state)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        machine = self.machine
        if machine.registers:
            self.register_generator_state(machine.default)
        machine.graph = self
        for state in self.states:
            state.captured().within = 0
        try:
            with _Recorder(self):
                yield
        finally:
            self.increments = {state: state.captured().within for state in self.states}
            machine.graph = None

    def replay(self) -> None:
        machine = self.machine
        words = {state: state.words[None if machine.registers else self] for state in self.states}
        for state, increment in self.increments.items():
            if increment or machine.registers:
                words[state].fill(state.seed, state.offset)
                state.offset += increment
        with _unseen():
            for function, args, kwargs, outputs in self.nodes:
                results = tree_leaves(function(*args, **kwargs))
                for output, result in zip(outputs, results, strict=bool(outputs)):
                    output.copy_(result)
        for pair in words.values():  # what a replay leaves behind must not matter to the next
            pair.fill(next(_GARBAGE), next(_GARBAGE))

    def count(self, name: str) -> int:
        """Return how many nodes run the operator ``name``."""
        return sum(str(function).startswith(f"aten.{name}.") for function, *_ in self.nodes)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        machine, nodes = self._graph.machine, self._graph.nodes
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(machine.owns(tensor) for tensor in inputs):
            return func(*args, **kwargs)
        if func in machine.drawing:
            return machine.mask(args[0])
        if func in _SYNCHRONISES:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        schema = func._schema
        if schema.is_mutable:
            nodes.append((func, args, kwargs, []))
            return args[0] if schema.returns else None
        result = func(*args, **kwargs)
        outputs = [machine.own(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not any(value.alias_info for value in schema.returns):  # views show what their base holds
            nodes.append((func, args, kwargs, outputs))
            for output in outputs:
                output.fill_(float("nan") if output.is_floating_point() else next(_GARBAGE))
        return result


class Machine:
    """One CUDA device that is not there.

    Attributes
    ----------
    registers
        Whether generators must be registered with a graph before it captures, and have one pair of words for all
        graphs, as before torch 2.14.
    graph
        The graph under capture.
    drawing
        Operators that do nothing but call :meth:`mask`.
    """

    def __init__(self, registers: bool) -> None:
        self.registers = registers
        self.graph: FakeGraph | None = None
        self.drawing: set[Any] = set()
        self._memory: set[int] = set()
        self._held: list[Tensor] = []
        self.kind = FakeGenerator if registers else LazyGenerator
        self.default = self.kind(_State(self, 99))

    def own(self, tensor: Tensor) -> Tensor:
        """Make ``tensor`` live on the device."""
        self._memory.add(tensor.untyped_storage().data_ptr())
        self._held.append(tensor.detach() if tensor.requires_grad else tensor)  # an address is never used again
        return tensor

    def owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory

    def captured_words(self, handle: FakeGenerator) -> tuple[Tensor, Tensor, int]:
        """Stand in for ``transformer_engine_ext.pytorch.rng.native.captured_words``."""
        words = handle.state.captured()
        return words.seed, words.offset, words.within

    def mask(self, like: Tensor) -> Tensor:
        """Draw from the default generator, as a dropout of one half does: zeros and twos."""
        state, shape = self.default.state, like.shape
        with _disable_current_modes():
            if self.graph is None:
                state.offset += STEP
                return self.own(_mask(state.seed, state.offset - STEP, shape))
            words = state.captured()
            within, words.within = words.within, words.within + STEP
            output = self.own(torch.full(shape, float("nan")))

            def kernel() -> list[Tensor]:
                return [_mask(int(words.seed) % (1 << 64), int(words.offset) + within, shape)]

            self.graph.nodes.append((kernel, (), {}, [output]))
            return output

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let torch and the package find this device, and no other."""
        for name, value in {
            "is_available": True,
            "is_initialized": True,
            "device_count": 1,
            "current_device": 0,
            "init": None,
        }.items():
            patch.setattr(torch.cuda, name, _always(value))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.graph is not None)
        patch.setattr(capture, "stream_captures", lambda: self.graph is not None)
        patch.setattr(coverage, "alone", ())  # found anew, and forgotten with the device
        patch.setattr(torch.cuda, "default_generators", (self.default,))
        patch.setattr(capture, "captured_words", self.captured_words)
        for module in (coverage, registration):  # they ask what is a generator
            patch.setattr(module, "Generator", self.kind)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Let operators run as kernels of a graph do: autograd neither records them nor counts the versions they write."""
    counting = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(counting):
        yield


def _signed(word: int) -> int:
    """Return the ``int64`` with the bits of an unsigned word."""
    return word - (1 << 64) if word >> 63 else word


def _always(value: Any) -> Callable[[], Any]:
    return lambda: value


def _mask(seed: int, offset: int, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(hash((seed, offset)) % 2**62)
    return (torch.rand(shape, generator=generator) < 0.5).float() * 2
