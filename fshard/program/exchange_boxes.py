"""Boxes of the global tensor that each rank of an `Exchange` sends and receives.

They are computed for one rank at a time, from its own box, never for all pairs of ranks. All ranks
compute the same assignment, so that none has to be communicated. `cost/shard_overlap.py` defines
the words, and counts elements where the boxes themselves are not required.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from fshard.layout.mesh import Mesh
from fshard.layout.mesh_groups import mesh_points, shard_coords
from fshard.layout.partition_spec import Kinds
from fshard.layout.spec import Spec
from fshard.program.boxes import Box, common, intersect, local_box, volume
from fshard.program.infer import DimSizes, join_sizes


class Piece(NamedTuple):
    """Box that is sent to, or received from, the rank `peer`."""

    peer: int
    box: Box


class _Need(NamedTuple):
    """Part of a shard, and the ranks that lack it, sorted."""

    ranks: tuple[int, ...]
    size: int
    box: Box


def sends(src: Spec, dst: Spec, rank: int) -> tuple[Piece, ...]:
    """Return the pieces that a rank sends in the exchange from `src` to `dst`, ordered by peer.

    There is at most one box for each other rank, and none from a rank outside of the source's
    mesh. All holders of one shard send about equal parts of it: the pieces that other ranks lack
    are lined up in the order of these ranks and split into equal runs, one for each holder, which
    sends the pieces whose middle is in its run.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> mesh = Mesh(x=2, y=2)
    >>> src = Spec(mesh, P("x"), shape=(4, 2))
    >>> sends(src, src.replace(partition=P(None, "y")), 1)
    (Piece(peer=3, box=((0, 2), (1, 2))),)
    """
    if rank not in src.mesh:
        return ()
    first = _holders(src, dst, rank)[0]
    served = _served(src, dst, first)
    return tuple(Piece(peer, box) for holder, peer, box in served if holder == rank)


@lru_cache(maxsize=8192)
def receives(src: Spec, dst: Spec, rank: int) -> tuple[Piece, ...]:
    """Return the pieces that a rank receives, ordered by peer: all it lacks of every partial sum.

    There is none for a rank outside of the target's mesh.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> mesh = Mesh(x=2, y=2)
    >>> src = Spec(mesh, P("x"), shape=(4, 2))
    >>> receives(src, src.replace(partition=P(None, "y")), 1)
    (Piece(peer=3, box=((2, 4), (1, 2))),)
    """
    if rank not in dst.mesh:
        return ()
    pieces = []
    target, fixed = local_box(dst, rank), _fixed(src, dst, rank)
    for shard in _overlapping(src, target, _converted_coords(src, dst, fixed)):
        for partial in mesh_points(src.mesh, reduction_axes(src, dst)):
            first = _rank(src, shard, {**fixed, **partial})
            holders = _holders(src, dst, first)
            if rank not in holders:
                box = common(local_box(src, first), target)
                pieces.append(Piece(_server(src, dst, holders[0], rank, volume(box)), box))
    return tuple(sorted(pieces))


def sent_elements(src: Spec, dst: Spec, sender: int, receiver: int) -> int:
    """Count the elements that one rank sends another in the exchange, without listing pieces.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2), P("x"), shape=(4, 2))
    >>> sent_elements(src, src.replace(partition=P(None, "y")), 3, 1)
    2
    """
    if sender not in src.mesh or receiver not in dst.mesh:
        return 0
    holders, fixed = _holders(src, dst, sender), _fixed(src, dst, receiver)
    if receiver in holders or any(src.mesh.coords(sender)[axis] != i for axis, i in fixed.items()):
        return 0
    box = intersect(local_box(src, sender), local_box(dst, receiver))
    if box is None:
        return 0
    size = volume(box)
    return size if _server(src, dst, holders[0], receiver, size) == sender else 0


def kept_box(src: Spec, dst: Spec, rank: int) -> Box | None:
    """Return the box of its target that a rank holds (of its own partial sum), or None.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2), P("x"), shape=(4, 2))
    >>> kept_box(src, src.replace(partition=P(None, "y")), 1)
    ((0, 2), (1, 2))
    """
    if rank not in src.mesh or rank not in dst.mesh:
        return None
    return intersect(local_box(src, rank), local_box(dst, rank))


def reduction_axes(src: Spec, dst: Spec) -> tuple[str, ...]:
    """Return the axes along which the exchange reduces an unreduced source, in mesh order."""
    before, after = src.partition.unreduced, dst.partition.unreduced
    return tuple(axis for axis in src.mesh.axes if axis in before and axis not in after)


@lru_cache(maxsize=4096)
def converted_axes(src: Spec, dst: Spec) -> tuple[str, ...]:
    """Return the axes along which the exchange converts between shards and states, in mesh order.

    Along these, shards become unreduced, or reduced copies become shards. A rank and all ranks
    that it exchanges with have the same coordinate along them: elements from another coordinate
    have no partial sum there, and a reduced copy is sliced on its own rank.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2), P(("x", "y")), shape=(8,))
    >>> converted_axes(src, src.replace(partition=P(unreduced={"y"}, reduced={"x"})))
    ('y',)
    """
    p, q = src.partition, dst.partition
    if src.mesh != dst.mesh:
        return ()
    axes = converted(p.dims, p.reduced_kinds, q.dims, q.unreduced_kinds)
    return tuple(axis for axis, size in src.mesh.shape.items() if size > 1 and axis in axes)


def converted(
    have: Iterable[tuple[str, ...]],
    reduced: Kinds,
    need: Iterable[tuple[str, ...]],
    unreduced: Kinds,
) -> frozenset[str]:
    """Return `converted_axes`, in any order, from the dims and states of two layouts."""
    if not unreduced and not reduced:
        return frozenset()
    embedded = {axis for axis, _ in unreduced}.intersection(itertools.chain(*have))
    return frozenset(embedded | {axis for axis, _ in reduced}.intersection(itertools.chain(*need)))


@lru_cache(maxsize=4096)
def exchange_axes(src: Spec, dst: Spec) -> tuple[str, ...]:
    """Return the axes along which ranks of one mesh exchange anything, in mesh order.

    Nothing is exchanged along an axis that stays unreduced, or shards nothing in both layouts, or
    shards the same dim at the same positions, or is among the `converted_axes`.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2, z=2), P(("x", "y")), shape=(8,))
    >>> exchange_axes(src, src.replace(partition=P(("x", "z"))))
    ('y', 'z')
    """
    before, after = (
        axis_positions(spec.mesh.shape, spec.partition.dims, spec.sizes)
        | dict(spec.partition.unreduced_kinds)
        for spec in (src, dst)
    )
    axes = converted_axes(src, dst)
    return tuple(
        axis
        for axis, size in src.mesh.shape.items()
        if size > 1 and before.get(axis) != after.get(axis) and axis not in axes
    )


def axis_positions(
    axis_sizes: Mapping[str, int],
    dims: Iterable[tuple[str, ...]],
    sizes: Iterable[tuple[int, ...] | None],
    join: Callable[[DimSizes, int], DimSizes] = join_sizes,
) -> dict[str, object]:
    """Return where each axis shards: dim, shards major to it, sizes of the shards up to it.

    `join` is `join_sizes`, or remembers its results.
    """
    positions: dict[str, object] = {}
    for dim, (axes, dim_sizes) in enumerate(zip(dims, sizes, strict=True)):
        joined, major = dim_sizes, math.prod([axis_sizes[axis] for axis in axes])
        for axis in reversed(axes):
            major //= axis_sizes[axis]
            positions[axis] = dim, major, joined
            joined = join(joined, axis_sizes[axis])
    return positions


@lru_cache(maxsize=8192)
def exchange_group(src: Spec, dst: Spec, rank: int) -> tuple[int, ...]:
    """Return the ranks that take part in one launch with `rank`, or none if it does not.

    On one mesh these are its group along `exchange_axes`, between two meshes all ranks that send
    or receive.
    """
    if src.mesh == dst.mesh:
        return src.mesh.group(rank, exchange_axes(src, dst)) if rank in src.mesh else ()
    ranks = _participants(src, dst)
    return ranks if rank in ranks else ()


@lru_cache(maxsize=256)
def _participants(src: Spec, dst: Spec) -> tuple[int, ...]:
    """Return all ranks of two meshes that send or receive, sorted."""
    num_partials = src.mesh.axis_size(reduction_axes(src, dst))
    participants: set[int] = set()
    seen: set[int] = set()
    for rank in src.mesh.ranks:
        if rank not in seen:
            seen.update(_holders(src, dst, rank))
            participants.update(_senders(src, dst, rank))
    for rank in dst.mesh.ranks:
        target = local_box(dst, rank)
        if volume(target) and (kept_box(src, dst, rank) != target or num_partials > 1):
            participants.add(rank)
    return tuple(sorted(participants))


# -- holders and needers ------------------------------------------------------------------


def _fixed(src: Spec, dst: Spec, rank: int) -> Mapping[str, int]:
    """Return the coordinates that a rank has in common with all that it exchanges with."""
    if src.mesh != dst.mesh:
        return MappingProxyType({})
    axes = exchange_axes(src, dst)
    return {axis: c for axis, c in src.mesh.coords(rank).items() if axis not in axes}


def _converted_coords(src: Spec, dst: Spec, fixed: Mapping[str, int]) -> Mapping[str, int]:
    """Return the coordinates among `fixed` along the converted axes."""
    return {axis: fixed[axis] for axis in converted_axes(src, dst)}


@lru_cache(maxsize=65536)
def _holders(src: Spec, dst: Spec, rank: int) -> tuple[int, ...]:
    """Return the ranks, sorted, that hold the shard of `rank` and can send it to the same ranks."""
    axes = _replicated(src, exchange_axes(src, dst) if src.mesh == dst.mesh else src.mesh.axes)
    return tuple(sorted(src.mesh.group(rank, axes)))


def _replicated(spec: Spec, among: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of `among` along which all ranks hold the same values."""
    p = spec.partition
    varied = {axis for axes in p.dims for axis in axes} | set(p.unreduced)
    return tuple(axis for axis in among if axis not in varied)


@lru_cache(maxsize=8192)
def _needs(src: Spec, dst: Spec, first: int) -> tuple[_Need, ...]:
    """Return the parts of one shard that other ranks lack; `first` is its first holder."""
    holders = frozenset(_holders(src, dst, first))
    shard, fixed = local_box(src, first), _fixed(src, dst, first)
    copies = _replicated(dst, exchange_axes(src, dst) if src.mesh == dst.mesh else dst.mesh.axes)
    needs = []
    for target in _overlapping(dst, shard, _converted_coords(src, dst, fixed)):
        needer = _rank(dst, target, fixed)
        ranks = _sorted_group(dst.mesh, needer, copies)
        if not holders.isdisjoint(ranks):
            ranks = tuple(rank for rank in ranks if rank not in holders)
        if ranks:
            part = common(local_box(dst, needer), shard)
            needs.append(_Need(ranks, volume(part), part))
    return tuple(needs)


@lru_cache(maxsize=4096)
def _sorted_group(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(sorted(mesh.group(rank, axes)))


def _server(src: Spec, dst: Spec, first: int, rank: int, size: int) -> int:
    """Return the holder that sends a rank the `size` elements that it lacks of one shard."""
    holders = _holders(src, dst, first)
    if len(holders) == 1:
        return first
    needs = _needs(src, dst, first)
    before = sum(need.size * bisect_left(need.ranks, rank) for need in needs)
    return _in_run(holders, before, size, _total(needs))


def _in_run(holders: tuple[int, ...], before: int, size: int, total: int) -> int:
    """Return the holder whose run contains the middle of a piece."""
    return holders[(2 * before + size) * len(holders) // (2 * total)]


@lru_cache(maxsize=256)
def _served(src: Spec, dst: Spec, first: int) -> tuple[tuple[int, int, Box], ...]:
    """Return (sender, receiver, box) of every piece of one shard, ordered by receiver."""
    holders, needs = _holders(src, dst, first), _needs(src, dst, first)
    total, before = _total(needs), 0
    served = []
    for rank, part in sorted((rank, need) for need in needs for rank in need.ranks):
        served.append((_in_run(holders, before, part.size, total), rank, part.box))
        before += part.size
    return tuple(served)


def _senders(src: Spec, dst: Spec, first: int) -> Iterable[int]:
    """Return the holders of one shard that send any of it: all, if no piece exceeds a run."""
    holders, needs = _holders(src, dst, first), _needs(src, dst, first)
    if max((need.size for need in needs), default=0) * len(holders) <= _total(needs):
        return holders if needs else ()
    return {holder for holder, _, _ in _served(src, dst, first)}


def _total(needs: Iterable[_Need]) -> int:
    return sum(need.size * len(need.ranks) for need in needs)


def _rank(spec: Spec, shard: tuple[int, ...], coords: Mapping[str, int]) -> int:
    """Return a rank that holds a shard, the one at `coords` along other axes; 0 by default."""
    zeros = dict.fromkeys(spec.mesh.axes, 0)
    return spec.mesh.rank(**{**zeros, **coords, **shard_coords(spec, shard)})


# -- overlapping shards --------------------------------------------------------------------


def _overlapping(spec: Spec, box: Box, coords: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """Return the shards of `spec` at `coords` with elements of `box`, as an index for every dim."""
    rows = [_overlapping_in_dim(spec, dim, *ends) for dim, ends in enumerate(box)]
    if coords:
        for dim, axes in enumerate(spec.partition.dims):
            minor = spec.dim_shards(dim)
            for axis in axes:
                size = spec.mesh.shape[axis]
                minor //= size
                if axis in coords:
                    rows[dim] = [i for i in rows[dim] if i // minor % size == coords[axis]]
    return itertools.product(*rows)


def _overlapping_in_dim(spec: Spec, dim: int, start: int, stop: int) -> list[int]:
    """Return the indices of the shards of a dim that meet an interval."""
    if start == stop:
        return []
    if spec.sizes[dim] is None:
        width = spec.shape[dim] // spec.dim_shards(dim)
        return list(range(start // width, -(-stop // width)))
    ends = _ends(spec, dim)
    indices = range(bisect_right(ends, start), bisect_left(ends, stop) + 1)
    return [i for i in indices if ends[i] > (ends[i - 1] if i else 0)]


@lru_cache(maxsize=1024)
def _ends(spec: Spec, dim: int) -> tuple[int, ...]:
    return tuple(itertools.accumulate(spec.shard_sizes(dim)))
