# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's own CUDA graphs: they differentiate with ``torch.autograd.grad``, where only one engine works."""

from __future__ import annotations

import sys

__all__ = ["prefers_non_reentrant", "warming_up"]

_GRAPHS = "megatron.core.transformer.cuda_graphs"


# Note [Local graphs take the non-reentrant engine]
# With cuda_graph_impl="local", Megatron warms up and captures with torch.autograd.grad and looks for the parameters of
# a graph by walking back from its outputs. A reentrant region refuses the first and hides the second, so regions there
# run on the non-reentrant engine, in warm-up too, so that the warm-up runs what is captured.
def prefers_non_reentrant() -> bool:
    """Tell whether Megatron is warming up or capturing one of its own graphs."""
    return _asked("is_graph_capturing") or _asked("is_graph_warmup")


def warming_up() -> bool:
    """Tell whether Megatron is warming up one of its own graphs."""
    return _asked("is_graph_warmup")


def _asked(question: str) -> bool:
    ask = getattr(sys.modules.get(_GRAPHS), question, None)
    return bool(ask()) if callable(ask) else False
