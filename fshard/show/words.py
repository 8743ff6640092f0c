"""Lists as short text, and colours."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable

__all__ = ["colour", "listing"]


def listing(items: Iterable[object], count: int, last: object, most: int = 8) -> str:
    """The items with commas; the first ones, the last and the count where there are many.

    >>> listing(range(4), 4, 3), listing(range(64), 64, 63)
    ('0, 1, 2, 3', '0, 1, 2, … 63 (64 in all)')
    """
    if count <= most:
        return ", ".join(map(str, items))
    first = [str(item) for _, item in zip(range(3), items, strict=False)]
    return f"{', '.join(first)}, … {last} ({count:,} in all)"


def colour(place: int) -> str:
    """A light colour for black text, far from those of the neighbouring places.

    Hues step by the golden angle, so that any few in a row differ.

    >>> colour(0), colour(0) == colour(1)
    ('#a6c7ed', False)
    """
    hue = (0.59 + place * 0.381966) % 1
    level = (0.79, 0.72, 0.85)[place // 8 % 3]
    red, green, blue = colorsys.hls_to_rgb(hue, level, 0.66)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
