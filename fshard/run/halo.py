"""Halo steps of one rank: the boxes that it sends and receives, and what it makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fshard.layout.spec import Spec
from fshard.program.halo_boxes import (
    HaloPiece,
    halo_axes,
    owners_of,
    shard_pieces,
    volume,
    window_pieces,
)
from fshard.program.halo_steps import HaloExchange, HaloReduce
from fshard.run.collective import UNCHANGED, Wire
from fshard.run.packing import Box, Source, Unpack, box_shape, packer, unpacker, view_box
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
    """Return a function that puts a window together, of received and of own pieces."""
    index = {member: i for i, member in enumerate(group)}
    sources = [
        Source(index[p.owner], p.window, own=p.owned if p.owner == rank else None) for p in pieces
    ]
    return unpacker(shape, sorted(sources, key=lambda source: source.peer), UNCHANGED)


def _added(shape: tuple[int, ...], pieces: Sequence[HaloPiece], group: Group, rank: int) -> Unpack:
    """Return a function that adds the received pieces, and the own ones, to zeros."""
    own = [(piece.owned, piece.window) for piece in pieces if piece.reader == rank]
    boxes = _by_peer([(piece.reader, piece.owned) for piece in pieces], group, rank)

    def unpack(moved: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result, start = x.new_zeros(shape), 0
        for owned, window in own:
            view_box(result, owned).add_(view_box(x, window))
        for _, box in boxes:
            size = volume(box)
            view_box(result, box).add_(moved.narrow(0, start, size).view(box_shape(box)))
            start += size
        return result

    return unpack
