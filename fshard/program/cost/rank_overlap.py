"""Elements that each rank needs, holds and lacks, as vectors over the ranks of a mesh.

Words are those of `shard_overlap.py`. Dims are sharded independently, so every vector is a product
of one factor per dim; searches meet the same factors again and again, and `RankOverlap` remembers
them. On a mesh of more than `MAX_RANKS` ranks a sample stands for all, so that planning time does
not depend on the number of ranks; the lack of the sample is a lower bound.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import lru_cache

from fshard.layout.mesh import Mesh
from fshard.layout.mesh_groups import shard_coords
from fshard.layout.spec import Spec
from fshard.program.cost.dim_overlap import Interval, even_stops
from fshard.program.cost.shard_overlap import (
    NO_AXES,
    masks_by_coordinate,
    meeting_pieces,
    shard_indices,
    shard_intervals,
)
from fshard.program.cost.traffic import Traffic, busiest_exchange, max_local_nbytes

MAX_RANKS = 64
"""Ranks of larger meshes are sampled: at most so many, spread over the mesh."""

Axes = tuple[str, ...]
DimSharding = tuple[Axes, tuple[int, ...] | None]
"""The axes of a dim, and the sizes of its shards, None if they are equal."""

DimShardings = tuple[DimSharding, ...]

Ranks = range | tuple[int, ...]
Vector = tuple[int, ...]
"""One number for each of some ranks, in their order."""


def shard_stops(sizes: tuple[int, ...]) -> list[int]:
    """Return the ends of the shards of a dim, 0 first."""
    return [*itertools.accumulate(sizes, initial=0)]


class RankOverlap:
    """Tables of the shards that the ranks of one mesh have in layouts of one global shape."""

    def __init__(
        self,
        mesh: Mesh,
        shape: Sequence[int],
        always: Iterable[int] = (),
        stops_of: Callable[[tuple[int, ...]], Sequence[int]] = shard_stops,
        max_ranks: int = MAX_RANKS,
    ) -> None:
        """Choose the ranks: all of at most `max_ranks`, or a sample and those at `always`.

        `stops_of` is `shard_stops`, or remembers its results.
        """
        self.mesh = mesh
        self.shape = shape
        self.complete = mesh.size <= max_ranks
        stride = 1 if self.complete else (mesh.size // MAX_RANKS) | 1
        ranks = sorted({*range(0, mesh.size, stride), *always})
        self.coords: dict[str, list[int]] = {}
        stride = mesh.size
        for axis, n in mesh.shape.items():
            stride //= n
            self.coords[axis] = [rank // stride % n for rank in ranks]
        self.count = len(ranks)
        self._intervals: dict[tuple[int, DimSharding], list[Interval]] = {}
        self._distinct: dict[tuple[int, DimSharding], set[Interval]] = {}
        self._dim_holds: dict[tuple[int, DimSharding, DimSharding], list[int]] = {}
        self._pieces: dict[tuple[int, DimSharding, DimSharding, Set[str]], int] = {}
        self.stops_of = stops_of
        self._dim_needs: dict[tuple[int, DimSharding, DimSharding, Set[str]], list[int]] = {}
        self._numels: dict[DimShardings, list[int]] = {}
        self._holds: dict[tuple[DimShardings, DimShardings], list[int]] = {}

    def max_lack(
        self,
        have: DimShardings,
        need: DimShardings,
        num_partials: int = 1,
        within: Collection[str] = (),
    ) -> int:
        """Return the elements that the worst-placed rank lacks of `num_partials` partial sums.

        Ranks along `within` must need the same; they pool what they hold, and the result is what
        all of them together lack.
        """
        needs, holds = self.numels(need), self.holds(have, need)
        if not within:
            needs = [num_partials * a for a in needs] if num_partials > 1 else needs
            lack: int = max(map(operator.sub, needs, holds))
            return lack
        if not self.complete:
            return 0
        outside = [axis for axis in self.coords if axis not in within]
        groups = list(zip(*(self.coords[axis] for axis in outside), strict=True))
        lacks: dict[tuple[int, ...], int] = {}
        for group, a, b in zip(groups or [()] * self.count, needs, holds, strict=True):
            lacks[group] = lacks.get(group, num_partials * a) - b
        return max(lacks.values())

    def exchange_traffic(
        self,
        have: DimShardings,
        need: DimShardings,
        item: int,
        num_partials: int,
        needers: int,
        holders: int,
        converted: Set[str] = NO_AXES,
    ) -> Traffic:
        """Return `traffic` of an exchange of elements of `item` bytes, if no rank is left out.

        `needers` and `holders` are the ranks that need and that hold each shard.
        """
        holds = self.holds(have, need)
        targets = list(zip(self.needs(have, need, converted), holds, strict=True))
        shards = list(zip(self.needs(need, have, converted), holds, strict=True))
        incoming, outgoing = (
            self.pieces(have, need, converted), self.pieces(need, have, converted)
        )  # fmt: skip
        return busiest_exchange(
            targets, shards, item, num_partials, needers, holders, incoming, outgoing
        )

    def pieces(self, have: DimShardings, need: DimShardings, converted: Set[str]) -> int:
        """Bound the source shards that a target shard meets: the product of the most per dim."""
        count = 1
        for dim, (before, after) in enumerate(zip(have, need, strict=True)):
            key = dim, before, after, converted
            most = self._pieces.get(key)
            if most is None:
                stops, targets = self.stops(dim, before), self.distinct(dim, after)
                masks: Iterable[tuple[bool, ...] | None] = [None]
                if not converted.isdisjoint(before[0]):
                    masks = masks_by_coordinate(self.mesh.shape, before[0], converted)
                most = max(meeting_pieces(stops, targets, mask) for mask in masks)
                self._pieces[key] = most
            count *= most
        return count

    def needs(self, have: DimShardings, need: DimShardings, converted: Set[str]) -> list[int]:
        """Count the elements that each rank needs: its shard of `need`.

        Only elements from source shards at the rank's own coordinate along the `converted` axes
        of `have` are needed.
        """
        if not converted or converted.isdisjoint(itertools.chain(*(axes for axes, _ in have))):
            return self.numels(need)
        counts = [1] * self.count
        for dim, (before, after) in enumerate(zip(have, need, strict=True)):
            key = dim, before, after, converted
            factor = self._dim_needs.get(key)
            if factor is None:
                factor = self._dim_needs[key] = self._needs_of_dim(*key)
            counts = [a * b for a, b in zip(counts, factor, strict=True)]
        return counts

    def _needs_of_dim(
        self, dim: int, have: DimSharding, need: DimSharding, converted: Set[str]
    ) -> list[int]:
        """Return one dim's factor in `needs`."""
        shards = list(itertools.pairwise(self.stops(dim, have)))
        goals = self.stops(dim, need)
        # For each coordinate along the converted axes: elements there before the end of each goal.
        below = [
            [sum([min(goal, b) - a for a, b in selected if a < goal]) for goal in goals]
            for mask in masks_by_coordinate(self.mesh.shape, have[0], converted)
            for selected in [list(itertools.compress(shards, mask))]
        ]
        coordinates = self.index(tuple(axis for axis in have[0] if axis in converted))
        return [
            below[coordinate][i + 1] - below[coordinate][i]
            for coordinate, i in zip(coordinates, self.index(need[0]), strict=True)
        ]

    def numels(self, layout: DimShardings) -> list[int]:
        """Count the elements of each rank's shard."""
        counts = self._numels.get(layout)
        if counts is None:
            unsharded = [n for n, (axes, _) in zip(self.shape, layout, strict=True) if not axes]
            counts = [math.prod(unsharded)] * self.count
            for dim, sharding in enumerate(layout):
                if sharding[0]:
                    widths = [high - low for low, high in self.intervals(dim, sharding)]
                    counts = [*map(operator.mul, counts, widths)]
            self._numels[layout] = counts
        return counts

    def holds(self, have: DimShardings, need: DimShardings) -> list[int]:
        """Count the elements that each rank has in both layouts."""
        counts = self._holds.get((have, need)) or self._holds.get((need, have))
        if counts is not None:
            return counts
        pairs = list(zip(have, need, strict=True))
        unsharded = [n for n, (a, b) in zip(self.shape, pairs, strict=True) if not (a[0] or b[0])]
        counts = [math.prod(unsharded)] * self.count
        for dim, pair in enumerate(pairs):
            if not (pair[0][0] or pair[1][0]):
                continue
            factor = self._dim_holds.get((dim, *pair))
            if factor is None:
                ends = zip(*(self.intervals(dim, sharding) for sharding in pair), strict=True)
                factor = [max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in ends]
                self._dim_holds[dim, *pair] = factor
            counts = [*map(operator.mul, counts, factor)]
        self._holds[have, need] = counts
        return counts

    def intervals(self, dim: int, sharding: DimSharding) -> list[Interval]:
        """Return start and stop of each rank's shard of a dim."""
        intervals = self._intervals.get((dim, sharding))
        if intervals is None:
            stops = self.stops(dim, sharding)
            intervals = [(stops[i], stops[i + 1]) for i in self.index(sharding[0])]
            self._intervals[dim, sharding] = intervals
        return intervals

    def distinct(self, dim: int, sharding: DimSharding) -> set[Interval]:
        """Return the different `intervals` of a dim."""
        if (dim, sharding) not in self._distinct:
            self._distinct[dim, sharding] = set(self.intervals(dim, sharding))
        return self._distinct[dim, sharding]

    def index(self, axes: Axes) -> list[int]:
        """Return the row-major index of each rank along `axes`."""
        index = [0] * self.count
        for axis in axes:
            n = self.mesh.shape[axis]
            index = [n * a + b for a, b in zip(index, self.coords[axis], strict=True)]
        return index

    def stops(self, dim: int, sharding: DimSharding) -> Sequence[int]:
        """Return the ends of all shards of a dim, 0 first."""
        axes, sizes = sharding
        if sizes is None:
            return even_stops(self.shape[dim], math.prod(self.mesh.shape[axis] for axis in axes))
        return self.stops_of(sizes)


def index_of_largest(spec: Spec) -> int:
    """Return the row-major index on the mesh of the first rank with the largest shard."""
    largest = shard_coords(spec, [sizes.index(max(sizes)) if sizes else 0 for sizes in spec.sizes])
    index = 0
    for axis, n in spec.mesh.shape.items():
        index = n * index + largest.get(axis, 0)
    return index


# -- bytes, of the ranks of one or two meshes -----------------------------------------------


@lru_cache(maxsize=512)
def local_bytes(spec: Spec, ranks: Ranks) -> Vector:
    """Return the bytes of each rank's local, 0 outside of the spec's mesh."""
    if any(spec.sizes):
        return overlap_bytes(spec, spec, ranks)
    local = max_local_nbytes(spec)
    return tuple([local if place >= 0 else 0 for place in places(spec.mesh, ranks)])


@lru_cache(maxsize=512)
def overlap_bytes(src: Spec, dst: Spec, ranks: Ranks) -> Vector:
    """Return the bytes of its local of `dst` that each rank holds in that of `src`."""
    sharded = [
        dim
        for dim, axes in enumerate(zip(src.partition.dims, dst.partition.dims, strict=True))
        if any(axes)
    ]
    item = src.dtype.itemsize
    item *= math.prod(n for dim, n in enumerate(src.shape) if dim not in sharded)
    both = zip(places(src.mesh, ranks), places(dst.mesh, ranks), strict=True)
    sizes = [item if min(pair) >= 0 else 0 for pair in both]
    for dim in sharded:
        rows = zip(sizes, _intervals(src, dim, ranks), _intervals(dst, dim, ranks), strict=True)
        sizes = [
            size and size * max(0, min(stop, end) - max(start, begin))
            for size, (start, stop), (begin, end) in rows
        ]
    return tuple(sizes)


def needed_bytes(src: Spec, dst: Spec, ranks: Ranks, converted: tuple[str, ...]) -> Vector:
    """Return the bytes of its local of `dst` that each rank needs.

    Only elements from source shards at the rank's own coordinate along `converted` are needed.
    """
    if not converted:
        return local_bytes(dst, ranks)
    inside = places(src.mesh, ranks)
    sizes = [dst.dtype.itemsize if place >= 0 else 0 for place in places(dst.mesh, ranks)]
    for dim, axes in enumerate(src.partition.dims):
        masks = masks_by_coordinate(src.mesh.shape, axes, frozenset(converted))
        shards = [[*itertools.compress(shard_intervals(src, dim), mask)] for mask in masks]
        indices = shard_indices(src.mesh, tuple(axis for axis in axes if axis in converted))
        rows = zip(inside, sizes, _intervals(dst, dim, ranks), strict=True)
        sizes = [
            size
            and size * sum(max(0, min(stop, b) - max(start, a)) for a, b in shards[indices[place]])
            for place, size, (start, stop) in rows
        ]
    return tuple(sizes)


@lru_cache(maxsize=128)
def places(mesh: Mesh, ranks: Ranks) -> Sequence[int]:
    """Return the place of each rank in `mesh.devices`, -1 for ranks outside of the mesh."""
    if mesh.devices == ranks:
        return range(mesh.size)
    place = dict(zip(mesh.devices, range(mesh.size), strict=True))
    return [place.get(rank, -1) for rank in ranks]


def _intervals(spec: Spec, dim: int, ranks: Ranks) -> list[Interval]:
    """Return start and stop of each rank's shard of a dim, (0, 0) outside of the mesh."""
    intervals = shard_intervals(spec, dim)
    indices = shard_indices(spec.mesh, spec.partition.dims[dim])
    return [
        intervals[indices[place]] if place >= 0 else (0, 0) for place in places(spec.mesh, ranks)
    ]
