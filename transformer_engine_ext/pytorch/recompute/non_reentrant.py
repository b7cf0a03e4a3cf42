# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The non-reentrant engine: saved-tensor hooks keep places instead of tensors, and a recompute fills them.

It follows the semantics of ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine_ext.pytorch.recompute.arguments import PackedCall, TensorList, pack
from transformer_engine_ext.pytorch.recompute.inputs import SavedInputs
from transformer_engine_ext.pytorch.recompute.operator_log import OperatorLogs
from transformer_engine_ext.pytorch.recompute.region import Region
from transformer_engine_ext.pytorch.recompute.saving import Saving, pop_hooks_of, users_hooks

__all__ = ["run_non_reentrant"]

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_sequence_number = torch._C._autograd._get_sequence_nr


def run_non_reentrant(
    region: Region,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    packed: PackedCall,
    tensors: Sequence[Tensor],
    early_stop: bool,
    check: bool,
    logs: OperatorLogs | None,
) -> Any:
    """Run a region's forward on this engine.

    Parameters
    ----------
    region : Region
        The region.
    args, kwargs : sequence, dict
        The original arguments.
    packed : tuple
        The same, with the tensors taken out by ``pack_call``.
    tensors : sequence of torch.Tensor
        Those tensors.
    early_stop : bool
        Whether a recompute ends with the last tensor that backward needs.
    check : bool
        Whether to compare shape, dtype and device of the recomputed tensors with the saved ones.
    logs : OperatorLogs or None
        What to report on a mismatch, with ``debug=True``.

    Returns
    -------
    object
        What the function returned.
    """
    # See Note [Inputs belong to the enclosing region]
    saving = Saving(region, packed, SavedInputs(tensors), early_stop, check, logs)
    if _top_hooks(False) is not None:
        saving._user_hooks = users_hooks()
    try:
        _push_hooks(saving, saving.load)  # See Note [An interrupt may come between two lines]
        result = region.forward(args, kwargs)
    finally:
        pop_hooks_of(saving)
        saving._user_hooks = None
    saving.ended = True
    if saving.places:
        # See Note [Smart stop]
        saving.open_end = saving.last_save != _sequence_number()
        snapshot = region.snapshot
        if snapshot is not None:
            snapshot.finish()
            if snapshot.words is not None:
                _keep_with_outputs(result, snapshot.words)
    return result


def _keep_with_outputs(result: Any, words: object) -> None:
    """Let the nodes of a captured region's outputs hold its saved words.

    Backward drops the region, and with it the words, whose memory a graph that is captured later could then take. That
    is right as long as graphs replay in the order of their capture, which torch asks of graphs that share a memory
    pool; kept with the outputs, as the reentrant engine's node does by itself, the words survive other orders too.
    """
    outputs = TensorList()
    pack(result, outputs)
    for output in outputs:
        node: Any = output.grad_fn
        if node is not None:
            node.metadata["transformer_engine_ext.words"] = words
