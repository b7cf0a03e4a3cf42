# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The parallel layout of a job, and where its ranks stand in it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Layout",
    "Topology",
    "axes_in_order",
    "describe_axes",
    "describe_place",
    "effective_axes",
    "from_megatron",
    "resolve_topology",
]

#: What ``ParallelRNG`` takes as a topology; None and an empty mapping are the single process.
Topology = DeviceMesh | Sequence[DeviceMesh] | Mapping[str, dist.ProcessGroup] | None


@dataclass(frozen=True)
class Layout:
    """Sizes of the named axes, and this rank's coordinates on them.

    Attributes
    ----------
    axes : dict of str to int
        Size of each axis, at least 1.
    coordinates : dict of str to int
        This rank's position on each axis.
    rank, world_size : int
        Of the default process group; 0 and 1 without one.
    peers : dict of str to tuple of int
        Per axis the ranks of this rank's group along it, in the order of positions.
    everyone : numpy.ndarray or None
        ``int32 [world_size, axes]``: the coordinates of every rank, where they are known without asking.
    """

    axes: dict[str, int]
    coordinates: dict[str, int]
    rank: int = 0
    world_size: int = 1
    peers: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    everyone: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of_product(cls, axes: Mapping[str, int], rank: int) -> Layout:
        """Return the layout of a mesh of these sizes as ``init_device_mesh`` numbers its ranks: the last axis first."""
        sizes = list(axes.values())
        everyone = np.indices(sizes, np.int32).reshape(len(sizes), math.prod(sizes)).T if sizes else None
        here = [] if everyone is None else everyone[rank].tolist()
        peers: dict[str, tuple[int, ...]] = {}
        for index, (axis, size) in enumerate(axes.items()):
            stride = math.prod(sizes[index + 1 :])
            peers[axis] = tuple(rank + (position - here[index]) * stride for position in range(size))
        return cls(dict(axes), dict(zip(axes, here, strict=True)), rank, math.prod(sizes), peers, everyone)

    def describe(self) -> str:
        """Return the layout as text, for messages: ``pp=1 x tp=2 (world size 2)``."""
        return describe_axes(self.axes, self.world_size)

    def places(self) -> Any:
        """Return the coordinates at which ranks stand.

        Returns
        -------
        numpy.ndarray
            ``int32 [places, axes]``: those of every rank where they are known, or follow since the axes multiply to
            the world; else this rank's only.
        """
        if self.everyone is not None:
            return self.everyone
        sizes = list(self.axes.values())
        # Folded expert meshes (tp x ep over the same ranks) are no product, so most combinations name no rank.
        if math.prod(sizes) == self.world_size and sizes:
            return np.indices(sizes, np.int32).reshape(len(sizes), -1).T
        return np.array([list(self.coordinates.values())], np.int32).reshape(1, len(sizes))


def effective_axes(axes: Mapping[str, int]) -> dict[str, int]:
    """Return what matters of the sizes for comparing layouts: axes by name, without those of size 1.

    An axis of size 1 has one position only, so that no stream can differ on it: it equals an axis that is missing.
    """
    return {axis: axes[axis] for axis in sorted(axes) if axes[axis] > 1}


def axes_in_order(axes: Iterable[str]) -> list[str]:
    """Return axes in the order in which ranks send their coordinates: that of their names.

    Ranks may have built their meshes with the axes in different orders, which is the same layout.
    """
    return sorted(axes)


def describe_axes(axes: Mapping[str, int], world_size: int) -> str:
    """Return axis sizes as text, for messages."""
    sizes = " x ".join(f"{name}={size}" for name, size in axes.items()) or "no axes"
    return f"{sizes} (world size {world_size})"


def describe_place(coordinates: Mapping[str, int]) -> str:
    """Return coordinates as text, for messages."""
    return ", ".join(f"{name} {position}" for name, position in coordinates.items()) or "the only rank"


@dataclass(frozen=True)
class _Axis:
    """One axis: this rank's group along it, its position there, and every rank's position if known."""

    peers: tuple[int, ...]
    position: int
    column: Any


def resolve_topology(topology: Topology) -> Layout:
    """Read sizes and coordinates from what the user calls a topology.

    Parameters
    ----------
    topology : DeviceMesh, sequence of DeviceMesh, mapping of str to ProcessGroup, or None
        A mesh with named dimensions; several of them, where expert parallelism is folded over the ranks of other
        axes (an axis that two meshes name must be the same in both); or one group per axis, such as
        :func:`from_megatron` returns. None or an empty one: no axes, so every rank has the same seeds; the usual
        single process.

    Raises
    ------
    TypeError
        If it is something else, or an axis has no process group.
    ValueError
        If a mesh has no dimension names, two meshes contradict each other, or this rank is not in a mesh or group.
    """
    initialised = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if initialised else (0, 1)
    places: dict[str, _Axis] = {}
    if isinstance(topology, Mapping):
        places = {_axis_name(axis): _read_group(axis, group, rank, world_size) for axis, group in topology.items()}
    elif topology is not None:
        for mesh in _meshes(topology):
            for name, axis in _read_mesh(mesh, rank, world_size).items():
                former = places.setdefault(name, axis)
                if former.peers != axis.peers:
                    raise ValueError(
                        f"two meshes name the axis {name!r}, but along it rank {rank} has the ranks {former.peers} in "
                        f"one and {axis.peers} in the other; give different axes different names"
                    )
    columns = [axis.column for axis in places.values()]
    # See Note [Where the other ranks stand]
    known = columns and all(column is not None for column in columns)
    return Layout(
        axes={name: len(axis.peers) for name, axis in places.items()},
        coordinates={name: axis.position for name, axis in places.items()},
        rank=rank,
        world_size=world_size,
        peers={name: axis.peers for name, axis in places.items()},
        everyone=np.stack(columns, axis=1) if known else None,
    )


# The getters of megatron.core.parallel_state. dp is data parallelism without cp, as in Megatron's seeds.
_MEGATRON_GROUPS = {
    "pp": "get_pipeline_model_parallel_group",
    "dp": "get_data_parallel_group",
    "cp": "get_context_parallel_group",
    "tp": "get_tensor_model_parallel_group",
    "ep": "get_expert_model_parallel_group",
    "etp": "get_expert_tensor_parallel_group",
}


def from_megatron(parallel_state: Any = None) -> dict[str, dist.ProcessGroup]:
    """Return the topology of a job that Megatron-core has initialised.

    Parameters
    ----------
    parallel_state : module, optional
        ``megatron.core.parallel_state``; by default the one that is imported.

    Returns
    -------
    dict of str to ProcessGroup
        This rank's groups for ``pp``, ``dp``, ``cp``, ``tp``, ``ep`` and ``etp``. A job with generalised tensor
        parallelism adds its own: ``{**from_megatron(), "gtp": gtp_group}``.

    Raises
    ------
    RuntimeError
        If Megatron-core is not imported, or its model parallelism not initialised.
    """
    state = sys.modules.get("megatron.core.parallel_state") if parallel_state is None else parallel_state
    if state is None:
        raise RuntimeError(
            "megatron.core.parallel_state is not imported, so there is no topology to read; call "
            "parallel_state.initialize_model_parallel(...) first, or pass the module"
        )
    if not state.model_parallel_is_initialized():
        raise RuntimeError(
            "Megatron's model parallelism is not initialised, so its groups do not exist yet; call "
            "parallel_state.initialize_model_parallel(...) first"
        )
    groups = {axis: getattr(state, getter)() for axis, getter in _MEGATRON_GROUPS.items() if hasattr(state, getter)}
    return {axis: group for axis, group in groups.items() if group is not None}


def _meshes(topology: object) -> list[DeviceMesh]:
    meshes = [topology] if isinstance(topology, DeviceMesh) else topology
    got = type(topology).__name__
    if isinstance(meshes, (list, tuple)):
        found = [mesh for mesh in meshes if isinstance(mesh, DeviceMesh)]
        if len(found) == len(meshes):
            return found
        got += f" of {', '.join(type(mesh).__name__ for mesh in meshes)}"
    raise TypeError(
        "a topology is a DeviceMesh with named dimensions, a list of them, or a mapping from axis name to process "
        f"group, got {got}"
    )


def _axis_name(axis: object) -> str:
    if not isinstance(axis, str) or not axis:
        raise TypeError(f"an axis name is a non-empty string, got {axis!r}")
    return axis


def _read_mesh(mesh: DeviceMesh, rank: int, world_size: int) -> dict[str, _Axis]:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("this DeviceMesh has no dimension names; build it with mesh_dim_names=('pp', 'dp', 'tp', ...)")
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise ValueError(f"rank {rank} is not part of the DeviceMesh {names}; build ParallelRNG on its members only")
    ranks = np.array(mesh.mesh.tolist())
    whole = sorted(ranks.ravel().tolist()) == list(range(world_size))
    axes = {}
    for index, name in enumerate(names):
        line = tuple(slice(None) if other == index else place for other, place in enumerate(coordinates))
        peers = tuple(ranks[line].tolist())
        column = np.empty(world_size, np.int32) if whole else _regular_column(peers, world_size)
        if whole:
            column[ranks] = np.indices(ranks.shape, np.int32)[index]
        axes[name] = _Axis(peers, coordinates[index], column)
    return axes


def _read_group(axis: str, group: object, rank: int, world_size: int) -> _Axis:
    if isinstance(group, dist.ProcessGroup):
        position = dist.get_rank(group)
        if position >= 0:
            peers = tuple(dist.get_process_group_ranks(group))
            return _Axis(peers, position, _regular_column(peers, world_size))
    elif group != dist.GroupMember.NON_GROUP_MEMBER:
        # None is refused too: to torch it means the whole world, to Megatron an axis that does not exist.
        raise TypeError(
            f"axis {axis!r} needs a torch.distributed.ProcessGroup, got {type(group).__name__}; leave an axis that the "
            "job does not have out of the mapping"
        )
    raise ValueError(f"rank {rank} is not a member of the group given for axis {axis!r}; give the rank's own group")


# Note [Where the other ranks stand]
# A whole mesh says where every rank stands; a group names this rank's peers only. But groups are laid out regularly
# (Megatron's, and those of meshes): ranks s apart that are counted up to n, and then again. If this rank's group is of
# that form, the others' positions follow as (rank // s) % n. If any is not, nothing is assumed about other ranks.
def _regular_column(peers: tuple[int, ...], world_size: int) -> Any:
    if len(peers) == 1:
        return np.zeros(world_size, np.int32)
    stride = peers[1] - peers[0]
    if stride <= 0 or any(second - first != stride for first, second in pairwise(peers)):
        return None
    column: Any = (np.arange(world_size, dtype=np.int32) // stride) % len(peers)
    return column if column[list(peers)].tolist() == list(range(len(peers))) else None
