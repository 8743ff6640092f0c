"""`lower_bound`: what any program between two specs must receive and hold."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from fshard.errors import raise_if
from fshard.program.cost import max_local_nbytes
from fshard.program.loads import Ranks, Vector, added, everyone, held, kept
from fshard.program.overlap import on_one_mesh, overlaps
from fshard.program.program import endpoint_problems, wire_problems
from fshard.spec import Spec

__all__ = ["Bound", "lower_bound", "lower_bound_together"]

Move = tuple[Spec, Spec, torch.dtype | None]


@dataclass(frozen=True, slots=True)
class Bound:
    """Of the busiest rank: bytes that any program receives, and holds at some time.

    `peak_memory` is the larger of the two locals, at the start and at the end.
    """

    bytes_received: int
    peak_memory: int


def lower_bound(src: Spec, dst: Spec, /, *, forward_dtype: torch.dtype | None = None) -> Bound:
    """Bytes that the busiest rank must receive and hold on the way from `src` to `dst`.

    Between sharded or copied layouts it is exact: what the rank that lacks most lacks, which an
    exchange receives and no more. Where addends are reduced, or stay, it is a bound that not
    every pair can reach. With `forward_dtype` it is that of a program that sends it.

    With addends it is the larger of two. A rank, or the ranks that hold the addends of a target
    between them, must receive what they do not hold complete. And each element takes so many
    messages: to reduce c addends and bring the sum to t ranks takes c - 1 and t - 1, spread over
    all ranks at best. Boxes after Rink et al. (arXiv 2112.01075), reductions after Patarasu and
    Yuan (2009).

    The specs may be of two meshes; then the ranks are those of both, and nothing is said of
    addends that may stay where grids cross (2x3 and 3x2). On one mesh and even shards it is 0
    exactly where a program without communication exists. Uneven sizes can make it 0 by
    coincidence: each rank happens to hold what it needs, though most steps would move it.

    Raises `ShardingError` where the global shapes differ, and for trees of specs: `.explain()`
    of a `Batch` has the bounds of its leaves.

    >>> from fshard.mesh import Mesh
    >>> from fshard.partition import PartitionSpec as P
    >>> mesh = Mesh(x=4)
    >>> lower_bound(Spec(mesh, P(unreduced={"x"}), shape=(8,)), Spec(mesh, P(), shape=(8,)))
    Bound(bytes_received=48, peak_memory=32)
    """
    fix = "one pair at a time; of trees fs.redistribute(src, dst).explain() has the bounds"
    raise_if("fs.lower_bound", endpoint_problems("lower_bound", src, dst, fix))
    raise_if("fs.lower_bound", wire_problems(src, (forward_dtype,)))
    return _lower_bound(src, dst, forward_dtype)


@lru_cache(maxsize=4096)
def _lower_bound(src: Spec, dst: Spec, wire: torch.dtype | None) -> Bound:
    src, dst = _as_sent(src, dst, wire)
    least = _least(src, dst)
    item = min(src.dtype.itemsize, dst.dtype.itemsize)
    peak = max(max_local_nbytes(src), max_local_nbytes(dst))
    each = max(-(-least.missing // least.members), -(-least.messages // least.ranks))
    return Bound(each * item, peak)


def lower_bound_together(moves: Iterable[Move]) -> Bound:
    """`lower_bound` of many tensors: each is a source, a target, and what is sent, or None.

    Of each rank what it lacks of all of them, where that is known of one rank; all messages,
    spread over all ranks; and the largest bound of one tensor.

    >>> from fshard.mesh import Mesh
    >>> from fshard.partition import PartitionSpec as P
    >>> mesh = Mesh(x=2)
    >>> src = Spec(mesh, P("x"), shape=(4,))
    >>> owners = [src.replace(sizes={0: sizes}) for sizes in ((4, 0), (0, 4))]
    >>> lower_bound_together((src, owner, None) for owner in owners)
    Bound(bytes_received=8, peak_memory=16)
    """
    rows = [(*_as_sent(src, dst, wire), _lower_bound(src, dst, wire)) for src, dst, wire in moves]
    ranks = everyone(spec.mesh for row in rows for spec in row[:2])
    lacks, total = [], 0
    for src, dst, _ in rows:
        lack = _lacking(src, dst, ranks)
        item = min(src.dtype.itemsize, dst.dtype.itemsize)
        least = _least(src, dst)
        total += max(sum(lack), least.missing * item, least.messages * item)
        lacks.append(lack)
    ends = [added((held(row[at], ranks) for row in rows), ranks) for at in range(2)]
    most = max(added(lacks, ranks), default=0)
    return Bound(
        max(most, -(-total // max(1, len(ranks))), *(bound.bytes_received for *_, bound in rows)),
        max(map(max, ends)) if ranks else 0,
    )


def _lacking(src: Spec, dst: Spec, ranks: Ranks) -> Vector:
    """Bytes that each rank must receive itself: none of an addend, which others may hold."""
    if any(dst.mesh.shape[axis] > 1 for axis in dst.partition.unreduced):
        return (0,) * len(ranks)
    small = min(src.dtype, dst.dtype, key=lambda dtype: dtype.itemsize)
    src, dst = src._with(dtype=small), dst._with(dtype=small)
    needs = held(dst, ranks)
    if any(src.mesh.shape[axis] > 1 for axis in src.partition.unreduced):
        return needs
    return tuple(map(operator.sub, needs, kept(src, dst, ranks)))


def _as_sent(src: Spec, dst: Spec, wire: torch.dtype | None) -> tuple[Spec, Spec]:
    return (src, dst) if wire is None else (src._with(dtype=wire), dst._with(dtype=wire))


class Least(NamedTuple):
    """Elements that the worst placed group of `members` lacks, and messages of all `ranks`."""

    missing: int
    members: int
    messages: int
    ranks: int


NOTHING = Least(0, 1, 0, 1)


@lru_cache(maxsize=4096)
def _least(src: Spec, dst: Spec) -> Least:
    src, dst = on_one_mesh(src, dst)
    p, q = src.partition, dst.partition
    one = src.mesh == dst.mesh
    stay = set(p.unreduced_kinds) & set(q.unreduced_kinds) if one else set()
    group = tuple(axis for axis, _ in q.unreduced_kinds)
    # Of c addends that are reduced and k that stay: (c-1) k + (t-1) messages to t groups of
    # ranks, one more where the target has other devices; where c = 1 and f groups lack the
    # element (k-1) + f. All addends and groups that need each other are connected by messages.
    kept = math.prod(src.mesh.shape[axis] for axis, _ in stay)
    addends = math.prod(src.mesh.shape[axis] for axis, _ in p.unreduced_kinds) // kept
    members = math.prod(dst.mesh.shape[axis] for axis in group)
    copies = dst.mesh.size // members // dst.num_shards
    if addends > 1 and group and not one:
        return NOTHING  # which addends may stay is not known where grids cross
    if addends > 1:
        missing = max_local_nbytes(dst) // dst.dtype.itemsize
        ranks = src.mesh.devices if one else {*src.mesh.ranks, *dst.mesh.ranks}
        apart = len(ranks) == src.mesh.size + dst.mesh.size
        each = (addends - 1) * kept + (copies - 1) + apart
        return Least(missing, members, math.prod(src.shape) * each, len(ranks))
    missing = max(total - held for total, held in overlaps(src, dst, group))
    # How many target groups an element is missing in, at least: of all, and of those missing.
    far = max(0, copies - src.mesh.size // kept // src.num_shards)
    everywhere = math.prod(src.shape) * (kept - 1 + far) if far else 0
    messages = max(everywhere, missing * kept) if kept > 1 else 0
    return Least(missing, members, messages, src.mesh.size)
