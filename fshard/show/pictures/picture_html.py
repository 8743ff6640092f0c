"""Pictures of layouts as HTML tables: inline styles only, readable on any background."""

from __future__ import annotations

import html
from collections.abc import Sequence

from fshard.layout.spec import Spec
from fshard.show.pictures.axis_marks import coordinate_spans, legend
from fshard.show.pictures.drawing import MONO, Line
from fshard.show.pictures.picture_grid import (
    Cell,
    CellText,
    Grid,
    Segment,
    grid,
    lengths,
    proportions,
    slabs,
    view_of,
)

PLAIN = "border:0;background:transparent;color:inherit"
FULL, SLAB = (480, 200), (240, 140)
"""Pixels of the picture of all, and of one of several slabs."""


def picture_html(
    spec: Spec, titles: Sequence[str], notes: Sequence[str], text: CellText | None = None
) -> str:
    """Return the picture of a layout, with its titles, legend and notes."""
    lines = "".join(f"<div>{html.escape(note)}</div>" for note in notes)
    heads = "".join(
        f'<div style="font-weight:600;margin-bottom:4px">{html.escape(title)}</div>'
        for title in titles
    )
    items = "".join(
        f'<span style="margin-right:1.6em;white-space:nowrap">{spans_html(list(item))}</span>'
        for item in legend(spec)
    )
    tables = "".join(_slab(spec, slab, text) for slab in slabs(spec)) if 0 not in spec.shape else ""
    return (
        f'<div style="{MONO};font-size:12.5px;margin:4px 0">{heads}'
        f'<div style="margin-bottom:6px;line-height:1.5">{items}</div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:16px;align-items:center">{tables}</div>'
        f'<div style="opacity:.75;margin-top:6px;line-height:1.5">{lines}</div></div>'
    )


def spans_html(line: Line) -> str:
    """Return spans as HTML."""
    return "".join(span.html for span in line)


def _slab(spec: Spec, slab: tuple[Segment, ...] | None, text: CellText | None) -> str:
    """Return the table of a slab below its indices, an ellipsis for slabs that are left out."""
    if slab is None:
        return '<div style="opacity:.6">…</div>'
    rows = [
        f'<div style="margin-bottom:2px">dim {dim}&nbsp; {html.escape(segment.span)}&nbsp; '
        f"{spans_html(coordinate_spans(spec.mesh, filter(None, segment.coords)))}</div>"
        for dim, segment in zip(view_of(spec).slabs, slab, strict=True)
    ]
    return f"<div>{''.join(rows)}{_table(spec, slab, text)}</div>"


def _table(spec: Spec, slab: Sequence[Segment], text: CellText | None) -> str:
    limits = (16, 16) if spec.num_shards <= 64 else (5, 5)
    picture = grid(spec, limits, brief=False, slab=slab, text=text)
    across, down = proportions(picture, *(SLAB if slab else FULL))
    least = [
        16 + 8 * max(map(len, (*column.coords, column.span,
                               *(line for row in picture.cells for line in row[i].lines))))
        for i, column in enumerate(picture.columns)
    ]  # fmt: skip
    taken = [max(30, 14 + 16 * max(len(cell.lines) for cell in row)) for row in picture.cells]
    widths = lengths([c.size for c in picture.columns], least, across, 900)
    tall = down if picture.row_name else 34
    heights = lengths([r.size for r in picture.rows], taken, tall, max(900, sum(taken)))
    rows = [_head(picture, widths)] if any(c.span for c in picture.columns) else []
    for i, (row, height) in enumerate(zip(picture.rows, heights, strict=True)):
        cells = "".join(
            _cell(cell, width, height, _pattern(spec))
            for cell, width in zip(picture.cells[i], widths, strict=True)
        )
        rows.append(f'<tr style="background:transparent">{_side(picture, row)}{cells}</tr>')
    style = f"border-collapse:collapse;{MONO};font-size:12.5px;margin:0;color:inherit"
    return f'<table style="{style}">{"".join(rows)}</table>'


def _pattern(spec: Spec) -> str:
    """Return the pattern of cells: stripes of unreduced values, dots of reduced ones."""
    white = "rgba(255,255,255,.5)"
    if spec.partition.unreduced:
        return (f";background-image:repeating-linear-gradient(45deg,{white} 0 5px,"
                "transparent 5px 10px)")  # fmt: skip
    if spec.partition.reduced:
        return (f";background-image:radial-gradient({white} 2.5px,transparent 3px);"
                "background-size:10px 10px")  # fmt: skip
    return ""


def _head(picture: Grid, widths: Sequence[int]) -> str:
    names = f"{picture.row_name}&nbsp;↓&nbsp; " if picture.row_name else ""
    corner = (
        f'<td style="{PLAIN};text-align:right;vertical-align:bottom;padding:0 10px 4px 0;'
        f'opacity:.6;white-space:nowrap">{names}{picture.column_name}&nbsp;→</td>'
    )
    cells = "".join(
        f'<td width="{width}" style="{PLAIN};text-align:center;padding:0 2px 4px;'
        f'white-space:nowrap">{_label(picture, column, "<br/>")}</td>'
        for column, width in zip(picture.columns, widths, strict=True)
    )
    return f'<tr style="background:transparent">{corner}{cells}</tr>'


def _side(picture: Grid, row: Segment) -> str:
    if not picture.column_name:
        return ""
    style = f"{PLAIN};text-align:right;padding:0 10px 0 0;white-space:nowrap"
    return f'<td style="{style}">{_label(picture, row, ",")}</td>'


def _label(picture: Grid, segment: Segment, between: str) -> str:
    mesh = picture.spec.mesh
    coords = [spans_html(coordinate_spans(mesh, [text])) for text in segment.coords if text]
    span = f'<span style="opacity:.7">{html.escape(segment.span)}</span>'
    return f"{between.join(coords)}<br/>{span}" if coords else span


def _cell(cell: Cell, width: int, height: int, pattern: str) -> str:
    shape = f"text-align:center;vertical-align:middle;padding:2px 6px;width:{width}px"
    text = "<br/>".join(html.escape(line).replace(" ", "&nbsp;") for line in cell.lines)
    if not cell.fill:
        return f'<td height="{height}" style="{PLAIN};{shape};opacity:.6">{text}</td>'
    return (
        f'<td width="{width}" height="{height}" bgcolor="{cell.fill}" style="{shape};'
        f"height:{height}px;background-color:{cell.fill}{pattern};color:#111;"
        f'border:1px solid rgba(40,40,40,.55);white-space:nowrap">{text}</td>'
    )
