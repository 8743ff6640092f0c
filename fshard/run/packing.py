"""Boxes of a tensor concatenated into one flat tensor, and put at their positions in another.

A box is (start, stop) per dim. Boxes that are contiguous in memory already are views, the others
are copied once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fshard.program.boxes import Box, box_shape, volume
from fshard.run.transports.reduce_dtypes import (
    REDUCE,
    TensorFunction,
    as_number,
    neutral_like,
    over,
    reduced,
    times,
)

Unpack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The received flat tensor, and the local that was packed, to the local after the collective."""


def concat_flat(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of one dtype as one flat tensor.

    >>> concat_flat([torch.zeros(2, 3), torch.zeros(2)]).shape
    torch.Size([8])
    """
    flat = [x.reshape(-1) for x in xs]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def nbytes_of(x: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, `x.nbytes` for sizes that may be symbols."""
    return x.numel() * x.element_size()


def split_flat(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    """Split the result of `concat_flat` into tensors of `shapes`; several are copied."""
    if len(shapes) == 1:
        return (flat.reshape(tuple(shapes[0])),)
    return tuple(
        piece.clone().view(tuple(shape))
        for piece, shape in zip(flat.split([*map(math.prod, shapes)]), shapes, strict=True)
    )


class Source(NamedTuple):
    """Origin of one `box` of the result.

    Attributes:
        peer: the sender's index in the group.
        box: the box in the result's coordinates.
        term: number of the unreduced value; the values of one box are reduced in this order.
        own: the box of this rank's local that is used instead of something received, if it is.
    """

    peer: int
    box: Box
    term: int = 0
    own: Box | None = None


def _offset(shape: Sequence[int], box: Box) -> int | None:
    """Return the first element's offset in a contiguous tensor, None if the box has gaps there."""
    start, stride, partial = 0, 1, False
    for size, (i, j) in zip(reversed(shape), reversed(box), strict=True):
        if partial and j - i > 1:
            return None
        start, stride, partial = start + i * stride, stride * size, partial or j - i < size
    return start


def _offset_in_row(shape: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """Return the first box's offset in a contiguous tensor if the others follow it, else None."""
    first = end = _offset(shape, boxes[0])
    for box in boxes:
        if end is None or _offset(shape, box) != end:
            return None
        end += volume(box)
    return first


def view_box(x: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of one box of a tensor."""
    for dim, (i, j) in enumerate(box):
        if j - i < x.shape[dim]:
            x = x.narrow(dim, i, j - i)
    return x


def packer(shape: Sequence[int], boxes: Sequence[Box]) -> TensorFunction:
    """Return a function that concatenates boxes of a tensor of `shape` into one flat tensor."""
    if not boxes:
        return lambda x: x.new_empty(0)
    sizes = [volume(box) for box in boxes]
    total, start = sum(sizes), _offset_in_row(shape, boxes)
    if start is not None:
        if total == math.prod(shape):
            return lambda x: x.reshape(-1)
        return lambda x: x.reshape(-1).narrow(0, start, total)
    # The concatenation of channels-last tensors would be channels-last itself: reshape copies.
    split = _split_dim(shape, boxes)
    if split is not None:
        return lambda x: torch.cat(x.chunk(len(boxes), split)).reshape(-1)
    if shape and len({box_shape(box)[1:] for box in boxes}) == 1:
        return lambda x: torch.cat([view_box(x, box) for box in boxes]).reshape(-1)

    def pack(x: torch.Tensor) -> torch.Tensor:
        flat = x.new_empty(total)
        for piece, box in zip(flat.split(sizes), boxes, strict=True):
            piece.view(box_shape(box)).copy_(view_box(x, box))
        return flat

    return pack


def _split_dim(shape: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """Return the dim that the boxes split into equal parts, in their order, None without one."""
    split = [dim for dim in range(len(shape)) if boxes[0][dim] != (0, shape[dim])]
    if len(split) != 1 or len({*map(box_shape, boxes)}) > 1:
        return None
    (dim,), size = split, box_shape(boxes[0])[split[0]]
    starts = [box[dim][0] for box in boxes]
    return dim if starts == [*range(0, shape[dim], size or 1)] else None


def arrives_in_order(shape: Sequence[int], sources: Sequence[Source]) -> bool:
    """Return True if the concatenated sources are a contiguous result, or a stack of its terms.

    False for two terms: adding them apart saves sending the one that this rank holds itself.
    """
    order = [source.term for source in sources]
    if len(set(order)) == 2:
        return False
    rows = [[s.box for s in sources if s.term == term] for term in dict.fromkeys(order)]
    return bool(rows) and order == sorted(order) and all(_covers(shape, row) for row in rows)


def _covers(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return True if the concatenated boxes are a contiguous tensor of `shape`."""
    filled = sum(volume(box) for box in boxes)
    return filled == math.prod(shape) and _offset_in_row(shape, boxes) == 0


class Combine(NamedTuple):
    """Formula of an element: the reduction `op` of its terms, times `factor`, over `divisor`.

    Elements without a source are the neutral element of the reduction `fill`.
    """

    op: str = "sum"
    factor: int = 1
    divisor: int = 1
    fill: str = ""

    def of(self, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the combined terms, rounded once; a single unscaled term is returned itself."""
        if self.factor == self.divisor == 1:
            return terms[0] if len(terms) == 1 else reduced(terms, self.op)
        values = [as_number(x, self.op)[0] for x in terms]
        _, restore = as_number(terms[0], self.op)
        total = values[0] if len(values) == 1 else reduced(values, self.op)
        return restore(over(times(total, self.factor), self.divisor))


def unpacker(shape: Sequence[int], sources: Sequence[Source], combine: Combine) -> Unpack:
    """Return a function that makes a tensor of `shape` from the received sources in their order."""
    if arrives_in_order(shape, sources) and all(source.own is None for source in sources):
        n = len({source.term for source in sources})
        if n == 1:
            return lambda moved, _: combine.of([moved.view(shape)])
        scale = combine._replace(op="sum")

        def unpack_stack(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            value, restore = as_number(moved, combine.op)
            return restore(scale.of([REDUCE[combine.op](value.view(n, *shape))]))

        return unpack_stack
    boxes: dict[Box, list[tuple[int, int, Box | None]]] = {}
    received = list[Box]()
    for _, box, term, own in sources:
        boxes.setdefault(box, []).append((term, len(received), own))
        received += [box] if own is None else []
    rows = sorted((box, sorted(terms)) for box, terms in boxes.items())
    assemble = assembler(shape, [box for box, _ in rows], combine.fill)
    if len(sources) == 1 and _covers(shape, [sources[0].box]):
        assemble = lambda parts, _: parts[0].clone(memory_format=torch.contiguous_format)  # noqa: E731

    def unpack(moved: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        pieces = _view_pieces(moved, received)
        parts = [
            combine.of([pieces[i] if own is None else view_box(x, own) for _, i, own in terms])
            for _, terms in rows
        ]
        return assemble(parts, moved)

    return unpack


def _view_pieces(flat: torch.Tensor, boxes: Sequence[Box]) -> Sequence[torch.Tensor]:
    """Return views of the concatenated boxes, in few operations."""
    shapes = [*map(box_shape, boxes)]
    if len({*shapes}) == 1:
        return flat.view(len(shapes), *shapes[0]).unbind()
    pieces = flat.split([*map(math.prod, shapes)])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _concatenation(
    shape: Sequence[int], rows: Sequence[tuple[int, int]], dim: int
) -> Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Return the concatenation of tensors at rows of a dim, in order, with zeros between them."""
    ends = [0, *(stop for _, stop in rows)]
    gaps = [start - end for start, end in zip([*(start for start, _ in rows), shape[dim]], ends,
                                              strict=True)]  # fmt: skip
    zeros = {i: (*shape[:dim], gap, *shape[dim + 1 :]) for i, gap in enumerate(gaps) if gap}

    def concatenate(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        pieces = list(parts)
        for i in reversed(zeros):
            pieces.insert(i, like.new_zeros(zeros[i]))
        return torch.cat(pieces, dim)

    return concatenate


def assembler(
    shape: Sequence[int], boxes: Sequence[Box], fill: str
) -> Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Return a function of the boxes' tensors, and one with the dtype and device of the result.

    Elements outside of the boxes are the neutral element of the reduction `fill`.
    """
    filled = sum(volume(box) for box in boxes) == math.prod(shape)
    if filled and len(boxes) == 1:
        return lambda parts, _: parts[0]
    partial = [dim for dim, size in enumerate(shape) if {(0, size)} != {box[dim] for box in boxes}]
    if boxes and len(partial) == 1 and (filled or fill in ("sum", "avg")):
        return _concatenation(shape, [box[partial[0]] for box in boxes], partial[0])

    def assemble(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        result = like.new_empty(shape) if filled else neutral_like(like, fill, tuple(shape))
        for part, box in zip(parts, boxes, strict=True):
            view_box(result, box).copy_(part)
        return result

    return assemble
