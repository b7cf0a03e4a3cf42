# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What a region does beyond its function, counted and not timed, so that a regression shows on any machine alike.

Counted are moves of generator states, operators, autograd nodes, calls of saved-tensor hooks, and calls of Python
functions of this package; compared with formulas, and with what ``torch.utils.checkpoint`` needs for the same.
benchmarks/ measures the time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine_ext
from _proof import ENGINE_IDS, ENGINES
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.recompute import non_reentrant, saving

engines = pytest.mark.parametrize("use_reentrant", ENGINES, ids=ENGINE_IDS)

PACKAGE = str(Path(transformer_engine_ext.__file__).parent)

# Whatever is installed, both are counted: the Python functions that move streams, and the native library's.
pytestmark = pytest.mark.usefixtures("any_moves")

#: Calls of this package's Python functions for one region with one tensor argument that saves four tensors, forward and
#: backward, by engine (Python 3.11; newer ones count fewer; one more where a test before has left a hook source). Each
#: costs up to half a microsecond. Lower these when the code does with fewer calls; raise them knowingly.
MOST_CALLS = {"python": {True: 50, False: 69}, "native": {True: 28, False: 47}}

#: The same for each further stream that a region uses, its forks included, and for each further tensor that it saves.
MOST_CALLS_PER_STREAM = {"python": {True: 35, False: 35}, "native": {True: 22, False: 25}}
MOST_CALLS_PER_SAVED_TENSOR = {True: 0, False: 3}

Step = Callable[[], object]


class _Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls(step: Step) -> Counter[str]:
    """Count calls of the package's functions (under "package") and of methods of generators, in a step that is warm."""
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            counts["package"] += 1
        elif event == "c_call" and type(getattr(arg, "__self__", None)) is torch.Generator:
            counts[arg.__name__] += 1

    step()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return counts


def operators(step: Step) -> Counter[str]:
    """Count operators in a step that is warm."""
    step()
    with _Operators() as mode:
        step()
    return mode.counts


def nodes(step: Step) -> int:
    """Count the autograd nodes that a step makes, once it is warm."""
    step()
    before = torch._C._autograd._get_sequence_nr()
    step()
    return torch._C._autograd._get_sequence_nr() - before


def step_of(checkpoint: Callable[..., Tensor], body: Callable[[Tensor], Tensor], regions: int = 1) -> Step:
    """Return forward and backward of a chain of regions."""
    x = torch.ones(8, requires_grad=True)
    grad = torch.ones(8)

    def step() -> None:
        x.grad = None
        y = x
        for _ in range(regions):
            y = checkpoint(body, y)
        y.backward(grad)

    return step


def ours(use_reentrant: bool, **options: Any) -> Callable[..., Tensor]:
    return lambda body, *args: te_checkpoint(body, *args, use_reentrant=use_reentrant, **options)


def torchs(use_reentrant: bool, **options: Any) -> Callable[..., Tensor]:
    return lambda body, *args: torch_checkpoint(body, *args, use_reentrant=use_reentrant, **options)


def cube(v: Tensor) -> Tensor:
    return (v * v) * v


def chain(length: int) -> Callable[[Tensor], Tensor]:
    """Return a function that saves so many tensors."""

    def body(v: Tensor) -> Tensor:
        for _ in range(length):
            v = v.sin()
        return v

    return body


def drops(streams: int, used: int) -> Callable[[Tensor], Tensor]:
    """Return a function that draws once from each of ``used`` streams of a tracker of ``streams``."""
    tracker = CudaRNGStatesTracker(device="cpu")
    names = [f"stream {number}" for number in range(streams)]
    for seed, name in enumerate(names):
        tracker.add(name, seed)

    def body(v: Tensor) -> Tensor:
        for name in names[:used]:
            with tracker.fork(name):
                v = F.dropout(v, 0.5)
        return cube(v)

    return body


def state_moves(step: Step) -> dict[str, int]:
    counts = calls(step)
    return {name: counts[name] for name in ("get_state", "set_state")}


@engines
def test_state_moves_of_a_region(use_reentrant: bool, any_moves: str) -> None:
    """The default stream: read at entry and end, stashed, rewound, read at the recompute's end, put back."""
    expected = {"get_state": 4, "set_state": 2} if any_moves == "python" else {"get_state": 0, "set_state": 0}
    assert state_moves(step_of(ours(use_reentrant), cube)) == expected
    assert state_moves(step_of(ours(use_reentrant, preserve_rng_state=False), cube)) == {"get_state": 0, "set_state": 0}


@engines
@pytest.mark.parametrize("used", [1, 3, 8])
def test_state_moves_of_a_used_stream(use_reentrant: bool, used: int, any_moves: str) -> None:
    """The same for each stream besides what its fork moves in forward and in the recompute: three in, three out."""
    by_python = int(any_moves == "python")
    moved = state_moves(step_of(ours(use_reentrant), drops(used, used)))
    plain = state_moves(step_of(lambda body, v: (body(v.detach()), body(v))[1], drops(used, used)))
    assert plain == {"get_state": 6 * used * by_python, "set_state": 6 * used * by_python}
    beyond = {name: moved[name] - plain[name] for name in plain}
    assert beyond == {"get_state": 4 * (used + 1) * by_python, "set_state": 2 * (used + 1) * by_python}


@engines
def test_unused_streams_cost_nothing(use_reentrant: bool) -> None:
    few, many = (calls(step_of(ours(use_reentrant), drops(streams, 1))) for streams in (1, 64))
    assert few == many


@engines
@pytest.mark.parametrize("regions", [4, 32])
def test_work_is_proportional_to_the_regions(use_reentrant: bool, regions: int) -> None:
    """The second region's input is no leaf, unlike the first one's: compared are steps of two and more regions."""
    two, three, many = (calls(step_of(ours(use_reentrant), cube, count)) for count in (2, 3, regions))
    each = Counter(three)
    each.subtract(two)
    assert many == {name: two[name] + (regions - 2) * count for name, count in each.items()}


@engines
def test_operators_of_a_region(use_reentrant: bool) -> None:
    """At most those that torch's own checkpoint runs, and the function's last one: See Note [Smart stop]."""
    for body in (cube, chain(64)):
        mine = operators(step_of(ours(use_reentrant), body))
        theirs = operators(step_of(torchs(use_reentrant), body))
        assert mine.total() <= theirs.total() + (not use_reentrant), (
            f"ours beyond torch's: {mine - theirs}; torch's beyond ours: {theirs - mine}"
        )


@engines
def test_autograd_nodes_of_a_region(use_reentrant: bool) -> None:
    """At most those that torch's own checkpoint makes, and that of the function's last operator."""
    for regions in (1, 5):
        for body in (cube, chain(64)):
            mine = nodes(step_of(ours(use_reentrant), body, regions))
            most = nodes(step_of(torchs(use_reentrant), body, regions)) + (0 if use_reentrant else regions)
            assert 0 < mine <= most


@pytest.mark.parametrize("number", [1, 16, 256])
def test_hook_calls_of_saved_tensors(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each saved tensor goes through one hook in forward, one in the recompute and one when backward asks for it."""
    counts: Counter[str] = Counter()
    push = non_reentrant._push_hooks

    def pushing(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        counts["push"] += 1
        push(pack, unpack)

    def counted(owner: type, method: str, what: str) -> None:
        original = getattr(owner, method)

        def counting(self: Any, *args: Any) -> Any:
            counts[what] += 1
            return original(self, *args)

        monkeypatch.setattr(owner, method, counting)

    counted(saving.Saving, "__call__", "pack")
    counted(saving._Run, "__call__", "pack")
    counted(saving.Saving, "load", "unpack")
    monkeypatch.setattr(non_reentrant, "_push_hooks", pushing)
    monkeypatch.setattr(saving, "_push_hooks", pushing)
    step_of(ours(False), chain(number))()
    assert counts == {"push": 2, "pack": 2 * number, "unpack": number}


@engines
def test_python_calls_of_a_region(use_reentrant: bool, any_moves: str) -> None:
    made = calls(step_of(ours(use_reentrant), cube))["package"]
    assert 0 < made <= MOST_CALLS[any_moves][use_reentrant]


@engines
def test_python_calls_of_further_streams(use_reentrant: bool, any_moves: str) -> None:
    one, nine = (calls(step_of(ours(use_reentrant), drops(9, used)))["package"] for used in (1, 9))
    assert 0 < (nine - one) / 8 <= MOST_CALLS_PER_STREAM[any_moves][use_reentrant]


@engines
def test_python_calls_of_further_saved_tensors(use_reentrant: bool) -> None:
    few, many = (calls(step_of(ours(use_reentrant), chain(length)))["package"] for length in (4, 260))
    assert (many - few) / 256 <= MOST_CALLS_PER_SAVED_TENSOR[use_reentrant]


def test_the_counters_count() -> None:
    """A region that is no region must be seen to do nothing, and work that is put in must be seen."""
    plain = step_of(lambda body, v: body(v), cube)
    assert calls(plain) == {}
    assert nodes(plain) == 2
    assert operators(plain)["aten.mul.Tensor"] == 2 + 4  # forward; backward of two products

    def wasteful(body: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        torch.default_generator.set_state(torch.default_generator.get_state())
        return body(v.clone())

    assert calls(step_of(wasteful, cube)) == {"get_state": 1, "set_state": 1}
    assert nodes(step_of(wasteful, cube)) == 3
    assert operators(step_of(wasteful, cube))["aten.clone.default"] == 1
