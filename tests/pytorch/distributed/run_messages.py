# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_messages.py: what is raised and warned where ranks do not agree, on two ranks; rank 0 prints texts."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from _helpers import PASS_TOKEN
from transformer_engine_ext.errors import PeerFailureError, StreamMismatchError
from transformer_engine_ext.pytorch.distributed import ParallelRNG


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    texts: dict[str, str] = {}
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logging.getLogger("transformer_engine_ext").addHandler(handler)

    rng = ParallelRNG({"tp": dist.group.WORLD}, device="cpu", timeout=3)
    rng.seed(1)
    if rank == 1:
        torch.rand(4)  # once too often
    rng.save(folder / "drifted.safetensors")
    try:
        rng.verify()
    except StreamMismatchError as error:
        texts["mismatch"] = str(error)

    other = ParallelRNG({"dp": dist.group.WORLD}, device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load(folder / "drifted.safetensors", on_layout_change="rederive")
    texts["drifted"] = "\n".join(f"{warning.category.__name__}: {warning.message}" for warning in caught)

    rng.seed(1)
    if rank == 1:
        torch.rand(4)
    rng.verify(repair="broadcast")
    texts["repaired"] = "\n".join(f"{record.levelname} {record.name}: {record.getMessage()}" for record in logged)
    rng.verify()

    dist.barrier()
    if rank == 0:
        try:
            rng.verify()  # rank 1 does not come
        except PeerFailureError as error:
            texts["dead"] = str(error)
    (folder / f"texts-{rank}.json").write_text(json.dumps(texts))
    if rank == 1:
        while not (folder / "texts-0.json").exists():
            time.sleep(0.1)
    print(PASS_TOKEN, flush=True)
    os._exit(0)  # past a process group that is out of step


if __name__ == "__main__":
    main(Path(sys.argv[1]))
