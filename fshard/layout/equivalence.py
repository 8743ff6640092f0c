"""Canonical forms by which two layouts on the same devices are compared.

Axes that are adjacent and in order both in the mesh and in a tensor dim act as one axis, as do
adjacent axes of one state; axes of size 1, and those of a dim without elements, have no effect.
"""

from __future__ import annotations

import itertools

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.validation import Sizes

Role = tuple[object, ...]
"""Effect of a mesh axis: `(dim, product of more major axes)`, `(state, reduction)`, or `()`."""


def canonical_grid(
    mesh: Mesh, partition: PartitionSpec, shape: tuple[int, ...], sizes: Sizes
) -> tuple[object, ...]:
    """Return the coarsest grid of the devices, with the role of each of its axes, and the sizes.

    Two layouts on one sequence of devices place equal shards on each rank if and only if their
    grids are equal, unless both have coincident shards.
    """
    roles: dict[str, Role] = {}
    for dim, axes in enumerate(partition.dims):
        major = 1
        for axis in axes if shape[dim] else ():
            roles[axis] = dim, major
            major *= mesh.shape[axis]
    roles |= {axis: ("unreduced", kind) for axis, kind in partition.unreduced_kinds}
    roles |= {axis: ("reduced", kind) for axis, kind in partition.reduced_kinds}
    grid: list[tuple[int, Role]] = []
    for axis, size in mesh.shape.items():
        if size == 1:
            continue
        role = roles.get(axis, ())
        if grid and role == _role_of_next_axis(*grid[-1]):
            grid[-1] = grid[-1][0] * size, grid[-1][1]
        else:
            grid.append((size, role))
    return (*grid, sizes)


def _role_of_next_axis(size: int, role: Role) -> Role:
    """Return the role with which the next mesh axis continues an axis of `size` and `role`."""
    match role:
        case (int(dim), int(major)):
            return dim, major * size
        case _:
            return role


def has_coincident_shards(sizes: Sizes) -> bool:
    """Return True if two shards have the same index: neighbouring empty ones."""
    return any(
        not left and not right
        for dim_sizes in sizes
        if dim_sizes is not None
        for left, right in itertools.pairwise(dim_sizes)
    )


def states_of_rank(
    mesh: Mesh, partition: PartitionSpec, rank: int
) -> frozenset[tuple[str, str, tuple[int, ...]]]:
    """Return `(state, reduction, ranks)` of the groups in which a rank is unreduced or reduced."""
    states = set()
    for state, kinds in (
        ("unreduced", partition.unreduced_kinds),
        ("reduced", partition.reduced_kinds),
    ):
        for kind in {kind for axis, kind in kinds if mesh.shape[axis] > 1}:
            axes = [axis for axis, axis_kind in kinds if axis_kind == kind]
            states.add((state, kind, tuple(sorted(mesh.group(rank, axes)))))
    return frozenset(states)
