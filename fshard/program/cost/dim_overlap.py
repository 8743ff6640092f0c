"""Lengths of one dim that ranks need and hold, as lists over many coordinates.

Words are those of `shard_overlap.py`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from fshard.layout.spec import Spec

BLOCK = 4096
"""Points that lists are made for at once."""
Interval = tuple[int, int]
Points = Mapping[str, Sequence[int]]
"""Coordinates by axis, one for each of some points."""


def all_points(axis_sizes: Mapping[str, int]) -> Points:
    """Return all coordinates along axes, in row-major order.

    >>> all_points({"x": 2, "y": 2})
    {'x': [0, 0, 1, 1], 'y': [0, 1, 0, 1]}
    """
    count = stride = math.prod(axis_sizes.values())
    points = {}
    for axis, n in axis_sizes.items():
        stride //= n
        points[axis] = [i for i in range(n) for _ in range(stride)] * (count // (n * stride))
    return points


def point_blocks(axis_sizes: Mapping[str, int]) -> Iterator[Points]:
    """Yield `all_points` in blocks, of at most `BLOCK` points unless the last axis has more."""
    sizes = [*axis_sizes.items()]
    cut = max(len(sizes) - 1, 0)
    while cut and math.prod(n for _, n in sizes[cut - 1 :]) <= BLOCK:
        cut -= 1
    inner = all_points(dict(sizes[cut:]))
    count = math.prod(n for _, n in sizes[cut:])
    for outer in itertools.product(*(range(n) for _, n in sizes[:cut])):
        rows = zip(sizes[:cut], outer, strict=True)
        yield {axis: (i,) * count for (axis, _), i in rows} | dict(inner)


def row_major(axis_sizes: Mapping[str, int], axes: Sequence[str], points: Points) -> list[int]:
    """Return the index along `axes` of each point, major to minor; one 0 without axes."""
    indices = [0]
    for i, axis in enumerate(axes):
        n = axis_sizes[axis]
        column = points[axis]
        indices = [n * a + b for a, b in zip(indices, column, strict=True)] if i else [*column]
    return indices


def even_stops(length: int, count: int) -> Sequence[int]:
    """Return the ends of `count` equal shards of a dim, 0 first."""
    return range(0, length + 1, length // count) if length else (0,) * (count + 1)


def point_overlaps(dims: Sequence[DimOverlap], points: Points) -> tuple[list[int], list[int]]:
    """Return the elements that the rank at each point needs, and that its group holds."""
    count = len(next(iter(points.values()), (0,)))
    needs = holds = [1] * count
    for dim in dims:
        longer, common = dim.overlaps(points)
        if len(longer) == 1:
            longer, common = longer * count, common * count
        needs = [a * b for a, b in zip(needs, longer, strict=True)]
        holds = [a * b for a, b in zip(holds, common, strict=True)]
    return needs, holds


class _Sources(NamedTuple):
    """Source shards at one coordinate along some axes: their ends, and the lengths before each."""

    starts: list[int]
    stops: list[int]
    before: list[int]

    def below(self, end: int) -> int:
        """Return the length of the shards before `end`."""
        i = bisect_left(self.starts, end)
        return self.before[i] - max(0, self.stops[i - 1] - end) if i else 0


class DimOverlap:
    """Length of one dim that a rank needs and that its group holds, by the rank's coordinates.

    `axes` are the axes on which that depends. If both layouts are even and begin with the same
    axes, one shard along these stands for all.
    """

    def __init__(
        self, src: Spec, dst: Spec, dim: int, group: tuple[str, ...], converted: Set[str]
    ) -> None:
        self.axis_sizes = axis_sizes = src.mesh.shape
        have = [axis for axis in src.partition.dims[dim] if axis_sizes[axis] > 1]
        need = [axis for axis in dst.partition.dims[dim] if axis_sizes[axis] > 1]
        self.length = src.shape[dim]
        if src.sizes[dim] is None and dst.sizes[dim] is None:
            while have and need and have[0] == need[0]:
                self.length //= axis_sizes[have.pop(0)]
                need.pop(0)
        self.apart = [axis for axis in have if axis not in group]
        self.have, self.need = (have if self.apart else []), need
        self.converted = [axis for axis in self.have if axis in converted]
        self.src_ends = self._ends(self.have, src.sizes[dim] if self.apart else None)
        self.dst_ends, sizes = self._ends(need, dst.sizes[dim]), dst.sizes[dim]
        self.widest = max(sizes) if sizes else self.dst_ends[1]
        self.largest = None if sizes is None else sizes.index(self.widest)
        even = sizes is None and (not self.apart or src.sizes[dim] is None)
        alike = even and not (self.apart and need)
        self.axes = () if alike else tuple(dict.fromkeys((*need, *self.apart)))

    def _ends(self, axes: Sequence[str], sizes: tuple[int, ...] | None) -> Sequence[int]:
        """Return the ends of the shards along `axes`, 0 first; None sizes are even."""
        if sizes is not None:
            return [*itertools.accumulate(sizes, initial=0)]
        return even_stops(self.length, math.prod(self.axis_sizes[axis] for axis in axes))

    def widest_coords(self) -> dict[str, int]:
        """Return the coordinates of the largest target shard, if shards differ."""
        if not self.axes or self.largest is None:
            return {}
        index, coords = self.largest, {}
        for axis in reversed(self.need):
            index, coords[axis] = divmod(index, self.axis_sizes[axis])
        return coords

    def overlaps(self, points: Points) -> tuple[list[int], list[int]]:
        """Return the length that the rank at each point needs, and how much its group holds.

        One of each stands for all points if they do not depend on these.
        """
        if not self.axes:
            points = dict.fromkeys((*self.need, *self.apart), (0,))
        targets = row_major(self.axis_sizes, self.need, points)
        if not self.need and self.axes:
            targets *= len(points[self.axes[0]])
        ends = self.dst_ends
        needs = [ends[i + 1] - ends[i] for i in targets]
        if self.converted:
            needs = self._common(targets, self.converted, points)
        return needs, self._common(targets, self.apart, points) if self.apart else needs

    def _common(self, targets: list[int], fixed: list[str], points: Points) -> list[int]:
        """Return the length of targets in source shards with the rank's coords on `fixed`."""
        places = row_major(self.axis_sizes, fixed, points)
        ends, held = self.dst_ends, self.src_ends
        if fixed == self.have:
            return [
                max(0, min(ends[i + 1], held[j + 1]) - max(ends[i], held[j]))
                for i, j in zip(targets, places, strict=True)
            ]
        below = self._even_below if isinstance(self.src_ends, range) else self._uneven_below
        before = below(fixed)
        keys = [*zip(targets, places, strict=True)]
        lengths = {(i, j): before(j, ends[i + 1]) - before(j, ends[i]) for i, j in {*keys}}
        return [lengths[key] for key in keys]

    def _even_below(self, fixed: list[str]) -> Callable[[int, int], int]:
        """Return a function of the length before an end in even shards at a place along `fixed`."""

        def below(place: int, end: int) -> int:
            width, count = self.length, 0
            parts = math.prod(self.axis_sizes[axis] for axis in fixed)
            for axis in self.have:
                width //= self.axis_sizes[axis]
                digit, rest = divmod(end, width)
                if axis not in fixed:
                    count, end = count + digit * (width // parts), rest
                    continue
                parts //= self.axis_sizes[axis]
                own, place = divmod(place, parts)
                if digit != own:
                    return count + (width // parts if digit > own else 0)
                end = rest
            return count + end

        return below

    def _uneven_below(self, fixed: list[str]) -> Callable[[int, int], int]:
        """Return the same function for shards of any sizes."""
        sources = self._sources(fixed)
        return lambda place, end: sources[place].below(end)

    def _sources(self, fixed: list[str]) -> list[_Sources]:
        """Return the uneven source shards that are not empty, for each index along `fixed`."""
        sizes = {axis: self.axis_sizes[axis] for axis in self.have}
        count = math.prod(sizes[axis] for axis in fixed)
        sources = [_Sources([], [], [0]) for _ in range(count)]
        places = row_major(sizes, fixed, all_points(sizes))
        for place, (start, stop) in zip(places, itertools.pairwise(self.src_ends), strict=True):
            if start < stop:
                own = sources[place]
                own.starts.append(start)
                own.stops.append(stop)
                own.before.append(own.before[-1] + stop - start)
        return sources
