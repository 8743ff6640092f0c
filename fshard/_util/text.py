"""Text for people: lists, columns and line breaks that fit a terminal, units, colours."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Collection, Iterable, Sequence

__all__ = [
    "WIDTH", "below", "bytes_text", "colour", "columns", "folded", "listing", "parts", "plural",
    "rate_text", "ratio_text", "time_text", "wrap",
]  # fmt: skip

WIDTH = 80
"""Columns of a terminal that every plain text fits in."""

_BREAKS = re.compile(
    r"(?<=[\s,+;])(?=[^\s,+;])"  # after commas, pluses and spaces
    r"|(?<=\S)(?=\{)"  # before the states of a spec
    r"|(?<=[A-Za-z_]\.)(?=\w)|(?<=\d\.)(?=[A-Za-z_])|(?<=\])(?=\[)"  # between keys of a tree
)
_CLAUSES = re.compile(r" (?=(?:->|on) )")


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


def folded(text: str, margin: int = 0, width: int = WIDTH) -> list[str]:
    r"""A text `margin` columns in, on as few lines as it takes, all but the first 4 more in.

    It breaks before arrows and before where something is, and only elsewhere if that is not
    enough.

    >>> print(*folded("f32[8@x] -> f32[8@y] on Mesh(x=2, y=2)", width=24), sep="\n")
    f32[8@x] -> f32[8@y]
        on Mesh(x=2, y=2)
    """
    lines: list[str] = []
    for clause in _CLAUSES.split(text):
        if lines and len(lines[-1]) + 1 + len(clause) <= width:
            lines[-1] += f" {clause}"
            continue
        here = margin + 4 * bool(lines)
        fits = here + len(clause) <= width
        for line in [clause] if fits else wrap(clause, width - margin - 4):
            lines.append(" " * (margin + 4 * bool(lines)) + line)
    return lines


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    r"""Rows in columns, 2 columns in, those of `right` flush right; none if a line is too wide.

    >>> print(*columns([("all_reduce(x)", "8 B"), ("cast(f32)", "16 B")], {1}), sep="\n")
      all_reduce(x)   8 B
      cast(f32)      16 B
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    if 2 + sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        return []
    return [
        "  " + "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]  # fmt: skip


def below(rows: Sequence[Sequence[str]]) -> list[str]:
    r"""Rows too wide for columns: of each the cells below each other.

    >>> print(*below([("['w']", "f32[8@x] -> f32[8]", "all_gather(x, dim 0)")]), sep="\n")
      ['w']
        f32[8@x] -> f32[8]
        all_gather(x, dim 0)
    """
    return [
        line
        for row in rows
        for at, cell in enumerate(row)
        for line in folded(cell, 2 + 2 * bool(at))
    ]


Units = Sequence[tuple[str, float]]

_BINARY: Units = (("MiB", 2**-20), ("GiB", 2**-30), ("TiB", 2**-40), ("PiB", 2**-50))
_DECIMAL: Units = (("MB/s", 1e-6), ("GB/s", 1e-9), ("TB/s", 1e-12))
_SECONDS: Units = (("µs", 1e6), ("ms", 1e3), ("s", 1.0))


def bytes_text(count: int) -> str:
    """Bytes as people read them: exact below 1 MiB, three digits and a unit from there on.

    >>> bytes_text(196608), bytes_text(8 << 20), bytes_text(3 << 30)
    ('196,608 B', '8.00 MiB', '3.00 GiB')
    """
    if count < 1 << 20:
        return f"{count:,} B"
    return _scaled(count, _BINARY)


def time_text(seconds: float) -> str:
    """Seconds with three digits and a unit.

    >>> time_text(8.4e-6), time_text(0.0123), time_text(0.0)
    ('8.40 µs', '12.3 ms', '0 µs')
    """
    return "0 µs" if seconds == 0 else _scaled(seconds, _SECONDS)


def rate_text(bandwidth: float) -> str:
    """Bytes per second with three digits and a decimal unit, as vendors write them.

    >>> rate_text(360e9), rate_text(2.68e12), rate_text(24e6)
    ('360 GB/s', '2.68 TB/s', '24.0 MB/s')
    """
    return _scaled(bandwidth, _DECIMAL)


def _scaled(value: float, units: Units) -> str:
    """In the first of growing units that makes fewer than 1,000 of it, or the last."""
    fits = (each for each in units if value * each[1] < 999.5)
    unit, scale = next(fits, units[-1])
    number = value * scale
    return f"{number:,.{max(0, 3 - len(str(int(number))))}f} {unit}"


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
