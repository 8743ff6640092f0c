"""Elements that the worst-placed rank needs, holds and lacks when a tensor changes its layout.

All files of `program` use these words, for one rank (or a group of ranks that pool what they have):

- it *needs* the elements of its shard of the target, and *holds* those that its shard of the
  source has of them; it *lacks* the rest. An element that is unreduced on n ranks and is to be
  reduced has n partial sums, each needed; a rank holds at most one of them.
- it *receives* what it lacks, if the step is an `Exchange`, and *sends* its part of what other
  ranks lack: all holders of one shard send equal parts;
- the *pieces* of a target shard are its intersections with source shards, each one message;
- along a *converted* axis shards become unreduced, or reduced copies become shards, each on its
  own rank: ranks exchange only at equal coordinates (`converted_axes` in `exchange_boxes.py`);
- a *term* is one partial sum of an element, where the result is computed.

Overlaps are sets of elements; no computation overlaps a communication here.

A shard is a box, a product of one interval per dim, so counts are products over dims. Five files
answer, each as fast as its question allows:

- this one, for the worst rank, by closed forms of the axes of each dim where shards are even on one
  mesh (`even_overlap`), else over the coordinates that a dim depends on (`overlaps`), so that the
  work does not grow with the ranks;
- `dim_overlap.py`, one dim's factors at many coordinates;
- `rank_overlap.py`, for each rank of a mesh, as vectors, with tables of each dim for searches;
- `traffic.py` and `rank_loads.py`, which make of these the bytes and messages of a step, for the
  busiest rank and for each;
- `exchange_boxes.py`, which lists the boxes themselves, and the rank that each goes to.

After the boxes of Rink et al. (arXiv 2112.01075).
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.cost.dim_overlap import (
    DimOverlap,
    Interval,
    Points,
    point_blocks,
    point_overlaps,
)

Dims = Sequence[tuple[str, ...]]
Overlap = tuple[int, int]
"""Elements that a rank needs, and how many of them it holds."""

NO_AXES: Set[str] = frozenset()

MAX_COORDINATES = 1 << 16
"""Counts over more coordinates are replaced by an upper bound, where that will do."""


# -- even shards on one mesh, in closed form ------------------------------------------------


def even_overlap(
    shape: Sequence[int],
    axis_sizes: Mapping[str, int],
    have: Dims,
    need: Dims,
    group: Collection[str] = (),
    converted: Set[str] = NO_AXES,
) -> Overlap | None:
    """Return what the worst-placed group of ranks needs and holds, or None without a closed form.

    `have` and `need` are the axes of each dim. Ranks along `group` pool what they hold and need.
    Elements that come from another coordinate along the `converted` axes are not needed.

    >>> even_overlap((8, 4), {"x": 2, "y": 4}, [("x", "y"), ()], [("y", "x"), ()])
    (4, 0)
    >>> even_overlap((8, 4), {"x": 2, "y": 4}, [("x", "y"), ()], [("x",), ()])
    (16, 4)
    """
    needs = holds = 1
    for length, before, after in zip(shape, have, need, strict=True):
        dim_needs, dim_holds, exact = even_dim_overlap(
            length, axis_sizes, before, after, group, converted
        )
        if not exact:
            return None
        needs *= dim_needs
        holds *= dim_holds
    return needs, holds


def even_dim_overlap(
    length: int,
    axis_sizes: Mapping[str, int],
    have: tuple[str, ...],
    need: tuple[str, ...],
    group: Collection[str] = (),
    converted: Set[str] = NO_AXES,
) -> tuple[int, int, bool]:
    """Return one dim's factors of `even_overlap`, and if they are exact; else they bound it above.

    Behind the axes that both layouts begin with, further ones in both mean that some rank holds
    nothing of what it needs: the first along the one and the last along the other. Axes of the
    target alone shard the elements held, axes of the source alone leave 1/n of them.
    """
    if have == need and not group:
        for axis in need:
            length //= axis_sizes[axis]
        return length, length, True
    have = tuple([axis for axis in have if axis_sizes[axis] > 1])
    need = tuple([axis for axis in need if axis_sizes[axis] > 1])
    common = 0
    for before, after in zip(have, need, strict=False):
        if before != after:
            break
        if before not in group:
            length //= axis_sizes[before]
        common += 1
    needs = holds = length
    for axis in need[common:]:
        if axis not in group:
            needs //= axis_sizes[axis]
    apart = [axis for axis in have[common:] if axis not in group]
    for axis in apart:
        holds //= axis_sizes[axis]
    if not apart or len(need) == common:
        for axis in apart:
            if axis in converted:
                needs //= axis_sizes[axis]
        return needs, min(needs, holds), True
    if have[common] in group or need[common] in group:
        return needs, min(needs, holds), False
    return needs, 0, converted.isdisjoint(apart)


def even_pieces(have: int, need: int) -> int:
    """Return the most of `have` even shards of a dim that one of `need` even shards meets.

    A target shard is p/q times as long as a source shard, and begins at any multiple of 1/q.

    >>> even_pieces(4, 2), even_pieces(2, 3), even_pieces(4, 4)
    (2, 2, 1)
    """
    if have in (need, 1):
        return 1
    common = math.gcd(have, need)
    p, q = have // common, need // common
    return (p + 2 * q - 2) // q


# -- pieces ---------------------------------------------------------------------------------


def pieces(src: Spec, dst: Spec, converted: Set[str] = NO_AXES) -> int:
    """Bound the source shards that a target shard meets: the product of the most in each dim.

    Only source shards at one coordinate along the `converted` axes count.
    """
    count = 1
    for dim, axes in enumerate(src.partition.dims):
        if not converted.isdisjoint(axes):
            sizes, targets = src.shard_sizes(dim), shard_intervals(dst, dim)
            masks = masks_by_coordinate(src.mesh.shape, axes, converted)
            count *= max(dim_pieces(sizes, targets, mask) for mask in masks)
        elif src.sizes[dim] is None and dst.sizes[dim] is None:
            count *= even_pieces(src.dim_shards(dim), dst.dim_shards(dim))
        else:
            count *= tiling_pieces(src.shard_sizes(dim), dst.shard_sizes(dim))
    return count


def tiling_pieces(have: Sequence[int], need: Sequence[int]) -> int:
    """Return the most shards of sizes `have` that one of sizes `need` meets, of a whole dim.

    >>> tiling_pieces((3, 0, 5), (4, 4))
    2
    """
    ends, goals = ([*dict.fromkeys(itertools.accumulate(x, initial=0))] for x in (have, need))
    if len(ends) > len(goals):
        firsts = [bisect_right(ends, goal) for goal in goals]
        stops = [bisect_left(ends, goal) for goal in goals[1:]]
        return 1 + max(map(operator.sub, stops, firsts), default=0)
    indices = zip((bisect_left(goals, end) for end in ends), ends, strict=True)
    inside = Counter(i for i, end in indices if goals[i] != end)
    return 1 + max(inside.values(), default=0)


def masks_by_coordinate(
    axis_sizes: Mapping[str, int], axes: tuple[str, ...], converted: Set[str]
) -> list[tuple[bool, ...]]:
    """Return one mask over a dim's shards for each coordinate along its `converted` axes.

    `axes` are all axes of the dim; shards and coordinates are in row-major order.

    >>> masks_by_coordinate({"x": 2, "y": 2}, ("x", "y"), {"y"})
    [(True, False, True, False), (False, True, False, True)]
    """
    coordinates: list[int] = [0]
    for axis in axes:
        n = axis_sizes[axis] if axis in converted else 1
        coordinates = [n * row + i % n for row in coordinates for i in range(axis_sizes[axis])]
    return [tuple(row == i for row in coordinates) for i in range(max(coordinates) + 1)]


def dim_pieces(
    have: Sequence[int], targets: Iterable[Interval], mask: Sequence[bool] | None = None
) -> int:
    """Return the most shards of sizes `have`, of those in `mask`, that one of `targets` meets.

    >>> dim_pieces((3, 0, 5), [(0, 4), (4, 8)])
    2
    >>> dim_pieces((3, 2, 3), [(0, 4), (4, 8)], (True, False, True))
    1
    """
    return meeting_pieces([*itertools.accumulate(have, initial=0)], targets, mask)


def meeting_pieces(
    stops: Sequence[int], targets: Iterable[Interval], mask: Sequence[bool] | None = None
) -> int:
    """Return `dim_pieces` of shards that end at `stops`, 0 first.

    Empty shards do not count; they are looked for only where a target may meet more shards than
    the targets before it.
    """
    full = [(start, stop) for start, stop in targets if start < stop]
    most = 0 if full else 1
    for start, stop in full:
        low, high = bisect_right(stops, start) - 1, bisect_left(stops, stop)
        if high - low <= most:
            continue
        if mask is not None:
            shards = zip(mask[low:high], itertools.pairwise(stops[low : high + 1]), strict=True)
            most = max(most, sum(kept and first < last for kept, (first, last) in shards))
        else:
            most = max(most, len({*stops[low:high]}))
    return most


# -- shards of any sizes --------------------------------------------------------------------


def overlaps(
    src: Spec, dst: Spec, group: tuple[str, ...] = (), converted: Set[str] = NO_AXES
) -> set[Overlap]:
    """Return (needs, holds) of the ranks that can be worst placed.

    For any a, b >= 0, some pair in the result has the largest `a * needs - b * holds` of all
    ranks. Ranks along `group`, which must not shard the target, pool what they hold. Elements
    that come from another coordinate along the `converted` axes are not needed.
    """
    if 0 in src.shape:
        return {(0, 0)}
    if src.mesh != dst.mesh:
        return _overlaps_across_meshes(src, dst, group)
    if not any(src.sizes) and not any(dst.sizes):
        dims = src.partition.dims, dst.partition.dims
        pair = even_overlap(src.shape, src.mesh.shape, *dims, group, converted)
        if pair is not None:
            return {pair}
    front: set[Overlap] = {(1, 1)}
    all_dims = [DimOverlap(src, dst, dim, group, converted) for dim in range(src.ndim)]
    for dims_ in _components(all_dims):
        part = _component_overlaps(dims_, src.mesh.shape)
        front = _front((n * a, h * b) for (n, h), (a, b) in itertools.product(front, part))
    return front


def shared_elements(src: Spec, dst: Spec) -> int:
    """Count the elements for which some rank both holds an unreduced value and needs the sum.

    These are the elements whose shards, before and after, are at one coordinate along all axes
    that shard both. All elements are counted if that depends on more than `MAX_COORDINATES`.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2), P("x", "y"), shape=(8, 8))
    >>> [shared_elements(src, src.replace(partition=P(axis))) for axis in "yx"]
    [32, 64]
    """
    if 0 in src.shape:
        return 0
    before, after = ({a for axes in spec.partition.dims for a in axes} for spec in (src, dst))
    dst = _without_minor_axes(dst, after - before)
    after = {axis for axes in dst.partition.dims for axis in axes}
    all_dims = [
        DimOverlap(src, dst, dim, tuple(before - after), NO_AXES) for dim in range(src.ndim)
    ]
    total, left = 1, set(after)
    for dims in _components(all_dims):
        axes = tuple(dict.fromkeys(axis for dim in dims for axis in dim.axes))
        left -= {*axes}
        if math.prod(src.mesh.shape[axis] for axis in axes) > MAX_COORDINATES:
            total *= math.prod(dim.length for dim in dims)
            continue
        blocks = point_blocks({axis: src.mesh.shape[axis] for axis in axes})
        total *= sum(sum(point_overlaps(dims, points)[1]) for points in blocks)
    return total * math.prod(src.mesh.shape[axis] for axis in left)


def _without_minor_axes(spec: Spec, removed: Collection[str]) -> Spec:
    """Return `spec` with the minor axes of each dim dropped as long as they are in `removed`."""
    dims, all_sizes = [], []
    for axes, sizes in zip(spec.partition.dims, spec.sizes, strict=True):
        count = next((i for i in range(len(axes), 0, -1) if axes[i - 1] not in removed), 0)
        n = math.prod(spec.mesh.shape[axis] for axis in axes[count:])
        dims.append(axes[:count])
        all_sizes.append(sizes and tuple(sum(sizes[i : i + n]) for i in range(0, len(sizes), n)))
    return spec._with(partition=PartitionSpec._of(tuple(dims)), sizes=tuple(all_sizes))


def _front(pairs: Iterable[Overlap]) -> set[Overlap]:
    """Return the (needs, holds) that can make `a * needs - b * holds` the largest."""
    least_holding: dict[int, int] = {}
    for needs, holds in pairs:
        least_holding[needs] = min(holds, least_holding.get(needs, holds))
    front: set[Overlap] = set()
    least = None
    for needs in sorted(least_holding, reverse=True):
        if least is None or least_holding[needs] < least:
            least = least_holding[needs]
            front.add((needs, least))
    return front


def _components(dims: Iterable[DimOverlap]) -> list[list[DimOverlap]]:
    """Group the dims so that dims of different groups depend on different axes."""
    groups: list[list[DimOverlap]] = []
    for dim in dims:
        near = [group for group in groups if any({*dim.axes} & {*other.axes} for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*itertools.chain(*near), dim])
    return groups


def _component_overlaps(dims: Sequence[DimOverlap], axis_sizes: Mapping[str, int]) -> set[Overlap]:
    """Return `overlaps` of the dims of one component."""
    most = math.prod(dim.widest for dim in dims)
    sizes = {axis: axis_sizes[axis] for dim in dims for axis in dim.axes}
    pairs: set[Overlap] = set()
    for points in itertools.chain([_likely_points(dims, sizes)], point_blocks(sizes)):
        pairs.update(zip(*point_overlaps(dims, points), strict=True))
        if (most, 0) in pairs:
            return {(most, 0)}  # no other can be worse
    return _front(pairs)


def _likely_points(dims: Iterable[DimOverlap], axis_sizes: Mapping[str, int]) -> Points:
    """Return the coordinates that are likely to be worst: ends, and those of the widest shards."""
    likely = {axis: {0, n - 1} for axis, n in axis_sizes.items()}
    for dim in dims:
        for axis, coordinate in dim.widest_coords().items():
            likely[axis].add(coordinate)
    columns = zip(*itertools.product(*likely.values()), strict=True)
    return dict(zip(axis_sizes, map(list, columns), strict=True))


# -- two meshes, rank by rank ---------------------------------------------------------------


def _overlaps_across_meshes(src: Spec, dst: Spec, group: tuple[str, ...]) -> set[Overlap]:
    """Return `overlaps` of specs of two meshes, from every rank of the target's mesh."""
    src_shards = dict(zip(src.mesh.devices, _shard_coords(src), strict=True))
    outside = tuple(axis for axis in dst.mesh.axes if axis not in group)
    held: dict[tuple[int, tuple[int, ...]], set[tuple[int, ...]]] = {}
    rows = zip(dst.mesh.devices, shard_indices(dst.mesh, outside), _shard_coords(dst), strict=True)
    for rank, index, target in rows:
        shards = held.setdefault((index, target), set())
        if rank in src_shards:
            shards.add(src_shards[rank])
    src_dims = [shard_intervals(src, dim) for dim in range(src.ndim)]
    dst_dims = [shard_intervals(dst, dim) for dim in range(dst.ndim)]
    pairs: dict[tuple[tuple[int, ...], frozenset[tuple[int, ...]]], Overlap] = {}
    for (_, target), shards in held.items():
        key = (target, frozenset(shards))
        if key not in pairs:
            box = [intervals[i] for intervals, i in zip(dst_dims, target, strict=True)]
            # Shards are disjoint: a group holds the sum of what its shards have.
            holds = sum(_common_volume(box, src_dims, shard) for shard in shards)
            pairs[key] = (math.prod(stop - start for start, stop in box), holds)
    return _front(pairs.values())


def _common_volume(
    box: Sequence[Interval], dims: Sequence[Sequence[Interval]], shard: tuple[int, ...]
) -> int:
    """Count the elements of a box in one shard, given by its index in every dim."""
    count = 1
    for (start, stop), intervals, index in zip(box, dims, shard, strict=True):
        low, high = intervals[index]
        count *= max(0, min(stop, high) - max(start, low))
    return count


def _shard_coords(spec: Spec) -> Iterable[tuple[int, ...]]:
    """Return each device's shard index in every dim, in the order of `mesh.devices`."""
    if spec.ndim == 0:
        return [()] * spec.mesh.size
    return zip(*(shard_indices(spec.mesh, axes) for axes in spec.partition.dims), strict=True)


def shard_indices(mesh: Mesh, axes: tuple[str, ...]) -> list[int]:
    """Return each device's row-major index along `axes`, in the order of `mesh.devices`."""
    stride, strides = 1, {}
    for axis in reversed(axes):
        strides[axis] = stride
        stride *= mesh.shape[axis]
    indices = [0]
    for axis, size in mesh.shape.items():
        offsets = [i * strides.get(axis, 0) for i in range(size)]
        indices = [base + offset for base in indices for offset in offsets]
    return indices


def shard_intervals(spec: Spec, dim: int) -> list[Interval]:
    """Return start and stop of each shard of a dim."""
    stops = itertools.accumulate(spec.shard_sizes(dim), initial=0)
    return list(itertools.pairwise(stops))
