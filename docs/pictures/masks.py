# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Draw ``masks.png``: the dropout masks of one region's forward and recompute, with live handles and with this package.

    python docs/pictures/masks.py [FILE]

The masks are computed, on the CPU: a region that drops out ones shows the forward's mask in its output, and the
recompute's in the gradient of its input. "Live handles" is what Transformer Engine 2.20.2 does with a tracker, as in
the contrast of ``te-ext demo``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from transformer_engine_ext.cli.demo_contrast import live_handle_checkpoint
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

SIDE = 40  # the masks are squares
METHODS = ("live handles, as in\nTransformer Engine 2.20.2", "this package")


def masks(method: str) -> tuple[Tensor, Tensor]:
    """Return which elements the forward kept and which the recompute kept, ``bool [SIDE, SIDE]``."""
    tracker = CudaRNGStatesTracker("cpu")
    tracker.add("model-parallel-rng", 1234)

    def region(x: Tensor) -> Tensor:
        with tracker.fork():
            return torch.nn.functional.dropout(x, 0.5)

    run: Callable[[Tensor], Tensor] = {
        METHODS[0]: lambda x: live_handle_checkpoint(region, tracker, x),
        METHODS[1]: lambda x: te_checkpoint(region, x, get_rng_state_tracker=lambda: tracker),
    }[method]
    x = torch.ones(SIDE, SIDE, requires_grad=True)
    y = run(x)
    y.backward(torch.ones_like(y))
    gradient = x.grad
    if gradient is None:
        raise RuntimeError("backward left no gradient")
    return y.detach() != 0, gradient != 0


def draw(file: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    kept, differ = ListedColormap(["white", "#303030"]), ListedColormap(["white", "#c0141a"])
    figure, axes = pyplot.subplots(2, 3, figsize=(7.2, 5.2), layout="constrained")
    for line, method in zip(axes, METHODS, strict=True):
        forward, recompute = masks(method)
        wrong = forward != recompute
        share = f"{int(wrong.sum()):,} of {wrong.numel():,} differ"
        line[0].set_ylabel(method, fontsize=9.5)
        for axis, picture, title, colours in zip(
            line,
            (forward, recompute, wrong),
            ("forward: the loss's mask", "recompute: the gradient's mask", share),
            (kept, kept, differ),
            strict=True,
        ):
            axis.imshow(picture.numpy(), cmap=colours, vmin=0, vmax=1, interpolation="none")
            axis.set_title(title, fontsize=9)
            axis.set_xticks([])
            axis.set_yticks([])
    # No software version in the file, so that the same pixels are the same bytes.
    figure.savefig(file, dpi=110, metadata={"Software": None}, pil_kwargs={"optimize": True})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
