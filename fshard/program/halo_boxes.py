"""Typing of halo steps, and the boxes that each rank sends and receives in them.

A window is split into *segments*: parts that one shard owns, in the order of the window. The boxes
of a rank are products of segments, one per dim.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from fshard._util.errors import fail
from fshard.layout.mesh_groups import shard_coords
from fshard.layout.spec import Spec
from fshard.program.boxes import Box, volume
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
        return HaloExchange(step.windows)
    sizes = tuple(
        None if windows is None else src.shard_sizes(dim)
        for dim, windows in enumerate(step.windows)
    )
    return HaloReduce(step.windows, sizes)


def owners_of(step: HaloStep, src: Spec, dst: Spec) -> Spec:
    """Return the side of a halo step whose shards do not overlap."""
    return src if isinstance(step, HaloExchange) else dst


# -- segments and pieces --------------------------------------------------------------------


@lru_cache(maxsize=4096)
def segments(windows: Windows, sizes: tuple[int, ...]) -> tuple[tuple[WindowPart, ...], ...]:
    """Return the segments of every window over shards of `sizes`, in the windows' order.

    >>> [(part.owner, part.owned) for part in segments(((-1, 3), (1, 4)), (2, 2))[0]]
    [(1, (1, 2)), (0, (0, 2)), (1, (0, 1))]
    """
    ends = (0, *itertools.accumulate(sizes))
    return tuple(tuple(_segments(start, stop, ends)) for start, stop in windows)


def _segments(start: int, stop: int, ends: Sequence[int]) -> Iterator[WindowPart]:
    size, at = ends[-1], start
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
        if any(part.owner != i for i, row in enumerate(segments(windows, sizes)) for part in row):
            axes.update(src.partition.dims[dim])
    return tuple(a for a, n in src.mesh.shape.items() if n > 1 and a in axes)


def _rows(
    step: HaloStep, spec: Spec, rank: int
) -> list[tuple[tuple[tuple[WindowPart, ...], ...], int]]:
    """Return for every dim the segments of all windows, and the index of the rank's shard."""
    rows: list[tuple[tuple[tuple[WindowPart, ...], ...], int]] = []
    for dim, axes in enumerate(spec.partition.dims):
        index = spec.mesh.index(rank, axes)
        windows = step.windows[dim] if dim < len(step.windows) else None
        sizes = spec.shard_sizes(dim)
        if windows is None:
            part = WindowPart(index, (0, sizes[index]), (0, sizes[index]))
            own = [(part,) if i == index else () for i in range(len(sizes))]
            rows.append((tuple(own), index))
        else:
            rows.append((segments(windows, sizes), index))
    return rows


def _peer(spec: Spec, rank: int, indices: Sequence[int]) -> int:
    """Return the rank with the given shard index in every dim, and else the rank's coordinates."""
    return spec.mesh.rank(**{**spec.mesh.coords(rank), **shard_coords(spec, indices)})


@lru_cache(maxsize=8192)
def window_pieces(step: HaloStep, owners: Spec, rank: int) -> tuple[HaloPiece, ...]:
    """Return the pieces of a rank's window, the parts of its own shard included.

    They are ordered by owner, and those of one owner by their place in the window.
    """
    rows = [row[index] for row, index in _rows(step, owners, rank)]
    pieces = [
        HaloPiece(_peer(owners, rank, [p.owner for p in parts]), rank,
                  tuple(p.owned for p in parts), tuple(p.window for p in parts))
        for parts in itertools.product(*rows)
    ]  # fmt: skip
    return tuple(sorted(filter(_has_elements, pieces), key=lambda piece: piece.owner))


@lru_cache(maxsize=8192)
def shard_pieces(step: HaloStep, owners: Spec, rank: int) -> tuple[HaloPiece, ...]:
    """Return the pieces of a rank's shard that are in windows, its own window included.

    They are ordered by reader, and those of one reader by their place in its window.
    """
    pieces = []
    choices = [
        [(reader, part) for reader, row in enumerate(rows) for part in row if part.owner == index]
        for rows, index in _rows(step, owners, rank)
    ]
    for parts in itertools.product(*choices):
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
        window: the length of its window.
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
def halo_shares(windows: Windows | None, sizes: tuple[int, ...]) -> tuple[HaloShare, ...]:
    """Return the share of every shard of a dim of `sizes`; None windows are the shards.

    >>> halo_shares(((0, 3), (1, 4)), (2, 2))[0]
    HaloShare(lent=3, kept=2, window=3, readers=2, owners=2, both=2)
    """
    if windows is None:
        full = [(n, int(n > 0)) for n in sizes]
        return tuple(HaloShare(n, n, n, one, one, one) for n, one in full)
    rows = segments(windows, sizes)
    lent, readers = [0] * len(sizes), [set[int]() for _ in sizes]
    for reader, row in enumerate(rows):
        for part in row:
            lent[part.owner] += part.owned[1] - part.owned[0]
            readers[part.owner].add(reader)
    shares = []
    for index, row in enumerate(rows):
        owners = {part.owner for part in row}
        kept = sum(part.owned[1] - part.owned[0] for part in row if part.owner == index)
        start, stop = windows[index]
        both = len(readers[index] & owners)
        counts = len(readers[index]), len(owners), both
        shares.append(HaloShare(lent[index], kept, stop - start, *counts))
    return tuple(shares)


def dim_shares(step: HaloStep, owners: Spec, dim: int) -> tuple[HaloShare, ...]:
    """Return the shares of a dim of a halo step."""
    windows = step.windows[dim] if dim < len(step.windows) else None
    return halo_shares(windows, owners.shard_sizes(dim))


def join_shares(shares: Sequence[HaloShare]) -> tuple[int, int, int]:
    """Return the elements that a rank sends for windows, the elements it lacks, and its peers.

    `shares` are its shard's, one of each dim. A halo reduction sends the second number and
    receives the first.
    """
    lent, kept, window, readers, owners, both = map(math.prod, zip(*shares, strict=True))
    return lent - kept, window - kept, readers + owners - both - (kept > 0)
