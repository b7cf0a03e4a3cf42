# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Device words of a CUDA generator under graph capture."""

from __future__ import annotations

from torch import Generator, Tensor

from transformer_engine_ext.errors import UnsupportedCaptureError

__all__ = ["NotRegistered", "captured_words"]


class NotRegistered(Exception):  # noqa: N818
    """The graph under capture does not know this generator."""


def captured_words(generator: Generator) -> tuple[Tensor, Tensor, int]:
    """Return the device words (seed, offset) of a stream, ``int64`` of shape [1], and its offset within the graph."""
    philox_state = getattr(generator, "philox_state", None)
    if philox_state is None:
        raise UnsupportedCaptureError("a checkpointed region inside CUDA graph capture needs torch 2.14")
    seed, offset, within = philox_state(0)
    return seed, offset, int(within)
