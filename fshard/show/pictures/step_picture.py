"""`StepPicture`: the computation and the links of a partitioned step on a time axis."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from fshard._util.text import WIDTH, time_text
from fshard.partition.step_cost.roofline import COMPUTE, Roofline, StepEvent
from fshard.show.pictures.drawing import MONO, Line, Picture, TextSpan, plain
from fshard.show.pictures.plots import plot_bars
from fshard.show.pictures.timeline import Bar, timeline_html, timeline_lines

MAX_LONGEST = 8
"""Events that are listed below the lanes."""
PASSES = {"forward": "→", "backward": "←", "recompute": "↻"}


@dataclass(frozen=True, slots=True, repr=False)
class StepPicture(Picture):
    """Picture of a step: a lane for the computation, one for each kind of collective and its axes.

    The longest operations and collectives are listed below, with the part that computation waits.

    Attributes:
        roofline: The times of the step.
        header: Line above the picture, "" for none.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.partition(lambda w, x: x @ w, mesh=fs.Mesh(tp=2),
    ...                  in_specs=(fs.P("tp"), fs.P(None, "tp")), out_specs=fs.P())
    >>> w, x = (torch.empty(1024, 1024, device="meta") for _ in range(2))
    >>> picture = fs.visualize(f.trace(w, x).roofline())
    >>> [(bar.lane, bar.kind) for bar in picture.bars]
    [('compute', 'forward'), ('all_reduce(tp)', 'bytes')]
    """

    roofline: Roofline
    header: str = ""

    @property
    def bars(self) -> tuple[Bar, ...]:
        """A bar for every operation and collective."""
        return tuple(_bar(event) for event in self.roofline.events)

    @property
    def _titles(self) -> list[str]:
        roofline = self.roofline
        both = f"{time_text(roofline.time)} a step, {time_text(roofline.time_in_turn)} in turn"
        title = f"{roofline.title}, topology {roofline.topology.title}: {both}"
        return [self.header, title] if self.header else [title]

    @property
    def _longest(self) -> list[str]:
        """The longest events, as lines of text."""
        groups: dict[tuple[str, str, str, str], list[StepEvent]] = {}
        for event in sorted(self.roofline.events, key=lambda event: -event.time):
            key = time_text(event.time), event.phase, event.name, event.place
            groups.setdefault(key, []).append(event)
        lines = []
        for (seconds, phase, name, place), events in [*groups.items()][:MAX_LONGEST]:
            waited = sum(event.waited for event in events)
            waits = f", waited for {time_text(waited)}" if waited else ""
            times = f"{len(events)} x " if events[1:] else ""
            at = f"  {place}" if place else ""
            lines.append(f"{seconds:>8}  {PASSES[phase]} {times}{name}{waits}{at}")
        return lines

    def lines(self, width: int = WIDTH) -> list[Line]:
        """Return the lines, of at most `width` columns."""
        lines = [line for title in self._titles for line in plain(title, width, bold=True)]
        lines += timeline_lines(self.bars, width)
        lines += plain(self.roofline.bound_text, width)
        if self._longest:
            lines += [[TextSpan("the longest:")]]
        return lines + [line for text in self._longest for line in plain(text, width)]

    def plot(self, axes: Any = None) -> Any:
        """Draw the timeline with matplotlib and return its `Axes`."""
        return plot_bars(self.bars, self._titles[0], axes)

    def html(self) -> str:
        """Return self-contained HTML with inline styles, readable on light and dark pages."""
        heads = "".join(f'<div style="font-weight:600">{html.escape(title)}</div>'
                        for title in self._titles)  # fmt: skip
        notes = "".join(f'<div style="white-space:pre">{html.escape(text)}</div>'
                        for text in (self.roofline.bound_text, *self._longest))  # fmt: skip
        return (f'<div style="{MONO};font-size:12.5px;margin:4px 0">{heads}'
                f'{timeline_html(self.bars)}<div style="opacity:.75;margin-top:6px">{notes}</div>'
                "</div>")  # fmt: skip


def _bar(event: StepEvent) -> Bar:
    """Return the bar of an operation or a collective; the bar of a small one is all latency."""
    lane = "compute" if event.kind == COMPUTE else event.name
    kind = event.phase if event.kind == COMPUTE else "bytes"
    if event.kind != COMPUTE and event.startup > event.time / 2:
        kind = "latency"
    label = f"{PASSES[event.phase]} {event.name} {event.spec}".rstrip()
    return Bar(lane, label, kind, event.start, event.end)
