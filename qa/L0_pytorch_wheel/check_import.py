# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Use the installed package once: ``python3 -W error check_import.py FOLDER`` with the folder that it must lie in."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.resources import files
from pathlib import Path

import transformer_engine_ext as te_ext

#: Packages that importing this one must leave alone.
FOREIGN = ("transformer_engine", "transformer_engine_torch", "megatron")


def import_problems(folder: str) -> list[str]:
    """Return what is wrong after ``import transformer_engine_ext``."""
    here, expected = Path(te_ext.__file__).resolve(), Path(folder).resolve()
    problems = [] if expected in here.parents else [f"imported {here}, expected a file below {expected}"]
    problems += [f"the import imported {name}" for name in ("torch", *FOREIGN) if name in sys.modules]
    distribution = importlib.metadata.distribution("transformer-engine-ext")
    if distribution.version != te_ext.__version__:
        problems.append(f"metadata say version {distribution.version}, the package {te_ext.__version__}")
    for name in ("py.typed", "csrc/philox_state.cpp", "csrc/streams.cpp", "cli/data/american_documents.txt"):
        if not files("transformer_engine_ext").joinpath(name).is_file():
            problems.append(f"{name} was not installed")
    licences = [file for file in distribution.files or [] if file.name == "LICENSE"]
    if not licences or "Apache License" not in licences[0].read_text():
        problems.append("the licence was not installed")
    return problems


def use_problems() -> list[str]:
    """Return what is wrong after a region with a tracked stream, on the CPU."""
    import torch

    tracker = te_ext.CudaRNGStatesTracker(device="cpu")
    tracker.add("model-parallel-rng", 1234)
    x = torch.ones(64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return torch.nn.functional.dropout(x * x, 0.5)

    out = te_ext.te_checkpoint(function, x, get_rng_state_tracker=lambda: tracker)
    out.sum().backward()
    te_ext.distributed.get_all_rng_states()
    problems = [f"using it imported {name}" for name in FOREIGN if name in sys.modules]
    # Of ones, the output is the forward's mask and half the gradient the recompute's.
    if not torch.equal(x.grad, 2 * out.detach()):
        problems.append("the recompute drew another mask than the forward")
    if torch.cuda.is_initialized():
        problems.append("using it on the CPU initialised CUDA")
    return problems


def main() -> int:
    """Return the exit code."""
    problems = import_problems(sys.argv[1]) + use_problems()
    for problem in problems:
        print(f"Error: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
