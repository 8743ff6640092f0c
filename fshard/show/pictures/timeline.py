"""Bars on a time axis: the steps of a program, or the lanes of a partitioned step."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from fshard._util.text import time_text, wrap
from fshard.show.pictures.axis_marks import PALETTE
from fshard.show.pictures.drawing import DARK, Line, TextSpan, flow

KINDS = {
    "forward": ("█", PALETTE[0]),
    "backward": ("▄", PALETTE[5]),
    "recompute": ("▀", PALETTE[3]),
    "latency": ("░", PALETTE[4]),
    "bytes": ("▓", PALETTE[1]),
    "copies": ("▒", PALETTE[2]),
}
"""Glyph and colour of each kind of bar."""
_WHITE = "rgba(255,255,255,.55)"
PATTERNS = {
    "backward": f"repeating-linear-gradient(0deg,{_WHITE} 0 2px,transparent 2px 8px)",
    "recompute": f"repeating-linear-gradient(90deg,{_WHITE} 0 2px,transparent 2px 8px)",
    "latency": f"repeating-linear-gradient(45deg,{_WHITE} 0 3px,transparent 3px 6px)",
    "copies": f"radial-gradient({_WHITE} 1.5px,transparent 2px);background-size:6px 6px",
}
"""Patterns of the boxes in HTML, which distinguish kinds without colours."""
LABEL, TRACK = 32, 480
"""Columns of a label at most, and pixels of the time axis."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Work from `start` to `end`, in seconds.

    Attributes:
        lane: The row that it is drawn in.
        label: A text about it.
        kind: "forward", "backward" or "recompute" (of computation), "latency" (launches, messages
            and rounds), "bytes" (on links) or "copies".
        start: Seconds from the start.
        end: Seconds from the start.
    """

    lane: str
    label: str
    kind: str
    start: float
    end: float


def lanes_of(bars: Sequence[Bar]) -> dict[str, list[Bar]]:
    """Return bars by their lanes, in the order of their first bars."""
    lanes: dict[str, list[Bar]] = {}
    for bar in bars:
        lanes.setdefault(bar.lane, []).append(bar)
    return lanes


def timeline_lines(bars: Sequence[Bar], width: int) -> list[Line]:
    """Return a line for each lane, with its busy time, below a legend and above a time axis."""
    end = max((bar.end for bar in bars), default=0.0)
    if not end:
        return [[TextSpan("no time passes")]]
    lanes = lanes_of(bars)
    names = {lane: wrap(lane, LABEL, max_lines=3) for lane in lanes}
    label = max(len(line) for lines in names.values() for line in lines)
    track = max(10, width - label - 11)
    lines = flow([[TextSpan(KINDS[kind][0] * 2, ink=KINDS[kind][1]), TextSpan(f" {kind}")]
                  for kind in KINDS if any(bar.kind == kind for bar in bars)], width)  # fmt: skip
    for lane, own in lanes.items():
        first, *more = names[lane]
        busy = time_text(sum(bar.end - bar.start for bar in own))
        lines.append([TextSpan(f"{first:<{label}} "), *_track(own, end, track),
                      TextSpan(f"{busy:>10}")])  # fmt: skip
        lines += [[TextSpan(line)] for line in more]
    middle, last = time_text(end / 2), time_text(end)
    half = track // 2
    ticks = f"{'0':<{half - len(middle) // 2}}{middle}"
    lines.append([TextSpan(f"{'':<{label}} {ticks}{last:>{track - len(ticks)}}")])
    return lines


def _track(bars: Sequence[Bar], end: float, track: int) -> list[TextSpan]:
    """Return the bars of a lane as runs of their glyphs; each has one at least."""
    kinds = [""] * track
    for bar in bars:
        first = min(track - 1, round(bar.start / end * track))
        stop = max(first + 1, round(bar.end / end * track))
        kinds[first:stop] = [bar.kind] * (min(stop, track) - first)
    spans: list[TextSpan] = []
    start = 0
    for i in range(1, track + 1):
        if i == track or kinds[i] != kinds[start]:
            glyph, ink = KINDS.get(kinds[start], (" ", ""))
            spans.append(TextSpan(glyph * (i - start), ink=ink))
            start = i
    return spans


def timeline_html(bars: Sequence[Bar]) -> str:
    """Return the lanes as rows of boxes; texts about the bars appear under the pointer."""
    end = max((bar.end for bar in bars), default=0.0)
    if not end:
        return "<div>no time passes</div>"
    legend = "".join(
        f'<span style="margin-right:1.4em">{_box("display:inline-block;width:12px;height:12px", k)}'
        f" {k}</span>"
        for k in KINDS if any(bar.kind == k for bar in bars)
    )  # fmt: skip
    rows = []
    for lane, own in lanes_of(bars).items():
        boxes = "".join(
            _box(
                f"position:absolute;top:2px;height:16px;left:{100 * bar.start / end:.3f}%;"
                f"width:{max(0.3, 100 * (bar.end - bar.start) / end):.3f}%",
                bar.kind,
                f"{bar.label}: {time_text(bar.end - bar.start)}",
            )
            for bar in own
        )
        busy = time_text(sum(bar.end - bar.start for bar in own))
        rows.append(
            '<tr style="background:transparent">'
            f'<td style="border:0;text-align:left;padding:1px 10px 1px 0">{html.escape(lane)}</td>'
            f'<td style="border:0;padding:0"><div style="position:relative;width:{TRACK}px;'
            f'height:20px;background:rgba(128,128,128,.15)">{boxes}</div></td>'
            f'<td style="border:0;text-align:right;padding:1px 0 1px 10px">{busy}</td></tr>'
        )
    ticks = (f'<tr style="background:transparent"><td style="border:0"></td><td style="border:0;'
             f'padding:0"><div style="display:flex;justify-content:space-between;opacity:.7">'
             f"<span>0</span><span>{time_text(end / 2)}</span><span>{time_text(end)}</span></div>"
             '</td><td style="border:0"></td></tr>')  # fmt: skip
    return (f'<div style="margin:6px 0 2px">{legend}</div><table style="border-collapse:collapse;'
            f'color:inherit;font-size:12.5px">{"".join(rows)}{ticks}</table>')  # fmt: skip


def _box(place: str, kind: str, title: str = "") -> str:
    """Return a box in the colour and the pattern of a kind of bar."""
    image = PATTERNS.get(kind, "")
    pattern = f";background-image:{image}" if image else ""
    style = f"{place};background-color:{KINDS[kind][1]}{pattern};color:{DARK}"
    hint = f' title="{html.escape(title, quote=True)}"' if title else ""
    return f'<span{hint} style="{style}"></span>'
