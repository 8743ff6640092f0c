"""`lower_bound`: what any program between two specs must receive and hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from fshard.errors import raise_if
from fshard.program.cost import max_local_nbytes
from fshard.program.program import endpoint_problems, wire_problems
from fshard.spec import Spec

__all__ = ["Bound", "lower_bound"]

Coords = Mapping[str, int]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Bound:
    """Of the busiest rank: bytes that any program receives, and holds at some time."""

    bytes_received: int
    peak_memory: int


def lower_bound(src: Spec, dst: Spec, /, *, forward_dtype: torch.dtype | None = None) -> Bound:
    """Bytes that the busiest rank must receive and hold on the way from `src` to `dst`.

    A group of ranks that hold one tensor between them (the addends of an unreduced target, or
    a single rank) must receive every element it does not hold complete; and an element with c
    addends on other ranks that ends on t ranks takes (c-1) + (t-1) messages. Both are bounds,
    the result is the larger. With `forward_dtype` they are those of a program that sends it.
    Boxes after Rink et al. (arXiv 2112.01075), reductions after Patarasu and Yuan (2009).

    For even shards it is 0 exactly where a program without communication exists. Uneven sizes
    can make it 0 by coincidence (each rank happens to hold what it needs) where the steps,
    which know axes only, still move something.

    Raises `ShardingError` where the global shapes or the meshes differ.

    >>> from fshard.mesh import Mesh
    >>> from fshard.partition import PartitionSpec as P
    >>> mesh = Mesh(x=4)
    >>> lower_bound(Spec(mesh, P(unreduced={"x"}), shape=(8,)), Spec(mesh, P(), shape=(8,)))
    Bound(bytes_received=48, peak_memory=32)
    """
    raise_if("fs.lower_bound", endpoint_problems("lower_bound", src, dst))
    raise_if("fs.lower_bound", wire_problems(src, (forward_dtype,)))
    return _lower_bound(src, dst, forward_dtype)


@lru_cache(maxsize=4096)
def _lower_bound(src: Spec, dst: Spec, wire: torch.dtype | None) -> Bound:
    if wire is not None:
        src, dst = src._with(dtype=wire), dst._with(dtype=wire)
    item = min(src.dtype.itemsize, dst.dtype.itemsize)
    mesh, shape = src.mesh, src.mesh.shape
    kept = {
        axis for axis, _ in set(src.partition.unreduced_kinds) & set(dst.partition.unreduced_kinds)
    }
    addends = math.prod(shape[a] for a, _ in src.partition.unreduced_kinds if a not in kept)
    group = tuple(a for a, _ in dst.partition.unreduced_kinds if shape[a] > 1)
    members = math.prod(shape[axis] for axis in group)
    if addends > 1:
        missing = max_local_nbytes(dst) // dst.dtype.itemsize
    else:
        missing = _missing(src, dst, group)
    received = -(-missing // members)
    if addends > 1:
        copies = mesh.size // members // dst.num_shards
        messages = (addends - 1) + (copies - 1)
        received = max(received, -(-math.prod(src.shape) * messages // mesh.size))
    peak = max(max_local_nbytes(src), max_local_nbytes(dst))
    return Bound(received * item, peak)


def _missing(src: Spec, dst: Spec, group: tuple[str, ...]) -> int:
    """The most elements of its target box that a rank's group does not hold.

    `group` are the axes along which the target is unreduced: they do not cut the target, and
    where they cut the source the group's boxes are a product of unions of intervals. A box
    is a product over the dims, and dims that share no axis vary independently.
    """
    if 0 in src.shape:
        return 0
    fronts: set[Pair] = {(1, 1)}
    for dims in _components([_Dim(src, dst, dim, group) for dim in range(src.ndim)]):
        pairs = _pairs(dims, src.mesh.shape)
        fronts = _front((t * a, c * b) for (t, c), (a, b) in itertools.product(fronts, pairs))
    return max(total - held for total, held in fronts)


def _components(dims: Iterable[_Dim]) -> list[list[_Dim]]:
    """The dims grouped, so that those of different groups depend on different axes."""
    found: list[list[_Dim]] = []
    for dim in dims:
        near = [each for each in found if any(set(dim.axes) & set(other.axes) for other in each)]
        found = [each for each in found if each not in near]
        found.append([*itertools.chain(*near), dim])
    return found


def _front(pairs: Iterable[Pair]) -> set[Pair]:
    """Of pairs (total, held) those that can make `total * a - held * b` the largest."""
    best: dict[int, int] = {}
    for total, held in pairs:
        best[total] = min(held, best.get(total, held))
    front: set[Pair] = set()
    least = None
    for total in sorted(best, reverse=True):
        if least is None or best[total] < least:
            least = best[total]
            front.add((total, least))
    return front


def _pairs(dims: Sequence[_Dim], shape: Mapping[str, int]) -> set[Pair]:
    """The elements of a rank's target box along `dims`, and how many its group holds."""
    most = math.prod(dim.widest for dim in dims)
    found: set[Pair] = set()
    for coords in _coords(dims, shape):
        parts = [dim.part(coords) for dim in dims]
        pair = (math.prod(t for t, _ in parts), math.prod(c for _, c in parts))
        if pair == (most, 0):
            return {pair}  # no other can be worse
        found.add(pair)
    return _front(found)


def _coords(dims: Sequence[_Dim], shape: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Every coordinate of the axes of `dims`, the likely worst first."""
    axes = list(dict.fromkeys(axis for dim in dims for axis in dim.axes))
    worst = {axis: {0, shape[axis] - 1} for axis in axes}
    for dim in dims:
        for axis, at in dim.where_widest().items():
            worst[axis].add(at)
    corners = itertools.product(*(sorted(worst[axis]) for axis in axes))
    everywhere = itertools.product(*(range(shape[axis]) for axis in axes))
    for point in itertools.chain(corners, everywhere):
        yield dict(zip(axes, point, strict=True))


class _Dim:
    """One dim of two specs: what a coordinate needs of it and what its group holds.

    `axes` are those on which that depends. Even cuts that both begin with the same axes are
    looked at inside of one such shard: all are alike.
    """

    def __init__(self, src: Spec, dst: Spec, dim: int, group: tuple[str, ...]) -> None:
        self.shape = shape = src.mesh.shape
        have = [axis for axis in src.partition.dims[dim] if shape[axis] > 1]
        need = [axis for axis in dst.partition.dims[dim] if shape[axis] > 1]
        self.size = src.shape[dim]
        if src.sizes[dim] is None and dst.sizes[dim] is None:
            while have and need and have[0] == need[0]:
                self.size //= shape[have.pop(0)]
                need.pop(0)
        self.own = [axis for axis in have if axis not in group]
        self.have, self.need = (have if self.own else []), need
        # Where each shard stops, for cuts that are not even.
        self.stops = _stops(src.sizes[dim]) if self.own else None
        self.goals = _stops(dst.sizes[dim])
        goals = dst.sizes[dim]
        self.widest = max(goals or (self.size // math.prod(shape[a] for a in need),))
        all_alike = self.stops is None and self.goals is None and not (self.own and need)
        self.axes = () if all_alike else tuple(dict.fromkeys((*need, *self.own)))

    def part(self, at: Coords) -> Pair:
        """The length of the target's interval, and how much of it the group holds."""
        here = at if self.axes else dict.fromkeys((*self.need, *self.own), 0)
        low, high = self._interval(self.need, self.goals, here)
        if not self.own:
            return high - low, high - low
        if self.stops is None:
            return high - low, self._held_below(high, here) - self._held_below(low, here)
        swept = [axis for axis in self.have if axis not in self.own]
        held = 0
        for point in itertools.product(*(range(self.shape[axis]) for axis in swept)):
            mine = {**here, **dict(zip(swept, point, strict=True))}
            start, stop = self._interval(self.have, self.stops, mine)
            held += max(0, min(high, stop) - max(low, start))
        return high - low, held

    def where_widest(self) -> dict[str, int]:
        """The coordinates of the largest target shard."""
        if not self.axes or self.goals is None:
            return {}
        widths = [stop - start for start, stop in itertools.pairwise((0, *self.goals))]
        index = widths.index(max(widths))
        found = {}
        for axis in reversed(self.need):
            index, found[axis] = divmod(index, self.shape[axis])
        return found

    def _interval(self, axes: list[str], stops: tuple[int, ...] | None, at: Coords) -> Pair:
        index = 0
        for axis in axes:
            index = index * self.shape[axis] + at[axis]
        if stops is not None:
            return stops[index - 1] if index else 0, stops[index]
        width = self.size // math.prod(self.shape[axis] for axis in axes)
        return index * width, (index + 1) * width

    def _held_below(self, place: int, at: Coords) -> int:
        """How many of the first `place` elements the group holds, of an even cut."""
        width, count = self.size, 0
        parts = math.prod(self.shape[axis] for axis in self.own)
        for axis in self.have:
            width //= self.shape[axis]
            digit, rest = divmod(place, width)
            if axis not in self.own:
                count, place = count + digit * (width // parts), rest
                continue
            parts //= self.shape[axis]
            if digit != at[axis]:
                return count + (width // parts if digit > at[axis] else 0)
            place = rest
        return count + place


def _stops(sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(itertools.accumulate(sizes))
