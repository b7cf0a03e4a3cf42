# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Single steps of saving and rewinding under capture, on devices that are not there, which behave as torch's do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from _capture import ORDERS, FakeKit, Kit, Outcome, Rig, Split, assert_like_plain, kit
from _fake_graphs import FakeGraph
from _foreign import PointerTracker
from _regions import both_engines
from transformer_engine_ext.errors import UnsupportedCaptureError
from transformer_engine_ext.pytorch import is_recomputing
from transformer_engine_ext.pytorch.rng import capture, get_all_rng_states, set_all_rng_states
from transformer_engine_ext.pytorch.rng.capture import SavedWords
from transformer_engine_ext.pytorch.rng.native import NotRegistered

__all__ = ["kit"]


@pytest.fixture(params=["before 2.14", "since 2.14"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeKit:
    made = FakeKit(request.param == "before 2.14")
    made.machine.install(monkeypatch)
    return made


def _foreach(graph: FakeGraph) -> list[tuple[int, str, list[torch.Tensor]]]:
    """Return index, operator and written or read words of the nodes that move words."""
    return [
        (index, str(function).split(".")[1], args[0])
        for index, (function, args, *_) in enumerate(graph.nodes)
        if "_foreach" in str(function)
    ]


# ---------------------------------------------------------------- the stand-ins


def test_stand_in_executes_at_replay_only(fake: FakeKit) -> None:
    x, graph = fake.ones(4), fake.graph()
    total = fake.ones(4)
    with fake.capturing(graph):
        y = (x + 1) * 2
        total.add_(y)
    assert bool(y.isnan().all())
    assert torch.equal(total, torch.ones(4))
    graph.replay()
    graph.replay()
    assert torch.equal(y, torch.full((4,), 4.0))
    assert torch.equal(total, torch.full((4,), 9.0))


def test_stand_in_refuses_what_torch_refuses_in_capture(fake: FakeKit) -> None:
    x, default = fake.ones(1), fake.default()
    for call in (
        lambda: x.item(),
        default.get_offset,
        default.clone_state,
        lambda: default.manual_seed(1),
        lambda: default.set_state(torch.tensor([1, 0]).view(torch.uint8)),
    ):
        with fake.capturing(fake.graph()), pytest.raises(RuntimeError, match="captur"):
            call()


def test_stand_in_draws_by_words_and_position(fake: FakeKit) -> None:
    """Replays draw what an eager run from the same seed would draw."""
    x, graph = fake.ones(64), fake.graph()
    with fake.capturing(graph):
        captured = [fake.drop(x), fake.drop(x)]
    fake.seed(5)
    eager = [fake.drop(x) for _ in range(4)]
    fake.seed(5)
    for turn in range(2):
        graph.replay()
        assert all(torch.equal(captured[i], eager[2 * turn + i]) for i in range(2))


def test_stand_in_wants_registration_before_2_14(fake: FakeKit) -> None:
    rig = Rig(fake, True)
    if fake.registers:
        with fake.capturing(fake.graph(register=False)), rig.on("a"), pytest.raises(NotRegistered):
            fake.drop(rig.ones)
    else:
        with fake.capturing(fake.graph(register=False)), rig.on("a"):
            fake.drop(rig.ones)


# ---------------------------------------------------------------- saving


@both_engines
def test_words_are_saved_once_behind_the_draws_of_the_forward(fake: FakeKit, use_reentrant: bool) -> None:
    rig = Rig(fake, use_reentrant)
    graph, x = fake.graph(), rig.input()
    with fake.capturing(graph):
        rig.checkpoint(rig.body, x)
    ((index, name, _),) = _foreach(graph)
    assert name == "_foreach_add"
    draws = [number for number, (function, *_) in enumerate(graph.nodes) if not hasattr(function, "_schema")]
    assert len(draws) == len(rig.rows)
    assert index > max(draws)


@both_engines
def test_words_of_used_streams_only(fake: FakeKit, use_reentrant: bool) -> None:
    """ "b" is used; the default stream moves around the region, and "a" is forked in it without a draw."""
    rig = Rig(fake, use_reentrant)

    def function(x: torch.Tensor) -> torch.Tensor:
        with rig.on("a"):
            pass
        with rig.on("b"):
            return fake.drop(x)

    graphs, x = [fake.graph(), fake.graph()], rig.input()
    with fake.capturing(graphs[0]):
        rig.draws()
        y = rig.checkpoint(function, x)
        rig.draws()
    with fake.capturing(graphs[1]):
        y.backward(torch.ones_like(y))
    assert [len(words) for graph in graphs for _, _, words in _foreach(graph)] == [2, 2, 2, 2]


@both_engines
def test_nothing_is_saved_or_kept_without_preserve_rng_state(fake: FakeKit, use_reentrant: bool) -> None:
    rig = Rig(fake, use_reentrant, preserve_rng_state=False)
    legs = Split(rig, micro_batches=1).legs
    assert _foreach(legs[0].fwd) == _foreach(legs[0].bwd) == []


def test_saved_words_read_back_as_unsigned_numbers_and_for_every_alias(fake: FakeKit) -> None:
    stream = fake.default().clone_state().manual_seed(2**63 + 5)
    stream.state.offset = 40
    alias = stream.graphsafe_get_state()
    graph = fake.graph()
    if fake.registers:
        graph.register_generator_state(stream)
    with fake.capturing(graph):
        words = SavedWords([("stream", stream), ("alias", alias)])
        stream.set_state(torch.tensor([5 - 2**63, 8]).view(torch.uint8))  # draws move the host's part only
    graph.replay()
    found = words.read_back()
    assert found.keys() == {id(stream), id(alias)}
    assert {(state.seed, state.offset) for state in found.values()} == {(2**63 + 5, 40)}


def test_saved_words_of_nothing(fake: FakeKit) -> None:
    graph = fake.graph()
    with fake.capturing(graph):
        words = SavedWords([])
        words.restore(words.rewind())
    assert graph.nodes == []
    assert words.read_back() == {}


# ---------------------------------------------------------------- rewinding


@both_engines
def test_host_positions_are_the_forwards_in_the_recompute_and_put_back_after_it(
    fake: FakeKit, use_reentrant: bool
) -> None:
    """Though the backward graph has drawn otherwise before; also when the recompute raises."""
    rig = Rig(fake, use_reentrant)
    seen: dict[str, list[list[int]]] = {"forward": [], "recompute": []}

    def within() -> list[int]:
        return [int(value[1]) for value in rig.positions().values()]

    def function(x: torch.Tensor) -> torch.Tensor:
        seen["recompute" if is_recomputing() else "forward"].append(within())
        y = rig.body(x)
        if is_recomputing() and len(seen["recompute"]) == 2:
            raise KeyError("in the recompute")
        return y * rig.w

    x = rig.input()
    with fake.capturing(fake.graph()):
        rig.draws()
        with rig.on("b"):
            fake.drop(rig.ones)
        y = rig.checkpoint(function, x)
    with fake.capturing(fake.graph()):
        for _ in range(3):
            rig.draws()
        before = within()
        y.backward(torch.ones_like(y), retain_graph=True)
        assert within() == before == [12, 12, 12]
        rig.draws()
        with pytest.raises(KeyError, match="in the recompute"):
            y.backward(torch.ones_like(y), retain_graph=True)
        assert within() == [16, 16, 16]
    assert seen["forward"] == [[4, 4, 8]]
    assert seen["recompute"] == [[4, 4, 8], [4, 4, 8]]


@both_engines
def test_the_words_of_all_streams_are_stashed_before_any_is_overwritten(fake: FakeKit, use_reentrant: bool) -> None:
    rig = Rig(fake, use_reentrant)
    leg = Split(rig, micro_batches=1, around=False).legs[0]
    nodes = _foreach(leg.bwd)
    assert [name for _, name, _ in nodes] == ["_foreach_add", "_foreach_copy_", "_foreach_copy_"]
    assert nodes[1][0] == nodes[0][0] + 1, "something lies between stash and rewind"
    draws = [number for number, (function, *_) in enumerate(leg.bwd.nodes) if not hasattr(function, "_schema")]
    assert nodes[1][0] < min(draws) < max(draws) < nodes[2][0]


@both_engines
def test_first_note_of_an_aliased_stream_wins(fake: FakeKit, use_reentrant: bool) -> None:
    """The second name is first touched after draws under the first: its later note must not be what is rewound to."""

    def make(kit: Kit, engine: bool | None) -> Rig:
        rig = Rig(kit, engine, ("a", "a"))
        states = dict(rig.tracker.get_states())
        rig.tracker.states_ = states | {"second a": states["a"].graphsafe_get_state()}
        rig.rows = ("a", "a", "second a", "a", "second a")
        rig.twin = lambda: make(kit, engine)  # type: ignore[method-assign]
        return rig

    assert_like_plain(fake, use_reentrant, lambda rig: Split(rig).run(ORDERS["mixed"]), make)


@both_engines
def test_eager_backward_leaves_streams_that_the_region_did_not_use(fake: FakeKit, use_reentrant: bool) -> None:
    """Stream "a" is forked without a draw, so no words of it are kept; eagerly it stands somewhere else by now."""
    rig = Rig(fake, use_reentrant, ("default", "default"), ("a",))

    def function(x: torch.Tensor) -> torch.Tensor:
        with rig.on("a"):
            pass
        return rig.body(x)

    graph, x = fake.graph(), rig.input()
    with fake.capturing(graph):
        y = rig.checkpoint(function, x)
    rig.seed(3)
    graph.replay()
    rig.draws()
    before = rig.positions()
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(y != 0, x.grad != 0)
    assert all(torch.equal(value, before[name]) for name, value in rig.positions().items())


class ForeignRig(Rig):
    """Works with another library's tracker, which is passed to every region."""

    def __init__(self, kit: Kit, use_reentrant: bool | None) -> None:
        super().__init__(kit, use_reentrant)
        tracker = PointerTracker("cuda", {})
        for number, name in enumerate(self.names):
            tracker.states[name] = kit.default().clone_state().manual_seed(number)
        self.tracker: Any = tracker
        self.options = {"get_rng_state_tracker": lambda: tracker}

    def twin(self) -> Rig:
        return ForeignRig(self.kit, self.use_reentrant)


@pytest.fixture
def known() -> Iterator[None]:
    yield
    set_all_rng_states({})


@both_engines
@pytest.mark.usefixtures("known")
def test_tracker_of_another_library(kit: Kit, use_reentrant: bool) -> None:
    """Covered whole at entry, and known to ``register_streams`` through ``set_all_rng_states``."""

    def scenario(rig: Rig) -> Outcome:
        set_all_rng_states(rig.tracker.get_states())
        assert get_all_rng_states().keys() >= {"a", "b"}
        return Split(rig).run(ORDERS["mixed"])

    assert_like_plain(kit, use_reentrant, scenario, ForeignRig)


# ---------------------------------------------------------------- telling whether a capture is under way


def test_nothing_asks_cuda_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def started() -> bool:
        raise AssertionError("asked about capture, which starts CUDA")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", started)
    assert not capture.capturing()


@both_engines
def test_text_of_the_error_for_an_eager_forward(fake: FakeKit, use_reentrant: bool) -> None:
    rig = Rig(fake, use_reentrant)
    y = rig.checkpoint(rig.body, rig.input())
    with fake.capturing(fake.graph()), pytest.raises(UnsupportedCaptureError) as caught:
        y.backward(torch.ones_like(y))
    text = str(caught.value)
    for part in (
        "backward of a checkpointed region is being captured",
        "forward ran outside",
        "make_graphed_callables",
    ):
        assert part in text
    assert "run this backward" in text
