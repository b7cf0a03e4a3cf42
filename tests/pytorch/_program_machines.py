# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What running a random program of :mod:`_programs` means, and the interpreter that knows nothing of checkpointing.

:class:`Reference` uses neither checkpointing, nor trackers, nor forks: it keeps a list of generators and passes the one
whose turn it is to every draw, so it cannot share a fault with the package. Its twin is in :mod:`_program_check`.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from _programs import ALIAS, SHARED, STREAM_SEEDS, STREAMS, Forward, Program

# (index of the statement, what it is, its bits). Text only where something differs: most of it would be thrown away.
Record = tuple[int, str, Any, bytes]

SHAPE = (2, 3)
KEEP = 0.75


def _bank(count: int, *shape: int) -> list[torch.Tensor]:
    return list(torch.randn(count, *shape, generator=torch.Generator().manual_seed(5)).unbind())


WEIGHTS = _bank(61, 3, 3)
INPUTS = _bank(59, *SHAPE)
ODDS = torch.full(SHAPE, 0.6)


class BoomError(Exception):
    """Raised by a `Boom`; programs catch it."""


class TrapError(Exception):
    """Raised by a `Trap` in a recompute; it leaves the backward."""


def bits(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.detach().cpu().contiguous().numpy().tobytes()


@functools.cache
def _wake(device: torch.device) -> None:
    """Start CUDA, and give autograd's own thread its context: cuBLAS warns if it is the first there."""
    if device.type == "cuda":
        (torch.ones(1, device=device, requires_grad=True) * 2).backward()


class Machine:
    """What both interpreters have in common: everything but forks, draws, regions and the call of backward."""

    def __init__(self, program: Program, device: str) -> None:
        self.program = program
        self.device = torch.device(device)
        _wake(self.device)
        self.records: list[Record] = []
        self.default: torch.Generator = torch.default_generator
        self.defaults = {"default cpu": torch.default_generator.manual_seed(program.seed)}
        if self.device.type == "cuda":
            self.default = torch.cuda.default_generators[torch.cuda.current_device()]
            self.defaults["default cuda"] = self.default.manual_seed(program.seed + 1)
        self.streams: dict[Any, torch.Generator] = {}
        self.weights: dict[int, torch.Tensor] = {}
        self.inputs: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor | None] = {}
        self.kept: dict[int, Any] = {}
        self.odds = ODDS.to(self.device)
        self.index = 0
        self.batch = -1  # the micro-batch that runs, whose number the streams of `Grow` bear

    def run(self) -> list[Record]:
        for index, statement in enumerate(self.program.script):
            self.index = index
            getattr(self, f"_do_{type(statement).__name__}")(statement)
            self.after_statement()
            states = [*self.defaults.items(), *sorted(self.streams.items())]
            self.records += [(index, "state of", name, bits(g.get_state())) for name, g in states]
        return self.records

    def where(self) -> str:
        return f"statement {self.index}, {self.program.script[self.index]!r}"

    def after_statement(self) -> None:
        """Look at what must hold between any two statements."""

    # Statements.

    def _do_Forward(self, statement: Forward) -> None:
        h = INPUTS[(self.program.seed + statement.batch) % len(INPUTS)].to(self.device, copy=True)
        self.inputs[statement.batch] = h.requires_grad_(statement.mode != "constant")
        self.batch = statement.batch
        try:
            with self.forked(statement.fork), torch.set_grad_enabled(statement.mode != "no_grad"):
                output = self.body(self.program.models[statement.model], h)
        except BoomError:
            output = None
        self.outputs[statement.batch] = output
        needs_grad = output is not None and output.requires_grad
        self.records.append((self.index, "requires_grad of", "output", str(needs_grad).encode()))
        self.records.append((self.index, "bits of", "output", bits(output)))

    def _do_Backward(self, statement: Any) -> None:
        found = [(batch, self.outputs.get(batch)) for batch in statement.batches]
        roots = {batch: out for batch, out in found if out is not None and out.requires_grad}
        if not roots:
            return
        self.differentiate(statement, roots)
        self.records += [(self.index, "gradient of input", key, bits(leaf.grad)) for key, leaf in self.inputs.items()]
        self.records += [(self.index, "gradient of weight", key, bits(leaf.grad)) for key, leaf in self.weights.items()]
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for leaf in (*self.inputs.values(), *self.weights.values()):
            leaf.grad = None

    def backward(self, how: str, roots: dict[int, torch.Tensor], retain: bool) -> None:
        seeds = [INPUTS[(self.program.seed + batch + 17) % len(INPUTS)].to(self.device) for batch in roots]
        outputs = list(roots.values())
        if how == "backward":
            torch.autograd.backward(outputs, seeds, retain_graph=retain)
        elif how == "thread":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(torch.autograd.backward, outputs, seeds, retain_graph=retain).result()
        else:
            leaves = [leaf for leaf in (*self.inputs.values(), *self.weights.values()) if leaf.requires_grad]
            gradients = torch.autograd.grad(outputs, leaves, seeds, retain_graph=retain, allow_unused=True)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient

    def _do_Discard(self, statement: Any) -> None:
        self.outputs.pop(statement.batch, None)

    def _do_Between(self, statement: Any) -> None:
        self.batch = -1 - self.index
        try:
            output = self.body(statement.body, INPUTS[0].to(self.device))
        except BoomError:
            output = None
        self.records.append((self.index, "bits of", "output", bits(output)))

    # Nodes.

    def body(self, body: tuple[Any, ...], h: torch.Tensor) -> torch.Tensor:
        for node in body:
            h = getattr(self, f"_{type(node).__name__}")(node, h)
        return h

    def _Op(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        if node.kind == "sin":
            return torch.sin(h)
        if node.kind == "cos":
            return torch.cos(h)
        return h * torch.tanh(h)

    def _Lin(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        weight = self.weights.get(node.index)
        if weight is None:
            value = WEIGHTS[(self.program.seed + node.index) % len(WEIGHTS)]
            weight = self.weights[node.index] = value.to(self.device, copy=True).requires_grad_()
        return torch.nn.functional.linear(h, weight)

    def _Draw(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        kind = node.kind
        if kind == "dropout":
            return self.dropout(h)
        generator = self.generator()
        if kind == "rand":
            return h * (0.5 + torch.rand(SHAPE, generator=generator, device=self.device))
        if kind == "bernoulli":
            return h * (0.5 + torch.bernoulli(self.odds, generator=generator))
        if kind == "randn":  # an odd number: mt19937 keeps the other half of the last pair of normals
            return h * (1.5 + torch.randn(3, generator=generator, device=self.device))
        if kind == "host":
            host = generator if self.device.type == "cpu" else None  # a fork binds the generator of its own device only
            return h * (0.5 + torch.rand(3, generator=host)).to(self.device)
        torch.rand(3, generator=generator, device=self.device)
        return h

    def _Fork(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        with self.forked(node.stream):
            return self.body(node.body, h)

    def _Grow(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        with self.forked(self.grow(f"{node.number} of {self.batch}", 10_000 + 100 * node.number + self.batch)):
            return self.body(node.body, h)

    def _Residual(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        return h + self.body(node.body, h * 0.5)

    def _NoGrad(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            factor = self.body(node.body, h)
        return h * factor

    def _Unused(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        self.body(node.body, h)
        return h

    def _Attempt(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        try:
            return self.body(node.body, h)
        except BoomError:
            return h

    def _Boom(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        raise BoomError

    def _Trap(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        return h

    # What the interpreters do each in their own way.

    def forked(self, stream: tuple[int, str] | None) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def generator(self) -> torch.Generator | None:
        raise NotImplementedError

    def grow(self, name: str, seed: int) -> tuple[int, str]:
        raise NotImplementedError

    def dropout(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def differentiate(self, statement: Any, roots: dict[int, torch.Tensor]) -> None:
        raise NotImplementedError


class Reference(Machine):
    """The program without checkpointing, trackers or forks."""

    def __init__(self, program: Program, device: str) -> None:
        super().__init__(program, device)
        for stream in STREAMS:
            if stream in STREAM_SEEDS:
                self.streams[stream] = torch.Generator(self.device).manual_seed(STREAM_SEEDS[stream])
            else:
                self.streams[stream] = self.default if stream == ALIAS else self.streams[SHARED[stream]]
        self.stack = [self.default]
        self.start = {stream: g.get_state() for stream, g in self.streams.items()}

    @contextmanager
    def forked(self, stream: tuple[int, str] | None) -> Any:
        self.stack.append(self.stack[-1] if stream is None else self.streams[stream])
        try:
            yield
        finally:
            self.stack.pop()

    def generator(self) -> torch.Generator:
        return self.stack[-1]

    def grow(self, name: str, seed: int) -> tuple[int, str]:
        self.streams[0, name] = torch.Generator(self.device).manual_seed(seed)
        return 0, name

    def _Seed(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        self.stack[-1].manual_seed(node.seed)
        return h

    def _Jump(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        self._set_all(node.tracker, self.start)
        return h

    def dropout(self, h: torch.Tensor) -> torch.Tensor:
        # The one draw that takes no generator: lend the default generator the value of the stream.
        current, default = self.stack[-1], self.default
        live = default.get_state()
        default.set_state(current.get_state())
        output = torch.nn.functional.dropout(h, 1 - KEEP)
        drawn = default.get_state()
        default.set_state(live)
        current.set_state(drawn)  # last: it may be the default generator itself
        return output

    def _Region(self, node: Any, h: torch.Tensor) -> torch.Tensor:
        return self.body(node.body, h)

    def differentiate(self, statement: Any, roots: dict[int, torch.Tensor]) -> None:
        self.backward(statement.how, roots, statement.retain)

    def _do_Save(self, statement: Any) -> None:
        mine = {stream: g for stream, g in self.streams.items() if stream[0] == statement.tracker}
        self.kept[statement.tracker] = {stream: g.get_state() for stream, g in mine.items()}

    def _do_Rewind(self, statement: Any) -> None:
        self._set_all(statement.tracker, self.kept[statement.tracker])

    def _set_all(self, tracker: int, states: dict[Any, torch.Tensor]) -> None:
        for stream in [stream for stream in self.streams if stream[0] == tracker and stream not in states]:
            del self.streams[stream]
        for stream, value in states.items():
            if stream[0] == tracker:
                self.streams.setdefault(stream, torch.Generator(self.device)).set_state(value)
