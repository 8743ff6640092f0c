"""Pictures of layouts as HTML tables: inline styles only, readable on any background."""

from __future__ import annotations

import html
from collections.abc import Sequence

from fshard._util.text import colour
from fshard.layout.spec import Spec
from fshard.show.pictures.picture_grid import Grid, Segment, grid, lengths

MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
PLAIN = "border:0;background:transparent;color:inherit"


def picture_html(spec: Spec, title: str, notes: Sequence[str]) -> str:
    """Return the picture of a layout of at most 2 dims, with title and notes."""
    lines = "".join(f"<div>{html.escape(note)}</div>" for note in notes)
    table = _table(spec) if 0 not in spec.shape else ""
    return (
        f'<div style="{MONO};font-size:12.5px;margin:4px 0">'
        f'<div style="font-weight:600;margin-bottom:6px">{html.escape(title)}</div>{table}'
        f'<div style="opacity:.75;margin-top:6px;line-height:1.5">{lines}</div></div>'
    )


def _table(spec: Spec) -> str:
    limits = (16, 16) if spec.num_shards <= 64 else (5, 5)
    picture = grid(spec, *limits, brief=False)
    num_rows, num_columns = ((1, 1), (1, *spec.shape), spec.shape)[spec.ndim]
    unit = min(480 / num_columns, 200 / num_rows) if spec.ndim == 2 else 480 / num_columns
    least = [
        16 + 8 * max(map(len, (*column.coords, column.span, *(r[i][0] for r in picture.cells))))
        for i, column in enumerate(picture.columns)
    ]
    widths = lengths([c.size for c in picture.columns], least, num_columns * unit, 900)
    heights = lengths([r.size for r in picture.rows], [30] * len(picture.rows),
                      num_rows * unit if spec.ndim == 2 else 34, 900)  # fmt: skip
    unreduced = bool(spec.partition.unreduced_kinds)
    rows = [_head(picture, widths)] if any(c.span for c in picture.columns) else []
    for i, (row, height) in enumerate(zip(picture.rows, heights, strict=True)):
        cells = "".join(
            _cell(text, shard, width, height, unreduced)
            for (text, shard), width in zip(picture.cells[i], widths, strict=True)
        )
        rows.append(f'<tr style="background:transparent">{_side(picture, row)}{cells}</tr>')
    style = f"border-collapse:collapse;{MONO};font-size:12.5px;margin:0;color:inherit"
    return f'<table style="{style}">{"".join(rows)}</table>'


def _head(picture: Grid, widths: Sequence[int]) -> str:
    names = f"{picture.row_name}&nbsp;↓&nbsp; " if picture.row_name else ""
    corner = (
        f'<td style="{PLAIN};text-align:right;vertical-align:bottom;padding:0 10px 4px 0;'
        f'opacity:.6;white-space:nowrap">{names}{picture.column_name}&nbsp;→</td>'
    )
    cells = "".join(
        f'<td width="{width}" style="{PLAIN};text-align:center;padding:0 2px 4px;'
        f'white-space:nowrap">{_label(column, "<br/>")}</td>'
        for column, width in zip(picture.columns, widths, strict=True)
    )
    return f'<tr style="background:transparent">{corner}{cells}</tr>'


def _side(picture: Grid, row: Segment) -> str:
    if not picture.column_name:
        return ""
    style = f"{PLAIN};text-align:right;padding:0 10px 0 0;white-space:nowrap"
    return f'<td style="{style}">{_label(row, ",")}</td>'


def _label(segment: Segment, between: str) -> str:
    coords = between.join(html.escape(text) for text in segment.coords if text)
    span = f'<span style="opacity:.7">{html.escape(segment.span)}</span>'
    return f"<b>{coords}</b><br/>{span}" if coords else span


def _cell(text: str, shard: int | None, width: int, height: int, unreduced: bool) -> str:
    shape = f"text-align:center;vertical-align:middle;padding:2px 6px;width:{width}px"
    if shard is None:
        return f'<td height="{height}" style="{PLAIN};{shape};opacity:.6">{text}</td>'
    fill = colour(shard)
    # Stripes mark unreduced cells: the value is a reduction over the ranks.
    stripes = (
        ";background-image:repeating-linear-gradient(45deg,rgba(255,255,255,.45) 0 5px,"
        "transparent 5px 10px)"
        if unreduced
        else ""
    )
    return (
        f'<td width="{width}" height="{height}" bgcolor="{fill}" style="{shape};'
        f"height:{height}px;background-color:{fill}{stripes};color:#111;"
        f'border:1px solid rgba(40,40,40,.55)">{html.escape(text)}</td>'
    )
