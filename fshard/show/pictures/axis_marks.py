"""Colours and marks of mesh axes, and colours of shards, that colour-blind readers distinguish.

The palette is that of Okabe and Ito (2008, "Color Universal Design"). A mark stands beside every
colour, and texts name the axis, so that nothing depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.show.pictures.drawing import TextSpan

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b3a800")
"""Okabe's and Ito's colours; their yellow is darkened, to be seen on white."""
MARKS = "●▲■◆★▼✚"
_TINTS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#0072b2")
_WHITE = 0.45
"""Part of white in the colours of shards, under dark text."""


def axis_mark(mesh: Mesh, axis: str) -> str:
    """Return the mark of an axis; it repeats after seven axes."""
    return MARKS[mesh.axes.index(axis) % len(MARKS)]


def axis_colour(mesh: Mesh, axis: str) -> str:
    """Return the colour of an axis; it repeats after seven axes.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> axis_mark(mesh, "tp"), axis_colour(mesh, "tp")
    ('▲', '#e69f00')
    """
    return PALETTE[mesh.axes.index(axis) % len(PALETTE)]


def shard_colour(row: int, column: int) -> str:
    """Return a light colour for the cell of a shard, another one than its neighbours'.

    >>> len({shard_colour(0, 0), shard_colour(0, 1), shard_colour(1, 0)})
    3
    """
    tint = _TINTS[(3 * row + column) % len(_TINTS)]
    parts = (int(tint[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 * _WHITE + part * (1 - _WHITE)):02x}" for part in parts)


def coordinate_spans(mesh: Mesh, coords: Iterable[str]) -> list[TextSpan]:
    """Return coordinates such as `dp=1` in the colours of their axes."""
    spans: list[TextSpan] = []
    for text in coords:
        spans += [TextSpan(",")] if spans else []
        spans.append(TextSpan(text, ink=axis_colour(mesh, text.partition("=")[0]), bold=True))
    return spans


def legend(spec: Spec) -> list[Sequence[TextSpan]]:
    """Return an item for each mesh axis: mark, name, size, and what it does to the tensor.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> spec = Spec(Mesh(dp=2, tp=4), P("dp", unreduced={"tp"}), shape=(8, 2))
    >>> ["".join(span.text for span in item) for item in legend(spec)]
    ['● dp=2 shards dim 0', '▲ tp=4 unreduced']
    """
    p, mesh = spec.partition, spec.mesh
    states = {axis: f"shards dim {dim}" for dim, axes in enumerate(p.dims) for axis in axes}
    for name, kinds in (("unreduced", p.unreduced_kinds), ("reduced", p.reduced_kinds)):
        states |= {axis: name if kind == "sum" else f"{name} ({kind})" for axis, kind in kinds}
    texts = {axis: f" {states.get(axis, 'invariant')}" for axis in mesh.axes}
    return [[*axis_spans(mesh, axis), TextSpan(text)] for axis, text in texts.items()]


def axis_spans(mesh: Mesh, axis: str) -> list[TextSpan]:
    """Return mark, name and size of an axis in its colour."""
    text = f"{axis_mark(mesh, axis)} {axis}={mesh.shape[axis]}"
    return [TextSpan(text, ink=axis_colour(mesh, axis), bold=True)]
