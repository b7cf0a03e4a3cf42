# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``distribute_saved_activations``: each rank of a group keeps its share of a region's input between passes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Distributed", "gather_split_1d_tensor", "split_tensor_into_1d_equal_chunks"]

Group = Any  # dist.ProcessGroup is not there in builds of torch without distributed


def split_tensor_into_1d_equal_chunks(tensor: Tensor, tp_group: Group = None, new_buffer: bool = False) -> Tensor:
    """Return this rank's share of a tensor, flat.

    Parameters
    ----------
    tensor : torch.Tensor
        Any shape; the same on all ranks. Elements beyond a multiple of the group's size belong to no share.
    tp_group : torch.distributed.ProcessGroup, optional
        The group to divide among; the default is the world.
    new_buffer : bool
        Return a copy instead of a view, so that the whole tensor can be freed.

    Returns
    -------
    torch.Tensor
        ``numel // world_size`` elements, one-dimensional.
    """
    share = tensor.numel() // dist.get_world_size(tp_group)
    start = share * dist.get_rank(tp_group)
    chunk = tensor.reshape(-1)[start : start + share]
    return chunk.clone() if new_buffer else chunk


def gather_split_1d_tensor(tensor: Tensor, tp_group: Group = None) -> Tensor:
    """Put the shares of all ranks together again.

    Parameters
    ----------
    tensor : torch.Tensor
        This rank's share; the same number of elements on all ranks.
    tp_group : torch.distributed.ProcessGroup, optional
        The group; the default is the world.

    Returns
    -------
    torch.Tensor
        ``world_size * numel`` elements, one-dimensional.
    """
    whole = tensor.new_empty(dist.get_world_size(tp_group) * tensor.numel())
    dist.all_gather_into_tensor(whole, tensor.contiguous().view(-1), group=tp_group)
    return whole


# Note [The caller's input is spread in place]
# As in Transformer Engine and Megatron, the storage of the region's first tensor argument is replaced by this rank's
# share, in the caller's own tensor: a share kept by the region alone would free nothing, since the caller and the graph
# hold the tensor too. So between the passes everybody who holds this tensor object sees a flat share; the region's
# backward makes it whole again, and so does another region with distribute_saved_activations that gets the same tensor.
# A tensor whose region never runs backward stays a share.
class _Spread:
    """One tensor that may be spread, shared by all regions that got it."""

    __slots__ = ("__weakref__", "group", "shape", "spread", "stride", "tensor")

    def __init__(self, tensor: Tensor, group: Group) -> None:
        self.tensor = tensor
        self.group = group
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.spread = False

    def scatter(self) -> None:
        size = dist.get_world_size(self.group)
        whole = self.tensor.detach().reshape(-1)
        if self.spread or size == 1 or whole.numel() == 0:
            return
        share = -(-whole.numel() // size)  # rounded up: shares beyond the end are filled up with zeros
        start = min(share * dist.get_rank(self.group), whole.numel())
        part = whole[start : start + share]
        chunk = whole.new_zeros(share)
        chunk[: part.numel()].copy_(part)
        self.tensor.data = chunk
        self.spread = True

    def gather(self) -> None:
        if not self.spread:
            return
        flat = gather_split_1d_tensor(self.tensor.detach(), self.group)[: self.shape.numel()]
        whole = flat.view(self.shape)
        if whole.stride() != self.stride and _dense(self.shape, self.stride):
            # The recompute's kernels should see the strides that the forward's saw.
            whole = torch.empty_strided(self.shape, self.stride, dtype=flat.dtype, device=flat.device).copy_(whole)
        self.tensor.data = whole
        self.spread = False


# Regions hold the entries; a tensor that no region holds any more is not found here.
_known: weakref.WeakValueDictionary[int, _Spread] = weakref.WeakValueDictionary()


class Distributed:
    """The first tensor argument of one region, spread over a group between its passes.

    Parameters
    ----------
    tensor : torch.Tensor
        The argument; any shape, strides and number of elements. Made whole if an earlier region has spread it.
    group : torch.distributed.ProcessGroup or None
        The group; None is the world.
    """

    __slots__ = ("_entry",)

    def __init__(self, tensor: Tensor, group: Group) -> None:
        entry = _known.get(id(tensor))
        if entry is None or entry.tensor is not tensor:
            entry = _known[id(tensor)] = _Spread(tensor, group)
        entry.gather()
        self._entry = entry

    def scatter(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Leave this rank's share in the caller's tensor; return the tensors that remain to be saved."""
        self._entry.scatter()
        return tuple(tensors[1:])

    def gather(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Make the caller's tensor whole again; return all tensors."""
        self._entry.gather()
        return (self._entry.tensor, *tensors)


def _dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether these strides fill a block of memory without gaps or overlaps."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
