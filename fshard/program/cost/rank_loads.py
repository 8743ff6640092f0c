"""Bytes that every rank sends, receives and copies in a step, to be added up over many tensors.

The busiest rank of a batch is not the busiest rank of each tensor: owners of tensors differ. The
formulas are those of `traffic`, for each rank's own shards; even steps on one mesh are taken to
load all ranks alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.program.cost.model import copy_passes
from fshard.program.cost.rank_overlap import (
    Ranks,
    Vector,
    local_bytes,
    needed_bytes,
    overlap_bytes,
    places,
)
from fshard.program.cost.shard_overlap import shard_indices
from fshard.program.cost.traffic import ceil_share, exchange_peers, step_axes, traffic
from fshard.program.exchange_boxes import converted_axes, reduction_axes
from fshard.program.halo_boxes import dim_shares, join_shares, owners_of
from fshard.program.halo_steps import HaloStep
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    HaloExchange,
    HaloReduce,
    ReduceScatter,
    Step,
)


class Load(NamedTuple):
    """Bytes that each rank sends, receives, and reads and writes in its own memory."""

    sent: Vector
    received: Vector
    copied: Vector


def union_ranks(meshes: Iterable[Mesh]) -> Ranks:
    """Return the ranks of any of the meshes, sorted."""
    distinct = [*dict.fromkeys(meshes)]
    if len(distinct) == 1:
        return distinct[0].ranks
    return tuple(sorted({rank for mesh in distinct for rank in mesh.ranks}))


def add_vectors(vectors: Iterable[Vector], ranks: Ranks) -> Vector:
    """Return the sum of vectors of `ranks`, zeros if there are none."""
    return tuple(map(sum, zip(*vectors, strict=True))) or (0,) * len(ranks)


@lru_cache(maxsize=512)
def step_load(step: Step, src: Spec, dst: Spec, ranks: Ranks) -> Load:
    """Return the load of each of `ranks`, which must contain those of both meshes, in a step.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2), P("x"), shape=(8,))
    >>> step = Exchange(P("x"), sizes=((8, 0),))
    >>> step_load(step, src, src.replace(sizes={0: (8, 0)}), range(2))
    Load(sent=(0, 16), received=(16, 0), copied=(96, 32))
    """
    moved = traffic(step, src, dst)
    before, after = local_bytes(src, ranks), local_bytes(dst, ranks)
    packed, unpacked = copy_passes(step, src, dst, moved.launches)
    copied = tuple(packed * a + unpacked * b for a, b in zip(before, after, strict=True))
    if src.mesh == dst.mesh and not any(src.sizes) and not any(dst.sizes):
        inside = [int(rank in src.mesh) for rank in ranks]
        sent, received = (tuple(n * i for i in inside) for n in (moved.sent, moved.received))
        return Load(sent, received, copied)
    sent = received = (0,) * len(ranks)
    if moved.launches:
        sent, received = _uneven_load(step, src, dst, ranks, before, after)
    return Load(sent, received, copied)


def busiest_bytes(steps: Iterable[tuple[Step, Spec, Spec]], ranks: Ranks) -> tuple[int, int]:
    """Return the most bytes that one of `ranks` sends in all steps, and that one receives."""
    loads = [step_load(*step, ranks) for step in steps]
    sent, received = (
        add_vectors(vectors, ranks)
        for vectors in ([load.sent for load in loads], [load.received for load in loads])
    )
    return max(sent, default=0), max(received, default=0)


def _uneven_load(
    step: Step, src: Spec, dst: Spec, ranks: Ranks, before: Vector, after: Vector
) -> tuple[Vector, Vector]:
    """Return the bytes that each rank sends and receives, from the bytes of its two locals."""
    n = math.prod(src.mesh.shape[axis] for axis in step_axes(step, src, dst))
    match step:
        case AllGather():
            return _times(n - 1, before), _minus(after, before)
        case ReduceScatter():
            return _minus(before, after), _times(n - 1, after)
        case AllReduce():
            item = src.dtype.itemsize
            moved = tuple(ceil_share(2 * (n - 1), nbytes // item, n) * item for nbytes in before)
            return moved, moved
        case AllToAll():
            holds = overlap_bytes(src, dst, ranks)
            return _minus(before, holds), _minus(after, holds)
        case Exchange():
            holds = overlap_bytes(src, dst, ranks)
            num_partials = src.mesh.axis_size(reduction_axes(src, dst))
            needs = needed_bytes(src, dst, ranks, converted_axes(src, dst))
            return _exchange_sent(src, dst, ranks, holds), _minus(
                _times(num_partials, needs), holds
            )
        case HaloExchange() | HaloReduce():
            counts = _halo_counts(step, owners_of(step, src, dst), ranks)
            lent, lacking = (_times(src.dtype.itemsize, column) for column in counts)
            return (lent, lacking) if isinstance(step, HaloExchange) else (lacking, lent)
        case _:  # a permutation
            return before, after


def _halo_counts(step: HaloStep, owners: Spec, ranks: Ranks) -> tuple[Vector, Vector]:
    """Return the elements that each rank has in windows of others, and those that it lacks."""
    index, choices = [0] * owners.mesh.size, []
    for dim, axes in enumerate(owners.partition.dims):
        shares = dim_shares(step, owners, dim)
        numbers = {share: i for i, share in enumerate(dict.fromkeys(shares))}
        column = [numbers[share] for share in shares]
        rows = zip(index, shard_indices(owners.mesh, axes), strict=True)
        index = [len(numbers) * i + column[shard] for i, shard in rows]
        choices.append(numbers)
    counts = [join_shares(row)[:2] for row in itertools.product(*choices)]
    own = [counts[index[i]] if i >= 0 else (0, 0) for i in places(owners.mesh, ranks)]
    lent, lacking = zip(*own, strict=True)
    return lent, lacking


def _times(n: int, xs: Vector) -> Vector:
    return tuple(n * x for x in xs)


def _minus(xs: Vector, ys: Vector) -> Vector:
    return tuple(x - y for x, y in zip(xs, ys, strict=True))


def _exchange_sent(src: Spec, dst: Spec, ranks: Ranks, holds: Vector) -> Vector:
    """Return the bytes that each rank sends in an exchange.

    All holders of one shard send equal parts of what other ranks lack of it.
    """
    p, converted = src.partition, converted_axes(src, dst)
    lent = tuple(axis for axis in converted if axis in p.reduced)
    varied = tuple(axis for axes in (*p.dims, tuple(p.unreduced), lent) for axis in axes)
    shard = dict(zip(src.mesh.devices, shard_indices(src.mesh, varied), strict=True))
    kept = [0] * src.mesh.axis_size(varied)
    for rank, nbytes in zip(ranks, holds, strict=True):
        if rank in shard:
            kept[shard[rank]] += nbytes
    needers, holders = exchange_peers(src, dst)
    return tuple(
        -(-(needers * nbytes - kept[shard[rank]]) // holders) if rank in shard else 0
        for rank, nbytes in zip(ranks, needed_bytes(dst, src, ranks, converted), strict=True)
    )
