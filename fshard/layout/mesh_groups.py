"""Ranks of a mesh in order, coordinates, and the groups that communicate along some axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fshard.layout.mesh import Mesh
    from fshard.layout.spec import Spec


@lru_cache(maxsize=64)
def sorted_ranks(mesh: Mesh) -> range | tuple[int, ...]:
    """Return the ranks of a mesh in increasing order, as a range where they are dense."""
    first, last = min(mesh.devices), max(mesh.devices)
    dense = last - first + 1 == len(mesh.devices)
    return range(first, last + 1) if dense else tuple(sorted(mesh.devices))


@lru_cache(maxsize=64)
def rank_positions(mesh: Mesh) -> dict[int, int]:
    """Return the position of every rank among the devices of a mesh."""
    return {rank: position for position, rank in enumerate(mesh.devices)}


def mesh_points(mesh: Mesh, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield all coordinates along some axes, row-major."""
    for point in itertools.product(*(range(mesh.shape[axis]) for axis in axes)):
        yield dict(zip(axes, point, strict=True))


def index_coords(mesh: Mesh, axes: Sequence[str], index: int) -> dict[str, int]:
    """Return the coordinates along `axes`, major to minor, of a shard of a dim."""
    coords: dict[str, int] = {}
    for axis in reversed(axes):
        index, coords[axis] = divmod(index, mesh.shape[axis])
    return {axis: coords[axis] for axis in axes}


def shard_coords(spec: Spec, shard: Sequence[int]) -> dict[str, int]:
    """Return the coordinates of a shard, given by its index in every dim, along its dims' axes."""
    coords: dict[str, int] = {}
    for axes, index in zip(spec.partition.dims, shard, strict=True):
        coords |= index_coords(spec.mesh, axes, index)
    return coords


@lru_cache(maxsize=1024)
def mesh_groups(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks along `axes`, which must be axes of the mesh."""
    others = tuple(axis for axis in mesh.axes if axis not in axes)
    inner = _offsets(mesh, axes)
    return tuple(
        tuple(mesh.devices[base + step] for step in inner) for base in _offsets(mesh, others)
    )


@lru_cache(maxsize=4096)
def rank_group(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the group along `axes` that contains a rank of the mesh; one object for its ranks."""
    mesh.check_axes(axes, "Mesh.group")
    strides = _strides(mesh)
    coords = mesh.coords(rank)
    base = sum(strides[axis] * coords[axis] for axis in mesh.axes if axis not in axes)
    return _group_at(mesh, base, axes)


@lru_cache(maxsize=4096)
def _group_at(mesh: Mesh, base: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the group along `axes` whose first rank is at a position among the devices."""
    return tuple(mesh.devices[base + step] for step in _offsets(mesh, axes))


@lru_cache(maxsize=1024)
def _offsets(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the distances among the devices from the first rank to all ranks along `axes`."""
    strides = _strides(mesh)
    steps = (range(0, mesh.shape[axis] * strides[axis], strides[axis]) for axis in axes)
    return tuple(map(sum, itertools.product(*steps)))


def _strides(mesh: Mesh) -> dict[str, int]:
    """Return the distance among the devices of neighbours along each axis."""
    sizes = mesh.sizes
    return {axis: math.prod(sizes[dim + 1 :]) for dim, axis in enumerate(mesh.axes)}
