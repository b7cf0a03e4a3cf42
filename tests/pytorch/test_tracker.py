# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Cases C1 to C3 and C6, and F6: the tracker's streams, forks and states. C4, C5 are in test_tracker_kinds.py.

Torch's own generators are the oracle: a stream of a seed draws what ``torch.Generator(device).manual_seed(seed)`` does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transformer_engine_ext.errors import StreamExistsError, StreamStateTypeError, UnknownStreamError
from transformer_engine_ext.pytorch import CudaRNGStatesTracker


def make(device: str, **seeds: int) -> CudaRNGStatesTracker:
    tracker = CudaRNGStatesTracker(device=device)
    for name, seed in (seeds or {"a": 101, "b": 202}).items():
        tracker.add(name, seed)
    return tracker


def draw(device: str, count: int = 5) -> torch.Tensor:
    """Draw as user code does, from the default generator."""
    return torch.randn(count, device=device).cpu()


def sequence(device: str, seed: int, *counts: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(count, device=device, generator=generator).cpu() for count in counts]


def values(tracker: CudaRNGStatesTracker) -> dict[str, bytes]:
    return {name: bytes(state.get_state().tolist()) for name, state in tracker.states_.items()}


# ---------------------------------------------------------------- C1


def test_c1_unknown_stream_names_the_known_ones(device: str) -> None:
    tracker = make(device, alpha=1, beta=2)
    torch.manual_seed(3)
    with pytest.raises(KeyError) as caught, tracker.fork("gamma"):
        pytest.fail("the body ran")
    assert isinstance(caught.value, UnknownStreamError)
    for name in ("gamma", "alpha", "beta"):
        assert name in str(caught.value)
    assert torch.equal(draw(device), sequence(device, 3, 5)[0]), "a refused fork moved the default generator"


def test_c1_default_stream_name_is_the_known_one(device: str) -> None:
    tracker = make(device, **{"model-parallel-rng": 31})
    with tracker.fork():
        assert torch.equal(draw(device), sequence(device, 31, 5)[0])
    empty = CudaRNGStatesTracker(device=device)
    with pytest.raises(KeyError, match="model-parallel-rng"), empty.fork():
        pytest.fail("the body ran")


def test_f6_multi_line_key_error_reads_as_lines(device: str) -> None:
    tracker = make(device, alpha=1)
    with pytest.raises(UnknownStreamError) as caught, tracker.fork("gamma"):
        pytest.fail("the body ran")
    text = str(caught.value)
    assert "\\n" not in text
    assert not text.startswith(("'", '"'))  # KeyError would show repr(text)
    assert str(UnknownStreamError("first line\nsecond line")).splitlines() == ["first line", "second line"]


@pytest.mark.parametrize(("name", "seed"), [("a", 999), ("fresh", 101)], ids=["name", "seed"])
def test_c1_failed_add_changes_nothing(device: str, name: str, seed: int) -> None:
    tracker = make(device)
    handles, before, seeds = dict(tracker.states_), values(tracker), set(tracker.seeds_)
    with pytest.raises(RuntimeError) as caught:
        tracker.add(name, seed)
    assert isinstance(caught.value, StreamExistsError)
    assert (name if name == "a" else str(seed)) in str(caught.value)
    assert tracker.states_ == handles
    assert values(tracker) == before
    assert tracker.seeds_ == seeds
    # Neither the name nor the seed of the refused call is used up.
    tracker.add("fresh", 999)
    with tracker.fork("fresh"):
        assert torch.equal(draw(device), sequence(device, 999, 5)[0])


def test_c1_add_touches_no_other_stream(device: str) -> None:
    torch.manual_seed(3)
    tracker = make(device)
    with tracker.fork("a"):
        tracker.add("c", 303)  # also while a stream is bound
        assert torch.equal(draw(device), sequence(device, 101, 5)[0])
    with tracker.fork("c"):
        assert torch.equal(draw(device), sequence(device, 303, 5)[0])
    assert torch.equal(draw(device), sequence(device, 3, 5)[0])
    assert tracker.seeds_ == {101, 202, 303}


def test_c1_reset_forgets_names_and_seeds(device: str) -> None:
    tracker = make(device)
    tracker.reset()
    assert tracker.get_states() == {}
    assert tracker.seeds_ == set()
    tracker.add("a", 202)
    with tracker.fork("a"):
        assert torch.equal(draw(device), sequence(device, 202, 5)[0])


# ---------------------------------------------------------------- C2


def test_c2_nested_forks_draw_as_the_unnested_order(device: str) -> None:
    torch.manual_seed(3)
    tracker = make(device)
    got: dict[str, list[torch.Tensor]] = {"a": [], "b": [], "default": []}

    def take(name: str) -> None:
        got[name].append(draw(device))

    take("default")
    with tracker.fork("a"):
        take("a")
        with tracker.fork("a"):
            take("a")
            with tracker.fork("b"):
                take("b")
                with tracker.fork("a"):
                    take("a")
                take("b")
            take("a")
        take("a")
        with tracker.fork("b"):
            take("b")
        take("a")
    take("default")
    seeds = {"default": 3, "a": 101, "b": 202}
    for name, drawn in got.items():
        expected = sequence(device, seeds[name], *[5] * len(drawn))
        assert all(map(torch.equal, drawn, expected)), f"stream {name} drew out of its order"
    for name in ("a", "b"):
        generator = torch.Generator(device).manual_seed(seeds[name])
        for _ in got[name]:
            torch.randn(5, device=device, generator=generator)
        assert torch.equal(tracker.states_[name].get_state(), generator.get_state()), f"final state of {name}"


def test_c2_fork_of_a_second_name_of_one_state(device: str) -> None:
    tracker = make(device)
    states = tracker.get_states()
    tracker.set_states({**states, "also a": states["a"]})
    expected = sequence(device, 101, 2, 3, 4, 5)
    with tracker.fork("a"):
        assert torch.equal(draw(device, 2), expected[0])
        with tracker.fork("also a"):
            assert torch.equal(draw(device, 3), expected[1])
        assert torch.equal(draw(device, 4), expected[2])
    with tracker.fork("also a"):
        assert torch.equal(draw(device, 5), expected[3])


def test_c2_fork_of_a_name_that_shares_the_default(device: str) -> None:
    torch.manual_seed(3)
    tracker = make(device)
    if device == "cpu":
        shared = torch.default_generator
    else:
        shared = torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_get_state()
    tracker.set_states({**tracker.get_states(), "shared": shared})
    expected = sequence(device, 3, 2, 3, 4, 5)
    assert torch.equal(draw(device, 2), expected[0])
    with tracker.fork("shared"):
        assert torch.equal(draw(device, 3), expected[1])
    with tracker.fork("a"), tracker.fork("shared"):
        assert torch.equal(draw(device, 4), expected[2])
    assert torch.equal(draw(device, 5), expected[3])


def test_c2_fork_as_decorator(device: str) -> None:
    torch.manual_seed(3)
    tracker = make(device)

    @tracker.fork("a")
    def noisy(depth: int) -> list[torch.Tensor]:
        """Draw, recurse, draw: one decorated function entered while it is entered."""
        return [draw(device), *(noisy(depth - 1) if depth else []), draw(device)]

    got = noisy(2) + noisy(0)
    assert noisy.__doc__ is not None
    assert all(map(torch.equal, got, sequence(device, 101, *[5] * 8)))
    assert torch.equal(draw(device), sequence(device, 3, 5)[0])


# ---------------------------------------------------------------- C3


def test_c3_get_draw_set_rewinds_in_place(device: str) -> None:
    tracker = make(device)
    handles = dict(tracker.states_)
    saved = tracker.get_states()
    assert isinstance(saved, dict)
    assert all(isinstance(state, torch.Generator) for state in saved.values())
    with tracker.fork("a"):
        first = draw(device)
    for _ in range(2):  # the saved states can be set again and again
        tracker.set_states(saved)
        with tracker.fork("a"):
            assert torch.equal(draw(device), first)
    assert all(tracker.states_[name] is handle for name, handle in handles.items()), "a generator was replaced"
    assert set(tracker.states_) == {"a", "b"}


def test_c3_a_copied_dict_of_states_keeps_the_values(device: str) -> None:
    """``copy()`` of a saved dict is still saved states; ``dict()`` of it is only its handles."""
    tracker = make(device)
    saved = tracker.get_states()
    again = saved.copy()
    with tracker.fork("a"):
        first = draw(device)
    tracker.set_states(again)
    with tracker.fork("a"):
        assert torch.equal(draw(device), first)


def test_c3_edited_states_mean_what_they_say(device: str) -> None:
    """Saved states in which the caller dropped, replaced and added an entry before setting them."""
    tracker = make(device, a=101, b=202, c=303)
    saved = tracker.get_states()
    for name in ("a", "b", "c"):
        with tracker.fork(name):
            draw(device)
    del saved["c"]
    saved["b"] = torch.Generator(device).manual_seed(55)
    saved["d"] = torch.Generator(device).manual_seed(66)
    tracker.set_states(saved)
    assert set(tracker.get_states()) == {"a", "b", "d"}
    for name, seed in {"a": 101, "b": 55, "d": 66}.items():
        with tracker.fork(name):
            assert torch.equal(draw(device), sequence(device, seed, 5)[0]), name


def test_c3_states_are_not_the_trackers_own_dict(device: str) -> None:
    tracker = make(device)
    saved = tracker.get_states()
    saved.clear()
    assert set(tracker.get_states()) == {"a", "b"}
    mine: dict[str, Any] = dict(tracker.get_states())
    copy = dict(mine)
    tracker.set_states(mine)
    assert mine == copy
    mine["a"] = mine["b"]
    del mine["b"]
    with tracker.fork("a"):
        assert torch.equal(draw(device), sequence(device, 101, 5)[0])
    with tracker.fork("b"):
        assert torch.equal(draw(device), sequence(device, 202, 5)[0])


def test_c3_states_of_another_tracker_are_adopted(device: str) -> None:
    first, second = make(device), CudaRNGStatesTracker(device=device)
    second.set_states(first.get_states())
    expected = sequence(device, 101, 2, 3, 4)
    with first.fork("a"):
        assert torch.equal(draw(device, 2), expected[0])
    with second.fork("a"):
        assert torch.equal(draw(device, 3), expected[1])
    with first.fork("a"):
        assert torch.equal(draw(device, 4), expected[2])


def test_c3_plain_dict_adopts_its_handles_and_drops_other_names(device: str) -> None:
    tracker = make(device)
    generator = torch.Generator(device).manual_seed(55)
    tracker.set_states({"a": generator})
    assert set(tracker.get_states()) == {"a"}
    assert tracker.states_["a"] is generator
    with tracker.fork("a"):
        assert torch.equal(draw(device, 2), sequence(device, 55, 2, 3)[0])
    assert torch.equal(torch.randn(3, device=device, generator=generator).cpu(), sequence(device, 55, 2, 3)[1])
    with pytest.raises(KeyError), tracker.fork("b"):
        pytest.fail("the body ran")


def test_c3_byte_states_are_written_in_place(device: str) -> None:
    tracker = make(device)
    handle = tracker.states_["a"]
    state = torch.Generator(device).manual_seed(55).get_state()
    kept = state.clone()
    tracker.set_states({"a": state, "new": state})
    assert tracker.states_["a"] is handle
    with tracker.fork("a"):
        assert torch.equal(draw(device), sequence(device, 55, 5)[0])
    assert torch.equal(state, kept), "drawing changed the caller's bytes"
    state.zero_()
    with tracker.fork("new"):  # a stream of its own, though made of the same bytes
        assert torch.equal(draw(device), sequence(device, 55, 5)[0])
    assert all(isinstance(stream, torch.Generator) for stream in tracker.get_states().values())


def test_c3_set_inside_a_fork_reaches_the_bound_stream(device: str) -> None:
    torch.manual_seed(3)
    tracker = make(device)
    saved = tracker.get_states()
    expected = sequence(device, 101, 5, 5)
    with tracker.fork("a"):
        assert torch.equal(draw(device), expected[0])
        tracker.set_states(saved)
        assert torch.equal(draw(device), expected[0])
        inside = tracker.get_states()  # the value of now, though "a" is bound
        assert torch.equal(draw(device), expected[1])
    tracker.set_states(inside)
    with tracker.fork("a"):
        assert torch.equal(draw(device), expected[1])
    assert torch.equal(draw(device), sequence(device, 3, 5)[0])


@pytest.mark.parametrize("states", [None, 5, [("a", 1)], {"a": 5}, {"a": None}], ids=repr)
def test_c3_other_types_are_refused(device: str, states: Any) -> None:
    tracker = make(device)
    before = values(tracker)
    with pytest.raises(TypeError) as caught:
        tracker.set_states(states)
    assert isinstance(caught.value, StreamStateTypeError)
    assert values(tracker) == before


# ---------------------------------------------------------------- C6


def test_c6_body_that_raises_leaves_every_binding_restored(device: str) -> None:
    torch.manual_seed(3)
    tracker = make(device)
    a, b = sequence(device, 101, 5, 5, 5), sequence(device, 202, 5, 5)
    assert torch.equal(draw(device), sequence(device, 3, 5, 5)[0])

    def failing() -> None:
        with tracker.fork("a"):
            assert torch.equal(draw(device), a[0])
            with tracker.fork("b"):
                assert torch.equal(draw(device), b[0])
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert torch.equal(draw(device), sequence(device, 3, 5, 5)[1])
    with tracker.fork("a"):  # what was drawn before the exception is consumed
        assert torch.equal(draw(device), a[1])
    with tracker.fork("b"):
        assert torch.equal(draw(device), b[1])


def test_c6_exception_caught_inside_the_outer_fork(device: str) -> None:
    tracker = make(device)
    with tracker.fork("a"):
        with pytest.raises(KeyError), tracker.fork("unknown"):
            pytest.fail("the body ran")
        with pytest.raises(ZeroDivisionError), tracker.fork("b"):
            raise ZeroDivisionError
        assert torch.equal(draw(device), sequence(device, 101, 5)[0])


def test_c6_seeding_inside_a_fork_seeds_the_stream_not_the_default(device: str) -> None:
    torch.manual_seed(3)
    tracker = make(device)
    with tracker.fork("a"):
        draw(device)
        torch.manual_seed(44)
        assert torch.equal(draw(device, 2), sequence(device, 44, 2, 3)[0])
    assert torch.equal(draw(device), sequence(device, 3, 5)[0])
    with tracker.fork("a"):
        assert torch.equal(draw(device, 3), sequence(device, 44, 2, 3)[1])
