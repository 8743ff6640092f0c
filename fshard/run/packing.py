"""Boxes of tensors laid one after the other to travel, and put in their places where they come.

A box is (start, stop) per dim. What lies already as it travels is a view; whatever has to be
copied is copied once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fshard.run.transports.reduce_dtypes import (
    REDUCE,
    as_number,
    neutral_like,
    over,
    reduced,
    times,
)

__all__ = [
    "Box",
    "Made",
    "Source",
    "Tensors",
    "Unpack",
    "cut",
    "join",
    "lands",
    "lengths",
    "meet",
    "packer",
    "part",
    "relative",
    "unpacker",
]

Box = tuple[tuple[int, int], ...]
Tensors = Callable[[torch.Tensor], torch.Tensor]
Unpack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What has come, flat, and the local that was packed, to the local afterwards."""


def join(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one dtype one after the other, flat.

    >>> join([torch.zeros(2, 3), torch.zeros(2)]).shape
    torch.Size([8])
    """
    flat = [x.reshape(-1) for x in xs]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def part(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    """What `join` laid one after the other, taken apart: several in memory of their own each."""
    if len(shapes) == 1:
        return (flat.reshape(tuple(shapes[0])),)
    return tuple(
        piece.clone().view(tuple(shape))
        for piece, shape in zip(flat.split([*map(math.prod, shapes)]), shapes, strict=True)
    )


class Source(NamedTuple):
    """Where a `box` of the result comes from: a place of the group, or `own` of the local before.

    Of several addends of one box the reduction is taken, in their order.
    """

    place: int
    box: Box
    addend: int = 0
    own: Box | None = None


def meet(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    box = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return box if all(i < j for i, j in box) else None


def relative(box: Box, whole: Box) -> Box:
    """A box in coordinates that begin where `whole` does."""
    return tuple((i - k, j - k) for (i, j), (k, _) in zip(box, whole, strict=True))


def lengths(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(j - i for i, j in box)


def _begins(shape: Sequence[int], box: Box) -> int | None:
    """Where a box begins in a contiguous tensor, if its elements lie there in one row."""
    start, stride, cut = 0, 1, False
    for size, (i, j) in zip(reversed(shape), reversed(box), strict=True):
        if cut and j - i > 1:
            return None
        start, stride, cut = start + i * stride, stride * size, cut or j - i < size
    return start


def _in_a_row(shape: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """Where boxes begin in a contiguous tensor, if they lie there one after the other."""
    first = end = _begins(shape, boxes[0])
    for box in boxes:
        if end is None or _begins(shape, box) != end:
            return None
        end += math.prod(lengths(box))
    return first


def cut(x: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a tensor, as a view."""
    for dim, (i, j) in enumerate(box):
        if j - i < x.shape[dim]:
            x = x.narrow(dim, i, j - i)
    return x


def packer(shape: Sequence[int], boxes: Sequence[Box]) -> Tensors:
    """What lays boxes of a tensor of `shape` one after the other in one flat tensor."""
    if not boxes:
        return lambda x: x.new_empty(0)
    sizes = [math.prod(lengths(box)) for box in boxes]
    total, start = sum(sizes), _in_a_row(shape, boxes)
    if start is not None:
        if total == math.prod(shape):
            return lambda x: x.reshape(-1)
        return lambda x: x.reshape(-1).narrow(0, start, total)
    if shape and len({lengths(box)[1:] for box in boxes}) == 1:
        # What is joined of tensors that lie channels last lies so itself.
        return lambda x: torch.cat([cut(x, box) for box in boxes]).reshape(-1)

    def pack(x: torch.Tensor) -> torch.Tensor:
        flat = x.new_empty(total)
        for part, box in zip(flat.split(sizes), boxes, strict=True):
            part.view(lengths(box)).copy_(cut(x, box))
        return flat

    return pack


def lands(shape: Sequence[int], sources: Sequence[Source]) -> bool:
    """Whether the sources lie in their order as the result does, addend after addend.

    What comes is then the result, or a stack of its addends. Two are better added where they
    are: the one that this rank has itself need not travel.
    """
    order = [source.addend for source in sources]
    if len(set(order)) == 2:
        return False
    rows = [[each.box for each in sources if each.addend == a] for a in dict.fromkeys(order)]
    return bool(rows) and order == sorted(order) and all(_whole(shape, row) for row in rows)


def _whole(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes one after the other are a contiguous tensor."""
    filled = sum(math.prod(lengths(box)) for box in boxes)
    return filled == math.prod(shape) and _in_a_row(shape, boxes) == 0


class Made(NamedTuple):
    """How elements are made of their addends: by `op` one, times a factor, over a divisor.

    Those of which no source has any are the neutral element of the reduction `rest`.
    """

    op: str = "sum"
    factor: int = 1
    divisor: int = 1
    rest: str = ""

    def of(self, addends: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor of several; of one that is not scaled itself. Rounded once."""
        if self.factor == self.divisor == 1:
            return addends[0] if len(addends) == 1 else reduced(addends, self.op)
        numbers = [as_number(x, self.op)[0] for x in addends]
        _, restore = as_number(addends[0], self.op)
        total = numbers[0] if len(numbers) == 1 else reduced(numbers, self.op)
        return restore(over(times(total, self.factor), self.divisor))


def unpacker(shape: Sequence[int], sources: Sequence[Source], made: Made) -> Unpack:
    """What makes a tensor of `shape` of the sources of its boxes, which lie side by side."""
    if lands(shape, sources) and all(source.own is None for source in sources):
        n = len({source.addend for source in sources})
        if n == 1:
            return lambda moved, _: made.of([moved.view(shape)])
        scaled = made._replace(op="sum")

        def stacked(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            number, restore = as_number(moved, made.op)
            return restore(scaled.of([REDUCE[made.op](number.view(n, *shape))]))

        return stacked
    boxes: dict[Box, list[tuple[int, int, Box | None]]] = {}
    start = 0
    for _, box, addend, own in sources:
        boxes.setdefault(box, []).append((addend, start, own))
        start += math.prod(lengths(box)) if own is None else 0
    rows = sorted((box, sorted(each)) for box, each in boxes.items())
    place = _placing(shape, [box for box, _ in rows], made.rest)
    if len(sources) == 1 and _whole(shape, [sources[0].box]):
        place = lambda parts, _: parts[0].clone(memory_format=torch.contiguous_format)  # noqa: E731

    def unpack(moved: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for box, addends in rows:
            size, n = lengths(box), math.prod(lengths(box))
            each = [
                moved.narrow(0, start, n).view(size) if own is None else cut(x, own)
                for _, start, own in addends
            ]
            parts.append(made.of(each))
        return place(parts, moved)

    return unpack


def _placing(
    shape: Sequence[int], boxes: Sequence[Box], rest: str
) -> Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]:
    """What puts tensors in the places of their boxes, in memory like that of another tensor.

    Between them are neutral elements of the reduction `rest`.
    """
    filled = sum(math.prod(lengths(box)) for box in boxes) == math.prod(shape)
    if filled and len(boxes) == 1:
        return lambda parts, _: parts[0]
    cuts = [dim for dim in range(len(shape)) if len({box[dim] for box in boxes}) > 1]
    if filled and len(cuts) == 1:
        return lambda parts, _: torch.cat(list(parts), cuts[0])

    def place(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        whole = like.new_empty(shape) if filled else neutral_like(like, rest, tuple(shape))
        for part, box in zip(parts, boxes, strict=True):
            cut(whole, box).copy_(part)
        return whole

    return place
