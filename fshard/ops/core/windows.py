"""`Window`: a factor whose elements read intervals of another factor, as a convolution does.

Element i of the factor reads positions `(step * i + low) // per` to `(step * i + high) // per` of
the other one, both included. That covers all windowed operations: `per` is 1 for convolutions and
pooling, the stride of a transposed convolution, the size of the result of an adaptive pooling.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BOUNDARIES = ("zeros", "circular", "reflect", "replicate")
"""Values at positions beyond the ends of a dim."""


class Reach(NamedTuple):
    """Interval of a dim that an interval of results reads.

    Attributes:
        start: the first position, of those that exist.
        stop: the position after the last one.
        before: number of positions read before the first element of the dim.
        after: number of positions read after its last element.
    """

    start: int
    stop: int
    before: int = 0
    after: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Factor `name` whose elements each read an interval of the factor `of`.

    It is sharded wherever `of` is: element i belongs to the shard that has position
    `(step * i + anchor) // per`, or to the first or last shard that has elements if that is beyond
    an end. A tensor that has `of` is extended to the positions that its rank's elements read, by a
    `HaloExchange`; a result that has `of` is computed so extended, and a `HaloReduce` adds up.

    Laws, for all shard sizes of `of`: the sizes of the windows' shards are non-negative and add up
    to `length`; an empty shard has none; the window of a shard has all positions that exist of
    those that its elements read, and no smaller interval has.

    With the boundary "padded", windows have zeros beyond the ends, which the exchange puts there.
    With "shifted", positions beyond an end are read `period` further inside: the intervals at the
    ends keep their lengths, as those of neighborhood attention do.

    Args:
        name: The factor.
        of: The factor that is read.
        length: Number of elements.
        size: Number of elements of `of`.
        step: Distance of the intervals, times `per`.
        low: Begin of the first interval, times `per`.
        high: Last position of the first interval, times `per`.
        anchor: Position of the first element, times `per`, which its owner holds; None for the
            middle of its interval.
        per: Divisor of the positions.
        boundary: Values beyond the ends: zeros are not read; the others are elements of the dim.
        period: Distance by which positions beyond the ends are shifted, with that boundary.
        reversed: True if element i reads the interval of element `length - 1 - i`, as in a flip.

    >>> window = Window("o", "h", 8, 16, step=2, low=-1, high=1)  # kernel 3, stride 2, padding 1
    >>> window.sizes((9, 7)), window.windows((9, 7))
    ((5, 3), ((0, 10), (9, 16)))
    """

    name: str
    of: str
    length: int
    size: int
    step: int = 1
    low: int = 0
    high: int = 0
    anchor: int | None = None
    per: int = 1
    boundary: str = "zeros"
    period: int = 0
    reversed: bool = False

    def __len__(self) -> int:
        return self.length

    @property
    def step_boundary(self) -> str:
        """The boundary of the halo steps of its windows."""
        return "zeros" if self.boundary == "padded" else "circular"

    def sizes(self, shard_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of elements in each shard of `of`, given the shards' sizes."""
        nonempty = [index for index, size in enumerate(shard_sizes) if size]
        if not nonempty:  # all elements read padding
            return (self.length, *(0,) * (len(shard_sizes) - 1))
        ends = list(itertools.accumulate(shard_sizes))
        counts = [self._count_before(end) if i >= nonempty[0] else 0 for i, end in enumerate(ends)]
        counts[nonempty[-1] :] = [self.length] * (len(ends) - nonempty[-1])
        return tuple(b - a for a, b in itertools.pairwise((0, *counts)))

    def read_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return sizes of the shards of `of` whose windows' shards have these sizes, or nearly so.

        >>> window = Window("o", "h", 8, 16, step=2, low=-1, high=1)
        >>> window.read_sizes((5, 3))
        (9, 7)
        """
        positions = range(self.size)
        ends = [bisect_left(positions, count, key=self._count_before)
                for count in itertools.accumulate(sizes[:-1])]  # fmt: skip
        return tuple(b - a for a, b in itertools.pairwise((0, *ends, self.size)))

    def _count_before(self, end: int) -> int:
        """Return the number of elements anchored before the position `end`."""
        anchor = (self.low + self.high) // 2 if self.anchor is None else self.anchor
        room = end * self.per - anchor
        if self.step == 0:
            return self.length if room > 0 else 0
        return min(max(-(-room // self.step), 0), self.length)

    def reach(self, start: int, stop: int) -> Reach:
        """Return the interval of `of` that elements `start` to `stop - 1` read.

        >>> Window("o", "h", 4, 4, low=-1, high=1).reach(0, 2)
        Reach(start=0, stop=3, before=1, after=0)
        """
        if start >= stop:
            return Reach(0, 0)
        if self.reversed:
            start, stop = self.length - stop, self.length - start
        first = (self.step * start + self.low) // self.per
        end = (self.step * (stop - 1) + self.high) // self.per + 1
        size = self.size
        beyond = max(0, min(end, 0) - first), max(0, end - max(first, size))
        if self.boundary in ("circular", "padded"):
            return Reach(first, end)
        low, high = min(max(first, 0), size), min(max(end, 0), size)
        if self.boundary != "zeros" and size:
            outside = [*range(first, min(end, 0)), *range(max(first, size), end)]
            positions = [self._inside(position) for position in outside]
            if low < high:
                positions += [low, high - 1]
            return Reach(min(positions), max(positions) + 1, *beyond)
        return Reach(low, max(low, high), *beyond)

    def _inside(self, position: int) -> int:
        """Return the element of the dim that a position beyond its ends reads."""
        if self.boundary == "shifted":
            return position + (self.period if position < 0 else -self.period)
        return (reflected if self.boundary == "reflect" else clamped)(position, self.size)

    def windows(self, shard_sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return start and stop of the positions that each shard's elements read."""
        rows, start, own = [], 0, 0
        for count, size in zip(self.sizes(shard_sizes), shard_sizes, strict=True):
            reach = self.reach(start, start + count)
            rows.append((reach.start, reach.stop) if count else (own, own))
            start, own = start + count, own + size
        return tuple(rows)

    def __str__(self) -> str:
        begin, end = (_position(self.step, x, self.per) for x in (self.low, self.high))
        name = f"{self.name} reversed" if self.reversed else self.name
        return f"{name} {self.of}[{begin}..{end}]"


def _position(step: int, offset: int, per: int) -> str:
    """Return the text of a position of element i."""
    text = f"{'' if step == 1 else step}i{offset:+d}" if offset else f"{'' if step == 1 else step}i"
    return text if per == 1 else f"({text})/{per}" if offset else f"{text}/{per}"


def reflected(position: int, size: int) -> int:
    """Return the element at a position of a dim that is reflected at its ends.

    >>> [reflected(position, 3) for position in (-2, -1, 0, 3, 4)]
    [2, 1, 0, 1, 0]
    """
    period = max(2 * (size - 1), 1)
    position %= period
    return position if position < size else period - position


def clamped(position: int, size: int) -> int:
    """Return the element at a position of a dim whose ends are repeated."""
    return min(max(position, 0), size - 1)
