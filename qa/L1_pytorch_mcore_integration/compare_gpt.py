# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Compare the runs of train_gpt.py with the run without recompute; fail if a patched one differs.

    python compare_gpt.py folder [--traces]

Columns: largest difference of a step's loss, and largest relative difference of a step's gradients (norm of the
difference over norm), recompute against none, all else equal, over all steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

#: Relative difference of gradients that other kernels of the same arithmetic may make (a region under no_grad takes
#: other fused kernels in forward, one bf16 unit in the last place apart); another dropout mask makes 0.3 and more.
TOLERANCE = 2e-2


def differences(run: dict[str, Any], reference: dict[str, Any]) -> tuple[float, float, float]:
    """Return the largest loss difference, and the relative difference of the gradients: first step, largest."""
    losses = max(abs(a - b) for a, b in zip(run["losses"], reference["losses"], strict=True))
    distance = (run["gradients"] - reference["gradients"]).norm(dim=1) / reference["gradients"].norm(dim=1)
    return losses, float(distance[0]), float(distance.max())


def main() -> int:
    """Print the table; return 1 if a patched run differs, or nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--traces", action="store_true")
    arguments = parser.parse_args()
    runs = {file.stem: torch.load(file) for file in sorted(arguments.folder.glob("*.pt"))}
    failed = []
    print(f"{'run':68} {'loss diff':>10} {'grad diff, step 1':>18} {'largest':>10} {'peak MiB':>9} {'calls':>6}")
    for key, run in runs.items():
        impl, precision, tracker, recompute, state = key.split(".")
        reference = runs.get(".".join([impl, precision, tracker, "none", "unpatched"]))
        if "error" in run:
            first = run["error"].splitlines()[0]
            print(f"{key:68} {first[:150]}")
            if arguments.traces:
                print(run["trace"])
            if state == "patched":
                failed.append(f"{key}: {first}")
            continue
        if reference is None or "error" in reference:
            print(f"{key:68} no reference; losses {run['losses'][0]:.4f} .. {run['losses'][-1]:.4f}")
            continue
        loss, first_step, largest = differences(run, reference)
        other = "" if run["weights"] == reference["weights"] else "  from other weights"
        numbers = f"{loss:10.2e} {first_step:18.2e} {largest:10.2e} {run['peak'] / 2**20:9.0f} {run['calls']:6d}"
        print(f"{key:68} {numbers}{other}")
        # A norm that is part of the next linear layer is none of its own: there is nothing to recompute.
        if state == "patched" and recompute not in ("none", "layernorm") and not run["calls"] > reference["calls"]:
            failed.append(f"{key}: nothing was recomputed")
        if state == "patched" and not first_step <= TOLERANCE:
            failed.append(f"{key}: gradients of the first step differ by {first_step:.2e}")
    if failed:
        print("differs while patched:\n  " + "\n  ".join(failed))
    return 1 if failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
