# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What the demo warns of: a checkpoint whose saved random-number states are live handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from transformer_engine_ext.pytorch.rng import CudaRNGStatesTracker

__all__ = ["live_handle_checkpoint"]


def live_handle_checkpoint(function: Callable[[Tensor], Tensor], tracker: CudaRNGStatesTracker, x: Tensor) -> Tensor:
    """Run ``function(x)`` and recompute it in backward the way Transformer Engine 2.20.2 does with a tracker.

    The states it saves are handles on the generators themselves. The forward pass moves these, so setting them again
    for the recompute sets nothing back, and the recompute draws on from where the streams now stand: another mask.
    CPU generators have no such handles; there the same thing is done with the generators as they are.
    """
    result: Tensor = _LiveHandleCheckpoint.apply(x, function, tracker)  # type: ignore[no-untyped-call]
    return result


def _default_generator(device: torch.device) -> Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _live_handles(device: torch.device, tracker: CudaRNGStatesTracker) -> tuple[Generator, dict[str, Generator]]:
    default = _default_generator(device)
    handle = default if device.type == "cpu" else default.graphsafe_get_state()
    return handle, dict(tracker.states_)


def _set_handles(
    device: torch.device, tracker: CudaRNGStatesTracker, saved: tuple[Generator, dict[str, Generator]]
) -> None:
    default, streams = saved
    if device.type == "cpu":
        torch.default_generator.set_state(default.get_state())
    else:
        _default_generator(device).graphsafe_set_state(default)
    tracker.set_states(streams)


class _LiveHandleCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], tracker: CudaRNGStatesTracker) -> Tensor:
        ctx.function, ctx.tracker = function, tracker
        ctx.saved_streams = _live_handles(x.device, tracker)
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        now = _live_handles(x.device, ctx.tracker)
        _set_handles(x.device, ctx.tracker, ctx.saved_streams)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        _set_handles(x.device, ctx.tracker, now)
        torch.autograd.backward(output, gradient)
        return x.grad, None, None
