# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The language of the random programs: what one may do, written as data, and what can be said without running it.

A program holds one or two *models* (sequences of nodes, each a function of one small tensor) and a *script*
(statements run in order: forwards of micro-batches, their backwards in any order, draws in between). The ``repr`` of a
program is Python that builds it again, so that a failure can be pasted into a test::

    from _programs import *
    from _program_check import Package, check
    check(Program(...), "cpu", Package())

See :mod:`_program_machines` for what running one means and :mod:`_program_strategies` for where they come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

__all__ = [
    "Attempt",
    "Backward",
    "Between",
    "Boom",
    "Discard",
    "Draw",
    "Fork",
    "Forward",
    "Grow",
    "Jump",
    "Lin",
    "NoGrad",
    "Op",
    "Program",
    "Region",
    "Residual",
    "Rewind",
    "Save",
    "Seed",
    "Trap",
    "Unused",
]

# The streams of every program as (tracker, name). Both trackers hold an "a", each its own; "b" of the second tracker
# is another name for "b" of the first; "default" is another name for the device's default generator.
STREAMS = ((0, "a"), (0, "b"), (1, "a"), (1, "b"), (1, "default"))
STREAM_SEEDS = {(0, "a"): 11, (0, "b"): 12, (1, "a"): 13}
SHARED = {(1, "b"): (0, "b")}
ALIAS = (1, "default")

OPS = ("sin", "cos", "mul")
DRAWS = ("dropout", "rand", "bernoulli", "randn", "host", "burn")
MODES = ("grad", "constant", "no_grad")


class _Node:
    """Positional ``repr`` without trailing defaults: short, and valid Python."""

    def __repr__(self) -> str:
        members = fields(self)  # type: ignore[arg-type]
        values = [getattr(self, member.name) for member in members]
        while (
            values
            and members[len(values) - 1].default is not MISSING
            and values[-1] == members[len(values) - 1].default
        ):
            values.pop()
        return f"{type(self).__name__}({', '.join(map(repr, values))})"


Body = tuple[Any, ...]


@dataclass(frozen=True, repr=False)
class Op(_Node):
    """An operation without parameters and without random numbers: one of `OPS`."""

    kind: str


@dataclass(frozen=True, repr=False)
class Lin(_Node):
    """A product with weight `index`.

    Every weight is used at one place of a program. A second one would make its gradient a sum of three and more terms,
    whose last bit depends on the order, and no engine promises that order.
    """

    index: int


@dataclass(frozen=True, repr=False)
class Draw(_Node):
    """Random numbers from the current stream, multiplied in: one of `DRAWS`.

    "burn" throws them away; "host" draws from the CPU's default generator, also in a program on CUDA.
    """

    kind: str


@dataclass(frozen=True, repr=False)
class Fork(_Node):
    """`body` under ``trackers[stream[0]].fork(stream[1])``."""

    stream: tuple[int, str]
    body: Body


@dataclass(frozen=True, repr=False)
class Region(_Node):
    """`body` as one checkpointed call; `number` is unique in the program.

    `tracker`: index of the tracker that is passed as ``get_rng_state_tracker``; `how`: the tensor goes in as an
    argument, a keyword argument or in a list, or "pair": a second output comes out that nobody uses; `early_stop` is
    passed to the non-reentrant engine only.
    """

    number: int
    reentrant: bool
    body: Body
    tracker: int | None = None
    early_stop: bool | None = None
    how: str = "args"


@dataclass(frozen=True, repr=False)
class Seed(_Node):
    """Seed the default generator, and with it the stream that a fork has put in its place."""

    seed: int


@dataclass(frozen=True, repr=False)
class Jump(_Node):
    """Set all streams of a tracker to where they stood when the program began."""

    tracker: int


@dataclass(frozen=True, repr=False)
class Grow(_Node):
    """Add a stream of its own for each micro-batch to the first tracker, and run `body` under its fork."""

    number: int
    body: Body


@dataclass(frozen=True, repr=False)
class Residual(_Node):
    """``h + body(h / 2)``; the halving keeps the gradient of `h` a sum of two terms, which has no order."""

    body: Body


@dataclass(frozen=True, repr=False)
class NoGrad(_Node):
    """``h * body(h)`` with the second factor computed under ``torch.no_grad()``."""

    body: Body


@dataclass(frozen=True, repr=False)
class Unused(_Node):
    """`body` runs and its output is dropped: no backward ever reaches its regions."""

    body: Body


@dataclass(frozen=True, repr=False)
class Attempt(_Node):
    """`body`, or the input unchanged if a `Boom` came out of it."""

    body: Body


@dataclass(frozen=True, repr=False)
class Boom(_Node):
    """Raise, in forward and in recompute alike."""


@dataclass(frozen=True, repr=False)
class Trap(_Node):
    """Raise in the first recompute that gets here, once in a run; without checkpointing it does nothing."""

    number: int


@dataclass(frozen=True, repr=False)
class Forward(_Node):
    """Micro-batch `batch` through `model`, perhaps inside a fork; mode "constant": its input needs no gradient."""

    batch: int
    model: int
    mode: str = "grad"
    fork: tuple[int, str] | None = None


@dataclass(frozen=True, repr=False)
class Backward(_Node):
    """One backward over the outputs of one or two micro-batches, perhaps inside a fork.

    `how`: in this thread, in another "thread", or by ``torch.autograd.grad`` ("grad").
    """

    batches: tuple[int, ...]
    retain: bool = False
    fork: tuple[int, str] | None = None
    how: str = "backward"


@dataclass(frozen=True, repr=False)
class Discard(_Node):
    """Forget the output of a micro-batch, and with it its graph."""

    batch: int


@dataclass(frozen=True, repr=False)
class Between(_Node):
    """Run `body` on a constant between micro-batches."""

    body: Body


@dataclass(frozen=True, repr=False)
class Save(_Node):
    """Keep ``get_states()`` of a tracker."""

    tracker: int


@dataclass(frozen=True, repr=False)
class Rewind(_Node):
    """``set_states()`` of what the last `Save` of that tracker kept."""

    tracker: int


@dataclass(frozen=True, repr=False)
class Program(_Node):
    """A whole program; `seed` chooses the default generators' seeds, the weights and the inputs."""

    seed: int
    models: tuple[Body, ...]
    script: tuple[Any, ...]

    def __repr__(self) -> str:
        models = "".join(f"        {model!r},\n" for model in self.models)
        script = "".join(f"        {statement!r},\n" for statement in self.script)
        return f"Program(\n    {self.seed},\n    (\n{models}    ),\n    (\n{script}    ),\n)"


class Outcome(NamedTuple):
    """What a body does, seen without running it."""

    needs_grad: bool  # the output requires a gradient
    saves: bool  # autograd keeps a tensor for it
    raises: bool  # a Boom comes out


def nodes(body: Body) -> Iterator[Any]:
    """Every node of a body, depth first."""
    for node in body:
        yield node
        yield from nodes(getattr(node, "body", ()))


def trace(body: Body, needs_grad: bool, reached: set[int]) -> Outcome:
    """Add to `reached` the numbers of the regions of `body` that a backward from its output must recompute.

    `needs_grad` says whether the input of `body` requires a gradient.
    """
    saves = False
    for node in body:
        kind = type(node)
        if kind is Boom:
            return Outcome(needs_grad, saves, True)
        if kind is Lin:
            needs_grad = saves = True
        elif kind is Op or kind is NoGrad or (kind is Draw and node.kind != "burn"):
            if kind is NoGrad and trace(node.body, False, set()).raises:
                return Outcome(needs_grad, saves, True)
            saves = True
        elif kind is Unused:
            if trace(node.body, needs_grad, set()).raises:
                return Outcome(needs_grad, saves, True)
        elif kind in (Fork, Grow, Region, Residual, Attempt):
            below: set[int] = set()
            outcome = trace(node.body, needs_grad, below)
            if outcome.raises:
                if kind is Attempt:
                    continue
                return Outcome(needs_grad, saves, True)
            needs_grad, saves = outcome.needs_grad, saves or outcome.saves
            if kind is Region and outcome.needs_grad and outcome.saves:
                below.add(node.number)
            reached |= below
    return Outcome(needs_grad, saves, False)


def must_recompute(program: Program, forward: Forward) -> frozenset[int]:
    """Numbers of the regions that a backward of this micro-batch cannot do without recomputing."""
    reached: set[int] = set()
    if forward.mode == "no_grad":
        return frozenset()
    outcome = trace(program.models[forward.model], forward.mode == "grad", reached)
    return frozenset() if outcome.raises or not outcome.needs_grad else frozenset(reached)
