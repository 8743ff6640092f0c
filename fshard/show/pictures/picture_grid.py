"""Cells of a picture: the shards that are drawn, their texts and their sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fshard._util.text import WIDTH
from fshard.layout.spec import Spec
from fshard.show.pictures.shard_owners import coords_texts, holders_text, index_coords

MAX_ROWS, MAX_COLUMNS = 8, 16

Span = tuple[str, int | None]
"""Text and the index of the shard that colours its background."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One shard of a dim, or with `index=None` the shards left out between two others."""

    index: int | None
    coords: tuple[str, ...]
    span: str
    size: int

    @property
    def coords_line(self) -> str:
        """The coordinates on one line."""
        return ",".join(filter(None, self.coords))


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows and columns of shards; a cell is its text and the index of its shard."""

    rows: tuple[Segment, ...]
    columns: tuple[Segment, ...]
    cells: tuple[tuple[tuple[str, int | None], ...], ...]
    row_name: str
    column_name: str


def segments(spec: Spec, dim: int, most: int) -> tuple[Segment, ...]:
    """Return the non-empty shards of a dim; of more than `most` the first ones and the last.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> [segment.span for segment in segments(Spec(Mesh(x=64), P("x"), shape=(128,)), 0, 4)]
    ['0:2', '2:4', '…', '126:128']
    """
    axes, sizes = spec.partition.dims[dim], spec.shard_sizes(dim)
    starts = itertools.accumulate(sizes, initial=0)
    filled = [(index, start, size) for index, (start, size) in
              enumerate(zip(starts, sizes, strict=False)) if size]  # fmt: skip
    shown = filled if len(filled) <= most else [*filled[: most - 2], filled[-1]]
    result = []
    for index, start, size in shown:
        coords = coords_texts(index_coords(spec.mesh, axes, index))
        result.append(Segment(index, coords, f"{start}:{start + size}", size))
    if len(shown) < len(filled):
        result.insert(-1, Segment(None, ("",) * len(axes), "…", 0))
    return tuple(result)


def grid(spec: Spec, rows: int, columns: int, brief: bool) -> Grid:
    """Return the grid of a layout of at most 2 dims, with at most so many rows and columns."""
    single = (Segment(0, (), "", 1),)
    across = segments(spec, spec.ndim - 1, columns) if spec.ndim else single
    down = segments(spec, 0, rows) if spec.ndim == 2 else single
    width = spec.dim_shards(spec.ndim - 1) if spec.ndim else 1
    cells = []
    for row in down:
        line: list[tuple[str, int | None]] = []
        for column in across:
            if row.index is None or column.index is None:
                line.append(("…", None))
                continue
            shard = (row.index, column.index)[2 - spec.ndim :]
            line.append((holders_text(spec, shard, brief), row.index * width + column.index))
        cells.append(tuple(line))
    names = {0: ("", ""), 1: ("", "dim 0"), 2: ("dim 0", "dim 1")}[spec.ndim]
    return Grid(down, across, tuple(cells), *names)


def fit(spec: Spec, width: int = WIDTH) -> Grid:
    """Return the largest grid that fits into plain text of `width` columns."""
    limits = (MAX_ROWS, MAX_COLUMNS) if spec.num_shards <= 64 else (5, 5)
    for columns in (limits[1], 8, 6, 5, 4, 3):
        for brief in (False, True):
            picture = grid(spec, limits[0], min(columns, limits[1]), brief)
            if _gutter(picture) + sum(_least(picture)) + len(picture.columns) + 1 <= width:
                return picture
    return picture


def _gutter(picture: Grid) -> int:
    """Return the columns left of the picture, for coordinates and spans of rows."""
    coords = max(len(row.coords_line) for row in picture.rows)
    spans = max(len(row.span) for row in picture.rows)
    heads = len(picture.row_name) + 2 * bool(picture.row_name) + len(picture.column_name)
    return max(coords + 2 * bool(coords and spans) + spans, heads) + 1


def _least(picture: Grid) -> list[int]:
    """Return the least inner width of each column: of its headings, and of cells with blanks."""
    return [
        max(
            *map(len, (*column.coords, column.span)), *(2 + len(row[i][0]) for row in picture.cells)
        )
        for i, column in enumerate(picture.columns)
    ]


def lengths(sizes: Sequence[int], least: Sequence[int], total: float, room: int) -> list[int]:
    """Return lengths proportional to `sizes`, about `total` together, equal for equal sizes.

    No length is below its least one; if the least ones exceed `room`, they are returned.

    >>> lengths([3, 5, 8], [2, 2, 2], 32, 40), lengths([1, 1], [3, 5], 4, 40)
    ([6, 10, 16], [5, 5])
    """
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    raised = list(least)
    for low, high in itertools.pairwise(order):
        raised[high] = max(raised[low], raised[high])
    for low, high in itertools.pairwise(reversed(order)):
        if sizes[low] == sizes[high]:
            raised[high] = max(raised[low], raised[high])
    floor = raised if sum(raised) <= room else list(least)
    unit = min(total, room) / max(1, sum(sizes))
    while unit > 1e-9:
        result = [max(low, round(size * unit)) for size, low in zip(sizes, floor, strict=True)]
        if sum(result) <= room:
            return result
        unit *= 0.9
    return floor


def draw(spec: Spec, picture: Grid, width: int) -> list[list[Span]]:
    """Return the picture as lines of spans; their texts alone are the plain picture."""
    gutter, count = _gutter(picture), len(picture.columns)
    room = width - gutter - count - 1
    num_rows, num_columns = ((1, 1), (1, *spec.shape), spec.shape)[spec.ndim]
    # A character is twice as tall as wide: 48 x 7 of them make a picture of 48 by 14.
    unit = min(48 / num_columns, 14 / num_rows) if spec.ndim == 2 else 48 / num_columns
    widths = lengths([c.size for c in picture.columns], _least(picture), num_columns * unit, room)
    heights = lengths([r.size for r in picture.rows], [1] * len(picture.rows),
                      num_rows * unit / 2 if spec.ndim == 2 else 1, 8)  # fmt: skip
    lines: list[list[Span]] = [[(text, None)] for text in _heads(picture, widths, gutter)]
    lines.append([(" " * gutter + _rule("┌┬┐", widths), None)])
    for i, (row, height) in enumerate(zip(picture.rows, heights, strict=True)):
        if i:
            lines.append([(" " * gutter + _rule("├┼┤", widths), None)])
        for line in range(height):
            middle = line == (height - 1) // 2
            lines.append(_cells(picture, i, row, widths, gutter, middle))
    lines.append([(" " * gutter + _rule("└┴┘", widths), None)])
    return lines


def _heads(picture: Grid, widths: Sequence[int], gutter: int) -> list[str]:
    """Return the lines above the picture: coordinates of the columns, then their spans."""
    rows = [list(line) for line in zip(*(column.coords for column in picture.columns), strict=True)]
    if any(column.span for column in picture.columns):
        rows.append([column.span for column in picture.columns])
    corner = f"{picture.row_name:<{gutter - 1 - len(picture.column_name)}}{picture.column_name} "
    lines = []
    for i, row in enumerate(rows):
        cells = " ".join(f"{text:^{n}}" for text, n in zip(row, widths, strict=True))
        left = corner if i == len(rows) - 1 else " " * gutter
        lines.append(f"{left} {cells}".rstrip())
    return lines


def _cells(
    picture: Grid, i: int, row: Segment, widths: Sequence[int], gutter: int, middle: bool
) -> list[Span]:
    """Return one line through a row of cells; the middle line has the texts."""
    coords = max(len(x.coords_line) for x in picture.rows)
    side = f"{row.coords_line:<{coords}}{row.span:>{gutter - 1 - coords}} "
    spans: list[Span] = [(f"{side if middle else ' ' * gutter}│", None)]
    for (text, shard), width in zip(picture.cells[i], widths, strict=True):
        spans += [(f"{text if middle else '':^{width}}", shard), ("│", None)]
    return spans


def _rule(ends: str, widths: Sequence[int]) -> str:
    return ends[0] + ends[1].join("─" * width for width in widths) + ends[2]
