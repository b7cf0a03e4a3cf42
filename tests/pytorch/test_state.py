# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""State values: exact round trips, and bytes that are no state are refused with a text that says why."""

from __future__ import annotations

import dataclasses
import struct

import pytest
import torch

from _helpers import requires_cuda
from transformer_engine_ext.errors import StateFormatError
from transformer_engine_ext.pytorch.rng.state import MT19937State, PhiloxState, decode_state

TOP = 2**64 - 1


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63, TOP])
@pytest.mark.parametrize("offset", [0, 4, 2**32, TOP - 3])
def test_philox_round_trip(seed: int, offset: int) -> None:
    state = PhiloxState(seed, offset)
    tensor = state.to_tensor()
    assert tensor.dtype == torch.uint8
    assert tensor.device.type == "cpu"
    assert tensor.shape == (16,)
    assert bytes(tensor.tolist()) == struct.pack("<QQ", seed, offset)
    assert decode_state(tensor) == state
    assert (decode_state(tensor).seed, state.offset) == (seed, offset)
    assert str(seed) in state.describe()
    assert str(offset) in state.describe()


@requires_cuda
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_philox_reads_and_sets_a_cuda_generator(seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    assert decode_state(generator.get_state()) == PhiloxState(seed, 0)
    torch.rand(1000, device="cuda", generator=generator)
    state = decode_state(generator.get_state())
    assert isinstance(state, PhiloxState)
    assert state.seed == seed
    assert state.offset > 0
    assert state.offset % 4 == 0
    assert state.offset == generator.get_offset()
    expected = torch.rand(50, device="cuda", generator=generator)
    other = torch.Generator("cuda")
    other.set_state(state.to_tensor())
    assert torch.equal(torch.rand(50, device="cuda", generator=other), expected)


@pytest.mark.parametrize(("seed", "offset"), [(-1, 0), (2**64, 0), (0, -4), (0, 2**64)])
def test_philox_refuses_what_does_not_fit(seed: int, offset: int) -> None:
    with pytest.raises(StateFormatError, match=str(seed if offset == 0 else offset)):
        PhiloxState(seed, offset)


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 2**32 + 1])
def test_philox_refuses_an_offset_between_calls(offset: int) -> None:
    with pytest.raises(StateFormatError, match=f"{offset}.*multiple of 4"):
        PhiloxState(3, offset)
    damaged = torch.frombuffer(bytearray(struct.pack("<QQ", 3, offset)), dtype=torch.uint8)
    with pytest.raises(StateFormatError, match="multiple of 4"):
        decode_state(damaged)


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1, 2**40 + 9])
@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 625, 2000])
def test_mt19937_round_trip(seed: int, drawn: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.rand(drawn, generator=generator)
    tensor = generator.get_state()
    state = decode_state(tensor)
    assert isinstance(state, MT19937State)
    assert state.seed == seed
    assert str(seed) in state.describe()
    back = state.to_tensor()
    assert back.dtype == torch.uint8
    assert back.device.type == "cpu"
    assert torch.equal(back, tensor)
    other = torch.Generator()
    other.set_state(back)
    assert torch.equal(torch.rand(700, generator=other), torch.rand(700, generator=generator))


def test_mt19937_keeps_the_half_pair_of_normals() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.randn((), generator=generator)  # normals come in pairs; the second one is kept aside in the state
    other = torch.Generator()
    other.set_state(decode_state(generator.get_state()).to_tensor())
    assert torch.equal(torch.randn(3, generator=other), torch.randn(3, generator=generator))


def test_values_are_values() -> None:
    generator = torch.Generator().manual_seed(4)
    tensor = generator.get_state()
    state = decode_state(tensor)
    tensor.zero_()
    generator.manual_seed(9)
    assert torch.equal(state.to_tensor(), torch.Generator().manual_seed(4).get_state())
    first = state.to_tensor()
    first.zero_()
    assert torch.equal(state.to_tensor(), torch.Generator().manual_seed(4).get_state())
    assert state == decode_state(torch.Generator().manual_seed(4).get_state())
    assert state != decode_state(generator.get_state())
    assert PhiloxState(1, 4) == PhiloxState(1, 4) != PhiloxState(1, 8)
    assert len({PhiloxState(1, 4), PhiloxState(1, 4), PhiloxState(2, 4)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        PhiloxState(1, 4).seed = 2  # type: ignore[misc]


@pytest.mark.parametrize("length", [0, 1, 15, 17, 32, 5055, 5057])
def test_wrong_length_is_refused_with_the_length(length: int) -> None:
    with pytest.raises(StateFormatError, match=rf"\b{length}\b"):
        decode_state(torch.zeros(length, dtype=torch.uint8))


def test_wrong_length_of_mt19937_bytes_is_refused() -> None:
    with pytest.raises(StateFormatError, match=r"5056.*100"):
        MT19937State(bytes(100))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_cast_bytes_are_refused_with_the_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(StateFormatError, match=str(dtype).replace(".", r"\.")):
        decode_state(torch.zeros(16, dtype=dtype))


@pytest.mark.parametrize("shape", [(2, 8), (1, 16), (16, 1)])
def test_other_shapes_are_refused_with_the_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(StateFormatError, match=rf"\({shape[0]}, {shape[1]}\)"):
        decode_state(torch.zeros(shape, dtype=torch.uint8))


def test_strided_bytes_decode_as_their_elements() -> None:
    doubled = torch.stack([PhiloxState(11, 400).to_tensor(), torch.full((16,), 255, dtype=torch.uint8)], dim=1)
    assert decode_state(doubled[:, 0]) == PhiloxState(11, 400)


@requires_cuda
def test_bytes_that_were_moved_to_the_device_still_decode() -> None:
    state = PhiloxState(12, 4000)
    assert decode_state(state.to_tensor().cuda()) == state
    cpu = torch.Generator().manual_seed(8).get_state()
    assert torch.equal(decode_state(cpu.cuda()).to_tensor(), cpu)
