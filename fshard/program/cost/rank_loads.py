"""What every rank sends, receives and copies in a step, to be added up over many tensors.

The busiest rank of all together is not the busiest of each: owners take turns. The laws are those
of `traffic`, of each rank's own shards; even steps on one mesh are taken to be alike on all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.program.cost.model import copy_passes, max_local_nbytes, share, step_axes, traffic
from fshard.program.cost.overlap import alike_shards, intervals, places
from fshard.program.exchange_boxes import reduced_axes, turned_axes
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Step,
)

__all__ = ["Load", "Ranks", "Vector", "added", "everyone", "held", "kept", "load"]

Ranks = range | tuple[int, ...]
Vector = tuple[int, ...]
"""A number for each of some ranks, in their order."""


class Load(NamedTuple):
    """Bytes that each rank sends, receives, and reads and writes in its own memory."""

    sent: Vector
    received: Vector
    copied: Vector


def everyone(meshes: Iterable[Mesh]) -> Ranks:
    """The ranks of any of the meshes, sorted."""
    found = [*dict.fromkeys(meshes)]
    if len(found) == 1:
        return found[0].ranks
    return tuple(sorted({rank for mesh in found for rank in mesh.ranks}))


def added(vectors: Iterable[Vector], ranks: Ranks) -> Vector:
    """Vectors of `ranks` added up."""
    return tuple(map(sum, zip(*vectors, strict=True))) or (0,) * len(ranks)


@lru_cache(maxsize=512)
def load(step: Step, src: Spec, dst: Spec, ranks: Ranks) -> Load:
    """What each of `ranks`, among them those of both specs, moves in a step.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2), P("x"), shape=(8,))
    >>> load(Exchange(P("x"), sizes=((8, 0),)), src, src.replace(sizes={0: (8, 0)}), range(2))
    Load(sent=(0, 16), received=(16, 0), copied=(96, 32))
    """
    moved = traffic(step, src, dst)
    before, after = held(src, ranks), held(dst, ranks)
    packed, unpacked = copy_passes(step, src, dst, moved.launches)
    copied = tuple(packed * a + unpacked * b for a, b in zip(before, after, strict=True))
    if src.mesh == dst.mesh and not any(src.sizes) and not any(dst.sizes):
        inside = [int(rank in src.mesh) for rank in ranks]
        sent, received = (tuple(n * each for each in inside) for n in (moved.sent, moved.received))
        return Load(sent, received, copied)
    sent = received = (0,) * len(ranks)
    if moved.launches:
        sent, received = _unevenly(step, src, dst, ranks, before, after)
    return Load(sent, received, copied)


def _unevenly(
    step: Step, src: Spec, dst: Spec, ranks: Ranks, before: Vector, after: Vector
) -> tuple[Vector, Vector]:
    n = math.prod(src.mesh.shape[axis] for axis in step_axes(step, src, dst))
    match step:
        case AllGather():
            return _times(n - 1, before), _less(after, before)
        case ReduceScatter():
            return _less(before, after), _times(n - 1, after)
        case AllReduce():
            item = src.dtype.itemsize
            moved = tuple(share(2 * (n - 1), each // item, n) * item for each in before)
            return moved, moved
        case AllToAll():
            both = kept(src, dst, ranks)
            return _less(before, both), _less(after, both)
        case Exchange():
            both = kept(src, dst, ranks)
            addends = src.mesh.axis_size(reduced_axes(src, dst))
            needed = _from_own_places(src, dst, ranks, turned_axes(src, dst))
            return _from_holders(src, dst, ranks, both), _less(_times(addends, needed), both)
        case _:  # a permutation
            return before, after


def _times(n: int, xs: Vector) -> Vector:
    return tuple(n * x for x in xs)


def _less(xs: Vector, ys: Vector) -> Vector:
    return tuple(x - y for x, y in zip(xs, ys, strict=True))


def _from_holders(src: Spec, dst: Spec, ranks: Ranks, both: Vector) -> Vector:
    """What each rank sends in an exchange: holders of one shard send alike what others lack."""
    p, turned = src.partition, turned_axes(src, dst)
    lent = tuple(axis for axis in turned if axis in p.reduced)
    varied = tuple(axis for axes in (*p.dims, tuple(p.unreduced), lent) for axis in axes)
    shard = dict(zip(src.mesh.devices, places(src.mesh, varied), strict=True))
    keeps = [0] * src.mesh.axis_size(varied)
    for rank, its in zip(ranks, both, strict=True):
        if rank in shard:
            keeps[shard[rank]] += its
    stay = dst.mesh.axis_size(tuple(dst.partition.unreduced))
    needers = dst.mesh.size // (dst.num_shards * stay)
    holders = src.mesh.size // len(keeps)
    asked = _from_own_places(dst, src, ranks, turned)
    return tuple(
        -(-(needers * size - keeps[shard[rank]]) // holders) if rank in shard else 0
        for rank, size in zip(ranks, asked, strict=True)
    )


def _from_own_places(src: Spec, dst: Spec, ranks: Ranks, turned: tuple[str, ...]) -> Vector:
    """Bytes of its local of `dst` that each rank has from its own place along axes of `src`."""
    if not turned:
        return held(dst, ranks)
    sizes = [dst.dtype.itemsize if rank in dst.mesh else 0 for rank in ranks]
    for dim, axes in enumerate(src.partition.dims):
        alike = alike_shards(src.mesh.shape, axes, frozenset(turned))
        cuts = [[*itertools.compress(intervals(src, dim), some)] for some in alike]
        where = places(src.mesh, tuple(axis for axis in axes if axis in turned))
        own = dict(zip(src.mesh.devices, where, strict=True))
        sizes = [
            size and size * sum(max(0, min(stop, b) - max(start, a)) for a, b in cuts[own[rank]])
            for rank, size, (start, stop) in zip(ranks, sizes, _cuts(dst, dim, ranks), strict=True)
        ]
    return tuple(sizes)


@lru_cache(maxsize=512)
def held(spec: Spec, ranks: Ranks) -> Vector:
    """Bytes of the local of each of `ranks`, among them those of the mesh."""
    if not any(spec.sizes):
        local = max_local_nbytes(spec)
        return tuple(local if rank in spec.mesh else 0 for rank in ranks)
    sizes = [spec.dtype.itemsize] * spec.mesh.size
    for dim, axes in enumerate(spec.partition.dims):
        widths = spec.shard_sizes(dim)
        cuts = places(spec.mesh, axes)
        sizes = [size * widths[at] for size, at in zip(sizes, cuts, strict=True)]
    by_rank = dict(zip(spec.mesh.devices, sizes, strict=True))
    return tuple(by_rank.get(rank, 0) for rank in ranks)


@lru_cache(maxsize=512)
def kept(src: Spec, dst: Spec, ranks: Ranks) -> Vector:
    """Bytes of its local of `dst` that each rank has in that of `src`."""
    item = src.dtype.itemsize
    sizes = [item if rank in src.mesh and rank in dst.mesh else 0 for rank in ranks]
    for dim in range(src.ndim):
        rows = zip(sizes, _cuts(src, dim, ranks), _cuts(dst, dim, ranks), strict=True)
        sizes = [
            size * max(0, min(stop, end) - max(start, begin)) if size else 0
            for size, (start, stop), (begin, end) in rows
        ]
    return tuple(sizes)


def _cuts(spec: Spec, dim: int, ranks: Ranks) -> list[tuple[int, int]]:
    """The part of a dim that each rank has."""
    cuts = intervals(spec, dim)
    where = places(spec.mesh, spec.partition.dims[dim])
    by_rank = dict(zip(spec.mesh.devices, where, strict=True))
    return [cuts[by_rank[rank]] if rank in by_rank else (0, 0) for rank in ranks]
