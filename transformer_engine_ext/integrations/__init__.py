# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Living with Transformer Engine and Megatron-core: the only part of the package that names them.

Imported by itself it imports neither; see ``patching`` for what puts this package into theirs.
"""

from __future__ import annotations

from transformer_engine_ext.pytorch.recompute import register_hook_source

__all__: list[str] = []


def _transformer_engine() -> None:
    from transformer_engine_ext.integrations.transformer_engine import install_hook

    install_hook()


# See Note [Hooks of other libraries come late]
register_hook_source("transformer_engine.pytorch.distributed", _transformer_engine)
