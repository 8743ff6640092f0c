"""`lower_bound`: what any program between two specs must receive and hold."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from fshard._util.errors import raise_if
from fshard.layout.spec import Spec
from fshard.program.cost.overlap import overlaps, shared_elements
from fshard.program.cost.rank_loads import add_vectors, union_ranks
from fshard.program.cost.rank_overlap import Ranks, Vector, local_bytes, overlap_bytes
from fshard.program.cost.traffic import max_local_nbytes, on_one_mesh
from fshard.program.program import endpoint_problems, wire_problems

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
    messages, spread over all ranks at best: to reduce c addends and bring the sum to t ranks takes
    c - 1 and t - 1, and one more where no rank that holds an addend is one that needs the sum.
    Addends that are to stay may also be merged. Boxes after Rink et al. (arXiv 2112.01075),
    reductions after Patarasu and Yuan (2009).

    The specs may be of two meshes; then the ranks are those of both, and nothing is said of
    addends that may stay where grids cross (2x3 and 3x2). On one mesh and even shards it is 0
    exactly where a program without communication exists. Uneven sizes can make it 0 by
    coincidence: each rank happens to hold what it needs, though most steps would move it.

    Raises `ShardingError` where the global shapes differ, and for trees of specs: `.explain()`
    of a `Batch` has the bounds of its leaves.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
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

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> mesh = Mesh(x=2)
    >>> src = Spec(mesh, P("x"), shape=(4,))
    >>> owners = [src.replace(sizes={0: sizes}) for sizes in ((4, 0), (0, 4))]
    >>> lower_bound_together((src, owner, None) for owner in owners)
    Bound(bytes_received=8, peak_memory=16)
    """
    rows = [(*_as_sent(src, dst, wire), _lower_bound(src, dst, wire)) for src, dst, wire in moves]
    ranks = union_ranks(spec.mesh for row in rows for spec in row[:2])
    lacks, total = [], 0
    for src, dst, _ in rows:
        lack = _lacking(src, dst, ranks)
        item = min(src.dtype.itemsize, dst.dtype.itemsize)
        least = _least(src, dst)
        total += max(sum(lack), least.missing * item, least.messages * item)
        lacks.append(lack)
    ends = [add_vectors((local_bytes(row[at], ranks) for row in rows), ranks) for at in range(2)]
    most = max(add_vectors(lacks, ranks), default=0)
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
    needs = local_bytes(dst, ranks)
    if any(src.mesh.shape[axis] > 1 for axis in src.partition.unreduced):
        return needs
    return tuple(map(operator.sub, needs, overlap_bytes(src, dst, ranks)))


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
    kept = math.prod(src.mesh.shape[axis] for axis, _ in stay)
    addends = math.prod(src.mesh.shape[axis] for axis, _ in p.unreduced_kinds)
    members = math.prod(dst.mesh.shape[axis] for axis in group)
    if addends > 1 and members > 1 and not one:
        return NOTHING  # which addends may stay is not known where grids cross
    if addends > kept:
        missing = max_local_nbytes(dst) // dst.dtype.itemsize
    else:
        missing = max(total - held for total, held in overlaps(src, dst, group))
    if addends == members == 1:
        return Least(missing, members, 0, dst.mesh.size)
    ranks = src.mesh.devices if one else {*src.mesh.ranks, *dst.mesh.ranks}
    if one:
        meet = shared_elements(src, dst)
    else:
        meet = math.prod(src.shape) if len(ranks) < src.mesh.size + dst.mesh.size else 0
    near, far = _messages(src, dst, addends, kept)
    messages = meet * near + (math.prod(src.shape) - meet) * far
    return Least(missing, members, messages, len(ranks))


def _messages(src: Spec, dst: Spec, addends: int, kept: int) -> tuple[int, int]:
    """Messages of one element, where a holder of an addend is to have it, and where none is.

    The target's ranks are groups of `copies` each that hold one value; the values of a rank of
    each group, any, sum up. So every addend comes to all ranks of some group: else those of each
    group that do not know it would sum up without it. A message is known to its sender, so that
    an addend that moves leaves its holders once for the first time, in a message of its own.

    - The addend that leaves last is known to nobody else until then: addends - 1 messages go
      before, and from then on one to each of its group's ranks but those that hold it.
    - Those that hold it lack another addend of their group, if there is one. They send no first
      message before; who else there is sends one of each addend, so that first messages alone
      take the other addend to one of them at most. Each but one costs a message:
      addends - 1 + copies - 1 in all.
    - Groups of one addend cost a message for each rank that does not hold it, which is no less
      where there are more addends than one.
    - An addend need not move if all of its group hold it: one of each group, so `kept` at most.
    """
    size = dst.mesh.shape
    alone = _replicated(dst)
    copies = math.prod(size[axis] for axis in alone)
    both = copies
    if src.mesh == dst.mesh:  # else any of them may
        both = math.prod(size[axis] for axis in alone & _replicated(src))
    far = addends + copies - 1
    if addends == 1:
        return copies - both, far
    if both < copies:
        return far - 1, far
    return (far - kept if addends > kept else 0), far


def _replicated(spec: Spec) -> set[str]:
    p = spec.partition
    return set(spec.mesh.axes) - {*p.unreduced, *(axis for axes in p.dims for axis in axes)}
