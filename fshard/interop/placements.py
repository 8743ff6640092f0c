"""Conversion of specs to DTensor's placements and back.

A spec names the mesh axes of each tensor dim, DTensor the tensor dim of each mesh axis:

| on one mesh axis | placement |
|---|---|
| sharded, its dim's axes in mesh order | `Shard(dim)` |
| sharded, a later mesh axis more major | `_StridedShard(dim, split_factor=...)` |
| invariant, reduced | `Replicate()` |
| unreduced | `Partial(kind)` |

A round trip therefore turns `reduced` into invariant, and may change the position of an axis of
size 1 in the order of a dim; `Spec.is_equivalent` ignores both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from fshard._torch.process_groups import strided_shard_type
from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Mesh, as_mesh
from fshard.layout.partition_spec import REDUCTIONS, PartitionSpec, chunk_sizes
from fshard.layout.spec import Spec, from_placements_hook, to_placements_hook


@to_placements_hook.set
def to_placements(spec: Spec) -> tuple[Any, ...]:
    """Return DTensor's placements of a spec, one per mesh axis in mesh order.

    Raises:
        ShardingError: DTensor has no such layout: its shard sizes are others, or an axis is
            reduced of `avg`; lists every such dim and axis.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> Spec(Mesh(dp=2, tp=4), P(None, "tp", unreduced={"dp"}), shape=(8, 16)).placements
    (Partial(sum), Shard(dim=1))
    >>> Spec(Mesh(dp=2, tp=4), P(("tp", "dp")), shape=(8, 16)).placements
    (_StridedShard(dim=0, sf=4), Shard(dim=0))
    """
    # The import takes seconds and most programs do not need it.
    from torch.distributed.tensor import Partial, Replicate, Shard

    strided_shard = strided_shard_type()

    partition = spec.partition
    problems = [
        Problem(f"{axis!r} reduced by avg in {spec}",
                "a Replicate of DTensor must hold the value, not its share of an average",
                "redistribute it to unreduced or invariant first")
        for axis, kind in partition.reduced_kinds if kind == "avg"
    ]  # fmt: skip
    placements: dict[str, Any] = {axis: Replicate() for axis in spec.mesh.axes}
    placements |= {axis: Partial(kind) for axis, kind in partition.unreduced_kinds}
    for dim, axes in enumerate(partition.dims):
        factors = _split_factors(spec.mesh, axes)
        placements |= {
            axis: Shard(dim) if factor == 1 else strided_shard(dim, split_factor=factor)
            for axis, factor in factors.items()
        }
        if (sizes := spec.sizes[dim]) is not None:
            expected = _dtensor_sizes(spec.mesh, axes, spec.shape[dim])
            if sizes != expected:
                problems.append(_size_problem(spec, dim, expected))
    raise_if("Spec.placements", problems)
    return tuple(placements.values())


@from_placements_hook.set
def from_placements(
    mesh: Mesh, placements: Sequence[Any], shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Spec:
    """Return the spec of DTensor's placements on a mesh, with DTensor's shard sizes.

    Args:
        mesh: mesh of the spec.
        placements: one placement per mesh axis in mesh order.
        shape: global shape.
        dtype: dtype of the spec.

    Raises:
        ShardingError: the number of placements differs from that of the mesh axes, a dim is not
            in the shape, a placement is not a `Shard`, `Replicate` or `Partial`, or the split
            factors of a `_StridedShard` belong to no order of the axes; lists every failure.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> Spec.from_placements(Mesh(dp=2, tp=4), (Shard(0), Replicate()), (8, 16))
    f32[8@dp,16]
    >>> Spec.from_placements(Mesh(dp=2, tp=2), (Shard(-1), Shard(-1)), (5,))
    f32[5@(dp,tp):chunk]
    """
    mesh = as_mesh(mesh, "Spec.from_placements")
    where = f"Spec.from_placements({mesh}, {tuple(placements)}, {tuple(shape)})"
    if len(placements) != len(mesh.axes):
        fail(where, f"{len(placements)} placements", f"one per mesh axis: {len(mesh.axes)}",
             "Replicate() on the axes that the tensor does not use")  # fmt: skip
    sharded, unreduced = _parse(mesh, placements, len(shape), where)
    problems: list[Problem] = []
    dims: list[tuple[str, ...]] = [()] * len(shape)
    sizes: dict[int, tuple[int, ...]] = {}
    for dim, factors in sharded.items():
        axes = _axis_order(mesh, factors)
        if axes is None:
            problems.append(Problem(
                f"split factors {factors} on dim {dim}",
                "a split factor is the product of the sizes of the later mesh axes that are more "
                "major in the dim; no order of these axes has these factors",
                "Shard(dim) on every axis, for the order of the mesh"))  # fmt: skip
            continue
        dims[dim] = axes
        if shape[dim] % mesh.axis_size(axes) == 0:
            continue
        dim_sizes = _dtensor_sizes(mesh, axes, shape[dim])
        if dim_sizes is None:
            problems.append(Problem(
                f"dim {dim} of size {shape[dim]} over {axes}, major to minor",
                "the rows of every rank must be contiguous; a _StridedShard that does not "
                "divide its dim has others",
                f"Shard({dim}) on every axis, or pad the dim to a multiple of "
                f"{mesh.axis_size(axes)}"))  # fmt: skip
            continue
        sizes[dim] = dim_sizes
    raise_if(where, problems)
    partition = PartitionSpec(*dims, unreduced=unreduced)
    return Spec(mesh, partition, shape=shape, dtype=dtype, sizes=sizes)


def _parse(
    mesh: Mesh, placements: Sequence[Any], ndim: int, where: str
) -> tuple[dict[int, dict[str, int]], dict[str, str]]:
    """Return `{dim: {axis: split factor}}` and `{unreduced axis: reduction}` of placements."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    strided_shard = strided_shard_type()

    problems: list[Problem] = []
    sharded: dict[int, dict[str, int]] = {}
    unreduced: dict[str, str] = {}
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Shard | strided_shard):
            if not -ndim <= placement.dim < ndim:
                rule = f"a dim must be in {-ndim}..{ndim - 1}"
                problems.append(Problem(
                    f"{placement!r} on axis {axis!r}",
                    rule if ndim else "a 0-dim tensor has no dims",
                    "name a dim it has" if ndim else "Replicate()"))  # fmt: skip
                continue
            factor = placement.split_factor if isinstance(placement, strided_shard) else 1
            sharded.setdefault(placement.dim % ndim, {})[axis] = int(factor)
        # Not a subclass of Partial: masks and norms have other meanings.
        elif type(placement) is Partial and placement.reduce_op in REDUCTIONS:
            unreduced[axis] = placement.reduce_op
        elif not isinstance(placement, Replicate):
            problems.append(Problem(
                f"{placement!r} on axis {axis!r}",
                f"a placement must be Shard, Replicate, or Partial of {', '.join(REDUCTIONS)}",
                "redistribute the DTensor to one of them first"))  # fmt: skip
    raise_if(where, problems)
    return sharded, unreduced


def _split_factors(mesh: Mesh, axes: Sequence[str]) -> dict[str, int]:
    """Return DTensor's split factor of each axis of a dim.

    It is the product of the sizes of later mesh axes that are more major in the dim.
    """
    position = mesh.axes.index
    return {
        axis: math.prod(mesh.shape[a] for a in axes[:i] if position(a) > position(axis))
        for i, axis in enumerate(axes)
    }


def _axis_order(mesh: Mesh, factors: dict[str, int]) -> tuple[str, ...] | None:
    """Return the axes, major to minor, that have these split factors, or None.

    As DTensor decodes them: from the last mesh axis to the first, each is inserted where the
    sizes of the axes before it multiply to its factor.
    """
    order: list[str] = []
    for axis in reversed([axis for axis in mesh.axes if axis in factors]):
        for i in range(len(order) + 1):
            if math.prod(mesh.shape[a] for a in order[:i]) == factors[axis]:
                order.insert(i, axis)
                break
        else:
            return None
    return tuple(order)


def _size_problem(spec: Spec, dim: int, expected: tuple[int, ...] | None) -> Problem:
    """Return the problem of a dim with other shard sizes than DTensor's, which are `expected`."""
    rule, fix = (
        ("DTensor has no shards of contiguous rows for this dim and order of axes",
         "name the axes of the dim in mesh order, or pad the dim")
        if expected is None
        else (f"DTensor's shard sizes must be {expected}", "redistribute to those sizes first")
    )  # fmt: skip
    return Problem(f"dim {dim} of {spec}, of shard sizes {spec.shard_sizes(dim)}", rule, fix)


# -- DTensor's shards of an uneven dim --------------------------------------------------------

Rows = list[tuple[int, int]]
"""Rows of a shard in order, as half-open intervals."""


def _dtensor_sizes(mesh: Mesh, axes: Sequence[str], size: int) -> tuple[int, ...] | None:
    """Return DTensor's shard sizes, major to minor, or None if a shard's rows are not contiguous.

    A `_StridedShard` chunks its part of the dim twice: by its split factor, then by its axis.
    """
    shards = mesh.axis_size(axes)
    if size % shards == 0:
        return (size // shards,) * shards
    factors = _split_factors(mesh, axes)
    if all(factor == 1 for factor in factors.values()):
        return chunk_sizes(size, [mesh.shape[axis] for axis in axes])
    rows_of: dict[tuple[int, ...], Rows] = {(): [(0, size)]}  # by coordinate in mesh order
    mesh_order = [axis for axis in mesh.axes if axis in factors]
    for axis in mesh_order:
        rows_of = {
            (*coordinate, i): part
            for coordinate, rows in rows_of.items()
            for i, part in enumerate(_strided_chunks(rows, mesh.shape[axis], factors[axis]))
        }
    positions = [mesh_order.index(axis) for axis in axes]
    shard_rows = sorted(rows_of.items(), key=lambda item: [item[0][i] for i in positions])
    intervals = [interval for _, rows in shard_rows for interval in rows]
    if any(a[1] != b[0] for a, b in itertools.pairwise(intervals)):
        return None
    return tuple(_count(rows) for _, rows in shard_rows)


def _strided_chunks(rows: Rows, shards: int, factor: int) -> list[Rows]:
    """Return the shards of a `_StridedShard`: shard i has chunk i of each of `factor` chunks."""
    parts = [_chunk_rows(outer, shards) for outer in _chunk_rows(rows, factor)]
    return [[interval for part in parts for interval in part[i]] for i in range(shards)]


def _chunk_rows(rows: Rows, count: int) -> list[Rows]:
    """Return `count` chunks of rows, sized as by `torch.chunk`; the last may be empty."""
    chunks: list[Rows] = []
    for n in chunk_sizes(_count(rows), (count,)):
        chunk: Rows = []
        left = n
        while left:
            (start, stop), rows = rows[0], rows[1:]
            if stop - start > left:
                rows = [(start + left, stop), *rows]
                stop = start + left
            chunk.append((start, stop))
            left -= stop - start
        chunks.append(chunk)
    return chunks


def _count(rows: Rows) -> int:
    """Return the number of rows."""
    return sum(stop - start for start, stop in rows)
