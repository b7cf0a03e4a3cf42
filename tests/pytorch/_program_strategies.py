# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Where random programs come from: one generator, fed by hypothesis (which shrinks) or by ``random`` (which is fast).

The generator only ever asks for "a number below n", and 0 always stands for the simplest choice, so that whatever
makes the numbers smaller makes the program simpler.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from _programs import (
    DRAWS,
    OPS,
    STREAMS,
    Attempt,
    Backward,
    Between,
    Body,
    Boom,
    Discard,
    Draw,
    Fork,
    Forward,
    Grow,
    Jump,
    Lin,
    NoGrad,
    Op,
    Program,
    Region,
    Residual,
    Rewind,
    Save,
    Seed,
    Trap,
    Unused,
)

Pick = Callable[[int], int]

# How often each kind of node is taken, by weight; the first must stay a leaf, for it is what shrinking ends at.
LEAVES = {"draw": 15, "lin": 5, "op": 5}
BRANCHES = {"region": 22, "fork": 20, "residual": 2, "no_grad": 2, "unused": 2, "attempt": 2}
STREAMS_SET = {"seed": 1, "jump": 2}
FAULTS = {"attempt": 10, "boom": 2}
MAX_DEPTH = 5


def _table(*weights: dict[str, int]) -> tuple[str, ...]:
    return tuple(name for group in weights for name, weight in group.items() for _ in range(weight))


class Writer:
    """Writes one program; `streams` False leaves out all that needs a tracker."""

    def __init__(self, pick: Pick, streams: bool = True) -> None:
        self.pick = pick
        self.streams = streams
        self.lins = self.regions = self.traps = self.grown = 0
        tables = (LEAVES, BRANCHES, STREAMS_SET) if streams else (LEAVES, {**BRANCHES, "fork": 0})
        self.leaf = _table(LEAVES)
        self.any = _table(*tables)
        self.faulty = _table(*tables, FAULTS)

    def choose(self, options: Any) -> Any:
        return options[self.pick(len(options))]

    def chance(self, percent: int) -> bool:
        # False is the simple choice, so it must be what 0 gives.
        return self.pick(100) >= 100 - percent

    def program(self) -> Program:
        seed = self.pick(100)
        # Some programs may raise; if all could, exceptions would hide what comes after them.
        self.faults = self.chance(40)
        # torch.autograd.grad works without the reentrant engine only.
        self.reentrant = not self.chance(15)
        models = tuple(self.body(0, 12 + 8 * self.pick(3)) for _ in range(1 + self.chance(20)))
        return Program(seed, models, self.script(len(models)))

    # Nodes.

    def body(self, depth: int, budget: int, constant: bool = False) -> Body:
        """A sequence of nodes, `budget` of them with all that is below; `constant`: outside every micro-batch."""
        made = []
        while budget > 0 and (not made or self.pick(6)):
            kind = self.choose(
                self.leaf if depth >= MAX_DEPTH or budget < 3 else self.faulty if self.faults else self.any
            )
            spent = 2 + self.pick(budget - 1) if kind in BRANCHES else 1
            made.append(self.node(kind, depth, spent, constant))
            budget -= spent
        return tuple(made)

    def node(self, kind: str, depth: int, budget: int, constant: bool) -> Any:
        if kind == "lin" and not constant:
            self.lins += 1
            return Lin(self.lins - 1)
        if kind in ("draw", "lin"):
            return Draw(self.choose(DRAWS))
        if kind == "op":
            return Op(self.choose(OPS))
        if kind == "boom":
            return Boom()
        if kind == "seed":
            return Seed(self.pick(100))
        if kind == "jump":
            return Jump(self.pick(2))
        body = self.body(depth + 1, budget - 1, constant)
        if kind == "region":
            return self.region(body)
        if kind == "fork":
            stream = self.choose((*STREAMS, *STREAMS, None))
            if stream is not None:
                return Fork(stream, body)
            self.grown += 1
            return Grow(self.grown - 1, body)
        if kind == "attempt" and self.faults and self.pick(4):
            body = (self.region((*body, Boom())),)
        return {"residual": Residual, "no_grad": NoGrad, "unused": Unused, "attempt": Attempt}[kind](body)

    def region(self, body: Body) -> Region:
        if self.faults and self.chance(30):
            at = self.pick(len(body) + 1)
            body = (*body[:at], Trap(self.traps), *body[at:])
            self.traps += 1
        self.regions += 1
        reentrant = self.reentrant and bool(self.pick(2))
        tracker = self.choose((None, 0, 1)) if self.streams else None
        early_stop = None if reentrant else self.choose((None, None, False, True))
        how = self.choose(("args", "args", "kwargs", "list", "pair"))
        return Region(self.regions - 1, reentrant, body, tracker, early_stop, how)

    # Statements.

    def stream(self, percent: int) -> tuple[int, str] | None:
        return self.choose(STREAMS) if self.streams and self.chance(percent) else None

    def script(self, models: int) -> tuple[Any, ...]:
        count = self.choose((1, 2, 3, 3))
        ahead = list(range(count))  # not yet run forward
        left: dict[int, int] = {}  # backwards still to run of each micro-batch
        script: list[Any] = []
        saved: set[int] = set()
        while ahead or any(left.values()):
            script += self.interlude(saved)
            waiting = [batch for batch, times in left.items() if times]
            if ahead and (not waiting or self.pick(4)):
                batch = ahead.pop(0)
                mode = self.choose(("grad",) * 8 + ("constant", "constant", "no_grad"))
                script.append(Forward(batch, self.pick(models), mode, self.stream(15)))
                if self.chance(12):
                    script.append(Discard(batch))
                else:
                    left[batch] = self.choose((1, 1, 1, 1, 1, 2, 2, 3, 0))
                continue
            first = waiting[self.pick(len(waiting))]
            others = [batch for batch in waiting if batch != first]
            batches = (first, self.choose(others)) if others and self.chance(20) else (first,)
            for batch in batches:
                left[batch] -= 1
            how = self.choose(("backward",) * 8 + ("thread",) + ("grad", "grad") * (not self.reentrant))
            script.append(Backward(batches, any(left[batch] for batch in batches), self.stream(20), how))
        return tuple(script)

    def interlude(self, saved: set[int]) -> list[Any]:
        """What may stand between two steps: draws, a seed, a tracker saved or rewound."""
        kind = self.choose(("",) * 6 + ("between", "between", "reseed") + ("save", "rewind") * self.streams)
        tracker = self.pick(2) if kind in ("save", "rewind") else 0
        if kind == "between":
            return [Between(self.body(MAX_DEPTH - 2, 4, constant=True))]
        if kind == "reseed":
            return [Between((Seed(self.pick(100)),))]
        if kind == "save" or (kind == "rewind" and tracker not in saved):
            saved.add(tracker)
            return [Save(tracker)]
        return [Rewind(tracker)] if kind == "rewind" else []


def programs(streams: bool = True) -> Any:
    """Return hypothesis's strategy for random programs."""
    from hypothesis import strategies as st  # here, so that the long run needs no hypothesis

    below = [st.integers(0, n) for n in range(100)]

    @st.composite
    def written(draw: Any) -> Program:
        return Writer(lambda n: 0 if n == 1 else draw(below[n - 1]), streams).program()

    return written()


def numbered_program(number: int, streams: bool = True) -> Program:
    """Program `number` of an endless list that is the same everywhere, for long runs."""
    return Writer(random.Random(number).randrange, streams).program()
