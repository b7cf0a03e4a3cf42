# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensor arguments of a non-reentrant region, kept until its recompute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["SavedInputs", "changed_in_place", "version_of"]

_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def changed_in_place(what: str, tensor: Tensor, expected: int) -> RuntimeError:
    """Return the error for a tensor that backward needs as it was, in autograd's words."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what}, of shape {tuple(tensor.shape)} and dtype {tensor.dtype}, is at version {version_of(tensor)}; "
        f"expected version {expected} instead. The recompute needs it as it was; change a clone instead"
    )


class _Keep(torch.autograd.Function):
    """Does nothing but save its inputs, and so hands them to the saved-tensor hooks of whoever is outside."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("the node that keeps a region's inputs is not part of any graph")


# Note [Inputs belong to the enclosing region]
# A region's inputs count as tensors saved by whatever encloses it: an outer non-reentrant region keeps places for them
# and recomputes them, a user's offload hooks move them. Autograd hands tensors to hooks only through a node, hence the
# node that does nothing. Without hooks around the region the tensors are kept as they are, which costs a tenth of it.
class SavedInputs:
    """Keeps tensors, and gives them back for a recompute.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        The region's tensor arguments.
    """

    __slots__ = ("_attributes", "_leaf", "_needs_grad", "_node", "_tensors", "_versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._node: Tensor | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._needs_grad = [tensor.requires_grad for tensor in tensors]
        self._leaf = [tensor.is_leaf for tensor in tensors]
        # What users hung on a tensor goes along with it, as it is now: the function may change it.
        self._attributes = [dict(tensor.__dict__) if tensor.__dict__ else None for tensor in tensors]
        if tensors and _default_hooks(True) is not None:
            anchor = torch.empty(0, requires_grad=True)
            # The output, not its grad_fn: before torch 2.13 a node held from Python alone loses what it saved.
            self._node = _Keep.apply(anchor, *tensors)  # type: ignore[no-untyped-call]
            return
        for tensor in tensors:
            # A non-leaf is kept without its graph: its history may come to hold this region (when it is changed in
            # place with the region's result), and a cycle through autograd's nodes is never collected.
            self._tensors.append(tensor if tensor.is_leaf else tensor.detach())
            self._versions.append(0 if tensor.is_inference() else tensor._version)

    def load(self) -> list[Tensor]:
        """Return the tensors, fit to be computed with again.

        Raises
        ------
        RuntimeError
            If one was changed in place since the region's forward began.
        """
        if self._node is not None:
            function: Any = self._node.grad_fn
            loaded = list(function.saved_tensors)
        else:
            grad = torch.is_grad_enabled()
            torch._C._set_grad_enabled(True)
            try:
                loaded = []
                for number, tensor in enumerate(self._tensors):
                    version = 0 if tensor.is_inference() else tensor._version  # version_of, written out
                    if version != self._versions[number]:
                        what = f"tensor argument {number} of a checkpointed region"
                        raise changed_in_place(what, tensor, self._versions[number])
                    if self._needs_grad[number] and not tensor.requires_grad:
                        tensor = tensor.detach().requires_grad_()
                        if not self._leaf[number]:
                            # With a history, as in forward, for functions that ask for it.
                            tensor = tensor.view_as(tensor)
                    loaded.append(tensor)
            finally:
                torch._C._set_grad_enabled(grad)
        for number, attributes in enumerate(self._attributes):
            if attributes is not None and not self._leaf[number]:
                loaded[number].__dict__.update(attributes)
        return loaded
