"""`ProgramPicture`: layouts before and after a program, its timeline, and who sends to whom."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from fshard._util.text import WIDTH
from fshard.program.cost.model import copied_bytes, copy_passes, step_parts
from fshard.program.cost.rank_loads import union_ranks
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes, traffic
from fshard.program.program import Program, wire_specs
from fshard.show.pictures.drawing import (
    MONO,
    Line,
    Picture,
    TextSpan,
    line_text,
    plain,
    side_by_side,
)
from fshard.show.pictures.layout_picture import LayoutPicture
from fshard.show.pictures.plots import plot_bars
from fshard.show.pictures.rank_transfers import Transfers, program_transfers
from fshard.show.pictures.timeline import Bar, timeline_html, timeline_lines

MAX_MATRIX = 8
"""Ranks of a matrix of at most so many rows; of more the first ones and the last."""
UNITS = (("bytes", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))
SHADES = ("", "#d6ecfa", "#abd9f4", "#80c6ee", "#56b4e9")


@dataclass(frozen=True, slots=True, repr=False)
class ProgramPicture(Picture):
    """Picture of a program: both layouts, a bar for each step, and a matrix of bytes.

    Rows of the matrix are senders, columns receivers. Rings and trees pass on the same bytes
    through other ranks.

    Attributes:
        prog: The program.
        topology: The machine of the times.
        header: Line above the picture, "" for none.

    >>> import fshard as fs
    >>> src = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))
    >>> picture = fs.visualize(fs.redistribute(src, src.replace(partition=fs.P())))
    >>> [(bar.lane, bar.kind) for bar in picture.bars]
    [('all_gather(x, dim 0)', 'latency'), ('all_gather(x, dim 0)', 'bytes')]
    """

    prog: Program
    topology: Topology
    header: str = ""

    @property
    def bars(self) -> tuple[Bar, ...]:
        """The parts of each step's time: copies, latency, bytes on links."""
        topology, wire = self.topology, wire_specs(self.prog)
        bars, start = [], 0.0
        for step, src, dst in zip(self.prog.steps, wire, wire[1:], strict=False):
            packed, _ = copy_passes(step, src, dst, traffic(step, src, dst).launches)
            time = step_parts(topology, step, src, dst)
            before = time.copies * packed * max_local_nbytes(src)
            before /= max(1, sum(copied_bytes(step, src, dst)))
            parts = (("copies", before), ("latency", time.startup), ("bytes", time.wire),
                     ("copies", time.copies - before))  # fmt: skip
            for kind, seconds in parts:
                if seconds > 1e-12:
                    bars.append(Bar(str(step), f"{step}, {kind}", kind, start, start + seconds))
                    start += seconds
        return tuple(bars)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the matrix: all, or the first ones and the last."""
        ranks = union_ranks((self.prog.src.mesh, self.prog.dst.mesh))
        few = len(ranks) <= MAX_MATRIX
        return tuple(ranks) if few else (*ranks[: MAX_MATRIX - 1], ranks[-1])

    @property
    def transfers(self) -> Transfers:
        """Bytes by sender and receiver, among `ranks`."""
        return program_transfers(self.prog, self.ranks)

    def lines(self, width: int = WIDTH) -> list[Line]:
        """Return the lines, of at most `width` columns."""
        lines = plain(self.header, width, bold=True) if self.header else []
        lines += plain(f"{self.prog.ends}, topology {self.topology.title}", width, bold=True)
        lines += [[], *_before_and_after(self.prog, width), []]
        lines += timeline_lines(self.bars, width)
        return [*lines, [], *_matrix(self.prog, self.transfers, self.ranks, self._count, width)]

    @property
    def _count(self) -> int:
        return len(union_ranks((self.prog.src.mesh, self.prog.dst.mesh)))

    def plot(self, axes: Any = None) -> Any:
        """Draw the timeline with matplotlib and return its `Axes`."""
        return plot_bars(self.bars, self.header or self.prog.ends, axes)

    def html(self) -> str:
        """Return self-contained HTML with inline styles, readable on light and dark pages."""
        titles = [self.header, f"{self.prog.ends}, topology {self.topology.title}"]
        heads = "".join(f'<div style="font-weight:600;margin-bottom:4px">{html.escape(title)}</div>'
                        for title in titles if title)  # fmt: skip
        ends = '<div style="align-self:center;font-size:20px">→</div>'.join(
            picture.html() for picture in _end_pictures(self.prog)
        )
        matrix = "\n".join(
            "".join(span.html for span in line)
            for line in _matrix(self.prog, self.transfers, self.ranks, self._count, 110)
        )
        return (f'<div style="{MONO};font-size:12.5px;margin:4px 0">{heads}'
                f'<div style="display:flex;flex-wrap:wrap;gap:24px">{ends}</div>'
                f'{timeline_html(self.bars)}'
                f'<pre style="{MONO};font-size:12.5px;line-height:1.35;margin:8px 0 0;'
                f'background:transparent;color:inherit">{matrix}</pre></div>')  # fmt: skip


def _end_pictures(prog: Program) -> list[LayoutPicture]:
    """Return the pictures of both layouts."""
    several = prog.src.mesh != prog.dst.mesh
    return [LayoutPicture(spec, names_mesh=several) for spec in (prog.src, prog.dst)]


def _before_and_after(prog: Program, width: int) -> list[Line]:
    """Return the pictures of both layouts, beside each other if they fit."""
    both = _end_pictures(prog)
    half = [picture.lines((width - 4) // 2) for picture in both]
    if all(len(line_text(line)) <= (width - 4) // 2 for block in half for line in block):
        return side_by_side(half, 4)
    first, second = (picture.lines(width) for picture in both)
    return [*first, [], *second]


def _matrix(
    prog: Program, transfers: Transfers, ranks: tuple[int, ...], count: int, width: int
) -> list[Line]:
    """Return the bytes of senders (rows) and receivers (columns), darker where they are more."""
    if not transfers:
        if prog.is_local:
            return plain("no rank sends anything", width)
        shown = ", ".join(map(str, ranks))
        return plain(f"none of these ranks sends to another: {shown}, of {count:,}", width)
    most = max(transfers.values())
    unit, scale = next((u, s) for u, s in UNITS if most / s < 10_000)
    cells = [[_cell_text(transfers[a, b] / scale) if a != b else "" for b in ranks] for a in ranks]
    names = [str(rank) for rank in ranks]
    wide = max(len(text) for row in (*cells, names) for text in row)
    label = max(4, *map(len, names))
    gap = len(ranks) < count
    lines = plain(f"{unit} from each rank (rows) to each other one (columns)"
                  + (f", {len(ranks)} of {count:,} ranks" if gap else ""), width)  # fmt: skip
    lines.append([TextSpan(" " * label), *(TextSpan(f" {name:>{wide}} ") for name in names)])
    for i, (name, row) in enumerate(zip(names, cells, strict=True)):
        if gap and i == len(names) - 1:
            lines.append([TextSpan(f"{'…':>{label}}")])
        line = [TextSpan(f"{name:>{label}}")]
        for j, text in enumerate(row):
            level = -(-4 * transfers[ranks[i], ranks[j]] // most)
            line.append(TextSpan(f" {text or '·':>{wide}} ", SHADES[level]))
        lines.append(line)
    return lines


def _cell_text(value: float) -> str:
    """Return a number of at most four digits, "" for 0."""
    if value == 0:
        return ""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
