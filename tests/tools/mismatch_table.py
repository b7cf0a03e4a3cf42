# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Count gradient elements that belong to another dropout mask than the output, eagerly, on CUDA or CPU.

    python tests/tools/mismatch_table.py [--device cuda] [--json]

One row per engine and kind of stream; one column for this package and, where they can be imported, for
``transformer_engine.pytorch.checkpoint`` with its own tracker and for ``torch.utils.checkpoint`` (default stream only).
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine_ext
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint

N = 4096
KINDS = ("default", "tracked", "shared", "default and tracked")


def _region(tracker: Any, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def region(x: torch.Tensor) -> torch.Tensor:
        if kind in ("default", "default and tracked"):
            x = F.dropout(x, 0.5)
        if kind == "default":
            return x
        with tracker.fork("shared" if kind == "shared" else "model-parallel-rng"):
            return F.dropout(x, 0.25)

    return region


def _tracker(kind: type, device: str) -> Any:
    tracker = kind(device) if kind is CudaRNGStatesTracker else kind()
    tracker.add("model-parallel-rng", 1234)
    states = dict(tracker.get_states())
    default = torch.default_generator if device == "cpu" else torch.cuda.default_generators[0].graphsafe_get_state()
    tracker.set_states({**states, "shared": default})
    return tracker


def count(checkpoint: Callable[..., torch.Tensor], tracker_class: type, kind: str, reentrant: bool, device: str) -> str:
    """Return ``mismatches`` of one case, and whether the default stream stands where an unchecked run leaves it."""
    draws = []
    mismatches = 0
    for checkpointed in (False, True):
        torch.manual_seed(7)
        tracker = _tracker(tracker_class, device)
        x = torch.ones(N, device=device, requires_grad=True)
        region = _region(tracker, kind)
        if checkpointed:
            options = {} if checkpoint is torch_checkpoint else {"get_rng_state_tracker": lambda held=tracker: held}
            y = checkpoint(region, x, use_reentrant=reentrant, **options)
        else:
            y = region(x)
        torch.rand(5, device=device)  # other work between forward and backward
        y.backward(torch.ones_like(y))
        if checkpointed:
            mismatches = int((y.detach() != x.grad).sum())
        drawn = [torch.rand(8, device=device)]
        with tracker.fork("model-parallel-rng"):
            drawn.append(torch.rand(8, device=device))
        draws.append(torch.cat(drawn))
    streams = "" if torch.equal(*draws) else ", streams moved"
    return f"{mismatches} of {N}{streams}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    columns: dict[str, tuple[Callable[..., torch.Tensor], type]] = {
        "this package": (te_checkpoint, CudaRNGStatesTracker)
    }
    versions = {
        "transformer-engine-ext": transformer_engine_ext.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if arguments.device == "cuda":
        versions["GPU"] = torch.cuda.get_device_name()
        try:
            import transformer_engine
            import transformer_engine.pytorch as te
        except (ImportError, OSError, AssertionError) as error:
            versions["transformer-engine"] = f"not importable ({error})"
        else:
            versions["transformer-engine"] = transformer_engine.__version__
            columns["Transformer Engine"] = (te.checkpoint, te.CudaRNGStatesTracker)
    columns["torch"] = (torch_checkpoint, CudaRNGStatesTracker)
    rows = [
        {
            "engine": "reentrant" if reentrant else "non-reentrant",
            "stream": kind,
            **{name: count(*parts, kind, reentrant, arguments.device) for name, parts in columns.items()},
        }
        for reentrant in (True, False)
        for kind in KINDS
    ]
    if arguments.json:
        print(json.dumps({"versions": versions, "rows": rows}, indent=1))
        return
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    for row in ({key: key for key in rows[0]}, *rows):
        print("  ".join(row[key].ljust(width) for key, width in widths.items()))


if __name__ == "__main__":
    main()
