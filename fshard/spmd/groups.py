"""`axis_index_groups`: an axis cut into groups is two axes of another mesh of the same devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from fshard.errors import fail
from fshard.mesh import Axes, Mesh, as_axes
from fshard.spmd.axes import resolve

__all__ = ["Groups", "resolve_groups"]

Groups = Sequence[Sequence[int]] | None
"""Indices along the axes, in groups that communicate among themselves."""


def resolve_groups(
    axes: Axes, mesh: Mesh | None, groups: Groups, where: str
) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh and its axes along which a collective runs: within `groups`, where they are given.

    Raises `ShardingError` for an unbound, unknown or repeated axis, and for groups that do not
    have every index once or differ in size.
    """
    found, names = resolve(as_axes(axes), mesh, where)
    if groups is None:
        return found, names
    return _split(found, names, tuple(tuple(int(i) for i in group) for group in groups), where)


@lru_cache(maxsize=1024)
def _split(
    mesh: Mesh, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...], where: str
) -> tuple[Mesh, tuple[str, ...]]:
    """`mesh` with the axes replaced by two: which group, and which member of it."""
    n = mesh.axis_size(axes)
    flat = sorted(index for group in groups for index in group)
    sizes = {len(group) for group in groups}
    if flat != list(range(n)) or len(sizes) != 1 or 0 in sizes:
        half = n // 2 if n % 2 == 0 else 1
        example = [list(range(at, at + half)) for at in range(0, n, half)]
        fail(
            where,
            f"axis_index_groups={[list(group) for group in groups]} along {', '.join(axes)}",
            f"the groups are of one size and have every index 0..{n - 1} once",
            f"axis_index_groups={example}, say",
        )
    others = {axis: size for axis, size in mesh.shape.items() if axis not in axes}
    member = "_".join(axes)
    while member in others:
        member += "_"
    which = f"{member}_groups"
    while which in others:
        which += "_"
    grid = {**others, which: len(groups), member: math.prod(sizes)}
    devices = [along[index] for along in mesh.groups(axes) for group in groups for index in group]
    return Mesh(grid, devices=devices), (member,)
