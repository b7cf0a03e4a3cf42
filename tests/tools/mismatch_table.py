# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Count gradient elements that belong to another dropout mask than the output, for what ``te-ext doctor`` leaves out.

    python tests/tools/mismatch_table.py [--device cuda] [--json]

The doctor's probes, run on this package, on ``torch.utils.checkpoint`` with streams of this package's tracker, and on
DeepSpeed's checkpoints with DeepSpeed's tracker, where that can be imported. On CUDA also inside CUDA graphs, but for
DeepSpeed, whose tracker holds byte states. The tables of the README are made of this and of the doctor's output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine_ext
from transformer_engine_ext.cli.demo_report import format_table
from transformer_engine_ext.cli.doctor_probe import MODES, Row, own_subject, probe
from transformer_engine_ext.integrations.probing import Region, Subject
from transformer_engine_ext.pytorch import CudaRNGStatesTracker


def torch_subject(device: str) -> Subject:
    """Return PyTorch's checkpoint; it knows no tracker, so the streams are of this package's."""

    def checkpoint(region: Region, x: Tensor, reentrant: bool, tracker: Any) -> Tensor:
        result: Tensor = torch_checkpoint(region, x, use_reentrant=reentrant)
        return result

    return Subject("torch.utils.checkpoint", checkpoint, lambda: CudaRNGStatesTracker(device))


def deepspeed_subject(device: str) -> Subject:
    """Return DeepSpeed's two checkpoints, which save the streams of DeepSpeed's own tracker."""
    os.environ.setdefault("DS_ACCELERATOR", device)  # read when it is imported
    from deepspeed.runtime.activation_checkpointing import checkpointing

    def checkpoint(region: Region, x: Tensor, reentrant: bool, tracker: Any) -> Tensor:
        engine = checkpointing.checkpoint if reentrant else checkpointing.non_reentrant_checkpoint
        result: Tensor = engine(region, x)
        return result

    def new_tracker() -> Any:
        tracker = checkpointing.get_cuda_rng_tracker()
        tracker.reset()
        return tracker

    return Subject("deepspeed", checkpoint, new_tracker, shares=False, captures=False)


def cell(row: Row) -> str:
    """Return what came out."""
    if row.mismatches is None:
        return row.error
    return f"{row.mismatches} of {row.of}" + ("" if row.streams_right else ", streams moved")


def main(argv: Sequence[str] | None = None) -> None:
    """Run all probes and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    versions = {
        "transformer-engine-ext": transformer_engine_ext.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if arguments.device == "cuda":
        versions["GPU"] = torch.cuda.get_device_name()
    subjects = [own_subject(arguments.device), torch_subject(arguments.device)]
    try:
        subjects.append(deepspeed_subject(arguments.device))
    except (ImportError, OSError) as error:
        versions["deepspeed"] = f"not importable ({error})"
    else:
        import deepspeed

        versions["deepspeed"] = deepspeed.__version__
    rows = list(probe(subjects, "-", arguments.device))
    cells = {(row.subject, row.engine, row.stream, row.mode): cell(row) for row in rows}
    if arguments.json:
        print(json.dumps({"versions": versions, "rows": [[*key, text] for key, text in cells.items()]}, indent=1))
        return
    modes = [mode for mode in MODES if any(row.mode == mode for row in rows)]
    table = [
        (*key, *(cells.get((*key, mode), "") for mode in modes)) for key in dict.fromkeys(key[:3] for key in cells)
    ]
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(format_table(("checkpoint", "engine", "stream", *modes), table))


if __name__ == "__main__":
    main()
