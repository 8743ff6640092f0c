"""`axis_index_groups`: an axis cut into groups is two axes of another mesh of the same devices.

Over no axis at all each rank is a group of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NoReturn

from fshard._util.errors import fail
from fshard.layout.mesh import Axes, Mesh
from fshard.layout.validation import whole_numbers
from fshard.spmd.axis_env import resolve_axes

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
    found, names = resolve_axes(axes, mesh, where)
    if groups is None and names:
        return found, names
    given = [[0]] if groups is None else groups
    rows = [whole_numbers(row) for row in given] if isinstance(given, Iterable) else [None]
    known = tuple(row for row in rows if row is not None)
    if len(known) != len(rows):
        _refuse(found.axis_size(names), names, groups, where)
    return _split(found, names, known, where)


@lru_cache(maxsize=1024)
def _split(
    mesh: Mesh, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...], where: str
) -> tuple[Mesh, tuple[str, ...]]:
    """`mesh` with the axes replaced by two: which group, and which member of it."""
    n = mesh.axis_size(axes)
    flat = sorted(index for group in groups for index in group)
    sizes = {len(group) for group in groups}
    if flat != list(range(n)) or len(sizes) != 1 or 0 in sizes:
        _refuse(n, axes, [list(group) for group in groups], where)
    others = {axis: size for axis, size in mesh.shape.items() if axis not in axes}
    member = "_".join(axes) or "alone"
    while member in others:
        member += "_"
    which = f"{member}_groups"
    while which in others:
        which += "_"
    grid = {**others, which: len(groups), member: math.prod(sizes)}
    devices = [along[index] for along in mesh.groups(axes) for group in groups for index in group]
    return Mesh(grid, devices=devices), (member,)


def _refuse(n: int, axes: tuple[str, ...], groups: object, where: str) -> NoReturn:
    half = n // 2 if n % 2 == 0 else 1
    example = [list(range(at, at + half)) for at in range(0, n, half)]
    fail(
        where,
        f"axis_index_groups={groups} along {', '.join(axes) or 'no axis'}",
        f"the groups are lists of one size and have every index 0..{n - 1} once",
        f"axis_index_groups={example}, say",
    )
