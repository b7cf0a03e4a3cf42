# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that is exact in its random numbers, for Transformer Engine, Megatron and plain PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_engine_ext import pytorch as pytorch
    from transformer_engine_ext.integrations.patching import patch as patch
    from transformer_engine_ext.integrations.patching import patched as patched
    from transformer_engine_ext.integrations.patching import unpatch as unpatch
    from transformer_engine_ext.pytorch import CudaRNGStatesTracker as CudaRNGStatesTracker
    from transformer_engine_ext.pytorch import distributed as distributed
    from transformer_engine_ext.pytorch import te_checkpoint as te_checkpoint

__version__ = "0.1.0"

__all__ = [
    "CudaRNGStatesTracker",
    "__version__",
    "distributed",
    "patch",
    "patched",
    "pytorch",
    "te_checkpoint",
    "unpatch",
]

# Note [Import is free]
# `import transformer_engine_ext` imports no torch, and no module of the package asks CUDA for anything or imports
# Transformer Engine or Megatron while it is imported itself. So a launcher can import the package before it chooses its
# devices or forks, and `te-ext --help` answers at once. Hence this table (PEP 562) instead of import statements.
_LAZY = {
    # public name: (module, attribute of it; None where the module is what is meant)
    "CudaRNGStatesTracker": ("transformer_engine_ext.pytorch", "CudaRNGStatesTracker"),
    "distributed": ("transformer_engine_ext.pytorch.distributed", None),
    "patch": ("transformer_engine_ext.integrations.patching", "patch"),
    "patched": ("transformer_engine_ext.integrations.patching", "patched"),
    "pytorch": ("transformer_engine_ext.pytorch", None),
    "te_checkpoint": ("transformer_engine_ext.pytorch", "te_checkpoint"),
    "unpatch": ("transformer_engine_ext.integrations.patching", "unpatch"),
}


if not TYPE_CHECKING:  # a type checker that sees a module's __getattr__ takes every misspelt name for an object

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
        module_name, attribute = _LAZY[name]
        module = import_module(module_name)
        value = module if attribute is None else getattr(module, attribute)
        globals()[name] = value  # looked up once
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
