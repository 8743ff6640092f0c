"""What ranks hold of what they need: how the boxes of two layouts of one tensor overlap.

A rank's local is a box, a product of intervals. Even cuts of one mesh have closed forms; else
each dim is looked at by the coordinates that it depends on, and across meshes every rank. After
the boxes of Rink et al. (arXiv 2112.01075).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.refinement import common_refinement
from fshard.layout.spec import Spec

__all__ = [
    "NONE", "alike_shards", "dim_pieces", "even_boxes", "even_dim", "intervals", "meeting",
    "missing_even", "on_one_mesh", "overlaps", "pieces", "pieces_even", "places",
]  # fmt: skip

Coords = Mapping[str, int]
Dims = Sequence[tuple[str, ...]]
Pair = tuple[int, int]
Intervals = Sequence[Pair]

NONE: Set[str] = frozenset()

MOST_PLACES = 1 << 16
"""Counts that would take longer are not made where a bound of them will do."""


def missing_even(shape: Sequence[int], size: Mapping[str, int], have: Dims, need: Dims) -> int:
    """Elements that the worst placed rank lacks, of a tensor that is cut evenly before and after.

    `size` are the devices along each axis, `have` and `need` the axes of each dim.

    >>> missing_even((8, 4), {"x": 2, "y": 4}, [("x", "y"), ()], [("y", "x"), ()])
    4
    >>> missing_even((8, 4), {"x": 2, "y": 4}, [("x", "y"), ()], [("x",), ()])
    12
    """
    boxes = even_boxes(shape, size, have, need)
    assert boxes is not None
    return boxes[0] - boxes[1]


def even_boxes(
    shape: Sequence[int],
    size: Mapping[str, int],
    have: Dims,
    need: Dims,
    group: Collection[str] = (),
    turned: Set[str] = NONE,
) -> Pair | None:
    """Elements of a target box, and how many of them the worst placed rank holds.

    Behind the axes that a dim begins with on both sides, further ones on both sides mean that
    some rank holds nothing of what it needs: it is first along the one and last along the other.
    Axes of the target alone cut what is held already, those of the source alone leave an n-th.

    Ranks along `group` hold together. Of a target box those elements count whose shard in the
    source is at the rank's own place along the `turned` axes. None where that has no closed form:
    where a dim's source begins with a group, and goes on with others, and where a dim with turned
    axes in its source is cut in the target by others than those it begins with.
    """
    whole = held = 1
    for length, mine, theirs in zip(shape, have, need, strict=True):
        box, part = even_dim(length, size, mine, theirs, group, turned)
        if part < 0:
            return None
        whole *= box
        held *= part
    return whole, held


def even_dim(
    length: int,
    size: Mapping[str, int],
    have: tuple[str, ...],
    need: tuple[str, ...],
    group: Collection[str],
    turned: Set[str],
) -> Pair:
    """One dim's part of `even_boxes`; -1 held where there is no closed form."""
    if have == need:
        for axis in need:
            length //= size[axis]
        return length, length
    have = tuple(axis for axis in have if size[axis] > 1)
    need = tuple(axis for axis in need if size[axis] > 1)
    at = 0
    for mine, theirs in zip(have, need, strict=False):
        if mine != theirs:
            break
        length //= size[mine]
        at += 1
    own = tuple(axis for axis in have[at:] if axis not in group) if group else have[at:]
    box = length
    for axis in need[at:]:
        box //= size[axis]
    if own and len(need) > at:
        return box, 0 if have[at] not in group and turned.isdisjoint(own) else -1
    part = box
    for axis in own:
        part //= size[axis]
        if axis in turned:
            box //= size[axis]
    return box, part


def pieces_even(have: Sequence[int], need: Sequence[int]) -> int:
    """The most source shards that a target shard meets, by the numbers of even shards per dim.

    A target shard is p/q of a source shard's length, and begins at any multiple of a q-th.

    >>> pieces_even((4,), (2,)), pieces_even((2,), (3,)), pieces_even((4, 1), (1, 4))
    (2, 2, 4)
    """
    count = 1
    for a, b in zip(have, need, strict=True):
        if a != b and a > 1:
            common = math.gcd(a, b)
            p, q = a // common, b // common
            count *= (p + 2 * q - 2) // q
    return count


def pieces(src: Spec, dst: Spec, turned: Set[str] = NONE) -> int:
    """The most source shards that a target shard meets: dim by dim, so at most so many.

    Of those at one place along the `turned` axes.
    """
    count = 1
    for dim, axes in enumerate(src.partition.dims):
        if not turned.isdisjoint(axes):
            sizes = src.shard_sizes(dim), dst.shard_sizes(dim)
            alike = alike_shards(src.mesh.shape, axes, turned)
            count *= max(dim_pieces(*sizes, some) for some in alike)
        elif src.sizes[dim] is None and dst.sizes[dim] is None:
            count *= pieces_even((src.dim_shards(dim),), (dst.dim_shards(dim),))
        else:
            count *= dim_pieces(src.shard_sizes(dim), dst.shard_sizes(dim))
    return count


def alike_shards(
    size: Mapping[str, int], axes: tuple[str, ...], turned: Set[str]
) -> list[tuple[bool, ...]]:
    """Which shards of a dim that is cut by `axes` are at one place along the `turned` ones of them.

    By their places, row-major in the order of the dim's axes.

    >>> alike_shards({"x": 2, "y": 2}, ("x", "y"), {"y"})
    [(True, False, True, False), (False, True, False, True)]
    """
    rows: list[int] = [0]
    for axis in axes:
        n = size[axis] if axis in turned else 1
        rows = [n * row + at % n for row in rows for at in range(size[axis])]
    return [tuple(row == at for row in rows) for at in range(max(rows) + 1)]


def dim_pieces(
    have: Sequence[int], need: Sequence[int], among: Sequence[bool] | None = None
) -> int:
    """The most shards of sizes `have` that a shard of sizes `need` meets; of those `among` them.

    >>> dim_pieces((3, 0, 5), (4, 4))
    2
    >>> dim_pieces((3, 2, 3), (4, 4), (True, False, True))
    1
    """
    edges = list(itertools.accumulate(n for n in have if n))
    stops = itertools.accumulate(need, initial=0)
    ends = [
        (bisect_right(edges, start), bisect_left(edges, stop) + 1)
        for start, stop in itertools.pairwise(stops)
        if start < stop
    ]
    if among is None:
        return max(last - first for first, last in ends)
    before = [0, *itertools.accumulate(a for a, n in zip(among, have, strict=True) if n)]
    return max(before[last] - before[first] for first, last in ends)


def on_one_mesh(src: Spec, dst: Spec) -> tuple[Spec, Spec]:
    """Both specs on a mesh that both of their meshes are coarser than; as they are if none is.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src, dst = (Spec(mesh, P(mesh.axes), shape=(8,)) for mesh in (Mesh(x=4), Mesh(a=2, b=2)))
    >>> on_one_mesh(src, dst)
    (f32[8@(x_0,x_1)], f32[8@(x_0,x_1)])
    """
    fine = None if src.mesh == dst.mesh else common_refinement(src.mesh, dst.mesh)
    if fine is None:
        return src, dst
    partitions = (fine.refine(spec.partition, which=at) for at, spec in enumerate((src, dst)))
    one, other = (
        Spec._of(fine.mesh, partition, spec.shape, spec.dtype, spec.sizes)
        for partition, spec in zip(partitions, (src, dst), strict=True)
    )
    return one, other


def overlaps(
    src: Spec, dst: Spec, group: tuple[str, ...] = (), turned: Set[str] = NONE
) -> set[Pair]:
    """Pairs of the elements of a target box and how many its ranks hold, those that can matter.

    That is: for any a and b of at least 0, the largest `total * a - held * b` of all ranks is
    among them. Ranks along `group`, on which the target is not cut, hold together. Along `turned`
    axes only what comes from one's own place counts.
    """
    if 0 in src.shape:
        return {(0, 0)}
    if src.mesh != dst.mesh:
        return _by_rank(src, dst, group)
    if not any(src.sizes) and not any(dst.sizes):
        size = src.mesh.shape
        boxes = even_boxes(src.shape, size, src.partition.dims, dst.partition.dims, group, turned)
        if boxes is not None:
            return {boxes}
    fronts: set[Pair] = {(1, 1)}
    for dims in _components([_Dim(src, dst, dim, group, turned) for dim in range(src.ndim)]):
        pairs = _pairs(dims, src.mesh.shape)
        fronts = _front((t * a, c * b) for (t, c), (a, b) in itertools.product(fronts, pairs))
    return fronts


def meeting(src: Spec, dst: Spec) -> int:
    """Elements whose shard is at one place, before and after, along all axes that both cut by.

    Of those, and of no others, some rank that holds an addend is one that needs the sum. Where it
    depends on more than `MOST_PLACES` places, all are counted.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2), P("x", "y"), shape=(8, 8))
    >>> meeting(src, src.replace(partition=P("y"))), meeting(src, src.replace(partition=P("x")))
    (32, 64)
    """
    if 0 in src.shape:
        return 0
    before, after = ({a for axes in spec.partition.dims for a in axes} for spec in (src, dst))
    dst = _without_minor(dst, after - before)
    after = {axis for axes in dst.partition.dims for axis in axes}
    dims = [_Dim(src, dst, dim, tuple(before - after)) for dim in range(src.ndim)]
    total, left = 1, set(after)
    for some in _components(dims):
        axes = tuple(dict.fromkeys(axis for dim in some for axis in dim.axes))
        left -= {*axes}
        if math.prod(src.mesh.shape[axis] for axis in axes) > MOST_PLACES:
            total *= math.prod(dim.size for dim in some)
            continue
        total *= sum(
            math.prod(dim.part(at)[1] for dim in some)
            for point in itertools.product(*(range(src.mesh.shape[axis]) for axis in axes))
            for at in [dict(zip(axes, point, strict=True))]
        )
    return total * math.prod(src.mesh.shape[axis] for axis in left)


def _without_minor(spec: Spec, others: Collection[str]) -> Spec:
    """`spec` with dims that are not cut by the axes of `others` behind all of their axes else."""
    dims, sizes = [], []
    for axes, each in zip(spec.partition.dims, spec.sizes, strict=True):
        count = next((at for at in range(len(axes), 0, -1) if axes[at - 1] not in others), 0)
        n = math.prod(spec.mesh.shape[axis] for axis in axes[count:])
        dims.append(axes[:count])
        sizes.append(each and tuple(sum(each[at : at + n]) for at in range(0, len(each), n)))
    return spec._with(partition=PartitionSpec._of(tuple(dims)), sizes=tuple(sizes))


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


# -- one mesh, dim by dim ------------------------------------------------------------------


def _components(dims: Iterable[_Dim]) -> list[list[_Dim]]:
    """The dims grouped, so that those of different groups depend on different axes."""
    found: list[list[_Dim]] = []
    for dim in dims:
        near = [each for each in found if any(set(dim.axes) & set(other.axes) for other in each)]
        found = [each for each in found if each not in near]
        found.append([*itertools.chain(*near), dim])
    return found


def _pairs(dims: Sequence[_Dim], shape: Mapping[str, int]) -> set[Pair]:
    """The elements of a rank's target box along `dims`, and how many its group holds."""
    most = math.prod(dim.widest for dim in dims)
    axes = tuple(dict.fromkeys(axis for dim in dims for axis in dim.axes))
    # What a dim needs and holds is worked out once for the coordinates that it depends on.
    known: list[dict[tuple[int, ...], Pair]] = [{} for _ in dims]
    where = [tuple(map(axes.index, dim.axes)) for dim in dims]
    found: set[Pair] = set()
    for point in _points(dims, axes, shape):
        total = held = 1
        for dim, places, parts in zip(dims, where, known, strict=True):
            key = tuple([point[place] for place in places])
            part = parts.get(key)
            if part is None:
                part = parts[key] = dim.part(dict(zip(dim.axes, key, strict=True)))
            total *= part[0]
            held *= part[1]
        if held == 0 and total == most:
            return {(total, held)}  # no other can be worse
        found.add((total, held))
    return _front(found)


def _points(
    dims: Sequence[_Dim], axes: tuple[str, ...], shape: Mapping[str, int]
) -> Iterator[tuple[int, ...]]:
    """Every coordinate along `axes`, the likely worst for `dims` first."""
    worst = {axis: {0, shape[axis] - 1} for axis in axes}
    for dim in dims:
        for axis, at in dim.where_widest().items():
            worst[axis].add(at)
    corners = itertools.product(*(sorted(worst[axis]) for axis in axes))
    everywhere = itertools.product(*(range(shape[axis]) for axis in axes))
    return itertools.chain(corners, everywhere)


class _Dim:
    """One dim of two specs: what a coordinate needs of it and what its group holds.

    `axes` are those on which that depends. Even cuts that both begin with the same axes are
    looked at inside of one such shard: all are alike.
    """

    def __init__(
        self, src: Spec, dst: Spec, dim: int, group: tuple[str, ...], turned: Set[str] = NONE
    ) -> None:
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
        self.turned = [axis for axis in self.have if axis in turned]
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
        total = self._common(low, high, self.turned, here) if self.turned else high - low
        return total, self._common(low, high, self.own, here) if self.own else total

    def _common(self, low: int, high: int, own: list[str], here: Coords) -> int:
        """How much of an interval is in shards of the source that agree with one along `own`."""
        if self.stops is None:
            return self._held_below(high, own, here) - self._held_below(low, own, here)
        swept = [axis for axis in self.have if axis not in own]
        held = 0
        for point in itertools.product(*(range(self.shape[axis]) for axis in swept)):
            mine = {**here, **dict(zip(swept, point, strict=True))}
            start, stop = self._interval(self.have, self.stops, mine)
            held += max(0, min(high, stop) - max(low, start))
        return held

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

    def _held_below(self, place: int, own: list[str], at: Coords) -> int:
        """How many of the first `place` elements agree with one along `own`, of an even cut."""
        width, count = self.size, 0
        parts = math.prod(self.shape[axis] for axis in own)
        for axis in self.have:
            width //= self.shape[axis]
            digit, rest = divmod(place, width)
            if axis not in own:
                count, place = count + digit * (width // parts), rest
                continue
            parts //= self.shape[axis]
            if digit != at[axis]:
                return count + (width // parts if digit > at[axis] else 0)
            place = rest
        return count + place


def _stops(sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(itertools.accumulate(sizes))


# -- two meshes, rank by rank --------------------------------------------------------------


def _by_rank(src: Spec, dst: Spec, group: tuple[str, ...]) -> set[Pair]:
    """`overlaps` of specs of two meshes, each rank of the target's asked what it holds."""
    have = dict(zip(src.mesh.devices, _shards(src), strict=True))
    alone = tuple(axis for axis in dst.mesh.axes if axis not in group)
    holders: dict[tuple[int, tuple[int, ...]], set[tuple[int, ...]]] = {}
    rows = zip(dst.mesh.devices, places(dst.mesh, alone), _shards(dst), strict=True)
    for rank, place, need in rows:
        held = holders.setdefault((place, need), set())
        if rank in have:
            held.add(have[rank])
    mine = [intervals(src, dim) for dim in range(src.ndim)]
    theirs = [intervals(dst, dim) for dim in range(dst.ndim)]
    found: dict[tuple[tuple[int, ...], frozenset[tuple[int, ...]]], Pair] = {}
    for (_, need), shards in holders.items():
        key = (need, frozenset(shards))
        if key not in found:
            box = [cut[at] for cut, at in zip(theirs, need, strict=True)]
            # Shards are disjoint: what a group holds is the sum.
            held_by = sum(_common(box, mine, shard) for shard in shards)
            found[key] = (math.prod(stop - start for start, stop in box), held_by)
    return _front(found.values())


def _common(box: Intervals, cuts: Sequence[Intervals], shard: tuple[int, ...]) -> int:
    """Elements of a box that one shard holds."""
    count = 1
    for (start, stop), cut, at in zip(box, cuts, shard, strict=True):
        low, high = cut[at]
        count *= max(0, min(stop, high) - max(start, low))
    return count


def _shards(spec: Spec) -> Iterable[tuple[int, ...]]:
    """Which shard of each dim every device holds, in the order of the mesh's devices."""
    if spec.ndim == 0:
        return [()] * spec.mesh.size
    return zip(*(places(spec.mesh, axes) for axes in spec.partition.dims), strict=True)


def places(mesh: Mesh, axes: tuple[str, ...]) -> list[int]:
    """The row-major index along `axes` of every device, in the order of the mesh's devices."""
    stride, strides = 1, {}
    for axis in reversed(axes):
        strides[axis] = stride
        stride *= mesh.shape[axis]
    found = [0]
    for axis, size in mesh.shape.items():
        step = strides.get(axis, 0)
        offsets = [at * step for at in range(size)]
        found = [base + offset for base in found for offset in offsets]
    return found


def intervals(spec: Spec, dim: int) -> Intervals:
    """Where each shard of a dim begins and ends."""
    stops = itertools.accumulate(spec.shard_sizes(dim), initial=0)
    return list(itertools.pairwise(stops))
