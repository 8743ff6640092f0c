"""`TreePicture`: the layouts of a tree of tensors by path, as those of a module's parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fshard._util.text import WIDTH, bytes_text, wrap
from fshard.layout.spec import Spec
from fshard.program.cost.traffic import max_local_nbytes
from fshard.show.folding import repetitions
from fshard.show.pictures.axis_marks import PALETTE, axis_colour, axis_spans
from fshard.show.pictures.drawing import Line, Picture, TextSpan, flow, plain
from fshard.show.pictures.plots import new_axes

BAR = 10
"""Columns of the longest bar."""


@dataclass(frozen=True, slots=True, repr=False)
class TreePicture(Picture):
    """Table of tensors: path, layout with its axes in colour, and a bar of the bytes of a rank.

    Bytes are those of the rank that holds most. Rows that repeat, as those of equal layers, are
    shown once.

    Attributes:
        specs: The layouts and their paths.
        header: Line above the picture, "" for none.

    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2, tp=4)
    >>> up = fs.Spec(mesh, fs.P("dp", "tp"), shape=(64, 256))
    >>> print(fs.visualize({"up": up, "bias": up.replace(partition=fs.P("dp"))}))
    2 tensors on Mesh(dp=2, tp=4), 131,072 B, 40,960 B of a rank
    ● dp=2   ▲ tp=4
    bias  f32[64@dp,256]     ██████████ 32,768 B
    up    f32[64@dp,256@tp]  ██▌        8,192 B
    """

    specs: tuple[tuple[str, Spec], ...]
    header: str = ""

    @property
    def title(self) -> str:
        """Number of tensors, their meshes, and their bytes."""
        meshes = " and ".join(dict.fromkeys(str(spec.mesh) for _, spec in self.specs))
        total = bytes_text(sum(spec.nbytes for _, spec in self.specs))
        local = bytes_text(sum(max_local_nbytes(spec) for _, spec in self.specs))
        return f"{len(self.specs):,} tensors on {meshes}, {total}, {local} of a rank"

    def rows(self) -> list[tuple[str, Spec | None]]:
        """Return the rows: a path and its layout, or a heading of repeated rows."""
        keys = [(re.sub(r"\d+", "#", path), spec) for path, spec in self.specs]
        rows: list[tuple[str, Spec | None]] = []
        for start, size, layers in repetitions(keys):
            if layers > 1:
                rows.append((f"each of {layers} such:", None))
            indent = "  " if layers > 1 else ""
            rows += [(indent + path, spec) for path, spec in self.specs[start : start + size]]
        return rows

    def lines(self, width: int = WIDTH) -> list[Line]:
        """Return the lines, of at most `width` columns."""
        lines = plain(self.header, width, bold=True) if self.header else []
        lines += plain(self.title, width, bold=True)
        meshes = dict.fromkeys(spec.mesh for _, spec in self.specs)
        lines += flow([axis_spans(mesh, axis) for mesh in meshes for axis in mesh.axes], width)
        most = max((max_local_nbytes(spec) for _, spec in self.specs), default=0)
        rows = self.rows()
        ends = [(_bar(max_local_nbytes(spec), most), bytes_text(max_local_nbytes(spec)))
                if spec else ("", "") for _, spec in rows]  # fmt: skip
        room = width - 4 - max((len(text) for _, text in ends), default=0)
        name = max((len(path) for path, _ in rows), default=0)
        layout = max((len(str(spec)) for _, spec in rows if spec), default=0)
        wide = name + layout + 1 + BAR <= room
        name = min(name, room // 2)
        layout = min(layout, room - name)
        for (path, spec), (bar, nbytes) in zip(rows, ends, strict=True):
            if spec is None:
                lines += plain(path, width)
                continue
            indent = path[: len(path) - len(path.lstrip())]
            paths = [indent + part for part in wrap(path.lstrip(), name - len(indent))]
            layouts = wrap(str(spec), layout)
            for i in range(max(len(paths), len(layouts))):
                text = layouts[i] if i < len(layouts) else ""
                line = [TextSpan(f"{paths[i] if i < len(paths) else '':<{name}}  ")]
                line += [*_layout_spans(text, spec), TextSpan(" " * (layout - len(text)))]
                end = f"  {bar:<{BAR}} {nbytes}" if wide else f"  {nbytes}"
                lines.append(line + ([TextSpan(end)] if i == 0 else []))
        return lines

    def plot(self, axes: Any = None) -> Any:
        """Draw the bytes of a rank as bars with matplotlib, and return the `Axes`."""
        rows = [(path, spec) for path, spec in self.rows() if spec is not None]
        axes = new_axes(axes, (8, 1 + 0.3 * max(1, len(rows))))
        for row, (_, spec) in enumerate(rows):
            axes.barh(row, max_local_nbytes(spec) / 2**20, height=0.7, color=PALETTE[0])
        axes.set_yticks(range(len(rows)), [f"{path.strip()}  {spec}" for path, spec in rows])
        axes.invert_yaxis()
        axes.set_xlabel("MiB of a rank")
        axes.set_title(self.header or self.title, fontsize="medium", loc="left")
        return axes


def _bar(nbytes: int, most: int) -> str:
    """Return a bar of whole and half columns."""
    halves = -(-2 * BAR * nbytes // most) if most else 0
    return "█" * (halves // 2) + "▌" * (halves % 2)


def _layout_spans(text: str, spec: Spec) -> Sequence[TextSpan]:
    """Return a layout's text with the names of axes in their colours."""
    spans = []
    for part in re.split(r"(\w+)", text):
        known = part in spec.mesh.axes
        ink = axis_colour(spec.mesh, part) if known else ""
        spans += [TextSpan(part, ink=ink, bold=known)] if part else []
    return spans
