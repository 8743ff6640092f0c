"""The cells of a picture: which shards are drawn, what they say, and how large they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fshard._util.text import WIDTH
from fshard.layout.spec import Spec
from fshard.show.shard_owners import coords_texts, holders_text, place_coords

__all__ = ["Grid", "Segment", "draw", "fit", "grid", "lengths"]

MOST_ROWS, MOST_COLUMNS = 8, 16

Span = tuple[str, int | None]
"""Text and the number of the shard whose colour is behind it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One shard of a dim, or with `place=None` the shards left out between two others."""

    place: int | None
    coords: tuple[str, ...]
    span: str
    size: int

    @property
    def coords_line(self) -> str:
        """The coordinates on one line."""
        return ",".join(filter(None, self.coords))


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows and columns of shards; a cell is its text and the number of its shard."""

    rows: tuple[Segment, ...]
    columns: tuple[Segment, ...]
    cells: tuple[tuple[tuple[str, int | None], ...], ...]
    row_name: str
    column_name: str


def segments(spec: Spec, dim: int, most: int) -> tuple[Segment, ...]:
    """The shards of a dim that hold anything; of more than `most` the first ones and the last.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> [each.span for each in segments(Spec(Mesh(x=64), P("x"), shape=(128,)), 0, 4)]
    ['0:2', '2:4', '…', '126:128']
    """
    axes, cut = spec.partition.dims[dim], spec.shard_sizes(dim)
    starts = itertools.accumulate(cut, initial=0)
    filled = [(place, start, size) for place, (start, size) in
              enumerate(zip(starts, cut, strict=False)) if size]  # fmt: skip
    kept = filled if len(filled) <= most else [*filled[: most - 2], filled[-1]]
    found = []
    for place, start, size in kept:
        coords = coords_texts(place_coords(spec.mesh, axes, place))
        found.append(Segment(place, coords, f"{start}:{start + size}", size))
    if len(kept) < len(filled):
        found.insert(-1, Segment(None, ("",) * len(axes), "…", 0))
    return tuple(found)


def grid(spec: Spec, rows: int, columns: int, brief: bool) -> Grid:
    """The grid of a layout of at most 2 dims, with at most so many rows and columns."""
    whole = (Segment(0, (), "", 1),)
    across = segments(spec, spec.ndim - 1, columns) if spec.ndim else whole
    down = segments(spec, 0, rows) if spec.ndim == 2 else whole
    width = spec.dim_shards(spec.ndim - 1) if spec.ndim else 1
    cells = []
    for row in down:
        line: list[tuple[str, int | None]] = []
        for column in across:
            if row.place is None or column.place is None:
                line.append(("…", None))
                continue
            places = (row.place, column.place)[2 - spec.ndim :]
            line.append((holders_text(spec, places, brief), row.place * width + column.place))
        cells.append(tuple(line))
    names = {0: ("", ""), 1: ("", "dim 0"), 2: ("dim 0", "dim 1")}[spec.ndim]
    return Grid(down, across, tuple(cells), *names)


def fit(spec: Spec, width: int = WIDTH) -> Grid:
    """The fullest grid that plain text of `width` columns has room for."""
    few = (MOST_ROWS, MOST_COLUMNS) if spec.num_shards <= 64 else (5, 5)
    for columns in (few[1], 8, 6, 5, 4, 3):
        for brief in (False, True):
            found = grid(spec, few[0], min(columns, few[1]), brief)
            if _gutter(found) + sum(_least(found)) + len(found.columns) + 1 <= width:
                return found
    return found


def _gutter(found: Grid) -> int:
    """Columns left of the picture: the rows' coordinates and spans, and a blank."""
    coords = max(len(row.coords_line) for row in found.rows)
    spans = max(len(row.span) for row in found.rows)
    heads = len(found.row_name) + 2 * bool(found.row_name) + len(found.column_name)
    return max(coords + 2 * bool(coords and spans) + spans, heads) + 1


def _least(found: Grid) -> list[int]:
    """The least inner width of each column: its heads, and its cells with a blank around."""
    return [
        max(*map(len, (*column.coords, column.span)), *(2 + len(row[at][0]) for row in found.cells))
        for at, column in enumerate(found.columns)
    ]


def lengths(sizes: Sequence[int], least: Sequence[int], total: float, room: int) -> list[int]:
    """Lengths in proportion to `sizes`, about `total` in all: equal sizes get equal lengths.

    None is under its least; where not even the least ones have room, they are returned.

    >>> lengths([3, 5, 8], [2, 2, 2], 32, 40), lengths([1, 1], [3, 5], 4, 40)
    ([6, 10, 16], [5, 5])
    """
    order = sorted(range(len(sizes)), key=lambda at: sizes[at])
    grown = list(least)
    for low, high in itertools.pairwise(order):
        grown[high] = max(grown[low], grown[high])
    for low, high in itertools.pairwise(reversed(order)):
        if sizes[low] == sizes[high]:
            grown[high] = max(grown[low], grown[high])
    floor = grown if sum(grown) <= room else list(least)
    unit = min(total, room) / max(1, sum(sizes))
    while unit > 1e-9:
        found = [max(low, round(size * unit)) for size, low in zip(sizes, floor, strict=True)]
        if sum(found) <= room:
            return found
        unit *= 0.9
    return floor


def draw(spec: Spec, found: Grid, width: int) -> list[list[Span]]:
    """The picture as lines of spans; their texts alone are the plain picture."""
    gutter, count = _gutter(found), len(found.columns)
    room = width - gutter - count - 1
    tall, wide = ((1, 1), (1, *spec.shape), spec.shape)[spec.ndim]
    # A character is twice as tall as wide: 48 x 7 of them make a picture of 48 by 14.
    unit = min(48 / wide, 14 / tall) if spec.ndim == 2 else 48 / wide
    widths = lengths([c.size for c in found.columns], _least(found), wide * unit, room)
    heights = lengths([r.size for r in found.rows], [1] * len(found.rows),
                      tall * unit / 2 if spec.ndim == 2 else 1, 8)  # fmt: skip
    lines: list[list[Span]] = [[(text, None)] for text in _heads(found, widths, gutter)]
    lines.append([(" " * gutter + _rule("┌┬┐", widths), None)])
    for at, (row, height) in enumerate(zip(found.rows, heights, strict=True)):
        if at:
            lines.append([(" " * gutter + _rule("├┼┤", widths), None)])
        for line in range(height):
            middle = line == (height - 1) // 2
            lines.append(_cells(found, at, row, widths, gutter, middle))
    lines.append([(" " * gutter + _rule("└┴┘", widths), None)])
    return lines


def _heads(found: Grid, widths: Sequence[int], gutter: int) -> list[str]:
    """The lines above the picture: the columns' coordinates, then their spans."""
    rows = [list(line) for line in zip(*(column.coords for column in found.columns), strict=True)]
    if any(column.span for column in found.columns):
        rows.append([column.span for column in found.columns])
    corner = f"{found.row_name:<{gutter - 1 - len(found.column_name)}}{found.column_name} "
    lines = []
    for at, row in enumerate(rows):
        cells = " ".join(f"{text:^{n}}" for text, n in zip(row, widths, strict=True))
        left = corner if at == len(rows) - 1 else " " * gutter
        lines.append(f"{left} {cells}".rstrip())
    return lines


def _cells(
    found: Grid, at: int, row: Segment, widths: Sequence[int], gutter: int, middle: bool
) -> list[Span]:
    """One line through a row of cells; the middle one bears the texts."""
    coords = max(len(each.coords_line) for each in found.rows)
    side = f"{row.coords_line:<{coords}}{row.span:>{gutter - 1 - coords}} "
    spans: list[Span] = [(f"{side if middle else ' ' * gutter}│", None)]
    for (text, shard), width in zip(found.cells[at], widths, strict=True):
        spans += [(f"{text if middle else '':^{width}}", shard), ("│", None)]
    return spans


def _rule(ends: str, widths: Sequence[int]) -> str:
    return ends[0] + ends[1].join("─" * width for width in widths) + ends[2]
