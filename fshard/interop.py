"""DTensor's placements, both ways.

A spec names mesh axes dim by dim, DTensor names tensor dims axis by axis:

| on one mesh axis | placement |
|---|---|
| sharded, its dim's axes in mesh order | `Shard(dim)` |
| sharded, a later mesh axis more major | `_StridedShard(dim, split_factor=...)` |
| invariant, reduced | `Replicate()` |
| unreduced | `Partial(kind)` |

So `reduced` comes back as invariant, and an axis of size 1 may come back elsewhere in its
dim's order, which `Spec.is_equivalent` does not count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import REDUCTIONS, PartitionSpec, chunk_sizes
from fshard.layout.spec import Spec, from_placements_hook, to_placements_hook

__all__ = ["from_placements", "to_placements"]


@to_placements_hook.set
def to_placements(spec: Spec) -> tuple[Any, ...]:
    """DTensor's placements of a spec, one per mesh axis in mesh order.

    Raises `ShardingError` where DTensor has no such layout: sizes that are not the ones it
    would cut, or a tensor whose ranks hold their shares of an average.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> Spec(Mesh(dp=2, tp=4), P(None, "tp", unreduced={"dp"}), shape=(8, 16)).placements
    (Partial(sum), Shard(dim=1))
    >>> Spec(Mesh(dp=2, tp=4), P(("tp", "dp")), shape=(8, 16)).placements
    (_StridedShard(dim=0, sf=4), Shard(dim=0))
    """
    # Imported here because it takes seconds and most programs never ask.
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    partition = spec.partition
    problems = [
        Problem(f"{axis!r} reduced by avg in {spec}",
                "each rank holds its share of an average: DTensor has no such placement",
                "redistribute it to unreduced or invariant first")
        for axis, kind in partition.reduced_kinds if kind == "avg"
    ]  # fmt: skip
    placements: dict[str, Any] = {axis: Replicate() for axis in spec.mesh.axes}
    placements |= {axis: Partial(kind) for axis, kind in partition.unreduced_kinds}
    for dim, axes in enumerate(partition.dims):
        factors = _split_factors(spec.mesh, axes)
        placements |= {
            axis: Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
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
    mesh: Mesh,
    placements: Sequence[Any],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Spec:
    """The spec of DTensor's placements on a mesh, with the shard sizes that DTensor cuts.

    Raises `ShardingError`, listing every failure, for a wrong number of placements, a dim
    that the shape lacks, a placement that is neither `Shard`, `Replicate` nor `Partial`,
    and a `_StridedShard` that is no order of the axes.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> Spec.from_placements(Mesh(dp=2, tp=4), (Shard(0), Replicate()), (8, 16))
    f32[8@dp,16]
    >>> Spec.from_placements(Mesh(dp=2, tp=2), (Shard(-1), Shard(-1)), (5,))
    f32[5@(dp,tp):chunk]
    """
    where = f"Spec.from_placements({mesh}, {tuple(placements)}, {tuple(shape)})"
    if len(placements) != len(mesh.axes):
        fail(where, f"{len(placements)} placements", f"one per mesh axis: {len(mesh.axes)}",
             "Replicate() on the axes that the tensor does not use")  # fmt: skip
    sharded, unreduced = _read(mesh, placements, len(shape), where)
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
        cut = _dtensor_sizes(mesh, axes, shape[dim])
        if cut is None:
            problems.append(Problem(
                f"dim {dim} of size {shape[dim]} over {axes}, major to minor",
                "DTensor gives some rank rows that do not adjoin where a _StridedShard does not "
                "divide its dim",
                f"Shard({dim}) on every axis, or pad the dim to a multiple of "
                f"{mesh.axis_size(axes)}"))  # fmt: skip
            continue
        sizes[dim] = cut
    raise_if(where, problems)
    partition = PartitionSpec(*dims, unreduced=unreduced)
    return Spec(mesh, partition, shape=shape, dtype=dtype, sizes=sizes)


def _read(
    mesh: Mesh, placements: Sequence[Any], ndim: int, where: str
) -> tuple[dict[int, dict[str, int]], dict[str, str]]:
    """Split factors of the axes by dim, and the axes that are unreduced; raises all at once."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    problems: list[Problem] = []
    sharded: dict[int, dict[str, int]] = {}
    unreduced: dict[str, str] = {}
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            if not -ndim <= placement.dim < ndim:
                problems.append(Problem(
                    f"{placement!r} on axis {axis!r}",
                    f"a dim is in {-ndim}..{ndim - 1}" if ndim else "a 0-dim tensor has no dims",
                    "name a dim it has" if ndim else "Replicate()"))  # fmt: skip
                continue
            factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
            sharded.setdefault(placement.dim % ndim, {})[axis] = int(factor)
        # Exactly Partial: its subclasses (masks, norms) mean something else.
        elif type(placement) is Partial and placement.reduce_op in REDUCTIONS:
            unreduced[axis] = placement.reduce_op
        elif not isinstance(placement, Replicate):
            problems.append(Problem(
                f"{placement!r} on axis {axis!r}",
                f"fshard knows Shard, Replicate, and Partial of {', '.join(REDUCTIONS)}",
                "redistribute the DTensor to one of them first"))  # fmt: skip
    raise_if(where, problems)
    return sharded, unreduced


def _split_factors(mesh: Mesh, axes: Sequence[str]) -> dict[str, int]:
    """DTensor's factor per axis: the sizes of later mesh axes that are more major in the dim."""
    place = mesh.axes.index
    return {
        axis: math.prod(mesh.shape[a] for a in axes[:i] if place(a) > place(axis))
        for i, axis in enumerate(axes)
    }


def _axis_order(mesh: Mesh, factors: dict[str, int]) -> tuple[str, ...] | None:
    """The axes major to minor that have these split factors, or None; the inverse of those.

    From the last mesh axis to the first, each goes where the axes before it multiply to its
    factor (DTensor's own decoding).
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
    rule, fix = (
        ("DTensor cannot cut this dim in this order into shards that adjoin",
         "name the axes of the dim in mesh order, or pad the dim")
        if expected is None
        else (f"DTensor cuts this dim into {expected}", "redistribute to those sizes first")
    )  # fmt: skip
    return Problem(f"dim {dim} of {spec}, cut into {spec.shard_sizes(dim)}", rule, fix)


# -- where DTensor puts the rows of an uneven dim ---------------------------------------------

Rows = list[tuple[int, int]]
"""Rows as half-open intervals in the order a rank holds them."""


def _dtensor_sizes(mesh: Mesh, axes: Sequence[str], size: int) -> tuple[int, ...] | None:
    """Shard sizes of DTensor, major to minor, or None where some shard's rows do not adjoin.

    A `_StridedShard` cuts its dim twice, and what earlier mesh axes left of it, not the
    whole: where nothing divides, that is not chunks of chunks.
    """
    shards = mesh.axis_size(axes)
    if size % shards == 0:
        return (size // shards,) * shards
    factors = _split_factors(mesh, axes)
    if all(factor == 1 for factor in factors.values()):
        return chunk_sizes(size, [mesh.shape[axis] for axis in axes])
    held: dict[tuple[int, ...], Rows] = {(): [(0, size)]}
    in_mesh_order = [axis for axis in mesh.axes if axis in factors]
    for axis in in_mesh_order:
        held = {
            (*coordinate, place): part
            for coordinate, rows in held.items()
            for place, part in enumerate(_strided(rows, mesh.shape[axis], factors[axis]))
        }
    places = [in_mesh_order.index(axis) for axis in axes]
    in_order = sorted(held.items(), key=lambda item: [item[0][place] for place in places])
    everything = [interval for _, rows in in_order for interval in rows]
    if any(a[1] != b[0] for a, b in itertools.pairwise(everything)):
        return None
    return tuple(_count(rows) for _, rows in in_order)


def _strided(rows: Rows, shards: int, factor: int) -> list[Rows]:
    """`_StridedShard`: chunk by the factor, chunk each by the shards, deal one to each shard."""
    parts = [_chunk_rows(outer, shards) for outer in _chunk_rows(rows, factor)]
    return [[interval for part in parts for interval in part[place]] for place in range(shards)]


def _chunk_rows(rows: Rows, count: int) -> list[Rows]:
    """`torch.chunk` of rows, empty chunks included."""
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
    return sum(stop - start for start, stop in rows)
