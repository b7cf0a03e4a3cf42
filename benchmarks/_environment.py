# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on: versions, card, driver, CPU, commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from transformer_engine_ext.pytorch.rng import accelerate

__all__ = ["environment"]

REPO = Path(__file__).resolve().parents[1]


def environment(commit: str | None = None) -> dict[str, Any]:
    """Return a description of this machine and of the software in use."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or _output("git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=10"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformer_engine": _version("transformer-engine", "transformer_engine"),
        "native_streams": accelerate() is not None,  # or Python moves them
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _version(distribution: str, package: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        pass
    try:  # unpacked beside the interpreter, without metadata
        return str(getattr(__import__(package), "__version__", "unknown"))
    except Exception:  # a broken installation raises whatever it likes
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
