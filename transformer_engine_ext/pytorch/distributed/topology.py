# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The parallel layout of a job, and where this rank stands in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Layout", "Topology", "describe_axes", "describe_place", "resolve_topology"]

#: What ``ParallelRNG`` takes as a topology; None and an empty mapping are the single process.
Topology = DeviceMesh | Mapping[str, dist.ProcessGroup] | None


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
    """

    axes: dict[str, int]
    coordinates: dict[str, int]
    rank: int = 0
    world_size: int = 1

    def describe(self) -> str:
        """Return the layout as text, for messages: ``pp=1 x tp=2 (world size 2)``."""
        return describe_axes(self.axes, self.world_size)

    def places(self) -> Iterator[dict[str, int]]:
        """Yield the coordinates of every rank where the axes multiply to the world; else this rank's only."""
        # Folded expert meshes (tp x ep over the same ranks) are no product, so most combinations name no rank.
        if math.prod(self.axes.values()) != self.world_size:
            yield self.coordinates
            return
        for combination in product(*map(range, self.axes.values())):
            yield dict(zip(self.axes, combination, strict=True))


def describe_axes(axes: Mapping[str, int], world_size: int) -> str:
    """Return axis sizes as text, for messages."""
    sizes = " x ".join(f"{name}={size}" for name, size in axes.items()) or "no axes"
    return f"{sizes} (world size {world_size})"


def describe_place(coordinates: Mapping[str, int]) -> str:
    """Return coordinates as text, for messages."""
    return ", ".join(f"{name} {position}" for name, position in coordinates.items()) or "the only rank"


def resolve_topology(topology: Topology) -> Layout:
    """Read sizes and coordinates from what the user calls a topology.

    Parameters
    ----------
    topology : DeviceMesh, mapping of str to ProcessGroup, or None
        A mesh with named dimensions, or one group per axis. None or an empty mapping: no axes, so every rank has
        the same seeds; the usual single process.

    Raises
    ------
    TypeError
        If it is something else, or an axis has no process group.
    ValueError
        If a mesh has no dimension names, or this rank is not in a mesh or group.
    """
    initialised = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if initialised else (0, 1)
    if topology is None:
        places: dict[str, tuple[int, int]] = {}
    elif isinstance(topology, DeviceMesh):
        places = _read_mesh(topology, rank)
    elif isinstance(topology, Mapping):
        places = {_axis_name(axis): _read_group(axis, group, rank) for axis, group in topology.items()}
    else:
        raise TypeError(
            f"a topology is a DeviceMesh with named dimensions or a mapping from axis name to process group, got "
            f"{type(topology).__name__}"
        )
    return Layout(
        axes={axis: size for axis, (size, _) in places.items()},
        coordinates={axis: position for axis, (_, position) in places.items()},
        rank=rank,
        world_size=world_size,
    )


def _axis_name(axis: object) -> str:
    if not isinstance(axis, str) or not axis:
        raise TypeError(f"an axis name is a non-empty string, got {axis!r}")
    return axis


def _read_mesh(mesh: DeviceMesh, rank: int) -> dict[str, tuple[int, int]]:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("this DeviceMesh has no dimension names; build it with mesh_dim_names=('pp', 'dp', 'tp', ...)")
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise ValueError(f"rank {rank} is not part of the DeviceMesh {names}; build ParallelRNG on its members only")
    return {name: (mesh.size(index), coordinates[index]) for index, name in enumerate(names)}


def _read_group(axis: str, group: object, rank: int) -> tuple[int, int]:
    if isinstance(group, dist.ProcessGroup):
        size, position = dist.get_world_size(group), dist.get_rank(group)
        if position >= 0:
            return size, position
    elif group != dist.GroupMember.NON_GROUP_MEMBER:
        # None is refused too: to torch it means the whole world, to Megatron an axis that does not exist.
        raise TypeError(
            f"axis {axis!r} needs a torch.distributed.ProcessGroup, got {type(group).__name__}; leave an axis that the "
            "job does not have out of the mapping"
        )
    raise ValueError(f"rank {rank} is not a member of the group given for axis {axis!r}; give the rank's own group")
