"""Numbers and lists as short text: bytes, times, ranks, wrapped lines, colours."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterable, Sequence

__all__ = ["bytes_text", "colour", "listing", "plural", "ratio_text", "time_text", "wrap"]

WIDTH = 80
"""Columns of a terminal that every plain text fits in."""

_BREAK = re.compile(r"[^\s,+;{]*[\s,+;{]*")
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: int) -> str:
    """Bytes as people read them: exact below 10 MB, three digits and a unit above.

    >>> bytes_text(196608), bytes_text(3 << 30)
    ('196,608 B', '3.00 GiB')
    """
    if count < 10_000_000:
        return f"{count:,} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1024
        if value < 1000 or unit == _UNITS[-1]:
            break
    return f"{value:,.{max(0, 3 - len(str(int(value))))}f} {unit}"


def time_text(seconds: float) -> str:
    """Seconds with three digits and a unit.

    >>> time_text(8.4e-6), time_text(0.0123), time_text(0.0)
    ('8.40 µs', '12.3 ms', '0 µs')
    """
    if seconds == 0:
        return "0 µs"
    value, unit = next(
        ((seconds * scale, unit) for scale, unit in ((1e6, "µs"), (1e3, "ms"))
         if seconds * scale < 999.5),
        (seconds, "s"),
    )  # fmt: skip
    return f"{value:,.{max(0, 3 - len(str(int(value))))}f} {unit}"


def ratio_text(value: float, bound: float) -> str:
    """How far a value is above its lower bound.

    >>> ratio_text(3, 2), ratio_text(0, 0), ratio_text(5, 0)
    ('1.50x', '1.00x', '')
    """
    if bound == 0:
        return "1.00x" if value == 0 else ""
    return f"{value / bound:.2f}x"


def plural(count: int, noun: str) -> str:
    """A count and its noun.

    >>> plural(1, "launch"), plural(2, "launch"), plural(1024, "rank")
    ('1 launch', '2 launches', '1,024 ranks')
    """
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "x", "s")) else "s"
    return f"{count:,} {noun}{ending}"


def listing(items: Iterable[object], count: int, last: object, most: int = 8) -> str:
    """The items with commas; the first ones, the last and the count where there are many.

    >>> listing(range(4), 4, 3), listing(range(64), 64, 63)
    ('0, 1, 2, 3', '0, 1, 2, … 63 (64 in all)')
    """
    if count <= most:
        return ", ".join(map(str, items))
    first = [str(item) for _, item in zip(range(3), items, strict=False)]
    return f"{', '.join(first)}, … {last} ({count:,} in all)"


def wrap(text: str, width: int, most: int = 4) -> list[str]:
    """Lines of at most `width`, broken after commas, pluses and spaces; at most `most` lines.

    >>> wrap("f32[1024@(dp,tp),512]{unreduced: ep}", 22)
    ['f32[1024@(dp,tp),512]{', 'unreduced: ep}']
    """
    lines = [""]
    for part in filter(None, _BREAK.findall(text)):
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


def columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of every column of equally long rows."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]
