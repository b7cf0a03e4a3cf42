# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The model of the step benchmarks: a stack of transformer layers with dropout, each layer one region."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _engines import Engine, transformer_engine
from transformer_engine_ext.pytorch import CudaRNGStatesTracker

__all__ = ["SIZES", "Region", "Size", "Stack", "make_tracker", "no_fusions"]

STREAM = "model-parallel-rng"


@dataclass(frozen=True)
class Size:
    """Shape of a stack; tokens are one sequence."""

    name: str
    hidden: int
    tokens: int
    heads: int


SIZES = {
    size.name: size
    for size in (
        Size("tiny", 64, 32, 4),  # runs anywhere
        Size("small", 1024, 512, 16),  # bound by the host
        Size("large", 4096, 2048, 32),  # bound by the GPU
    )
}


def no_fusions() -> None:
    """Switch Transformer Engine's compiled fusions off; to be called before it is imported.

    Its non-reentrant engine gives the fused bias-GELU up for good in every layer that it once ran, so that sides would
    run different kernels; and compiling takes longer than measuring.
    """
    os.environ.setdefault("NVTE_BIAS_GELU_NVFUSION", "0")
    os.environ.setdefault("NVTE_BIAS_DROPOUT_FUSION", "0")


def make_tracker(device: str) -> Any:
    """Return a tracker with one stream: Transformer Engine's, which its layers insist on under capture, or ours."""
    te = transformer_engine() if device == "cuda" else None
    tracker = CudaRNGStatesTracker(device) if te is None else te.distributed.CudaRNGStatesTracker()
    tracker.add(STREAM, 1234)
    return tracker


class PlainLayer(nn.Module):
    """Stand-in for Transformer Engine's layer where that is not there: same shape, same places of dropout."""

    def __init__(self, size: Size, dropout: float, tracker: Any, device: str) -> None:
        super().__init__()
        self.heads, self.dropout, self.tracker = size.heads, dropout, tracker
        with torch.device(device):
            self.norm1, self.norm2 = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
            self.qkv, self.proj = nn.Linear(size.hidden, 3 * size.hidden), nn.Linear(size.hidden, size.hidden)
            self.up, self.down = nn.Linear(size.hidden, 4 * size.hidden), nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for ``x``, of shape tokens, batch, hidden."""
        tokens, batch, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(tokens, batch, self.heads, -1).permute(1, 2, 0, 3).chunk(3, -1)
        with self.tracker.fork(STREAM):
            mixed = F.scaled_dot_product_attention(*parts, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.proj(mixed.permute(2, 0, 1, 3).reshape(tokens, batch, hidden)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


def _layer(size: Size, dropout: float, tracker: Any, device: str) -> nn.Module:
    te = transformer_engine() if device == "cuda" else None
    if te is None:
        return PlainLayer(size, dropout, tracker, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer: nn.Module = te.TransformerLayer(
            size.hidden,
            4 * size.hidden,
            size.heads,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            params_dtype=torch.bfloat16,
            get_rng_state_tracker=lambda: tracker,
            device=device,
        )
    return layer


class Region(nn.Module):
    """One layer as a region of an engine.

    With a probe, ones that require a gradient, the region also drops the first row of it by the default stream and the
    second by the tracked one: the probe's output then shows the masks of forward, its gradient those of the recompute.
    """

    def __init__(self, layer: nn.Module, engine: Engine, tracker: Any) -> None:
        super().__init__()
        self.layer, self.engine, self.tracker = layer, engine, tracker

    def _probed(self, x: Tensor, probe: Tensor) -> tuple[Tensor, Tensor]:
        first = F.dropout(probe[0], 0.5)
        x = self.layer(x)
        with self.tracker.fork(STREAM):
            second = F.dropout(probe[1], 0.5)
        return x, torch.stack((first, second))

    def forward(self, x: Tensor, probe: Tensor | None = None) -> Any:
        """Run the layer through the engine."""
        call: Callable[..., Any] = self.engine.call
        if probe is None:
            return call(lambda: self.tracker, self.layer, x)
        return call(lambda: self.tracker, self._probed, x, probe)


class Stack:
    """Layers with fixed input and output gradient; every stack made with one tracker has the same weights.

    Parameters
    ----------
    size : Size
        Its shape.
    layers : int
        How many.
    engine : Engine
        What runs each layer.
    tracker : object
        From ``make_tracker``.
    device : str
        ``"cpu"`` or ``"cuda"``.
    dropout : float
        Of hidden states and of attention.
    probe : int
        Elements per row of the probes; 0: none.
    """

    def __init__(
        self, size: Size, layers: int, engine: Engine, tracker: Any, device: str, dropout: float = 0.1, probe: int = 0
    ) -> None:
        self.engine, self.tracker = engine, tracker
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.seed(1)
        modules = [_layer(size, dropout, tracker, device).to(dtype) for _ in range(layers)]
        self.regions: list[Any] = [Region(module, engine, tracker) for module in modules]
        self.parameters = [parameter for module in modules for parameter in module.parameters()]
        shape = (size.tokens, 1, size.hidden)
        self.x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        self.grad = torch.randn(shape, device=device, dtype=dtype)
        self.probes = [torch.ones(2, probe, device=device, requires_grad=True) for _ in range(layers if probe else 0)]
        self.ones = torch.ones(2, probe, device=device)
        self.masks: list[Tensor] = []
        self.y = self.grad

    def seed(self, seed: int) -> None:
        """Put every stream at the start of a seed."""
        torch.manual_seed(seed)
        for handle in self.tracker.get_states().values():
            handle.manual_seed(seed + 1000)

    def clear(self) -> None:
        """Free gradients and results."""
        for tensor in (*self.parameters, self.x, *self.probes):
            tensor.grad = None
        self.y, self.masks = self.grad, []

    def step(self) -> None:
        """Run forward and backward, with fresh gradients."""
        self.clear()
        y, masks = self.x, []
        for region, probe in zip(self.regions, self.probes or [None] * len(self.regions), strict=True):
            if probe is None:
                y = region(y)
            else:
                y, mask = region(y, probe)
                masks.append(mask)
        torch.autograd.backward((y, *masks), (self.grad, *(self.ones for _ in masks)))
        # Without their graph, which would keep the nodes that accumulate into parameters, and the stream they ran on.
        self.y, self.masks = y.detach(), [mask.detach() for mask in masks]

    def results(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the last step left: output, and gradients of the input and of all parameters."""
        yield "output", self.y
        for name, tensor in (
            ("input gradient", self.x),
            *((f"gradient {i}", p) for i, p in enumerate(self.parameters)),
        ):
            if tensor.grad is not None:
                yield name, tensor.grad

    def mismatches(self) -> tuple[int, int]:
        """Return how many elements of the probes' masks differ between forward and recompute, and of how many."""
        wrong, of = 0, 0
        for mask, probe in zip(self.masks, self.probes, strict=True):
            if probe.grad is None:
                raise RuntimeError("a probe got no gradient: run step() first")
            wrong += int(((mask != 0) != (probe.grad != 0)).sum())
            of += mask.numel()
        return wrong, of
