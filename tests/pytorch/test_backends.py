# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""One behavioural suite of the device backends, run against each of them.

Torch's own generators are the oracle: a stream of a seed draws what ``torch.Generator(device).manual_seed(seed)`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from transformer_engine_ext.errors import UnsupportedDeviceError
from transformer_engine_ext.pytorch.rng.devices import get_backend

STATE_BYTES = {"cpu": 5056, "cuda": 16}


class Kit:
    """A backend together with what the tests do to it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.backend = get_backend(device)
        if device == "cuda":
            torch.cuda.init()
        self.index = torch.cuda.current_device() if device == "cuda" else 0

    def stream(self, seed: int) -> torch.Generator:
        return self.backend.new_stream(seed, self.index)

    def draw(self, count: int = 7) -> torch.Tensor:
        """Draw as user code does: from the default generator, whatever it is bound to."""
        return torch.randn(count, device=self.device).cpu()

    def sequence(self, seed: int, *counts: int) -> list[torch.Tensor]:
        """Draws of the oracle: successive draws of the given sizes after seeding."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return [torch.randn(count, device=self.device, generator=generator).cpu() for count in counts]

    def default(self) -> torch.Generator:
        return self.backend.default(self.index)


@pytest.fixture
def kit(device: str) -> Iterator[Kit]:
    kit = Kit(device)
    yield kit
    # Every test unbinds what it bound: the default generator must be the one that torch.manual_seed seeds.
    torch.manual_seed(77)
    assert torch.equal(kit.draw(), kit.sequence(77, 7)[0]), "the test left the default generator bound to a stream"


def test_device_type(kit: Kit) -> None:
    assert kit.backend.device_type == kit.device
    assert get_backend(kit.device) is kit.backend


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 5, 2**40])
def test_new_stream_starts_at_its_seed_and_touches_no_other(kit: Kit, seed: int) -> None:
    torch.manual_seed(5)
    first, twin, other = kit.stream(seed), kit.stream(seed), kit.stream(seed + 1)
    assert torch.equal(kit.draw(), kit.sequence(5, 7)[0])
    assert first.device.type == kit.device
    assert torch.equal(kit.backend.read(first), kit.backend.read(twin))
    assert not torch.equal(kit.backend.read(first), kit.backend.read(other))
    before = kit.backend.read(twin)
    drawn = torch.randn(7, device=kit.device, generator=first).cpu()
    assert torch.equal(drawn, kit.sequence(seed, 7)[0])
    assert torch.equal(kit.backend.read(twin), before)  # two streams of one seed are two streams


def test_read_gives_a_value(kit: Kit) -> None:
    stream = kit.stream(3)
    value = kit.backend.read(stream)
    assert value.dtype == torch.uint8
    assert value.device.type == "cpu"
    assert value.shape == (STATE_BYTES[kit.device],)
    assert torch.equal(value, stream.get_state())
    kept = value.clone()
    torch.randn(9, device=kit.device, generator=stream)
    assert torch.equal(value, kept), "the value moved with its stream"
    assert not torch.equal(kit.backend.read(stream), kept)


def test_write_rewinds_in_place(kit: Kit) -> None:
    stream = kit.stream(3)
    start = kit.backend.read(stream)
    kept = start.clone()
    first = torch.randn(5, device=kit.device, generator=stream)
    kit.backend.write(stream, start)
    assert torch.equal(torch.randn(5, device=kit.device, generator=stream), first)
    assert torch.equal(start, kept), "writing a value, or drawing after it, changed the value"


def test_default_is_what_user_code_draws_from(kit: Kit) -> None:
    torch.manual_seed(8)
    start = kit.backend.read(kit.default())
    first = kit.draw()
    assert torch.equal(first, kit.sequence(8, 7)[0])
    assert not torch.equal(kit.backend.read(kit.default()), start)
    kit.backend.write(kit.default(), start)
    assert torch.equal(kit.draw(), first)


def test_default_handle_stays_live(kit: Kit) -> None:
    handle = kit.default()
    torch.manual_seed(8)
    start = kit.backend.read(handle)
    first = kit.draw()
    kit.backend.write(handle, start)
    assert torch.equal(kit.draw(), first)
    assert torch.equal(kit.backend.read(handle), kit.backend.read(kit.default()))


def test_bind_makes_a_stream_the_default(kit: Kit) -> None:
    torch.manual_seed(8)
    outside = kit.sequence(8, 7, 7)
    inside = kit.sequence(21, 7, 7)
    stream = kit.stream(21)
    assert torch.equal(kit.draw(), outside[0])
    token = kit.backend.bind(stream)
    assert torch.equal(kit.draw(), inside[0])
    kit.backend.unbind(token)
    assert torch.equal(kit.draw(), outside[1])
    # What was drawn while it was bound, the stream has consumed.
    assert torch.equal(torch.randn(7, device=kit.device, generator=stream).cpu(), inside[1])


def test_bind_of_a_generator_that_user_code_made(kit: Kit) -> None:
    """``torch.Generator("cuda")`` names no device index, and still is a stream of the current device."""
    torch.manual_seed(8)
    stream = torch.Generator(kit.device).manual_seed(21)
    token = kit.backend.bind(stream)
    assert torch.equal(kit.draw(), kit.sequence(21, 7)[0])
    assert torch.equal(kit.backend.read(stream), kit.backend.read(kit.default()))
    kit.backend.unbind(token)
    assert torch.equal(kit.draw(), kit.sequence(8, 7)[0])
    assert torch.equal(torch.randn(7, device=kit.device, generator=stream).cpu(), kit.sequence(21, 7, 7)[1])


def test_bound_again_a_stream_goes_on(kit: Kit) -> None:
    stream, expected = kit.stream(21), kit.sequence(21, 3, 4, 5)
    for index, count in enumerate((3, 4, 5)):
        token = kit.backend.bind(stream)
        assert torch.equal(kit.draw(count), expected[index])
        kit.backend.unbind(token)


def test_read_and_write_while_bound(kit: Kit) -> None:
    stream = kit.stream(21)
    start = kit.backend.read(stream)
    token = kit.backend.bind(stream)
    first = kit.draw()
    assert not torch.equal(kit.backend.read(stream), start), "read gave the value from before the bind"
    assert torch.equal(kit.backend.read(stream), kit.backend.read(kit.default()))
    kit.backend.write(stream, start)
    assert torch.equal(kit.draw(), first), "write did not reach the bound stream"
    kit.backend.write(stream, start)
    kit.backend.unbind(token)
    assert torch.equal(kit.backend.read(stream), start)


def test_read_and_write_the_outer_default_while_a_stream_is_bound(kit: Kit) -> None:
    torch.manual_seed(8)
    handle = kit.default()
    start = kit.backend.read(handle)
    token = kit.backend.bind(kit.stream(21))
    kit.draw()
    assert torch.equal(kit.backend.read(handle), start), "the outer default moved with the bound stream"
    kit.backend.write(handle, get_backend(kit.device).read(kit.stream(99)))
    assert torch.equal(kit.draw(), kit.sequence(21, 7, 7)[1]), "writing the outer default reached the bound stream"
    kit.backend.unbind(token)
    assert torch.equal(kit.draw(), kit.sequence(99, 7)[0])


def test_nested_binds_of_different_streams(kit: Kit) -> None:
    torch.manual_seed(8)
    default, a, b = kit.sequence(8, 3, 3), kit.sequence(21, 3, 3, 3), kit.sequence(22, 3)
    first, second = kit.stream(21), kit.stream(22)
    assert torch.equal(kit.draw(3), default[0])
    outer = kit.backend.bind(first)
    assert torch.equal(kit.draw(3), a[0])
    inner = kit.backend.bind(second)
    assert torch.equal(kit.draw(3), b[0])
    innermost = kit.backend.bind(first)  # the same stream again, below another one
    assert torch.equal(kit.draw(3), a[1])
    assert torch.equal(kit.backend.read(first), kit.backend.read(kit.default()))
    kit.backend.unbind(innermost)
    kit.backend.unbind(inner)
    assert torch.equal(kit.draw(3), a[2]), "the outer stream was stale after a nested bind of itself"
    kit.backend.unbind(outer)
    assert torch.equal(kit.draw(3), default[1])


def test_nested_binds_of_the_same_stream(kit: Kit) -> None:
    stream, expected = kit.stream(21), kit.sequence(21, 2, 3, 4, 5)
    outer = kit.backend.bind(stream)
    assert torch.equal(kit.draw(2), expected[0])
    inner = kit.backend.bind(stream)
    assert torch.equal(kit.draw(3), expected[1])
    kit.backend.unbind(inner)
    assert torch.equal(kit.draw(4), expected[2])
    kit.backend.unbind(outer)
    assert torch.equal(torch.randn(5, device=kit.device, generator=stream).cpu(), expected[3])


def test_outer_stream_can_be_rewound_from_inside_another(kit: Kit) -> None:
    first, second, expected = kit.stream(21), kit.stream(22), kit.sequence(21, 7)
    start = kit.backend.read(first)
    outer = kit.backend.bind(first)
    kit.draw(5)
    moved = kit.backend.read(first)
    inner = kit.backend.bind(second)
    assert torch.equal(kit.backend.read(first), moved), "read gave a stale value of the stream bound outside"
    kit.backend.write(first, start)
    kit.backend.unbind(inner)
    assert torch.equal(kit.draw(), expected[0]), "the value written to the outer stream was lost"
    kit.backend.unbind(outer)


def test_bind_of_the_default_itself(kit: Kit) -> None:
    torch.manual_seed(8)
    expected = kit.sequence(8, 3, 4, 5)
    assert torch.equal(kit.draw(3), expected[0])
    token = kit.backend.bind(kit.default())
    assert torch.equal(kit.draw(4), expected[1])
    kit.backend.unbind(token)
    assert torch.equal(kit.draw(5), expected[2])


def test_the_default_bound_again_inside_a_stream(kit: Kit) -> None:
    torch.manual_seed(8)
    default, inside = kit.sequence(8, 3, 4, 5), kit.sequence(21, 3, 4)
    handle = kit.default()
    assert torch.equal(kit.draw(3), default[0])
    outer = kit.backend.bind(kit.stream(21))
    assert torch.equal(kit.draw(3), inside[0])
    inner = kit.backend.bind(handle)
    assert torch.equal(kit.draw(4), default[1])
    kit.backend.unbind(inner)
    assert torch.equal(kit.draw(4), inside[1])
    kit.backend.unbind(outer)
    assert torch.equal(kit.draw(5), default[2])


def _alias(kit: Kit, stream: torch.Generator) -> torch.Generator:
    """Another handle on the stream's state, where the device has such; the handle itself elsewhere."""
    return stream if kit.device == "cpu" else stream.graphsafe_get_state()


def test_aliasing_handles_are_one_stream(kit: Kit) -> None:
    stream = kit.stream(21)
    alias, expected = _alias(kit, stream), kit.sequence(21, 3, 4, 5, 6)
    start = kit.backend.read(alias)
    outer = kit.backend.bind(stream)
    assert torch.equal(kit.draw(3), expected[0])
    inner = kit.backend.bind(alias)
    assert torch.equal(kit.draw(4), expected[1])
    assert torch.equal(kit.backend.read(stream), kit.backend.read(alias))
    kit.backend.unbind(inner)
    assert torch.equal(kit.draw(5), expected[2])
    kit.backend.unbind(outer)
    assert torch.equal(torch.randn(6, device=kit.device, generator=alias).cpu(), expected[3])
    assert torch.equal(kit.backend.read(stream), kit.backend.read(alias))
    kit.backend.write(alias, start)
    assert torch.equal(kit.backend.read(stream), start)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("reseeded", [False, True])
def test_put_takes_back_what_take_took(kit: Kit, bound: bool, reseeded: bool) -> None:
    """The cheap form must restore everything that the bytes would: the seed too, and while the stream is bound."""
    stream = kit.stream(21)
    torch.randn(5, device=kit.device, generator=stream)
    token = kit.backend.bind(stream) if bound else None
    try:
        value, taken = kit.backend.read(stream), kit.backend.take(stream)
        assert kit.backend.equal(taken, kit.backend.take(stream))
        if reseeded:
            kit.backend.write(stream, kit.backend.read(kit.stream(22)))
        elif bound:
            kit.draw()
        else:
            torch.randn(5, device=kit.device, generator=stream)
        assert not kit.backend.equal(taken, kit.backend.take(stream))
        kit.backend.put(stream, taken)
        assert torch.equal(kit.backend.read(stream), value)
        assert kit.backend.equal(taken, kit.backend.take(stream))
        assert kit.backend.unmoved(taken, kit.backend.position(stream))
    finally:
        if bound:
            kit.backend.unbind(token)


@pytest.mark.parametrize("handle", [False, True], ids=["by itself", "to a handle"])
def test_unwind_forgets_bindings_that_nobody_ends(kit: Kit, handle: bool) -> None:
    torch.manual_seed(8)
    first, second, third = kit.stream(21), kit.stream(22), kit.stream(23)
    outer = kit.backend.bind(first)
    depth, bound = kit.backend.depth(kit.index), kit.default()
    tokens = [kit.backend.bind(second), kit.backend.bind(third)]
    assert kit.backend.depth(kit.index) == depth + 2
    kit.backend.unwind(kit.index, depth, bound if handle else None)
    assert kit.backend.depth(kit.index) == depth
    assert torch.equal(kit.draw(), kit.sequence(21, 7)[0])
    for token in reversed(tokens):  # ended late after all: too late to matter
        kit.backend.unbind(token)
    assert torch.equal(kit.draw(), kit.sequence(21, 7, 7)[1])
    kit.backend.unbind(outer)
    kit.backend.unwind(kit.index, 0)
    assert torch.equal(kit.draw(), kit.sequence(8, 7)[0])


def test_positions_differ_exactly_when_the_stream_moved(kit: Kit) -> None:
    stream = kit.stream(21)
    start, entry = kit.backend.position(stream), kit.backend.take(stream)
    assert kit.backend.same(start, kit.backend.position(stream))
    torch.randn(5, device=kit.device, generator=stream)
    moved = kit.backend.position(stream)
    assert not kit.backend.same(start, moved)
    assert kit.backend.distance(entry, start) != kit.backend.distance(entry, moved)
    kit.backend.put(stream, entry)
    assert kit.backend.same(start, kit.backend.position(stream))


def test_torch_seeding_reaches_the_bound_stream_only(kit: Kit) -> None:
    torch.manual_seed(8)
    stream = kit.stream(21)
    token = kit.backend.bind(stream)
    torch.manual_seed(9)
    kit.backend.unbind(token)
    assert torch.equal(kit.backend.read(stream), kit.backend.read(kit.stream(9)))
    assert torch.equal(kit.draw(), kit.sequence(8, 7)[0])


@pytest.mark.parametrize("device_type", ["meta", "nonsense", ""])
def test_device_type_without_backend_is_an_error_that_names_it(device_type: str) -> None:
    with pytest.raises(UnsupportedDeviceError) as caught:
        get_backend(device_type)
    assert repr(device_type) in str(caught.value) or f"{device_type} " in str(caught.value), str(caught.value)


@pytest.mark.parametrize("bad", ["short", "floats", "empty"])
def test_bad_value_is_refused_and_changes_nothing(kit: Kit, bad: str) -> None:
    stream = kit.stream(21)
    good = kit.backend.read(stream)
    values: dict[str, Any] = {"short": good[:-1].clone(), "floats": good.float(), "empty": good[:0].clone()}
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        kit.backend.write(stream, values[bad])
    assert torch.equal(kit.backend.read(stream), good)
