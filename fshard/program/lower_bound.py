"""Lower bounds on the bytes that any program between two specs receives and holds."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from fshard._util.errors import raise_if
from fshard._util.notebook_view import NotebookView
from fshard.layout.spec import Spec
from fshard.program.cost.rank_loads import add_vectors, union_ranks
from fshard.program.cost.rank_overlap import Ranks, Vector, local_bytes, overlap_bytes
from fshard.program.cost.shard_overlap import overlaps, shared_elements
from fshard.program.cost.traffic import max_local_nbytes, on_one_mesh
from fshard.program.program_arguments import endpoint_problems, wire_problems

Move = tuple[Spec, Spec, torch.dtype | None]


@dataclass(frozen=True, slots=True)
class Bound(NotebookView):
    """Lower bounds of the busiest rank, for any program between two specs.

    Attributes:
        bytes_received: Bytes that it receives at least.
        peak_memory: Bytes of its larger local, at the start or at the end.

    >>> import fshard as fs
    >>> fs.Bound(bytes_received=48, peak_memory=32)
    Bound(bytes_received=48, peak_memory=32)
    """

    bytes_received: int
    peak_memory: int


def lower_bound(src: Spec, dst: Spec, /, *, forward_dtype: torch.dtype | None = None) -> Bound:
    """Return the bytes that the busiest rank must receive and hold between two layouts.

    Between layouts without unreduced axes it is exact: the bytes that the worst-placed rank lacks,
    which an exchange receives and no more. With unreduced axes it is a bound that not every pair
    reaches, the larger of two. First, a rank, or the ranks that hold the partial sums of a target
    between them, must receive what they do not hold complete. Second, each element takes a number
    of messages, spread over all ranks at best: to reduce c partial sums and bring the sum to t
    ranks takes c - 1 and t - 1, and one more if no rank both holds a partial sum and needs the sum.
    Partial sums that stay unreduced may also be merged.

    Between two meshes the ranks are those of both, and the bound is 0 if partial sums may stay and
    the meshes have no common refinement (2x3 and 3x2). For even shards on one mesh it is 0 exactly
    if a program without communication exists. For uneven shards it may be 0 by coincidence: each
    rank happens to hold what it needs, though most steps would send it.

    Args:
        src: The spec of the input.
        dst: The spec of the output, of the same global shape.
        forward_dtype: The dtype that is sent, if it is not the specs' own.

    Returns:
        A `Bound` of the bytes that the busiest rank receives, and of its peak memory in bytes.

    Raises:
        ShardingError: If the global shapes differ, or for trees of specs; `.explain()` of a
            `Batch` has the bounds of its leaves.

    Boxes after Rink et al. (arXiv 2112.01075), reductions after Patarasu and Yuan (2009).

    >>> import fshard as fs
    >>> src = fs.Spec(fs.Mesh(x=4), fs.P(unreduced={"x"}), shape=(8,))
    >>> fs.lower_bound(src, src.replace(partition=fs.P()))
    Bound(bytes_received=48, peak_memory=32)
    """
    fix = "one pair at a time; of trees fs.redistribute(src, dst).explain() has the bounds"
    raise_if("fs.lower_bound", endpoint_problems("lower_bound", src, dst, fix))
    raise_if("fs.lower_bound", wire_problems(src, (forward_dtype,)))
    return _lower_bound(src, dst, forward_dtype)


@lru_cache(maxsize=4096)
def _lower_bound(src: Spec, dst: Spec, wire: torch.dtype | None) -> Bound:
    src, dst = _as_sent(src, dst, wire)
    needed = _minimum(src, dst)
    item = min(src.dtype.itemsize, dst.dtype.itemsize)
    peak = max(max_local_nbytes(src), max_local_nbytes(dst))
    received = max(-(-needed.lack // needed.members), -(-needed.messages // needed.ranks))
    return Bound(received * item, peak)


def lower_bound_together(moves: Iterable[Move]) -> Bound:
    """Return `lower_bound` of many tensors, from (source, target, dtype that is sent or None).

    It is the largest of three: the bytes that a rank lacks of all tensors, if known rank by rank;
    all messages, spread over all ranks; and the bound of a single tensor.

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
        lack = _lacked_bytes(src, dst, ranks)
        item = min(src.dtype.itemsize, dst.dtype.itemsize)
        needed = _minimum(src, dst)
        total += max(sum(lack), needed.lack * item, needed.messages * item)
        lacks.append(lack)
    ends = [add_vectors((local_bytes(row[end], ranks) for row in rows), ranks) for end in (0, 1)]
    most = max(add_vectors(lacks, ranks), default=0)
    return Bound(
        max(most, -(-total // max(1, len(ranks))), *(bound.bytes_received for *_, bound in rows)),
        max(map(max, ends)) if ranks else 0,
    )


def _lacked_bytes(src: Spec, dst: Spec, ranks: Ranks) -> Vector:
    """Return the bytes that each rank must receive itself: none if the target is unreduced."""
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


class _Minimum(NamedTuple):
    """Elements that the worst-placed group of `members` lacks, and messages of all `ranks`."""

    lack: int
    members: int
    messages: int
    ranks: int


@lru_cache(maxsize=4096)
def _minimum(src: Spec, dst: Spec) -> _Minimum:
    src, dst = on_one_mesh(src, dst)
    p, q = src.partition, dst.partition
    same_mesh = src.mesh == dst.mesh
    stay = set(p.unreduced_kinds) & set(q.unreduced_kinds) if same_mesh else set()
    group = tuple(axis for axis, _ in q.unreduced_kinds)
    kept = math.prod(src.mesh.shape[axis] for axis, _ in stay)
    num_partials = math.prod(src.mesh.shape[axis] for axis, _ in p.unreduced_kinds)
    members = math.prod(dst.mesh.shape[axis] for axis in group)
    if num_partials > 1 and members > 1 and not same_mesh:
        return _Minimum(0, 1, 0, 1)  # which partial sums may stay is unknown without a refinement
    if num_partials > kept:
        lack = max_local_nbytes(dst) // dst.dtype.itemsize
    else:
        lack = max(needs - holds for needs, holds in overlaps(src, dst, group))
    if num_partials == members == 1:
        return _Minimum(lack, members, 0, dst.mesh.size)
    ranks = src.mesh.devices if same_mesh else {*src.mesh.ranks, *dst.mesh.ranks}
    numel = math.prod(src.shape)
    if same_mesh:
        shared = shared_elements(src, dst)
    else:
        shared = numel if len(ranks) < src.mesh.size + dst.mesh.size else 0
    near, far = _messages(src, dst, num_partials, kept)
    return _Minimum(lack, members, shared * near + (numel - shared) * far, len(ranks))


def _messages(src: Spec, dst: Spec, num_partials: int, kept: int) -> tuple[int, int]:
    """Return the messages of one element, if some rank with a partial sum needs it, and if none.

    The target's ranks are groups of `copies` each that hold one value; the values of one rank of
    each group, any, add up to the sum. So every partial sum comes to all ranks of some group, or
    that group's ranks would add up without it. The sender of a message has its partial sum, so
    that a partial sum that leaves its holders does so for the first time in a message of its own.

    - The partial sum that leaves last is on no other rank until then: num_partials - 1 messages
      go before, and from then on one to each rank of its group but those that hold it.
    - Its holders lack another partial sum of their group, if there is one. They send no first
      message before; the other ranks send one for each partial sum, so that first messages alone
      bring that other partial sum to one holder at most. The others cost a message each:
      num_partials - 1 + copies - 1 in all.
    - Groups of one partial sum cost a message for each rank that does not hold it, which is no
      less if there are more partial sums than one.
    - A partial sum need not be sent if all of its group hold it: one of each group, so `kept` at
      most.
    """
    size = dst.mesh.shape
    copied = _replicated_axes(dst)
    copies = both = math.prod(size[axis] for axis in copied)
    if src.mesh == dst.mesh:  # else any copy may hold the partial sum
        both = math.prod(size[axis] for axis in copied & _replicated_axes(src))
    far = num_partials + copies - 1
    if num_partials == 1:
        return copies - both, far
    if both < copies:
        return far - 1, far
    return (far - kept if num_partials > kept else 0), far


def _replicated_axes(spec: Spec) -> set[str]:
    p = spec.partition
    return set(spec.mesh.axes) - {*p.unreduced, *(axis for axes in p.dims for axis in axes)}
