# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""E2, E3: forward and backward of a region in two graphs, replayed in any order."""

from __future__ import annotations

import functools

import pytest
import torch

import _capture
from _capture import ORDERS, Kit, Outcome, Rig, Split, assert_like_plain, by_grad, cuda_kit, kit
from _helpers import requires_cuda
from _proof import assert_same_tensors, plain_checkpoint
from _regions import both_engines
from transformer_engine_ext.errors import ReentrantGradError

__all__ = ["cuda_kit", "kit"]


@both_engines
def test_e2_e3_every_order_of_replays(kit: Kit, use_reentrant: bool) -> None:
    """One capture, all orders: recomputes use their own forward's masks, and the streams advance as without regions."""

    def scenario(rig: Rig) -> Outcome:
        split = Split(rig, keep=True)
        found = {name: split.run(order, seed=number) for number, (name, order) in enumerate(ORDERS.items())}
        wrong = {f"{name} {row}": count for name, outcome in found.items() for row, count in outcome.wrong.items()}
        values = {f"{name} {key}": value for name, outcome in found.items() for key, value in outcome.values.items()}
        return Outcome(wrong, min(outcome.compared for outcome in found.values()), values)

    assert_like_plain(kit, use_reentrant, scenario)


@both_engines
def test_e2_many_replays(kit: Kit, use_reentrant: bool) -> None:
    assert_like_plain(kit, use_reentrant, lambda rig: Split(rig, micro_batches=2).run("f0 f1 b1 b0", rounds=25))


@both_engines
def test_e2_without_rewinding_the_masks_differ(kit: Kit, use_reentrant: bool) -> None:
    """The contrast: what live handles give. If this region were exact too, the other tests would show nothing."""
    split = Split(Rig(kit, use_reentrant, preserve_rng_state=False))
    for name, order in ORDERS.items():
        outcome = split.run(order)
        low = min(outcome.wrong.values())
        assert low > 0.3 * outcome.compared, f"{name}: only {outcome.wrong} of {outcome.compared} elements a row differ"


@both_engines
def test_e2_a_plain_call_is_noticed(kit: Kit, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other contrast: a region that is none has the right masks, and keeps its activations."""
    monkeypatch.setattr(_capture, "te_checkpoint", plain_checkpoint)
    with pytest.raises(AssertionError, match=r"never in backward|survived forward"):
        Split(Rig(kit, use_reentrant))


@both_engines
def test_e2_a_backward_graph_does_not_move_the_streams(kit: Kit, use_reentrant: bool) -> None:
    rig = Rig(kit, use_reentrant)
    split = Split(rig, around=False)
    for leg in split.legs:
        leg.fwd.replay()
    before = rig.positions()
    for leg in split.legs:
        leg.bwd.replay()
    after = rig.positions()
    moved = {name: f"{before[name].tolist()} to {after[name].tolist()}" for name in before}
    assert all(torch.equal(before[name], after[name]) for name in before), moved


def _late_draws(rig: Rig, x: torch.Tensor) -> torch.Tensor:
    """Draws behind the last tensor that backward needs: an early stop leaves them out."""

    def function(x: torch.Tensor) -> torch.Tensor:
        h = rig.body(x)
        with rig.on("b"):
            late = rig.kit.drop(rig.ones)
        return h + 0 * (late + rig.kit.drop(rig.ones))

    return rig.checkpoint(function, x)


@both_engines
@pytest.mark.parametrize("early_stop", [None, False], ids=["early stop", "to the end"])
def test_e2_draws_behind_the_last_saved_tensor(kit: Kit, use_reentrant: bool, early_stop: bool | None) -> None:
    make = functools.partial(Rig, early_stop=early_stop)
    assert_like_plain(kit, use_reentrant, lambda rig: Split(rig, _late_draws).run(ORDERS["mixed"]), make)


def test_e2_captured_by_autograd_grad(kit: Kit) -> None:
    """What ``torch.cuda.make_graphed_callables`` does: only the non-reentrant engine can."""
    assert_like_plain(kit, False, lambda rig: Split(rig, differentiate=by_grad).run(ORDERS["mixed"]))
    with pytest.raises(ReentrantGradError, match=r"use_reentrant=False"):
        Split(Rig(kit, True), differentiate=by_grad)


@both_engines
def test_e2_two_backward_graphs_of_one_forward(kit: Kit, use_reentrant: bool) -> None:
    """The second from a retained graph: both recompute with the masks of the forward's latest replay."""
    rig = Rig(kit, use_reentrant)
    x, grad, forward = rig.input(), kit.ones(len(rig.rows), kit.size), kit.graph()
    with kit.capturing(forward):
        y = rig.checkpoint(rig.body, x)
    backwards, gradients = [], []
    for retain in (True, False):
        graph = kit.graph()
        with kit.capturing(graph):
            rig.draws()
            y.backward(grad, retain_graph=retain)
        assert x.grad is not None
        backwards.append(graph)
        gradients.append(x.grad)
        x.grad = rig.w.grad = None
    assert rig.proof.runs == 3
    wrong = []
    for turn in range(3):
        rig.seed(turn)
        forward.replay()
        for index in (1, 0) if turn else (0, 1):
            backwards[index].replay()
            wrong.append(int(((y != 0) != (gradients[index] != 0)).sum()))
    assert wrong == [0] * 6, f"wrong elements of {y.numel()}, by replay: {wrong}"


@both_engines
def test_e3_streams_reseeded_between_captures_and_replays(kit: Kit, use_reentrant: bool) -> None:
    def scenario(rig: Rig) -> Outcome:
        split = Split(rig, halfway=lambda: rig.seed(4321))
        return split.run(ORDERS["mixed"], between=lambda step: rig.seed(31 * step))

    assert_like_plain(kit, use_reentrant, scenario)


@both_engines
def test_e3_one_seed_gives_one_result(kit: Kit, use_reentrant: bool) -> None:
    """Reseeding to the same seed repeats every mask, whatever was replayed before."""
    split = Split(Rig(kit, use_reentrant))
    first, other, again = (split.run(ORDERS["FIFO"], seed=seed).values for seed in (5, 6, 5))
    assert_same_tensors(again, first, "values of the second run")
    same = [name for name in first if name.endswith("output") and torch.equal(first[name], other[name])]
    assert same == [], "another seed gave the same masks"


@both_engines
def test_e3_eager_draws_between_replays(kit: Kit, use_reentrant: bool) -> None:
    def scenario(rig: Rig) -> Outcome:
        return Split(rig).run(ORDERS["FIFO"], between=lambda step: [rig.draws() for _ in range(step % 3)])

    assert_like_plain(kit, use_reentrant, scenario)


@both_engines
def test_e3_one_pair_of_graphs_for_several_inputs(kit: Kit, use_reentrant: bool) -> None:
    """Another input is copied into the static one before each forward, as graphed callables do."""

    def scenario(rig: Rig) -> Outcome:
        split = Split(rig, micro_batches=1)
        leg = split.legs[0]
        rig.seed(3)
        values, wrong = {}, dict.fromkeys(rig.rows, 0)
        for turn in range(4):
            with torch.no_grad():
                leg.x.fill_(2**turn)
            outcome = split.run("f0 b0", rounds=1, seed=None)
            assert torch.equal(outcome.values["0 output"].unique(), torch.tensor([0.0, 2.0 ** (turn + 1)]))
            values |= {f"input {turn} {name}": value for name, value in outcome.values.items()}
            wrong = {name: wrong[name] + sum(outcome.wrong.values()) for name in wrong}
        return Outcome(wrong, 4 * outcome.compared, values)

    assert_like_plain(kit, use_reentrant, scenario)


@requires_cuda
@both_engines
@pytest.mark.parametrize("keep", [True, False], ids=["regions kept", "regions dropped"])
def test_e2_e8_one_pool_for_all_graphs(cuda_kit: Kit, use_reentrant: bool, keep: bool) -> None:
    """Replayed in the order of capture: what a dropped region kept is used again by later captures."""

    def scenario(rig: Rig) -> Outcome:
        return Split(rig, keep=keep, pool=torch.cuda.graph_pool_handle()).run(ORDERS["LIFO"], rounds=4)

    assert_like_plain(cuda_kit, use_reentrant, scenario)


@requires_cuda
@both_engines
def test_e2_captured_on_a_side_stream(cuda_kit: Kit, use_reentrant: bool) -> None:
    def scenario(rig: Rig) -> Outcome:
        side = torch.cuda.Stream()
        split = Split(rig, stream=side)
        with torch.cuda.stream(side):
            outcome = split.run(ORDERS["mixed"])
        torch.cuda.current_stream().wait_stream(side)
        return outcome

    assert_like_plain(cuda_kit, use_reentrant, scenario)
