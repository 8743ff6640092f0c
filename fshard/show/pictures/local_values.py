"""Values of all ranks' locals in the cells of a picture; equal replicas are shown once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fshard.layout.mesh import Mesh
from fshard.layout.mesh_groups import shard_coords
from fshard.layout.spec import Spec
from fshard.show.pictures.picture_grid import CellText, Shard, View, view_of
from fshard.show.pictures.shard_owners import MAX_HOLDERS, holders_text, members

MAX_VALUE_ROWS, MAX_VALUE_COLUMNS = 8, 8
"""Rows and columns of a local that are shown; of more the first ones and the last."""


def values_text(spec: Spec, locals_of: Mapping[int, torch.Tensor]) -> CellText:
    """Return a function of a shard that returns its values, below the ranks that hold them.

    Args:
        spec: The layout.
        locals_of: Locals by rank; shards of other ranks have the ranks alone.
    """
    view, mesh = view_of(spec), spec.mesh

    def text(shard: Shard, brief: bool) -> Sequence[str]:
        fixed = shard_coords(spec, shard)
        count = mesh.size // math.prod(mesh.shape[axis] for axis in fixed)
        ranks = [rank for rank in members(mesh, fixed) if rank in locals_of]
        if count > MAX_HOLDERS or not ranks:
            return (holders_text(spec, shard, brief),)
        lines: list[str] = []
        for same in _groups(spec, ranks, locals_of):
            sign = "+ " if lines and "sum" in dict(spec.partition.unreduced_kinds).values() else ""
            noun = "ranks" if same[1:] else "rank"
            between = " & " if spec.partition.reduced else ", "
            lines += [f"{sign}{noun} {between.join(map(str, same))}"]
            lines += matrix_lines(locals_of[same[0]], view, brief)
        return tuple(lines)

    return text


def _groups(
    spec: Spec, ranks: Sequence[int], locals_of: Mapping[int, torch.Tensor]
) -> list[list[int]]:
    """Return the ranks of one shard in lists of equal locals that are replicas of each other."""
    keys = tuple(spec.partition.unreduced)
    groups: list[list[int]] = []
    for rank in ranks:
        for group in groups:
            first = group[0]
            if _partial(spec.mesh, rank, keys) == _partial(spec.mesh, first, keys) and _equal(
                locals_of[rank], locals_of[first]
            ):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return groups


def _partial(mesh: Mesh, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    """Return the coordinates of a rank along the unreduced axes."""
    coords = mesh.coords(rank)
    return tuple(coords[axis] for axis in axes)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True for equal values; NaN equals NaN."""
    if a.is_meta or a.shape != b.shape:
        return a.shape == b.shape
    return bool(((a == b) | ((a != a) & (b != b))).all())


def matrix_lines(local: torch.Tensor, view: View, brief: bool = False) -> list[str]:
    """Return the values of a local as aligned rows; other dims are at their index 0.

    >>> matrix_lines(torch.tensor([[1.0, -0.5], [10.0, 2.25]]), View(0, 1, (), ()))
    ['   1  -0.5', '  10  2.25']
    """
    x = local.detach()
    if x.is_meta or x.numel() == 0:
        return ["(no values)"]
    at = tuple(slice(None) if dim in (view.row, view.column) else 0 for dim in range(x.ndim))
    matrix = x[at].reshape(-1, x.shape[view.column] if view.column is not None else 1)
    most = (3, 3) if brief else (MAX_VALUE_ROWS, MAX_VALUE_COLUMNS)
    rows, columns = (_shown(n, limit) for n, limit in zip(matrix.shape, most, strict=True))
    cells = [["…" if r is None or c is None else _number(matrix[r, c]) for c in columns]
             for r in rows]  # fmt: skip
    width = max(len(cell) for row in cells for cell in row)
    return ["  ".join(f"{cell:>{width}}" for cell in row) for row in cells]


def _shown(count: int, most: int) -> list[int | None]:
    """Return the indices that are shown, None for those left out."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


def _number(value: torch.Tensor) -> str:
    item = value.item()
    if isinstance(item, float):
        return f"{item:.4g}"
    return f"{item:.3g}" if isinstance(item, complex) else str(item)
