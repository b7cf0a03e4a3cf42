# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""E5, E6, E7: what capture refuses and how it says so, where it is silent, and graphs mixed with eager passes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from _capture import ORDERS, Kit, Outcome, Rig, Split, assert_like_plain, caused_by_us, kit
from _proof import assert_same_tensors
from _regions import both_engines, moved
from transformer_engine_ext.errors import RecomputeMismatchError, UnsupportedCaptureError
from transformer_engine_ext.pytorch import is_recomputing
from transformer_engine_ext.pytorch.rng import capture, register_streams, registering_streams
from transformer_engine_ext.pytorch.rng.native import NotRegistered

__all__ = ["kit"]


def _bytes(rig: Rig) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in rig.positions().items()}


def _assert_usable(rig: Rig) -> None:
    """Assert that an eager region, and then a capture, are exact with the same streams."""
    x = rig.input()
    w = rig.kit.ones(rig.kit.size).requires_grad_()
    y = rig.checkpoint(rig.body, x, w)
    y.sum().backward()
    assert x.grad is not None
    assert int(((y != 0) != (x.grad != 0)).sum()) == 0, "an eager region is not exact any more"
    rig.w = rig.kit.ones(rig.kit.size).requires_grad_()
    Split(rig, micro_batches=2).run("f0 f1 b0 b1").assert_exact("a capture after the error")


def _assert_remedy(error: UnsupportedCaptureError, stream: str) -> None:
    """Assert that the text names the stream and both ways to register it."""
    assert f"stream {stream!r}" in str(error), error
    assert "register_streams(graph)" in str(error), error
    assert "with registering_streams()" in str(error), error


def test_e5_what_the_error_says_to_call_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(handle: torch.Generator) -> None:
        raise NotRegistered

    monkeypatch.setattr(capture, "captured_words", unknown)
    with pytest.raises(UnsupportedCaptureError) as caught:
        capture.require_registered("a", torch.Generator())
    _assert_remedy(caught.value, "a")
    names = re.findall(r"transformer_engine_ext(?:\.\w+)+", str(caught.value))
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute, None)), f"there is no {name}"


# ---------------------------------------------------------------- E5


@both_engines
def test_e5_unregistered_stream(kit: Kit, use_reentrant: bool) -> None:
    if not kit.registers:
        pytest.skip("this torch registers streams by itself")
    rig = Rig(kit, use_reentrant)
    graph, x = kit.graph(register=False), rig.input()
    rig.draws()
    before = _bytes(rig)
    with pytest.raises(UnsupportedCaptureError) as caught, kit.capturing(graph):  # noqa: PT012
        kit.drop(rig.ones)
        rig.checkpoint(rig.body, x)
    _assert_remedy(caught.value, "a")
    assert moved(before, _bytes(rig)) == []
    _assert_usable(rig)


@both_engines
def test_e5_stream_that_only_the_forward_graph_knows(kit: Kit, use_reentrant: bool) -> None:
    if not kit.registers:
        pytest.skip("this torch registers streams by itself")
    rig = Rig(kit, use_reentrant)
    x, forward, backward = rig.input(), kit.graph(), kit.graph(register=False)
    with kit.capturing(forward):
        y = rig.checkpoint(rig.body, x)
    with pytest.raises(UnsupportedCaptureError) as caught, kit.capturing(backward):  # noqa: PT012
        kit.drop(rig.ones)
        y.backward(torch.ones_like(y))
    _assert_remedy(caught.value, "a")
    _assert_usable(rig)


@both_engines
def test_e5_registering_is_needed_by_used_streams_only(kit: Kit, use_reentrant: bool) -> None:
    """Streams "a" and "b" exist, and neither the graphs nor the region ever hear of them."""

    def scenario(rig: Rig) -> Outcome:
        return Split(rig, around=False).run(ORDERS["mixed"])

    kit.graph = functools.partial(kit.graph, register=False)  # type: ignore[method-assign]
    make = functools.partial(Rig, rows=("default", "default"), names=("a", "b"))
    assert_like_plain(kit, use_reentrant, scenario, make)


@both_engines
def test_e5_registering_streams_serves_code_that_makes_its_own_graphs(kit: Kit, use_reentrant: bool) -> None:
    if not kit.real:
        pytest.skip("patches torch.cuda.CUDAGraph, which this kit does not use")
    kit.graph = functools.partial(kit.graph, register=False)  # type: ignore[method-assign]

    def scenario(rig: Rig) -> Outcome:
        with registering_streams():
            split = Split(rig)
        return split.run(ORDERS["mixed"])

    assert_like_plain(kit, use_reentrant, scenario)


# ---------------------------------------------------------------- E6


@both_engines
def test_e6_no_warning_and_nothing_to_register_since_2_14(kit: Kit, use_reentrant: bool) -> None:
    if kit.registers:
        pytest.skip("this torch needs registration")
    warn_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught, registering_streams():
            warnings.simplefilter("always")
            graph = kit.graph()
            register_streams(graph)
            Split(Rig(kit, use_reentrant)).run(ORDERS["LIFO"]).assert_exact("with registration asked for")
            kit.graph = functools.partial(kit.graph, register=False)  # type: ignore[method-assign]
            Split(Rig(kit, use_reentrant)).run(ORDERS["LIFO"]).assert_exact("without registration")
    finally:
        torch.set_warn_always(warn_always)
    ours = [found for found in caught if caused_by_us(found) or "register_generator_state" in str(found.message)]
    assert [f"{found.filename}:{found.lineno}: {found.message}" for found in ours] == []


# ---------------------------------------------------------------- E7


@both_engines
def test_e7_captured_forward_and_eager_backward(kit: Kit, use_reentrant: bool) -> None:
    """The eager recompute takes the words of the latest replay, and moves no stream."""
    rig = Rig(kit, use_reentrant)
    twin = rig.twin()
    kit.aside(lambda: twin.checkpoint(twin.body, twin.input()).sum().backward())
    x, grad, graph = rig.input(), kit.ones(len(rig.rows), kit.size), kit.graph()
    with kit.capturing(graph):
        rig.draws()
        y = rig.checkpoint(rig.body, x)
        rig.draws()
    wrong, masks = [], set()
    for turn, replays in enumerate((1, 2, 1, 3)):
        rig.seed(turn)
        for _ in range(replays):
            rig.draws()
            graph.replay()
        forward = y.detach().clone()
        rig.draws()
        before = _bytes(rig)
        y.backward(grad, retain_graph=True)
        assert moved(before, _bytes(rig)) == [], "the backward moved streams"
        assert x.grad is not None
        wrong.append(int(((forward != 0) != (x.grad != 0)).sum()))
        masks.add(forward.cpu().numpy().tobytes())
        x.grad = rig.w.grad = None
    assert wrong == [0, 0, 0, 0], f"wrong elements of {y.numel()}, by turn: {wrong}"
    assert len(masks) == 4
    assert rig.proof.runs == 5


@both_engines
def test_e7_eager_forward_and_captured_backward(kit: Kit, use_reentrant: bool) -> None:
    rig = Rig(kit, use_reentrant)
    x, grad, graph = rig.input(), kit.ones(len(rig.rows), kit.size), kit.graph()
    # Backward runs on the stream of its forward, so only a forward on the stream of the capture comes this far.
    side = torch.cuda.Stream() if kit.real else None
    options = {} if side is None else {"stream": side}
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with contextlib.nullcontext() if side is None else torch.cuda.stream(side):
        y = rig.checkpoint(rig.body, x)
    before = _bytes(rig)
    with pytest.raises(UnsupportedCaptureError) as caught, kit.capturing(graph, **options):  # noqa: PT012
        kit.drop(rig.ones)
        y.backward(grad)
    text = str(caught.value)
    assert "forward ran outside of any graph" in text, text
    assert "Capture the forward too" in text, text
    assert moved(before, _bytes(rig)) == []
    # Outside of the capture the same backward is right.
    y.backward(grad)
    assert x.grad is not None
    assert int(((y != 0) != (x.grad != 0)).sum()) == 0
    _assert_usable(rig)


# ---------------------------------------------------------------- recomputes that fail


class _BoomError(Exception):
    pass


@both_engines
def test_recompute_that_raises_leaves_the_graph_as_it_was(kit: Kit, use_reentrant: bool) -> None:
    """Whoever catches the error inside the capture goes on with streams that the recompute has not touched."""

    def scenario(rig: Rig) -> Outcome:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = rig.body(x)
            if is_recomputing():
                raise _BoomError
            return y * rig.w

        x, grad = rig.input(), kit.ones(len(rig.rows), kit.size)
        forward, backward = kit.graph(), kit.graph()
        with kit.capturing(forward):
            y = rig.checkpoint(function, x)
        with kit.capturing(backward):
            before = rig.draws()
            if rig.use_reentrant is not None:
                with pytest.raises(_BoomError):
                    y.backward(grad)
            after = rig.draws()
        values: dict[str, Any] = {}
        rig.seed(3)
        for turn in range(3):
            forward.replay()
            backward.replay()
            values |= {f"{turn} before": before.clone(), f"{turn} after": after.clone()}
        values |= {"next draws": rig.draws(), **rig.positions()}
        return Outcome({}, 1, {name: value.cpu() for name, value in values.items()})

    assert_like_plain(kit, use_reentrant, scenario)


def _extra_draw_in(stream: str) -> Callable[[Rig, torch.Tensor], torch.Tensor]:
    def program(rig: Rig, x: torch.Tensor) -> torch.Tensor:
        def function(x: torch.Tensor) -> torch.Tensor:
            if is_recomputing():
                with rig.on(stream):
                    rig.kit.drop(rig.ones)
            return rig.body(x)

        return rig.checkpoint(function, x)

    return program


@both_engines
@pytest.mark.parametrize("stream", ["a", "unused"])
def test_a9_recompute_with_another_number_of_draws_is_refused_in_capture(
    kit: Kit, use_reentrant: bool, stream: str
) -> None:
    rig = Rig(kit, use_reentrant, names=("a", "b", "unused"))
    x, grad = rig.input(), kit.ones(len(rig.rows), kit.size)
    forward, backward = kit.graph(), kit.graph()
    with kit.capturing(forward):
        y = _extra_draw_in(stream)(rig, x)
    with pytest.raises(RecomputeMismatchError) as caught, kit.capturing(backward):  # noqa: PT012
        kit.drop(rig.ones)
        y.backward(grad)
    assert f"stream {stream!r}" in str(caught.value)
    del y, caught  # its traceback holds the recompute's frames
    _assert_usable(rig)


@both_engines
def test_e3_seed_of_the_capture_does_not_matter(kit: Kit, use_reentrant: bool) -> None:
    """A forward and a backward graph captured under different seeds give what any other pair gives."""

    def run(seeds: tuple[int, int]) -> dict[str, torch.Tensor]:
        rig = Rig(kit, use_reentrant)
        rig.seed(seeds[0])
        split = Split(rig, halfway=lambda: rig.seed(seeds[1]))
        outcome = split.run(ORDERS["FIFO"])
        outcome.assert_exact(f"seeds {seeds}")
        return outcome.values

    assert_same_tensors(run((1, 2)), run((3, 3)), "values")
