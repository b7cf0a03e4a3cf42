# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""One rank of the demo: runs the arms, and reports when another rank is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from transformer_engine_ext.cli import demo_store
from transformer_engine_ext.cli.demo_arms import Trace, Training, compare
from transformer_engine_ext.cli.demo_config import COLLECTIVE_TIMEOUT, CONTRAST, DIE_AT, REFERENCE, ModelSize
from transformer_engine_ext.cli.demo_text import load_corpus
from transformer_engine_ext.errors import PeerFailureError
from transformer_engine_ext.pytorch.distributed.parallel_rng import ParallelRNG

# The launcher says through the store who has died; it looks every 50 ms.
_NOTICE_SECONDS = 5.0


class _Progress:
    """What this rank is doing, for error messages, and rank 0's progress bar."""

    def __init__(self, rank: int, total: int, descriptor: int | None) -> None:
        self.arm = "start"
        self.step = -1
        self._rank = rank
        self._bar = None
        if descriptor is not None and rank == 0:
            self._bar = tqdm(total=total, unit="step", file=os.fdopen(descriptor, "w"), leave=False)

    def begin(self, arm: str) -> None:
        self.arm = arm
        if self._bar is not None:
            self._bar.set_description(arm)

    def __call__(self, step: int) -> None:
        self.step = step
        if os.environ.get(DIE_AT) == f"{self._rank}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _end_with_a_peer(store: Any, report: Any) -> None:
    """Report and end, should this rank not notice by itself that another one died (NCCL kernels wait for ever)."""

    def watch() -> None:
        while (notice := demo_store.read_notice(store)) is None:
            time.sleep(0.25)
        time.sleep(_NOTICE_SECONDS)
        report(PeerFailureError(notice))
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _first_launch(config: dict[str, Any], folder: Path, progress: _Progress, make: Any) -> dict[str, Any]:
    """Run all arms that need no restart, and the first half of the one that does."""
    steps = config["steps"]
    results: dict[str, Any] = {}
    reference = Trace()
    for engine in (REFERENCE, "reentrant", "non-reentrant", CONTRAST):
        progress.begin(engine)
        trace = make(engine).run(0, steps, progress)
        reference = trace if engine == REFERENCE else reference
        results[engine] = compare(trace, reference)
    progress.begin("first half")
    training = make(config["engine_before"])
    results["resumed"] = compare(training.run(0, steps // 2, progress), reference)
    training.save(folder)
    tensors = {"gradients": torch.stack(reference.gradients), **reference.streams}
    save_file(tensors, folder / f"reference-{dist.get_rank()}.safetensors")
    return results


def _second_launch(config: dict[str, Any], folder: Path, progress: _Progress, make: Any) -> dict[str, Any]:
    """Resume in this new process and go on to the end."""
    tensors = load_file(folder / f"reference-{dist.get_rank()}.safetensors")
    losses = json.loads((folder / f"result-0-{dist.get_rank()}.json").read_text())[REFERENCE]["losses"]
    reference = Trace(losses=losses, gradients=list(tensors.pop("gradients")), streams=tensors)
    progress.begin("resumed")
    training = make(config["engine_after"])
    training.load(folder)
    half = config["steps"] // 2
    return {"resumed": compare(training.run(half, config["steps"], progress), reference, first=half)}


def run_rank(config_path: str, rank: int) -> int:
    """Run one rank of one launch; returns the exit code."""
    config = json.loads(Path(config_path).read_text())
    folder, ranks, launch = Path(config["folder"]), config["nproc"], config["launch"]
    half = config["steps"] // 2
    total = 4 * config["steps"] + half if launch == 0 else config["steps"] - half
    progress = _Progress(rank, total, config["progress"])

    def report(error: BaseException) -> None:
        if isinstance(error, PeerFailureError):
            text = (
                f"rank {rank} of {ranks} stopped in arm {progress.arm!r} at step {progress.step}, because another "
                f"one is gone: {error}"
            )
        else:
            text = f"rank {rank} of {ranks} failed in arm {progress.arm!r} at step {progress.step}: {error!r}"
        details = {"type": type(error).__name__, "message": text, "traceback": traceback.format_exc()}
        partial = folder / f"error-{launch}-{rank}.tmp"
        partial.write_text(json.dumps(details))
        partial.rename(folder / f"error-{launch}-{rank}.json")

    # A connection of its own, since the other one may be waiting in a rendezvous.
    watched = demo_store.connect(config["port"], launch, COLLECTIVE_TIMEOUT)
    _end_with_a_peer(watched, report)
    try:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        device = torch.device(config["device"])
        if device.type == "cuda":
            device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        rendezvous = demo_store.connect(config["port"], launch, COLLECTIVE_TIMEOUT)
        dist.init_process_group(
            config["backend"], store=rendezvous, rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT
        )
        world: Any = dist.group.WORLD
        rng = ParallelRNG({"tp": world}, device=device, timeout=COLLECTIVE_TIMEOUT)
        corpus, size = load_corpus(), ModelSize(**config["size"])
        run = _second_launch if launch else _first_launch
        results = run(
            config, folder, progress, lambda engine: Training(engine, rng, corpus, size, device, config["seed"])
        )
        (folder / f"result-{launch}-{rank}.json").write_text(json.dumps(results))
        progress.close()
        dist.destroy_process_group()
        return 0
    except Exception as error:
        deadline = time.monotonic() + _NOTICE_SECONDS
        while (notice := demo_store.read_notice(watched)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if notice is None and isinstance(error, RuntimeError) and re.search("time-?d? ?out", str(error), re.IGNORECASE):
            seconds = COLLECTIVE_TIMEOUT.total_seconds()
            notice = f"no rank is known to have died, but one did not answer within {seconds:g} s ({error})"
        report(error if notice is None else PeerFailureError(notice))
        os._exit(1)  # past the destructors of a process group whose peers are gone
