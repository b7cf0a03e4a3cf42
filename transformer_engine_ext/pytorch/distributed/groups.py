# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes and ranks of process groups, and the initialisation of partitioned weights, by Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

__all__ = ["get_distributed_rank", "get_distributed_world_size", "initialize_affine_weight_gpu"]


class _ForksStreams(Protocol):
    def fork(self) -> AbstractContextManager[Any]: ...


# Note [No cached group sizes]
# Transformer Engine puts an lru_cache on these two. A process that destroys its group and initialises another one of
# a different size (tests, elastic restarts, notebooks) then keeps the old numbers, and every split made with them is
# wrong. torch answers in under a microsecond, so nothing is cached here.
def get_distributed_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the size of a process group; 1 if ``torch.distributed`` is not initialised.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.
    """
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def get_distributed_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank in a process group.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.

    Raises
    ------
    RuntimeError
        If ``torch.distributed`` is not initialised.
    """
    # See Note [No cached group sizes]
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized, so this process has no rank; call init_process_group")
    return dist.get_rank(group)


def initialize_affine_weight_gpu(
    weight: Tensor,
    init_method: Callable[[Tensor], Any],
    get_rng_state_tracker: Callable[[], _ForksStreams] | None,
    partition_dim: int = 0,
    stride: int = 1,
    set_tp_attributes: bool = True,
) -> None:
    """Initialise one tensor-parallel rank's slice of a weight in place, from the model-parallel stream.

    Parameters
    ----------
    weight : torch.Tensor
        This rank's slice, any shape, dtype and device that `init_method` takes.
    init_method : callable
        Initialises a tensor in place, such as ``torch.nn.init.xavier_normal_``.
    get_rng_state_tracker : callable or None
        Returns the tracker whose default stream the initialisation draws from; None: the default generator, so that
        ranks seeded alike get equal slices.
    partition_dim : int
        Dimension along which the whole weight is split.
    stride : int
        Stride of that split.
    set_tp_attributes : bool
        Also set ``weight.tensor_model_parallel``, ``weight.partition_dim`` and ``weight.partition_stride``.

    Raises
    ------
    RuntimeError
        If `weight` already has one of those attributes; nothing is initialised then.
    """
    if set_tp_attributes:
        attributes = {"tensor_model_parallel": True, "partition_dim": partition_dim, "partition_stride": stride}
        present = [name for name in attributes if hasattr(weight, name)]
        if present:
            raise RuntimeError(
                f"the weight already has the tensor-parallel attribute {present[0]!r} "
                f"(= {getattr(weight, present[0])!r}), so it was initialised before; pass set_tp_attributes=False to "
                "initialise it again"
            )
        for name, value in attributes.items():
            setattr(weight, name, value)
    with nullcontext() if get_rng_state_tracker is None else get_rng_state_tracker().fork():
        init_method(weight)
