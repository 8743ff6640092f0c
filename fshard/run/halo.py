"""Halo steps of one rank: the boxes that it sends and receives, and what it makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import reduce

import torch

from fshard.layout.spec import Spec
from fshard.program.boxes import Box, box_shape, intersect, relative, volume
from fshard.program.halo_boxes import HaloPiece, halo_axes, owners_of, shard_pieces, window_pieces
from fshard.program.halo_steps import HaloExchange, HaloReduce
from fshard.run.collective import Wire
from fshard.run.packing import Combine, Source, Unpack, assembler, packer, unpacker, view_box
from fshard.run.transports.base import Group
from fshard.run.transports.reduce_dtypes import TensorFunction


def halo(step: HaloExchange | HaloReduce, src: Spec, dst: Spec, rank: int) -> Wire | TensorFunction:
    """Return the wire of a halo step for a rank, a local function if nothing is sent."""
    owners, is_exchange = owners_of(step, src, dst), isinstance(step, HaloExchange)
    axes = halo_axes(step, src)
    group = src.mesh.group(rank, axes) if axes else (rank,)
    lacking, lent = window_pieces(step, owners, rank), shard_pieces(step, owners, rank)
    shape = dst.local_shape(rank)
    if is_exchange:
        out = _by_peer([(piece.reader, piece.owned) for piece in lent], group, rank)
        unpack = _windows(shape, lacking, group, rank)
        arriving = [(piece.owner, piece.window) for piece in lacking]
    else:
        out = _by_peer([(piece.owner, piece.window) for piece in lacking], group, rank)
        unpack = _added(shape, lent, group, rank)
        arriving = [(piece.reader, piece.owned) for piece in lent]
    if not axes:
        return lambda x: unpack(x.new_empty(0), x)
    receive = _counts(_by_peer(arriving, group, rank), len(group))
    send = _counts(out, len(group))
    pack = packer(src.local_shape(rank), [box for _, box in out])
    return Wire("all_to_all", step.name, axes, group, sum(send), pack, unpack, send=send,
                receive=receive)  # fmt: skip


def _by_peer(boxes: Sequence[tuple[int, Box]], group: Group, rank: int) -> list[tuple[int, Box]]:
    """Return boxes of other ranks with the ranks' indices in the group, in its order."""
    index = {member: i for i, member in enumerate(group)}
    others = [(index[peer], box) for peer, box in boxes if peer != rank]
    return sorted(others, key=lambda item: item[0])


def _counts(boxes: Sequence[tuple[int, Box]], n: int) -> tuple[int, ...]:
    counts = [0] * n
    for index, box in boxes:
        counts[index] += volume(box)
    return tuple(counts)


def _windows(
    shape: tuple[int, ...], pieces: Sequence[HaloPiece], group: Group, rank: int
) -> Unpack:
    """Return a function that puts a window together, of received and own pieces, and zeros."""
    index = {member: i for i, member in enumerate(group)}
    sources = [
        Source(index[p.owner], p.window, own=p.owned if p.owner == rank else None) for p in pieces
    ]
    return unpacker(shape, sorted(sources, key=lambda source: source.peer), Combine(fill="sum"))


def _added(shape: tuple[int, ...], pieces: Sequence[HaloPiece], group: Group, rank: int) -> Unpack:
    """Return a function that adds received and own pieces up where they overlap, zeros elsewhere.

    The shard is divided into cells that no piece covers in part; each is the sum of its terms.
    """
    own = [(piece.owned, piece.window) for piece in pieces if piece.reader == rank]
    boxes = [box for _, box in _by_peer([(p.reader, p.owned) for p in pieces], group, rank)]
    covers = [owned for owned, _ in own] + boxes
    corners = [window for _, window in own] + [relative(box, box) for box in boxes]
    cells = {
        cell: [
            (i, _moved(relative(cell, box), corners[i]))
            for i, box in enumerate(covers) if intersect(cell, box)
        ]
        for cell in _cells(shape, covers)
    }  # fmt: skip
    rows = [(cell, terms) for cell, terms in cells.items() if terms]
    assemble = assembler(shape, [cell for cell, _ in rows], "sum")
    is_part = [(cell, len(terms)) for cell, terms in rows] == [(_whole(shape), 1)]

    def unpack(moved: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        tensors, start = [x] * len(own), 0
        for box in boxes:
            size = volume(box)
            tensors.append(moved.narrow(0, start, size).view(box_shape(box)))
            start += size
        sums = ([view_box(tensors[i], box) for i, box in terms] for _, terms in rows)
        parts = [reduce(torch.add, terms) for terms in sums]
        result = assemble(parts, x)
        return result.clone(memory_format=torch.contiguous_format) if is_part else result

    return unpack


def _whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def _cells(shape: Sequence[int], boxes: Sequence[Box]) -> list[Box]:
    """Return the boxes between all ends of boxes in a tensor of `shape`."""
    ends = [
        sorted({0, size, *(end for box in boxes for end in box[dim])})
        for dim, size in enumerate(shape)
    ]
    return list(itertools.product(*map(itertools.pairwise, ends)))


def _moved(box: Box, corner: Box) -> Box:
    """Return a box moved by the first corner of another."""
    return tuple((i + k, j + k) for (i, j), (k, _) in zip(box, corner, strict=True))
