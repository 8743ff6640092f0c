"""Cells of a picture: the shards that are drawn, their texts and their sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fshard._util.text import WIDTH
from fshard.layout.mesh_groups import index_coords
from fshard.layout.spec import Spec
from fshard.show.pictures.axis_marks import coordinate_spans, shard_colour
from fshard.show.pictures.drawing import Line, TextSpan
from fshard.show.pictures.shard_owners import coords_texts, holders_text

MAX_ROWS, MAX_COLUMNS, MAX_SLABS = 8, 16, 4

Shard = tuple[int, ...]
"""Index of a shard in every dim."""
CellText = Callable[[Shard, bool], Sequence[str]]
"""Function that returns the lines in the cell of a shard, shorter ones if the bool is True."""


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


class Cell(NamedTuple):
    """Lines of text of a cell, and the colour of its background, "" for shards left out."""

    lines: tuple[str, ...]
    fill: str


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows and columns of shards at one index of all other dims.

    Attributes:
        spec: The layout.
        rows: Shards of the dim that is drawn downward.
        columns: Shards of the dim that is drawn to the right.
        cells: A cell for each row and column.
        row_name: Heading of the rows.
        column_name: Heading of the columns.
    """

    spec: Spec
    rows: tuple[Segment, ...]
    columns: tuple[Segment, ...]
    cells: tuple[tuple[Cell, ...], ...]
    row_name: str
    column_name: str


class View(NamedTuple):
    """Dims of a tensor in its picture.

    Attributes:
        row: The dim that is drawn downward, None for fewer than 2 dims.
        column: The dim that is drawn to the right, None for a scalar.
        slabs: Other sharded dims: there is a grid for each of their shards.
        rest: Other dims.
    """

    row: int | None
    column: int | None
    slabs: tuple[int, ...]
    rest: tuple[int, ...]


def view_of(spec: Spec) -> View:
    """Return the dims of a picture: the last two sharded ones are rows and columns.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> view_of(Spec(Mesh(x=2, y=2), P("x", None, "y"), shape=(2, 3, 4)))
    View(row=0, column=2, slabs=(), rest=(1,))
    """
    dims = range(spec.ndim)
    sharded = [dim for dim in dims if spec.partition.dims[dim]]
    drawn = sharded[-2:]
    for dim in reversed(dims):
        if len(drawn) < 2 and dim not in drawn:
            drawn.append(dim)
    drawn.sort()
    row, column = [None] * (2 - len(drawn)) + drawn
    slabs = tuple(sharded[:-2])
    return View(row, column, slabs, tuple(d for d in dims if d not in (*drawn, *slabs)))


def segments(spec: Spec, dim: int, most: int) -> tuple[Segment, ...]:
    """Return the non-empty shards of a dim; of more than `most` the first ones and the last.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> [segment.span for segment in segments(Spec(Mesh(x=64), P("x"), shape=(128,)), 0, 4)]
    ['0:2', '2:4', '…', '126:128']
    """
    axes, sizes = spec.partition.dims[dim], spec.shard_sizes(dim)
    starts = itertools.accumulate(sizes, initial=0)
    filled = ((index, start, size) for index, (start, size) in
              enumerate(zip(starts, sizes, strict=False)) if size)  # fmt: skip
    shown, result = [*itertools.islice(filled, most + 1)], []
    if is_cut := len(shown) > most:  # shards after the last one that is shown are empty
        last = next(i for i in reversed(range(len(sizes))) if sizes[i])
        shown = [*shown[: most - 2], (last, spec.shape[dim] - sizes[last], sizes[last])]
    for index, start, size in shown:
        coords = coords_texts(index_coords(spec.mesh, axes, index))
        result.append(Segment(index, coords, f"{start}:{start + size}", size))
    if is_cut:
        result.insert(-1, Segment(None, ("",) * len(axes), "…", 0))
    return tuple(result)


def slabs(spec: Spec) -> list[tuple[Segment, ...] | None]:
    """Return the shards of the slab dims that have a grid, and None where some are left out.

    Without slab dims there is one grid.
    """
    per_dim = [segments(spec, dim, MAX_SLABS) for dim in view_of(spec).slabs]
    points = [p for p in itertools.product(*per_dim) if all(s.index is not None for s in p)]
    is_complete = all(s.index is not None for dim in per_dim for s in dim)
    if len(points) <= MAX_SLABS and is_complete:
        return [*points]
    return [*points[: MAX_SLABS - 2], None, points[-1]]


def grid(
    spec: Spec, limits: tuple[int, int], brief: bool, slab: Sequence[Segment] = (),
    text: CellText | None = None,
) -> Grid:  # fmt: skip
    """Return the grid of a layout at one slab, with at most so many rows and columns."""
    view, single = view_of(spec), (Segment(0, (), "", 1),)
    down = segments(spec, view.row, limits[0]) if view.row is not None else single
    across = segments(spec, view.column, limits[1]) if view.column is not None else single
    fixed = dict(zip(view.slabs, slab, strict=False))
    cells = []
    for i, row in enumerate(down):
        line = []
        for j, column in enumerate(across):
            if row.index is None or column.index is None:
                line.append(Cell(("…",), ""))
                continue
            at = {view.row: row.index, view.column: column.index}
            shard = tuple(at.get(d, (fixed[d].index or 0) if d in fixed else 0)
                          for d in range(spec.ndim))  # fmt: skip
            lines = text(shard, brief) if text else (holders_text(spec, shard, brief),)
            line.append(Cell(tuple(lines), shard_colour(i, j)))
        cells.append(tuple(line))
    names = tuple("" if dim is None else f"dim {dim}" for dim in (view.row, view.column))
    return Grid(spec, down, across, tuple(cells), *names)


def fit(
    spec: Spec, width: int = WIDTH, slab: Sequence[Segment] = (), text: CellText | None = None
) -> Grid:
    """Return the largest grid that fits into plain text of `width` columns."""
    limits = (MAX_ROWS, MAX_COLUMNS) if spec.num_shards <= 64 else (5, 5)
    for columns in (limits[1], 8, 6, 5, 4, 3):
        for brief in (False, True):
            picture = grid(spec, (limits[0], min(columns, limits[1])), brief, slab, text)
            if least_width(picture) <= width:
                return picture
    return picture


def least_width(picture: Grid) -> int:
    """Return the columns that a grid needs."""
    return _gutter(picture) + sum(_least(picture)) + len(picture.columns) + 1


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
            *map(len, (*column.coords, column.span)),
            *(2 + len(line) for row in picture.cells for line in row[i].lines),
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


def proportions(picture: Grid, columns: float, rows: float) -> tuple[float, float]:
    """Return the width and the height of a picture of at most so many columns and rows."""
    view, shape = view_of(picture.spec), picture.spec.shape
    if view.column is None:
        return columns, 1
    if view.row is None:
        return columns, 1
    unit = min(columns / shape[view.column], rows / shape[view.row])
    return shape[view.column] * unit, shape[view.row] * unit


def draw(picture: Grid, width: int) -> list[Line]:
    """Return the picture as lines of spans; their texts alone are the plain picture."""
    gutter, count = _gutter(picture), len(picture.columns)
    room = width - gutter - count - 1
    # A character is twice as tall as wide: 48 x 7 of them make a picture of 48 by 14.
    across, down = proportions(picture, min(48, max(room, 1)), 14)
    widths = lengths([c.size for c in picture.columns], _least(picture), across, room)
    taken = [max(len(cell.lines) for cell in row) for row in picture.cells]
    tall = down / 2 if picture.row_name else 1
    heights = lengths([r.size for r in picture.rows], taken, tall, max(8, sum(taken)))
    lines = list(_heads(picture, widths, gutter))
    lines.append([TextSpan(" " * gutter + _rule("┌┬┐", widths))])
    for i, height in enumerate(heights):
        if i:
            lines.append([TextSpan(" " * gutter + _rule("├┼┤", widths))])
        lines += [_cells(picture, i, widths, gutter, height, line) for line in range(height)]
    lines.append([TextSpan(" " * gutter + _rule("└┴┘", widths))])
    return lines


def _heads(picture: Grid, widths: Sequence[int], gutter: int) -> Iterator[Line]:
    """Yield the lines above the picture: coordinates of the columns, then their spans."""
    mesh, columns = picture.spec.mesh, picture.columns
    rows = [list(line) for line in zip(*(column.coords for column in columns), strict=True)]
    if any(column.span for column in columns):
        rows.append([column.span for column in columns])
    blank = gutter - 1 - len(picture.column_name)
    corner = f"{picture.row_name:<{blank}}{picture.column_name} "
    for i, row in enumerate(rows):
        is_last = i == len(rows) - 1
        line = [TextSpan(corner if is_last else " " * gutter)]
        for text, n in zip(row, widths, strict=True):
            left = (n - len(text)) // 2
            inside = [TextSpan(text)] if is_last or not text else coordinate_spans(mesh, [text])
            line += [TextSpan(" " * (left + 1)), *inside, TextSpan(" " * (n - len(text) - left))]
        yield line


def _cells(
    picture: Grid, i: int, widths: Sequence[int], gutter: int, height: int, line: int
) -> Line:
    """Return one line through a row of cells; texts are in the middle of a cell."""
    row, mesh = picture.rows[i], picture.spec.mesh
    coords = max(len(x.coords_line) for x in picture.rows)
    side: Line = [TextSpan(" " * gutter)]
    if line == (height - 1) // 2:
        rest = f"{'':<{coords - len(row.coords_line)}}{row.span:>{gutter - 1 - coords}} "
        side = [*coordinate_spans(mesh, filter(None, row.coords)), TextSpan(rest)]
    spans = [*side, TextSpan("│")]
    for (texts, fill), width in zip(picture.cells[i], widths, strict=True):
        first = (height - len(texts)) // 2
        text = texts[line - first] if 0 <= line - first < len(texts) else ""
        spans += [TextSpan(f"{text:^{width}}", fill), TextSpan("│")]
    return spans


def _rule(ends: str, widths: Sequence[int]) -> str:
    return ends[0] + ends[1].join("─" * width for width in widths) + ends[2]
