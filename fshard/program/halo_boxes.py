"""Typing of halo steps, and the boxes that each rank sends and receives in them.

A window is split into *segments*: parts that one shard owns, in the order of the window. The boxes
of a rank are products of segments, one per dim.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from fshard._util.errors import fail
from fshard.layout.mesh_groups import shard_coords
from fshard.layout.spec import Spec
from fshard.program.boxes import Box, volume
from fshard.program.cost.links import Partners
from fshard.program.halo_steps import HaloExchange, HaloReduce, HaloStep, Windows


class WindowPart(NamedTuple):
    """Part of a window: the index of the shard that owns it, and the places in both.

    Attributes:
        owner: index of the shard.
        owned: start and stop in the shard.
        window: start and stop in the window.
    """

    owner: int
    owned: tuple[int, int]
    window: tuple[int, int]


class HaloPiece(NamedTuple):
    """Product of segments, one per dim, between the shard of one rank and the window of another.

    Attributes:
        owner: the rank of the shard.
        reader: the rank of the window.
        owned: the box in the shard.
        window: the box in the window.
    """

    owner: int
    reader: int
    owned: Box
    window: Box


# -- typing -------------------------------------------------------------------------------


def infer_halo(step: HaloStep, spec: Spec) -> Spec:
    """Return the spec that a halo step results in; raise if its windows do not fit."""
    where, dims = f"{step} on {spec}", step.windows
    if len(dims) > spec.ndim:
        fail(where, f"windows of {len(dims)} dims", f"the tensor has {spec.ndim} dims",
             f"windows={dims[: spec.ndim]!r}")  # fmt: skip
    shape, sizes = list(spec.shape), list(spec.sizes)
    for dim, windows in enumerate(dims):
        if windows is None:
            continue
        n, lengths = spec.dim_shards(dim), tuple(stop - start for start, stop in windows)
        if len(windows) != n:
            fail(where, f"{len(windows)} windows of dim {dim}",
                 f"there must be one window for each of its {n} shards",
                 "one (start, stop) for each, in major-to-minor order")  # fmt: skip
        new: tuple[int, ...]
        if isinstance(step, HaloExchange):
            if spec.shape[dim] == 0 and any(lengths):
                fail(where, f"windows of dim {dim}, which is empty",
                     "windows of an empty dim must be empty", "windows of (0, 0)")  # fmt: skip
            new = lengths
        else:
            if spec.shard_sizes(dim) != lengths:
                fail(where, f"shards of {spec.shard_sizes(dim)} in dim {dim}",
                     f"the shards must be the windows, of sizes {lengths}",
                     "the result of the halo exchange with these windows")  # fmt: skip
            new = step.sizes[dim] or ()
            if not any(new) and any(lengths):
                fail(where, f"windows of dim {dim} of size 0",
                     "windows of an empty dim must be empty", "windows of (0, 0)")  # fmt: skip
        shape[dim], sizes[dim] = sum(new), None if len({*new}) == 1 else new
    if isinstance(step, HaloReduce):
        _check_linear(where, spec)
    return Spec._of(spec.mesh, spec.partition, tuple(shape), spec.dtype, tuple(sizes))


def _check_linear(where: str, spec: Spec) -> None:
    """Raise if overlaps of values that are unreduced by a maximum, say, would be added."""
    kinds = {kind for _, kind in spec.partition.unreduced_kinds} - {"sum", "avg"}
    if kinds:
        fail(where, f"{spec}, unreduced by {', '.join(sorted(kinds))}",
             "a halo reduction adds: the operand must be unreduced by a sum or an average",
             "reduce it before: fs.AllReduce")  # fmt: skip


def reversed_halo(step: HaloStep, src: Spec) -> HaloStep:
    """Return the transpose of a halo step on `src`."""
    if isinstance(step, HaloReduce):
        return HaloExchange(step.windows, step.boundary)
    sizes = tuple(
        None if windows is None else src.shard_sizes(dim)
        for dim, windows in enumerate(step.windows)
    )
    return HaloReduce(step.windows, sizes, step.boundary)


def owners_of(step: HaloStep, src: Spec, dst: Spec) -> Spec:
    """Return the side of a halo step whose shards do not overlap."""
    return src if isinstance(step, HaloExchange) else dst


@lru_cache(maxsize=4096)
def halo_partners(step: HaloStep, src: Spec, dst: Spec, axes: tuple[str, ...]) -> Partners:
    """Return the most that any rank sends to and receives from each distance in a halo step."""
    owners = owners_of(step, src, dst)
    far, near = [], []
    for parts in itertools.product(*(_distances(step, owners, dim) for dim in range(owners.ndim))):
        along: dict[str, int] = {}
        for dim, (distance, _) in enumerate(parts):
            along |= _axis_distances(distance, owners.partition.dims[dim], owners.mesh.shape)
        size = math.prod(length for _, length in parts)
        if any(along.values()):
            far.append((tuple(along.get(axis, 0) for axis in axes), size))
            near.append((tuple(-along.get(axis, 0) for axis in axes), size))
    ends = tuple(near), tuple(far)
    return Partners(*(ends if isinstance(step, HaloExchange) else reversed(ends)))


def _distances(step: HaloStep, owners: Spec, dim: int) -> list[tuple[int, int]]:
    """Return distances of owners of a window from its reader, and the longest part of each."""
    sizes = owners.shard_sizes(dim)
    windows = step.windows[dim] if dim < len(step.windows) else None
    if windows is None:
        return [(0, max(sizes))]
    rows, few, _ = _shortened(windows, sizes)
    lengths: dict[int, int] = {0: 0}
    for reader, window in enumerate(segments(rows, few, step.boundary)):
        for part in window:
            distance = part.owner - reader
            if 2 * abs(distance) > len(few):  # around the ends, of all shards
                distance += int(math.copysign(len(sizes) - len(few), distance))
            length = part.owned[1] - part.owned[0]
            lengths[distance] = max(lengths.get(distance, 0), length)
    return [*lengths.items()]


def _axis_distances(
    distance: int, axes: Sequence[str], axis_sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return how far apart two shards are along each axis, at most, by the distance of indices.

    A carry from minor axes takes a message one rank further along the next one.
    """
    along, rest, carry = {}, abs(distance), 0
    for axis in reversed(axes):
        rest, place = divmod(rest, axis_sizes[axis])
        most = min(place + carry, axis_sizes[axis] - 1)
        along[axis], carry = most if distance > 0 else -most, int(most > 0)
    return along


# -- segments and pieces --------------------------------------------------------------------


def segments(
    windows: Windows, sizes: tuple[int, ...], boundary: str
) -> tuple[tuple[WindowPart, ...], ...]:
    """Return the segments of every window over shards of `sizes`, in the windows' order.

    >>> [(part.owner, part.owned) for part in segments(((-1, 3), (1, 4)), (2, 2), "circular")[0]]
    [(1, (1, 2)), (0, (0, 2)), (1, (0, 1))]
    """
    ends, wraps = (0, *itertools.accumulate(sizes)), boundary == "circular"
    return tuple(tuple(_segments(start, stop, ends, wraps)) for start, stop in windows)


def _segments(start: int, stop: int, ends: Sequence[int], wraps: bool) -> Iterator[WindowPart]:
    size, at = ends[-1], start
    if not wraps:
        at, stop = max(start, 0), min(stop, size)
    while at < stop:
        turn, position = divmod(at, size)
        owner = bisect_right(ends, position) - 1
        end = min(stop, turn * size + ends[owner + 1])
        first = position - ends[owner]
        yield WindowPart(owner, (first, first + end - at), (at - start, end - start))
        at = end


def halo_axes(step: HaloStep, src: Spec) -> tuple[str, ...]:
    """Return the axes of size > 1 that shard the dims with windows, in mesh order.

    Axes of dims in which every window is its own shard are left out.
    """
    rows = [windows for windows in step.windows if windows is not None]
    if 0 in src.shape or any(all(i == j for i, j in windows) for windows in rows):
        return ()
    axes: set[str] = set()
    for dim, windows in enumerate(step.windows):
        if windows is None:
            continue
        sizes = src.shard_sizes(dim) if isinstance(step, HaloExchange) else step.sizes[dim] or ()
        if _read_others(windows, sizes, step.boundary):
            axes.update(src.partition.dims[dim])
    return tuple(a for a, n in src.mesh.shape.items() if n > 1 and a in axes)


def _read_others(windows: Windows, sizes: Sequence[int], boundary: str) -> bool:
    """Return whether a window has elements of another shard."""
    ends, wraps = (0, *itertools.accumulate(sizes)), boundary == "circular"
    return any(
        (start < ends[i] or stop > ends[i + 1])
        and any(part.owner != i for part in _segments(start, stop, ends, wraps))
        for i, (start, stop) in enumerate(windows)
    )


def _dim_parts(
    step: HaloStep, spec: Spec, rank: int, *, of_shard: bool
) -> Iterator[list[tuple[int, WindowPart]]]:
    """Yield for every dim the parts of the rank's window, with the index of their reader.

    With `of_shard` yield the parts of the rank's shard, in all windows.
    """
    for dim, axes in enumerate(spec.partition.dims):
        index, sizes = spec.mesh.index(rank, axes), spec.shard_sizes(dim)
        windows = step.windows[dim] if dim < len(step.windows) else None
        if windows is None:
            yield [(index, WindowPart(index, (0, sizes[index]), (0, sizes[index])))]
            continue
        ends = (0, *itertools.accumulate(sizes))
        first, end, size = ends[index], ends[index + 1], ends[-1]
        readers = [i for i, (start, stop) in enumerate(windows)
                   if (start < end and first < stop) or start < 0 or stop > size]  # fmt: skip
        yield [
            (i, part)
            for i in (readers if of_shard else [index])
            for part in _segments(*windows[i], ends, step.boundary == "circular")
            if not of_shard or part.owner == index
        ]


def _peer(spec: Spec, rank: int, indices: Sequence[int]) -> int:
    """Return the rank with the given shard index in every dim, and else the rank's coordinates."""
    return spec.mesh.rank(**{**spec.mesh.coords(rank), **shard_coords(spec, indices)})


@lru_cache(maxsize=8192)
def window_pieces(step: HaloStep, owners: Spec, rank: int) -> tuple[HaloPiece, ...]:
    """Return the pieces of a rank's window, the parts of its own shard included.

    They are ordered by owner, and those of one owner by their place in the window.
    """
    rows = _dim_parts(step, owners, rank, of_shard=False)
    pieces = [
        HaloPiece(_peer(owners, rank, [p.owner for _, p in parts]), rank,
                  tuple(p.owned for _, p in parts), tuple(p.window for _, p in parts))
        for parts in itertools.product(*rows)
    ]  # fmt: skip
    return tuple(sorted(filter(_has_elements, pieces), key=lambda piece: piece.owner))


@lru_cache(maxsize=8192)
def shard_pieces(step: HaloStep, owners: Spec, rank: int) -> tuple[HaloPiece, ...]:
    """Return the pieces of a rank's shard that are in windows, its own window included.

    They are ordered by reader, and those of one reader by their place in its window.
    """
    pieces = []
    for parts in itertools.product(*_dim_parts(step, owners, rank, of_shard=True)):
        reader = _peer(owners, rank, [index for index, _ in parts])
        owned = tuple(part.owned for _, part in parts)
        pieces.append(HaloPiece(rank, reader, owned, tuple(part.window for _, part in parts)))
    order = lambda piece: (piece.reader, piece.window)  # noqa: E731
    return tuple(sorted(filter(_has_elements, pieces), key=order))


def _has_elements(piece: HaloPiece) -> bool:
    return volume(piece.owned) > 0


# -- counts ---------------------------------------------------------------------------------


class HaloShare(NamedTuple):
    """Length of one shard of a dim in windows, and how many shards meet there.

    Attributes:
        lent: the length that windows have of the shard, its own window included.
        kept: the length of the shard in its own window.
        window: the length of its window within the dim.
        readers: shards whose windows have a part of it.
        owners: shards that its window has parts of.
        both: shards that are readers and owners.
    """

    lent: int
    kept: int
    window: int
    readers: int
    owners: int
    both: int


@lru_cache(maxsize=4096)
def halo_shares(
    windows: Windows | None, sizes: tuple[int, ...], boundary: str
) -> tuple[HaloShare, ...]:
    """Return the share of every shard of a dim of `sizes`; None windows are the shards.

    >>> halo_shares(((0, 3), (1, 4)), (2, 2), "circular")[0]
    HaloShare(lent=3, kept=2, window=3, readers=2, owners=2, both=2)
    """
    if windows is None:
        full = [(n, int(n > 0)) for n in sizes]
        return tuple(HaloShare(n, n, n, one, one, one) for n, one in full)
    rows, few, runs = _shortened(windows, sizes)
    shares, every = iter(_every_share(rows, few, boundary)), list[HaloShare]()
    for n, m in runs:
        own = [*itertools.islice(shares, m)]
        every += own[: m // 2] + own[m // 2 : m // 2 + 1] * (n - m) + own[m // 2 :]
    return tuple(every)


def _shortened(
    windows: Windows, sizes: tuple[int, ...]
) -> tuple[Windows, tuple[int, ...], list[tuple[int, int]]]:
    """Return windows and sizes with long runs of equal ones shortened.

    A window depends on shards that are `far` away at most. Of each run its number of shards, and
    how many of them are left, come last.
    """
    ends = itertools.accumulate(sizes)
    keys = [(i - end, j - end, n) if i < j else (0, 0, n)
            for (i, j), n, end in zip(windows, sizes, ends, strict=True)]  # fmt: skip
    far = max(max(-n - first, last, 0) for first, last, n in {*keys})
    runs = [(key, len([*run])) for key, run in itertools.groupby(keys)]
    counts = [min(n, 2 * -(-far // key[2]) + 1) if key[2] else n for key, n in runs]
    short = [key for (key, _), n in zip(runs, counts, strict=True) for _ in range(n)]
    few = tuple(n for *_, n in short)
    ends = itertools.accumulate(few)
    rows = tuple((i + end, j + end) for (i, j, _), end in zip(short, ends, strict=True))
    return rows, few, [(n, m) for (_, n), m in zip(runs, counts, strict=True)]


def _every_share(windows: Windows, sizes: tuple[int, ...], boundary: str) -> list[HaloShare]:
    """Return the share of every shard, computed from all windows."""
    rows = segments(windows, sizes, boundary)
    lent, readers = [0] * len(sizes), [set[int]() for _ in sizes]
    for reader, row in enumerate(rows):
        for part in row:
            lent[part.owner] += part.owned[1] - part.owned[0]
            readers[part.owner].add(reader)
    shares = []
    for index, row in enumerate(rows):
        owners = {part.owner for part in row}
        kept = sum(part.owned[1] - part.owned[0] for part in row if part.owner == index)
        read = sum(part.owned[1] - part.owned[0] for part in row)
        counts = len(readers[index]), len(owners), len(readers[index] & owners)
        shares.append(HaloShare(lent[index], kept, read, *counts))
    return shares


def dim_shares(step: HaloStep, owners: Spec, dim: int) -> tuple[HaloShare, ...]:
    """Return the shares of a dim of a halo step."""
    windows = step.windows[dim] if dim < len(step.windows) else None
    return halo_shares(windows, owners.shard_sizes(dim), step.boundary)


def join_shares(shares: Sequence[HaloShare]) -> tuple[int, int, int]:
    """Return the elements that a rank sends for windows, the elements it lacks, and its peers.

    `shares` are its shard's, one of each dim. A halo reduction sends the second number and
    receives the first.
    """
    lent, kept, window, readers, owners, both = map(math.prod, zip(*shares, strict=True))
    return lent - kept, window - kept, readers + owners - both - (kept > 0)
