"""What ranks hold of what they need, of shards of any sizes: for bounds and for exchanges.

A rank's local is a box, a product of intervals, and dims are cut independently: what a rank has
of a box is a product over the dims, each of which a search meets again and again. Of very many
ranks some stand for all: the bound is then lower, and planning does not depend on their number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence, Set

from fshard.layout.mesh import Mesh
from fshard.program.cost.model import Traffic
from fshard.program.cost.overlap import NONE, alike_shards, dim_pieces

__all__ = ["Cuts", "Held"]

MOST_RANKS = 64
"""Of more ranks as many are looked at, spread over the mesh."""

Axes = tuple[str, ...]
Cut = tuple[Axes, tuple[int, ...] | None]
Cuts = tuple[Cut, ...]
Intervals = list[tuple[int, int]]


class Held:
    """The parts of the ranks of a mesh in layouts of one shape."""

    def __init__(self, mesh: Mesh, shape: Sequence[int]) -> None:
        self.mesh = mesh
        self.shape = shape
        self.all = mesh.size <= MOST_RANKS
        ranks = range(0, mesh.size, 1 if self.all else (mesh.size // MOST_RANKS) | 1)
        self.coords: dict[str, list[int]] = {}
        stride = mesh.size
        for axis, n in mesh.shape.items():
            stride //= n
            self.coords[axis] = [rank // stride % n for rank in ranks]
        self.count = len(ranks)
        self.found: dict[tuple[int, Cut], Intervals] = {}
        self.pairs: dict[tuple[int, Cut, Cut], list[int]] = {}
        self.met: dict[tuple[int, Cut, Cut, Set[str]], int] = {}
        self.owns: dict[tuple[int, Cut, Cut, Set[str]], list[int]] = {}
        self.whole: dict[Cuts, list[int]] = {}
        self.shared: dict[tuple[Cuts, Cuts], list[int]] = {}

    def lacking(
        self,
        have: Cuts,
        need: Cuts,
        addends: int = 1,
        within: Collection[str] = (),
    ) -> int:
        """Elements that the worst placed rank has to receive, of so many addends of each.

        Ranks along `within` hold together, and need the same: it is what they all lack.
        """
        wanted, held = self.boxes(need), self.common(have, need)
        if not within:
            return max([addends * a - b for a, b in zip(wanted, held, strict=True)])
        if not self.all:
            return 0
        alone = [axis for axis in self.coords if axis not in within]
        places = list(zip(*(self.coords[axis] for axis in alone), strict=True)) or [()] * self.count
        lacks: dict[tuple[int, ...], int] = {}
        for place, a, b in zip(places, wanted, held, strict=True):
            lacks[place] = lacks.get(place, addends * a) - b
        return max(lacks.values())

    def exchanged(
        self,
        have: Cuts,
        need: Cuts,
        item: int,
        addends: int,
        needers: int,
        holders: int,
        turned: Set[str] = NONE,
    ) -> Traffic:
        """The traffic of an exchange, of elements of `item` bytes, where all ranks are looked at.

        As `traffic` of specs says it: so many ranks need and hold each shard.
        """
        wanted, own = self.at_own(have, need, turned), self.at_own(need, have, turned)
        held = self.common(have, need)
        received = max([addends * a - b for a, b in zip(wanted, held, strict=True)])
        if received == 0:
            return Traffic()
        sent = max([-(-needers * a // holders) - b for a, b in zip(own, held, strict=True)])
        here = min(held) > 0
        come = addends * self.pieces(have, need, turned) - (here or self.keeps(wanted, held))
        theirs = -(-needers * self.pieces(need, have, turned) // holders)
        go = theirs - (here or self.keeps(own, held))
        return Traffic(sent * item, received * item, max(1, come, go), 1)

    def keeps(self, boxes: list[int], held: list[int]) -> bool:
        """Whether every rank holds some of its box, if that has any elements."""
        return all(b > 0 for a, b in zip(boxes, held, strict=True) if a)

    def pieces(self, have: Cuts, need: Cuts, turned: Set[str]) -> int:
        """The most source shards that a target shard meets: dim by dim."""
        count = 1
        for dim, (one, other) in enumerate(zip(have, need, strict=True)):
            key = dim, one, other, turned
            found = self.met.get(key)
            if found is None:
                mine, theirs = self.sizes(dim, one), self.sizes(dim, other)
                alike = alike_shards(self.mesh.shape, one[0], turned)
                found = max(dim_pieces(mine, theirs, some) for some in alike)
                self.met[key] = found
            count *= found
        return count

    def at_own(self, have: Cuts, need: Cuts, turned: Set[str]) -> list[int]:
        """The elements of each rank's box of `need` from its own places along axes of `have`."""
        if not turned or turned.isdisjoint(itertools.chain(*(axes for axes, _ in have))):
            return self.boxes(need)
        found = [1] * self.count
        for dim, (one, other) in enumerate(zip(have, need, strict=True)):
            part = self.owns.get((dim, one, other, turned))
            if part is None:
                part = self.owns[dim, one, other, turned] = self._at_own(dim, one, other, turned)
            found = [a * b for a, b in zip(found, part, strict=True)]
        return found

    def _at_own(self, dim: int, have: Cut, need: Cut, turned: Set[str]) -> list[int]:
        """One dim's part in `at_own`."""
        stops = itertools.accumulate(self.sizes(dim, have), initial=0)
        cuts = list(itertools.pairwise(stops))
        goals = list(itertools.accumulate(self.sizes(dim, need), initial=0))
        # For each place along the turned axes how much of the dim is there, up to each goal.
        below = [
            [sum([min(goal, b) - a for a, b in own if a < goal]) for goal in goals]
            for some in alike_shards(self.mesh.shape, have[0], turned)
            for own in [list(itertools.compress(cuts, some))]
        ]
        places = self.index(tuple(axis for axis in have[0] if axis in turned))
        return [
            below[place][at + 1] - below[place][at]
            for place, at in zip(places, self.index(need[0]), strict=True)
        ]

    def boxes(self, cuts: Cuts) -> list[int]:
        """The elements of each rank's box."""
        found = self.whole.get(cuts)
        if found is None:
            found = [1] * self.count
            for dim, cut in enumerate(cuts):
                widths = [high - low for low, high in self.intervals(dim, cut)]
                found = [a * b for a, b in zip(found, widths, strict=True)]
            self.whole[cuts] = found
        return found

    def common(self, have: Cuts, need: Cuts) -> list[int]:
        """How many elements each rank has of what it needs."""
        both = (have, need)
        found = self.shared.get(both)
        if found is not None:
            return found
        found = [1] * self.count
        for dim, key in enumerate(zip(have, need, strict=True)):
            part = self.pairs.get((dim, *key))
            if part is None:
                ends = zip(*(self.intervals(dim, cut) for cut in key), strict=True)
                part = [max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in ends]
                self.pairs[dim, *key] = part
            found = [a * b for a, b in zip(found, part, strict=True)]
        self.shared[both] = found
        return found

    def intervals(self, dim: int, cut: Cut) -> Intervals:
        """The interval of a dim that each rank has."""
        found = self.found.get((dim, cut))
        if found is None:
            stops = list(itertools.accumulate(self.sizes(dim, cut), initial=0))
            index = self.index(cut[0])
            found = self.found[dim, cut] = [(stops[at], stops[at + 1]) for at in index]
        return found

    def index(self, axes: Axes) -> list[int]:
        """The place of each rank along axes, row-major."""
        index = [0] * self.count
        for axis in axes:
            n = self.mesh.shape[axis]
            index = [n * a + b for a, b in zip(index, self.coords[axis], strict=True)]
        return index

    def sizes(self, dim: int, cut: Cut) -> Sequence[int]:
        """The sizes of the shards of a dim."""
        axes, sizes = cut
        if sizes is not None:
            return sizes
        count = math.prod(self.mesh.shape[axis] for axis in axes)
        return [self.shape[dim] // count] * count
