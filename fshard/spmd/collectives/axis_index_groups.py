"""`axis_index_groups` of collectives: an axis in groups is two axes of another mesh.

Over no axes each rank is its own group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NoReturn

from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import fail
from fshard.layout.mesh import Axes, Mesh
from fshard.layout.validation import as_ints
from fshard.spmd.axis_env import resolve_axes

Groups = Sequence[Sequence[int]] | None
"""Indices along the axes, in groups whose ranks communicate among themselves."""


def resolve_groups(
    axes: Axes, mesh: Mesh | None, groups: Groups, where: str
) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh and axes along which a collective runs, within `groups` if given.

    Raises `ShardingError` for an unbound, unknown or repeated axis, and for groups that do not
    have every index once or differ in size.
    """
    owner, names = resolve_axes(axes, mesh, where)
    if groups is None and names:
        return owner, names
    given = [[0]] if groups is None else groups
    rows = [as_ints(row) for row in given] if isinstance(given, Iterable) else [None]
    valid = tuple(row for row in rows if row is not None)
    if len(valid) != len(rows):
        _refuse(owner.axis_size(names), names, groups, where)
    return _split_mesh(owner, names, valid, where)


@lru_cache(maxsize=CACHE_SIZE)
def _split_mesh(
    mesh: Mesh, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...], where: str
) -> tuple[Mesh, tuple[str, ...]]:
    """Return `mesh` with two axes in place of `axes` (group, member of it), and the second."""
    n = mesh.axis_size(axes)
    indices = sorted(index for group in groups for index in group)
    sizes = {len(group) for group in groups}
    if indices != list(range(n)) or len(sizes) != 1 or 0 in sizes:
        _refuse(n, axes, [list(group) for group in groups], where)
    others = {axis: size for axis, size in mesh.shape.items() if axis not in axes}
    member = "_".join(axes) or "alone"
    while member in others:
        member += "_"
    group_axis = f"{member}_groups"
    while group_axis in others:
        group_axis += "_"
    grid = {**others, group_axis: len(groups), member: math.prod(sizes)}
    devices = [ranks[index] for ranks in mesh.groups(axes) for group in groups for index in group]
    return Mesh(grid, devices=devices), (member,)


def _refuse(n: int, axes: tuple[str, ...], groups: object, where: str) -> NoReturn:
    half = n // 2 if n % 2 == 0 else 1
    example = [list(range(start, start + half)) for start in range(0, n, half)]
    fail(where, f"axis_index_groups={groups} along {', '.join(axes) or 'no axis'}",
         f"the groups must be lists of one size and have every index 0..{n - 1} once",
         f"axis_index_groups={example}, say")  # fmt: skip
