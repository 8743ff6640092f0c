"""`MeshPicture`: the ranks of a mesh, on the nodes or the torus of a machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fshard._util.errors import ShardingError
from fshard._util.text import WIDTH, columns, rate_text, time_text
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.cost.link_groups import device_strides, stays_inside, torus_extents
from fshard.program.cost.links import Torus, own_link
from fshard.program.cost.topology import Topology
from fshard.show.pictures.axis_marks import axis_colour, axis_mark, axis_spans, coordinate_spans
from fshard.show.pictures.drawing import (
    Line,
    Picture,
    TextSpan,
    flow,
    line_text,
    plain,
    side_by_side,
)
from fshard.show.pictures.picture_grid import draw, fit, slabs
from fshard.show.pictures.plots import plot_layout

MAX_NODES, MAX_RANKS, MAX_SIDE, MAX_SLABS = 6, 16, 8, 3


@dataclass(frozen=True, slots=True, repr=False)
class MeshPicture(Picture):
    """Picture of a mesh: its axes, the links that they run on, and where its ranks are.

    Attributes:
        mesh: The mesh.
        topology: The machine; None draws the ranks by their coordinates.
        header: Line above the picture, "" for none.

    >>> import fshard as fs
    >>> print(fs.visualize(fs.Mesh(dp=2, tp=4), topology=fs.Topology.cluster(4)))
    Mesh(dp=2, tp=4) on cluster, nodes of 4
      axis    along          gathers    exchanges  latency
      ● dp=2  between nodes  45.0 GB/s  45.0 GB/s  2.70 µs
      ▲ tp=4  inside nodes   360 GB/s   360 GB/s   0.60 µs
    node 0 │ 0 1 2 3 │ dp=0
    node 1 │ 4 5 6 7 │ dp=1
    """

    mesh: Mesh
    topology: Topology | None = None
    header: str = ""

    def lines(self, width: int = WIDTH) -> list[Line]:
        """Return the lines, of at most `width` columns."""
        mesh, topology = self.mesh, self.topology
        on = f" on {topology.title}" if topology is not None else ""
        lines = plain(self.header, width, bold=True) if self.header else []
        lines += plain(f"{mesh}{on}", width, bold=True)
        if topology is None:
            lines += flow([axis_spans(mesh, axis) for axis in mesh.axes], width)
            return lines + _coordinate_grids(mesh, width)
        lines += _axis_table(mesh, topology, width)
        if isinstance(topology.inner, Torus):
            return lines + _torus(mesh, topology.inner, width)
        return lines + list(_nodes(mesh, topology.node_size or mesh.size, width))

    def plot(self, axes: Any = None) -> Any:
        """Draw the ranks by their coordinates with matplotlib and return its `Axes`."""
        return plot_layout(_coordinates(self.mesh), self.header or str(self.mesh), axes)


# -- without a machine ----------------------------------------------------------------------


def _coordinates(mesh: Mesh) -> Spec:
    """Return a layout with a dim for each axis, and one shard for each rank."""
    return Spec(mesh, PartitionSpec(*mesh.axes), shape=mesh.sizes)


def _coordinate_grids(mesh: Mesh, width: int) -> list[Line]:
    """Return the ranks by their coordinates."""
    spec = _coordinates(mesh)
    lines: list[Line] = []
    for slab in slabs(spec):
        if slab is None:
            lines.append([TextSpan("…")])
            continue
        grid = fit(spec, width, slab)
        rows, across = (tuple(replace(segment, span="" if segment.index is not None else "…")
                              for segment in dim) for dim in (grid.rows, grid.columns))  # fmt: skip
        bare = replace(grid, rows=rows, columns=across, row_name="", column_name="")
        if slab:
            lines.append(coordinate_spans(mesh, [text for s in slab for text in s.coords]))
        lines += draw(bare, width)
    return lines


# -- axes -------------------------------------------------------------------------------------


def _axis_table(mesh: Mesh, topology: Topology, width: int) -> list[Line]:
    """Return a line for each axis: its place, the rates of its collectives, and a hop's latency."""
    if not mesh.axes:
        return []
    rows = [("axis", "along", "gathers", "exchanges", "latency")]
    rows += [(f"{axis_mark(mesh, axis)} {axis}={mesh.shape[axis]}",
              *_axis_cells(mesh, topology, axis)) for axis in mesh.axes]  # fmt: skip
    lines = columns(rows) or [" ".join(row) for row in rows]
    styled: list[Line] = [[TextSpan(lines[0])]]
    for axis, row, line in zip(mesh.axes, rows[1:], lines[1:], strict=True):
        before, mark, after = line.partition(row[0])
        styled.append([TextSpan(before), TextSpan(mark, ink=axis_colour(mesh, axis), bold=True),
                       TextSpan(after)])  # fmt: skip
    if any(len(line_text(line)) > width for line in styled):
        return [piece for line in styled for piece in plain(line_text(line), width)]
    return styled


def _axis_cells(mesh: Mesh, topology: Topology, axis: str) -> tuple[str, str, str, str]:
    """Return the place of an axis, the rates of gathers and of exchanges, and the latency."""
    if mesh.shape[axis] == 1:
        return "one device", "", "", ""
    try:
        gather, swap = (topology.link(mesh, axis, exchange=flag) for flag in (False, True))
        place = _place(mesh, topology, axis)
    except ShardingError:
        return "does not fit the torus", "", "", ""
    return (place, rate_text(gather.bandwidth), rate_text(swap.bandwidth),
            time_text(gather.latency))  # fmt: skip


def _place(mesh: Mesh, topology: Topology, axis: str) -> str:
    """Return the part of the machine that the groups of an axis run along."""
    if own_link(dict(topology.links), axis) is not None:
        return "a link of its own"
    inner, size = topology.inner, topology.node_size
    inside = stays_inside(mesh, axis, size)
    if not isinstance(inner, Torus):
        if inside:
            return "inside nodes" if size is not None else "the node"
        strides = device_strides(mesh)
        return "between nodes" if strides and strides[axis] >= (size or 1) else "across nodes"
    extents = torus_extents(inner, mesh, (axis,))
    parts = []
    for extent in extents:
        far = f", every {extent.stride}" if extent.stride > 1 else ""
        parts.append(f"{'ring' if extent.ring else 'row'} of {extent.ranks}{far}")
    return " and ".join([*parts, *(["between slices"] * (not inside))])


# -- nodes --------------------------------------------------------------------------------------


def _nodes(mesh: Mesh, size: int, width: int) -> Iterator[Line]:
    """Yield a line for each node: its ranks, and the coordinates that they share."""
    nodes: dict[int, list[int]] = {}
    for rank in sorted(mesh.ranks):
        nodes.setdefault(rank // size, []).append(rank)
    shown = [*nodes] if len(nodes) <= MAX_NODES else [*[*nodes][: MAX_NODES - 2], [*nodes][-1]]
    name, digits = len(f"node {shown[-1]}"), len(str(nodes[shown[-1]][-1]))
    texts = {number: _rank_text(nodes[number], digits) for number in shown}
    wide = max(map(len, texts.values()))
    for number in shown:
        if number == shown[-1] and len(shown) < len(nodes):
            yield [TextSpan(f"… {len(nodes) - len(shown):,} more nodes")]
        text = f"{f'node {number}':<{name}} │ {texts[number]:<{wide}} │ "
        line = [TextSpan(text), *_shared(mesh, nodes[number])]
        yield line if len(line_text(line)) <= width else line[:1]


def _rank_text(ranks: Sequence[int], digits: int) -> str:
    """Return ranks of equally many digits, of many the first ones and the last."""
    texts = [f"{rank:>{digits}}" for rank in ranks]
    if len(texts) <= MAX_RANKS:
        return " ".join(texts)
    return f"{' '.join(texts[:3])} … {texts[-1]}"


def _shared(mesh: Mesh, ranks: Sequence[int]) -> list[TextSpan]:
    """Return the coordinates that all of some ranks have."""
    sample = ranks if len(ranks) <= 1024 else [ranks[0], *ranks[1 :: len(ranks) // 512], ranks[-1]]
    coords = [mesh.coordinate(rank) for rank in sample]
    texts = [f"{axis}={values[0]}"
             for axis, values in zip(mesh.axes, zip(*coords, strict=True), strict=True)
             if len(set(values)) == 1 and mesh.shape[axis] > 1]  # fmt: skip
    return coordinate_spans(mesh, texts)


# -- tori -----------------------------------------------------------------------------------------


def _torus(mesh: Mesh, torus: Torus, width: int) -> list[Line]:
    """Return the first slice of a torus: a grid of the last two dims for each index of the others.

    Dashes at the edges are links to the other end.
    """
    *leading, down, across = (1, 1, *torus.sizes)[-max(2, len(torus.sizes)) :]
    most = MAX_SLABS if max(down, across) <= MAX_SIDE else 1
    points = [*itertools.islice(itertools.product(*map(range, leading)), most)]
    first = mesh.ranks[0] // torus.size * torus.size
    cell = len(str(first + torus.size - 1))
    blocks = []
    for index, point in enumerate(points):
        start = first + index * down * across
        name = ", ".join(f"dim {dim}={i}" for dim, i in enumerate(point)) if torus.sizes[2:] else ""
        head: list[Line] = [[TextSpan(name)]] if name else []
        blocks.append(head + _torus_slab(mesh, torus, start, (down, across), cell))
    lines = _dim_names(mesh, torus, width)
    wide = sum(max(len(line_text(line)) for line in block) + 3 for block in blocks) - 3
    rows = [blocks] if wide <= width else [[block] for block in blocks]
    lines += [line for row in rows for line in side_by_side(row, 3)]
    more = math.prod(leading) - len(points)
    lines += [[TextSpan(f"… {more:,} more of {down} x {across}")]] if more else []
    slices = -(-mesh.size // torus.size)
    return lines + ([[TextSpan(f"the first of {slices:,} slices")]] if slices > 1 else [])


def _dim_names(mesh: Mesh, torus: Torus, width: int) -> list[Line]:
    """Return an item for each dim of a torus, with the axes that run along it."""
    strides = device_strides(mesh) or {}
    items, unit = [], torus.size
    arrows = ["", *[""] * (len(torus.sizes) - 2), " ↓", " →"][-len(torus.sizes) :]
    for dim, size in enumerate(torus.sizes):
        start, end = unit // size, unit
        unit = start
        item = [TextSpan(f"dim {dim}{arrows[dim]}")]
        for axis, low in strides.items():
            if mesh.shape[axis] > 1 and max(low, start) < min(low * mesh.shape[axis], end):
                name = f"{axis_mark(mesh, axis)} {axis}"
                colour = axis_colour(mesh, axis)
                item += [TextSpan(" "), TextSpan(name, ink=colour, bold=True)]
        items.append(item)
    return flow(items, width)


def _torus_slab(
    mesh: Mesh, torus: Torus, start: int, sizes: tuple[int, int], cell: int
) -> list[Line]:
    """Return a grid of devices with their links."""
    (down, across), wraps = sizes, (False, *_wraps(torus))[-2:]
    rows, cols = _indices(down), _indices(across)
    lines: list[Line] = []
    vertical = "   ".join(" " * (cell - 1) + ("│" if c is not None else " ") for c in cols)
    dashed = vertical.replace("│", "╎")
    edge = "╌ " if wraps[1] else "  "
    if wraps[0]:
        lines.append([TextSpan(f"  {dashed}")])
    for i, row in enumerate(rows):
        lines += [[TextSpan(f"  {vertical}")]] if i and row is not None else []
        texts = []
        for col in cols:
            rank = None if row is None or col is None else start + row * across + col
            mark = "…" if rank is None else str(rank) if rank in mesh else "·"
            texts.append(f"{mark:>{cell}}")
        link = " ─ " if row is not None else "   "
        lines.append([TextSpan(f"{edge if row is not None else '  '}{link.join(texts)}"
                               f"{' ╌' if wraps[1] and row is not None else ''}")])  # fmt: skip
    if wraps[0]:
        lines.append([TextSpan(f"  {dashed}")])
    return lines


def _wraps(torus: Torus) -> tuple[bool, ...]:
    return torus.wraps if isinstance(torus.wraps, tuple) else (torus.wraps,) * len(torus.sizes)


def _indices(count: int) -> list[int | None]:
    """Return the indices that are drawn, None for those left out."""
    if count <= MAX_SIDE:
        return list(range(count))
    return [*range(MAX_SIDE - 3), None, count - 1]
