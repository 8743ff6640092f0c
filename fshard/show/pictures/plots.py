"""Pictures drawn with matplotlib, which the extra `notebook` installs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fshard._util.errors import fail
from fshard.layout.spec import Spec
from fshard.show.pictures.axis_marks import axis_colour
from fshard.show.pictures.picture_grid import Segment, grid, slabs, view_of
from fshard.show.pictures.timeline import KINDS, Bar, lanes_of

HATCHES = {"backward": "--", "recompute": "||", "latency": "///", "copies": "..", "bytes": "",
           "forward": ""}  # fmt: skip
LAYER_HATCHES = ("", "//", "\\\\", "..", "xx", "--", "||", "oo")
LIMITS = (8, 8)
"""Rows and columns of shards in a plot."""


def new_axes(axes: Any, size: tuple[float, float]) -> Any:
    """Return axes to draw into: the given ones, or those of a new figure.

    Raises `ShardingError` if matplotlib is missing.
    """
    if axes is not None:
        return axes
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("Picture.plot", "a Python without matplotlib", "matplotlib must be installed",
             "pip install 'fshard[notebook]'; or print the picture")  # fmt: skip
    return Figure(figsize=size, layout="constrained").add_subplot()


def plot_bars(bars: Sequence[Bar], title: str, axes: Any = None) -> Any:
    """Draw bars on a time axis in microseconds, kinds distinguished by colour and hatch."""
    lanes = lanes_of(bars)
    axes = new_axes(axes, (8, 1 + 0.35 * max(1, len(lanes))))
    for row, own in enumerate(lanes.values()):
        for bar in own:
            axes.barh(row, 1e6 * (bar.end - bar.start), left=1e6 * bar.start, height=0.7,
                      color=KINDS[bar.kind][1], hatch=HATCHES[bar.kind], edgecolor="white",
                      linewidth=0.3)  # fmt: skip
    for kind in KINDS:
        if any(bar.kind == kind for bar in bars):
            axes.barh(
                0, 0, color=KINDS[kind][1], hatch=HATCHES[kind], edgecolor="white", label=kind
            )
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.set_xlabel("µs")
    axes.set_title(title, fontsize="medium", loc="left")
    if bars:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return axes


def plot_layers(
    times: Sequence[float], layers: Mapping[str, tuple[str, Sequence[float]]], title: str,
    axes: Any = None,
) -> Any:  # fmt: skip
    """Draw layers of bytes over time, a step at each change, distinguished by colour and hatch.

    Args:
        times: Seconds of the changes.
        layers: Colour and bytes of each layer by its name, from below.
        title: The title.
        axes: The axes to draw into, None for new ones.
    """
    axes = new_axes(axes, (8, 3))
    seconds = [1e6 * seconds for seconds in times]
    below = [0.0] * len(seconds)
    for i, (name, (colour, values)) in enumerate(layers.items()):
        above = [a + b / 2**20 for a, b in zip(below, values, strict=True)]
        axes.fill_between(seconds, below, above, step="post", label=name, facecolor=colour,
                          hatch=LAYER_HATCHES[i % 8], edgecolor="white", linewidth=0.3)  # fmt: skip
        below = above
    axes.set_xlabel("µs")
    axes.set_ylabel("MiB")
    axes.set_title(title, fontsize="medium", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return axes


def plot_layout(spec: Spec, title: str, axes: Any = None) -> Any:
    """Draw the shards of a layout, of several slabs the first one; cells name the ranks."""
    axes = new_axes(axes, (6, 3.2))
    axes.set_axis_off()
    if 0 in spec.shape:
        axes.set_title(title, fontsize="medium", loc="left")
        return axes
    picture = grid(spec, LIMITS, brief=True, slab=slabs(spec)[0] or ())
    above = max(sum(map(bool, (*column.coords, column.span))) for column in picture.columns)
    axes.set_title(title, fontsize="medium", loc="left", pad=10 + 14 * above)
    hatch = "//" if spec.partition.unreduced else ".." if spec.partition.reduced else ""
    left, top = _edges(picture.columns), _edges(picture.rows)
    for i, row in enumerate(picture.cells):
        for j, cell in enumerate(row):
            x, y, width, height = left[j], top[i], left[j + 1] - left[j], top[i + 1] - top[i]
            if cell.fill:
                axes.bar(x, height, width, y, align="edge", color=cell.fill, hatch=hatch,
                         edgecolor="white", linewidth=1)  # fmt: skip
            axes.text(x + width / 2, y + height / 2, cell.lines[0], ha="center", va="center",
                      color="#111111")  # fmt: skip
    for segments, ends, is_column in ((picture.columns, left, True), (picture.rows, top, False)):
        for k, segment in enumerate(segments):
            middle = (ends[k] + ends[k + 1]) / 2
            at = (middle, top[0]) if is_column else (left[0], middle)
            axes.annotate(
                "\n".join(filter(None, (*segment.coords, segment.span))), at,
                xytext=(0, 4) if is_column else (-4, 0), textcoords="offset points", ha="center"
                if is_column else "right", va="bottom" if is_column else "center",
                color=_label_colour(spec, segment),
            )  # fmt: skip
    axes.invert_yaxis()
    if view_of(spec).slabs:
        axes.text(0, -0.08, "the first slab", transform=axes.transAxes)
    return axes


def _edges(segments: Sequence[Segment]) -> list[float]:
    """Return the ends of segments side by side; shards left out take half an average one."""
    known = [segment.size for segment in segments if segment.index is not None]
    edges = [0.0]
    for segment in segments:
        size = segment.size if segment.index is not None else sum(known) / len(known) / 2
        edges.append(edges[-1] + size)
    return [edge / edges[-1] for edge in edges]


def _label_colour(spec: Spec, segment: Segment) -> str:
    """Return the colour of the axis of a segment, grey for several or none."""
    names = [text.partition("=")[0] for text in segment.coords if text]
    return axis_colour(spec.mesh, names[0]) if len(names) == 1 else "#666666"
