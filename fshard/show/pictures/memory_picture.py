"""`MemoryPicture`: the bytes that a rank holds in the course of a step, as a curve."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from fshard._util.text import WIDTH, bytes_text, time_text
from fshard.partition.step_cost.memory_timeline import CATEGORIES, MemoryPoint, StepMemory
from fshard.show.pictures.axis_marks import MARKS, PALETTE
from fshard.show.pictures.drawing import MONO, Line, Picture, TextSpan, flow, plain
from fshard.show.pictures.plots import plot_layers

HEIGHT = 12
"""Lines of the curve as text."""
PIXELS = (560, 180)
"""Width and height of the curve in HTML."""
GREY = "#999999"
COLOURS = (*PALETTE, GREY)


@dataclass(frozen=True, slots=True, repr=False)
class MemoryPicture(Picture):
    """Curve of the memory of a rank over a step, in layers by category.

    Attributes:
        memory: The bytes over time.
        header: Line above the picture, "" for none.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.partition(torch.relu, mesh=fs.Mesh(dp=2), in_specs=fs.P("dp"))
    >>> picture = fs.visualize(f.trace(torch.ones(64, 64)).memory())
    >>> str(picture).splitlines()[1]
    '▲ arguments 8,192 B   · temporary 8,192 B'
    """

    memory: StepMemory
    header: str = ""

    @property
    def _titles(self) -> list[str]:
        at = f" at {self.memory.peak_name}" if self.memory.peak_name else ""
        title = f"{self.memory.title}: peak {bytes_text(self.memory.peak)}{at}"
        return [self.header, title] if self.header else [title]

    @property
    def categories(self) -> tuple[int, ...]:
        """The indices in `CATEGORIES` of those that are held at some time."""
        points = self.memory.timeline
        return tuple(i for i in range(len(CATEGORIES)) if any(p.held[i] for p in points))

    @property
    def _legend(self) -> list[list[TextSpan]]:
        peak = self.memory.peak_point
        return [
            [TextSpan(f"{mark(i)} {CATEGORIES[i]}", ink=COLOURS[i], bold=True),
             TextSpan(f" {bytes_text(peak.held[i])}")]
            for i in self.categories
        ]  # fmt: skip

    @property
    def end(self) -> float:
        """Seconds of the step."""
        return self.memory.timeline[-1].time

    def held_at(self, seconds: float, until: float) -> tuple[int, ...]:
        """Return the bytes by category at the largest moment of an interval."""
        points = self.memory.timeline
        last = [p for p in points if p.time <= seconds][-1:] or points[:1]
        inside = [p for p in points if seconds < p.time < until]
        largest: MemoryPoint = max([*last, *inside], key=lambda point: point.total)
        return largest.held

    def lines(self, width: int = WIDTH) -> list[Line]:
        """Return the lines, of at most `width` columns."""
        lines = [line for title in self._titles for line in plain(title, width, bold=True)]
        lines += flow(self._legend, width)
        peak = max(1, self.memory.peak)
        levels = {row: bytes_text(round(peak * (row + 1) / HEIGHT)) for row in range(3, HEIGHT, 4)}
        label = max(map(len, levels.values()))
        track = width - label - 3
        cells = [self._column(i, track, peak) for i in range(track)]
        for row in reversed(range(HEIGHT)):
            line = [TextSpan(f"{levels.get(row, ''):>{label}} │")]
            for column in cells:
                layer = column[row]
                mark_, ink = (" ", "") if layer is None else (mark(layer), COLOURS[layer])
                if line[-1].ink == ink and len(line) > 1:
                    line[-1] = line[-1]._replace(text=line[-1].text + mark_)
                else:
                    line.append(TextSpan(mark_, ink=ink))
            lines.append(line)
        lines.append([TextSpan(f"{'0 B':>{label}} └{'─' * track}")])
        end = time_text(self.end)
        lines.append([TextSpan(f"{'':>{label}}  0{end:>{track - 1}}")])
        return lines

    def _column(self, i: int, track: int, peak: int) -> list[int | None]:
        """Return the category in each line of a column, from below; None above the curve."""
        step = self.end / track
        held = self.held_at(i * step, (i + 1) * step)
        column: list[int | None] = []
        total = 0
        for category, nbytes in enumerate(held):
            total += nbytes
            rows = round(total / peak * HEIGHT)
            column += [category] * (rows - len(column))
        return [*column, *[None] * (HEIGHT - len(column))]

    def plot(self, axes: Any = None) -> Any:
        """Draw the curve with matplotlib and return its `Axes`."""
        points = self.memory.timeline
        layers = {CATEGORIES[i]: (COLOURS[i], [point.held[i] for point in points])
                  for i in self.categories}  # fmt: skip
        return plot_layers([point.time for point in points], layers, self._titles[0], axes)

    def html(self) -> str:
        """Return self-contained HTML with an inline drawing, readable on light and dark pages."""
        heads = "".join(f'<div style="font-weight:600">{html.escape(title)}</div>'
                        for title in self._titles)  # fmt: skip
        legend = "".join(
            f'<span style="margin-right:1.6em;white-space:nowrap">{"".join(s.html for s in item)}'
            "</span>" for item in self._legend
        )  # fmt: skip
        width, height = PIXELS
        shapes = "".join(self._layer(i) for i in reversed(self.categories))
        ends = (f'<div style="display:flex;justify-content:space-between;width:{width}px;opacity:.7'
                f'"><span>0</span><span>{time_text(self.end)}</span></div>')  # fmt: skip
        return (
            f'<div style="{MONO};font-size:12.5px;margin:4px 0">{heads}'
            f'<div style="margin:4px 0;display:flex;flex-wrap:wrap;line-height:1.5">'
            f'{legend}</div><svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'style="background:rgba(128,128,128,.12)">{shapes}</svg>{ends}</div>'
        )

    def _layer(self, category: int) -> str:
        """Return the area below the top of a category's layer."""
        width, height = PIXELS
        peak, end = max(1, self.memory.peak), self.end or 1.0
        x, y = 0.0, float(height)
        points = [f"0,{height}"]
        for point in self.memory.timeline:
            x = width * point.time / end
            points.append(f"{x:.1f},{y:.1f}")
            y = height * (1 - sum(point.held[: category + 1]) / peak)
            points.append(f"{x:.1f},{y:.1f}")
        points += [f"{width},{y:.1f}", f"{width},{height}"]
        return (f'<polygon points="{" ".join(points)}" fill="{COLOURS[category]}" '
                f'stroke="rgba(255,255,255,.6)"></polygon>')  # fmt: skip


def mark(category: int) -> str:
    """Return the mark of a category of memory."""
    return f"{MARKS}·"[category]
