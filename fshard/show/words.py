"""Lists as short text, wrapped lines, colours."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterable

__all__ = ["colour", "listing", "parts", "wrap"]

WIDTH = 80
"""Columns of a terminal that every plain text fits in."""

_BREAKS = re.compile(
    r"(?<=[\s,+;])(?=[^\s,+;])"  # after commas, pluses and spaces
    r"|(?<=\S)(?=\{)"  # before the states of a spec
    r"|(?<=[A-Za-z_]\.)(?=\w)|(?<=\d\.)(?=[A-Za-z_])|(?<=\])(?=\[)"  # between keys of a tree
)


def listing(items: Iterable[object], count: int, last: object, most: int = 8) -> str:
    """The items with commas; the first ones, the last and the count where there are many.

    >>> listing(range(4), 4, 3), listing(range(64), 64, 63)
    ('0, 1, 2, 3', '0, 1, 2, … 63 (64 in all)')
    """
    if count <= most:
        return ", ".join(map(str, items))
    first = [str(item) for _, item in zip(range(3), items, strict=False)]
    return f"{', '.join(first)}, … {last} ({count:,} in all)"


def parts(text: str) -> list[str]:
    """What stays on one line: text breaks after commas, before states, between keys of a tree.

    >>> parts("f32[8,4]{unreduced: ep}"), parts("['attn.out']['w']")
    (['f32[8,', '4]', '{unreduced: ', 'ep}'], ["['attn.", "out']", "['w']"])
    """
    return _BREAKS.split(text)


def wrap(text: str, width: int, most: int = 4) -> list[str]:
    """Lines of at most `width`, broken between `parts`; at most `most` lines.

    >>> wrap("f32[1024@(dp,tp),512]{unreduced: ep}", 22)
    ['f32[1024@(dp,tp),512]', '{unreduced: ep}']
    """
    lines = [""]
    for part in parts(text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    lines = [line.rstrip() for line in lines]
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: width - 1]}…"]
    return lines


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
