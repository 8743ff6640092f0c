"""What each rank of an `Exchange` sends and receives, as boxes of the global tensor.

Worked out for one rank at a time, from its own boxes: never for all pairs of ranks. Every rank
finds the same, so that nothing has to be agreed on.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.program.infer import join_sizes

__all__ = [
    "Box",
    "Piece",
    "exchange_group",
    "kept",
    "moving_axes",
    "receives",
    "reduced_axes",
    "sends",
    "turned_axes",
]

Box = tuple[tuple[int, int], ...]
"""Start and stop in every dim, in the global tensor."""


class Piece(NamedTuple):
    """A box that goes to another rank, or comes from it."""

    peer: int
    box: Box


class Need(NamedTuple):
    """Ranks that lack one part of a shard, sorted, and that part."""

    ranks: tuple[int, ...]
    size: int
    box: Box


def sends(src: Spec, dst: Spec, rank: int) -> tuple[Piece, ...]:
    """What a rank sends in the exchange from `src` to `dst`: at most one box to each other rank.

    In the order of the ranks it sends to; empty for a rank outside of the source's mesh.

    Of a shard that several ranks hold each sends about as much: what the others need is laid out
    in the order of the ranks that need it and cut into equal runs, one per holder, who sends the
    pieces that have their middles in its run.

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
    """What a rank receives: all of its target that it does not hold, of every addend.

    In the order of the ranks that send it; empty for a rank outside of the target's mesh.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> mesh = Mesh(x=2, y=2)
    >>> src = Spec(mesh, P("x"), shape=(4, 2))
    >>> receives(src, src.replace(partition=P(None, "y")), 1)
    (Piece(peer=3, box=((2, 4), (1, 2))),)
    """
    if rank not in dst.mesh:
        return ()
    pieces = []
    target, fixed = _box(dst, rank), _fixed(src, dst, rank)
    for shard in _overlapping(src, target, _turned(src, dst, fixed)):
        for addend in _points(src.mesh, reduced_axes(src, dst)):
            first = _rank(src, shard, addend, fixed)
            holders = _holders(src, dst, first)
            if rank not in holders:
                box = _common(_box(src, first), target)
                pieces.append(Piece(_server(src, dst, holders[0], rank, _volume(box)), box))
    return tuple(sorted(pieces))


def kept(src: Spec, dst: Spec, rank: int) -> Box | None:
    """The box of its target that a rank holds already (its addend of it); None where none is.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2), P("x"), shape=(4, 2))
    >>> kept(src, src.replace(partition=P(None, "y")), 1)
    ((0, 2), (1, 2))
    """
    if rank not in src.mesh or rank not in dst.mesh:
        return None
    both = _common(_box(src, rank), _box(dst, rank))
    return both if all(start < stop for start, stop in both) else None


def reduced_axes(src: Spec, dst: Spec) -> tuple[str, ...]:
    """The axes that the source is unreduced along and the exchange reduces, in mesh order."""
    before, after = src.partition.unreduced, dst.partition.unreduced
    return tuple(axis for axis in src.mesh.axes if axis in before and axis not in after)


@lru_cache(maxsize=4096)
def turned_axes(src: Spec, dst: Spec) -> tuple[str, ...]:
    """The axes along which shards become addends, or reduced copies shards, in mesh order.

    A rank and all that it exchanges with agree in them: of what comes from another place along
    them it has no addend, and what it needs it takes from the copies at its own place.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2), P(("x", "y")), shape=(8,))
    >>> turned_axes(src, src.replace(partition=P(unreduced={"y"}, reduced={"x"})))
    ('y',)
    """
    p, q = src.partition, dst.partition
    if src.mesh != dst.mesh or not (q.unreduced_kinds or p.reduced_kinds):
        return ()
    before, after = ({axis for axes in spec.dims for axis in axes} for spec in (p, q))
    turned = (before & q.unreduced.keys()) | (after & p.reduced.keys())
    return tuple(axis for axis, size in src.mesh.shape.items() if size > 1 and axis in turned)


@lru_cache(maxsize=4096)
def moving_axes(src: Spec, dst: Spec) -> tuple[str, ...]:
    """The axes along which ranks of one mesh exchange anything, in mesh order.

    Along the others nothing does: they stay unreduced, or shard nothing before and after, or
    cut the same dim at the same places, or turn shards into addends or copies into shards, so
    that a rank and all it needs agree in them.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2, z=2), P(("x", "y")), shape=(8,))
    >>> moving_axes(src, src.replace(partition=P(("x", "z"))))
    ('y', 'z')
    """
    before, after, turned = _roles(src), _roles(dst), turned_axes(src, dst)
    return tuple(
        axis
        for axis, size in src.mesh.shape.items()
        if size > 1 and before.get(axis) != after.get(axis) and axis not in turned
    )


@lru_cache(maxsize=8192)
def exchange_group(src: Spec, dst: Spec, rank: int) -> tuple[int, ...]:
    """The ranks that take part in one launch with `rank`; none where it takes part in nothing.

    On one mesh its group along the axes that move, between two meshes all ranks that send or
    receive.
    """
    if src.mesh == dst.mesh:
        return src.mesh.group(rank, moving_axes(src, dst)) if rank in src.mesh else ()
    everyone = _busy(src, dst)
    return everyone if rank in everyone else ()


@lru_cache(maxsize=256)
def _busy(src: Spec, dst: Spec) -> tuple[int, ...]:
    addends = src.mesh.axis_size(reduced_axes(src, dst))
    busy: set[int] = set()
    seen: set[int] = set()
    for rank in src.mesh.ranks:
        if rank not in seen:
            seen.update(_holders(src, dst, rank))
            busy.update(_serving(src, dst, rank))
    for rank in dst.mesh.ranks:
        target, own = _box(dst, rank), kept(src, dst, rank)
        if _volume(target) and (own != target or addends > 1):
            busy.add(rank)
    return tuple(sorted(busy))


# -- who holds and who needs --------------------------------------------------------------


def _roles(spec: Spec) -> dict[str, object]:
    """What each axis does: the dim it cuts, into what and after how many others; its addends."""
    roles: dict[str, object] = {}
    for dim, axes in enumerate(spec.partition.dims):
        major = 1
        for at, axis in enumerate(axes):
            minor = math.prod(spec.mesh.shape[each] for each in axes[at + 1 :])
            roles[axis] = dim, major, join_sizes(spec.sizes[dim], minor)
            major *= spec.mesh.shape[axis]
    return roles | dict(spec.partition.unreduced_kinds)


def _fixed(src: Spec, dst: Spec, rank: int) -> Mapping[str, int]:
    """The coordinates that a rank shares with all that it exchanges with."""
    if src.mesh != dst.mesh:
        return MappingProxyType({})
    moving = moving_axes(src, dst)
    return {axis: c for axis, c in src.mesh.coords(rank).items() if axis not in moving}


def _turned(src: Spec, dst: Spec, fixed: Mapping[str, int]) -> Mapping[str, int]:
    """The coordinates among them that shards have, of those who exchange, on one side alone."""
    return {axis: fixed[axis] for axis in turned_axes(src, dst)}


@lru_cache(maxsize=65536)
def _holders(src: Spec, dst: Spec, rank: int) -> tuple[int, ...]:
    """The ranks that hold what `rank` holds, and can send it where `rank` can."""
    axes = _replicated(src, moving_axes(src, dst) if src.mesh == dst.mesh else src.mesh.axes)
    return tuple(sorted(src.mesh.group(rank, axes)))


def _replicated(spec: Spec, among: tuple[str, ...]) -> tuple[str, ...]:
    """Those axes along which all ranks hold the same."""
    p = spec.partition
    varied = {axis for axes in p.dims for axis in axes} | set(p.unreduced)
    return tuple(axis for axis in among if axis not in varied)


@lru_cache(maxsize=8192)
def _needs(src: Spec, dst: Spec, first: int) -> tuple[Need, ...]:
    """Who lacks what of one shard, which `first` is the first rank to hold."""
    holders = frozenset(_holders(src, dst, first))
    shard, fixed = _box(src, first), _fixed(src, dst, first)
    copies = _replicated(dst, moving_axes(src, dst) if src.mesh == dst.mesh else dst.mesh.axes)
    needs = []
    for target in _overlapping(dst, shard, _turned(src, dst, fixed)):
        one = _rank(dst, target, {}, fixed)
        ranks = _sorted_group(dst.mesh, one, copies)
        if not holders.isdisjoint(ranks):
            ranks = tuple(rank for rank in ranks if rank not in holders)
        if ranks:
            part = _common(_box(dst, one), shard)
            needs.append(Need(ranks, _volume(part), part))
    return tuple(needs)


@lru_cache(maxsize=4096)
def _sorted_group(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(sorted(mesh.group(rank, axes)))


def _server(src: Spec, dst: Spec, first: int, rank: int, size: int) -> int:
    """The holder that sends a rank what it lacks of one shard, of `size` elements."""
    holders = _holders(src, dst, first)
    if len(holders) == 1:
        return first
    needs = _needs(src, dst, first)
    before = sum(need.size * bisect_left(need.ranks, rank) for need in needs)
    return _in_run(holders, before, size, _total(needs))


def _in_run(holders: tuple[int, ...], before: int, size: int, total: int) -> int:
    """The holder in whose run the middle of a piece lies."""
    return holders[(2 * before + size) * len(holders) // (2 * total)]


@lru_cache(maxsize=256)
def _served(src: Spec, dst: Spec, first: int) -> tuple[tuple[int, int, Box], ...]:
    """Who sends what of one shard to whom, in the order of those who lack it."""
    holders, needs = _holders(src, dst, first), _needs(src, dst, first)
    total, before = _total(needs), 0
    served = []
    for rank, need in sorted((rank, each) for each in needs for rank in each.ranks):
        served.append((_in_run(holders, before, need.size, total), rank, need.box))
        before += need.size
    return tuple(served)


def _serving(src: Spec, dst: Spec, first: int) -> Iterable[int]:
    """The holders of one shard that send any of it: all, where no piece is longer than a run."""
    holders, needs = _holders(src, dst, first), _needs(src, dst, first)
    if max((need.size for need in needs), default=0) * len(holders) <= _total(needs):
        return holders if needs else ()
    return {holder for holder, _, _ in _served(src, dst, first)}


def _total(needs: Iterable[Need]) -> int:
    return sum(need.size * len(need.ranks) for need in needs)


def _rank(
    spec: Spec, shard: tuple[int, ...], addend: Mapping[str, int], fixed: Mapping[str, int]
) -> int:
    """A rank that holds a shard, given by its place in every dim."""
    coords = dict.fromkeys(spec.mesh.axes, 0) | dict(fixed) | dict(addend)
    for place, axes in zip(shard, spec.partition.dims, strict=True):
        rest = place
        for axis in reversed(axes):
            rest, coords[axis] = divmod(rest, spec.mesh.shape[axis])
    return spec.mesh.rank(**coords)


def _points(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    for point in itertools.product(*(range(mesh.shape[axis]) for axis in axes)):
        yield dict(zip(axes, point, strict=True))


# -- boxes --------------------------------------------------------------------------------


def _box(spec: Spec, rank: int) -> Box:
    return tuple((each.start, each.stop) for each in spec.index(rank))


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _common(one: Box, other: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _overlapping(spec: Spec, box: Box, turned: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """The shards of `spec` that have elements of `box`, by their places in every dim.

    Those alone that have the `turned` coordinates along these axes.
    """
    rows = [_places(spec, dim, *ends) for dim, ends in enumerate(box)]
    if turned:
        for dim, axes in enumerate(spec.partition.dims):
            minor = spec.dim_shards(dim)
            for axis in axes:
                size = spec.mesh.shape[axis]
                minor //= size
                if axis in turned:
                    rows[dim] = [at for at in rows[dim] if at // minor % size == turned[axis]]
    return itertools.product(*rows)


def _places(spec: Spec, dim: int, start: int, stop: int) -> list[int]:
    if start == stop:
        return []
    if spec.sizes[dim] is None:
        width = spec.shape[dim] // spec.dim_shards(dim)
        return list(range(start // width, -(-stop // width)))
    ends = _ends(spec, dim)
    places = range(bisect_right(ends, start), bisect_left(ends, stop) + 1)
    return [place for place in places if ends[place] > (ends[place - 1] if place else 0)]


@lru_cache(maxsize=1024)
def _ends(spec: Spec, dim: int) -> tuple[int, ...]:
    return tuple(itertools.accumulate(spec.shard_sizes(dim)))
