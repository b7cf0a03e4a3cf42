# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What the demo's launcher, workers and report have to agree on; imports nothing, since the launcher starts with it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

__all__ = ["COLLECTIVE_TIMEOUT", "CONTRAST", "DIE_AT", "REFERENCE", "ModelSize"]

#: The arm without checkpointing, which all others are compared with.
REFERENCE = "none"
#: The arm that shows what goes wrong elsewhere; all others must be exact.
CONTRAST = "live handles"

#: How long a rank waits for the others in one collective.
COLLECTIVE_TIMEOUT = timedelta(seconds=30)

#: Test hook, an environment variable "rank:step": that rank kills itself before that step of an arm.
DIE_AT = "NVTE_EXT_TEST_DIE_AT"


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model and of a batch."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    length: int = 48
    batch: int = 4
    dropout: float = 0.1
