"""Boxes of a tensor: products of intervals, one for each dim."""

from __future__ import annotations

import math

from fshard.layout.spec import Spec

Box = tuple[tuple[int, int], ...]
"""Start and stop in every dim."""


def local_box(spec: Spec, rank: int) -> Box:
    """Return the box of a rank's local in global coordinates."""
    return tuple((part.start, part.stop) for part in spec.index(rank))


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(j - i for i, j in box)


def volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(box_shape(box))


def common(a: Box, b: Box) -> Box:
    """Return the intersection of two boxes that overlap."""
    return tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, None if it is empty."""
    box = common(a, b)
    return box if all(i < j for i, j in box) else None


def relative(box: Box, outer: Box) -> Box:
    """Return a box in coordinates that start at the first corner of `outer`."""
    return tuple((i - k, j - k) for (i, j), (k, _) in zip(box, outer, strict=True))
