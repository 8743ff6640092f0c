"""`LayoutPicture`: the layout of a tensor, in plain text, in a terminal and in a notebook."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fshard._util.text import WIDTH, bytes_text, listing
from fshard.layout.mesh_groups import index_coords
from fshard.layout.spec import DTYPE_NAMES, Spec
from fshard.program.cost.traffic import max_local_nbytes
from fshard.show.pictures.axis_marks import coordinate_spans, legend
from fshard.show.pictures.drawing import Line, Picture, TextSpan, flow, plain, side_by_side
from fshard.show.pictures.local_values import values_text
from fshard.show.pictures.picture_grid import (
    CellText,
    Segment,
    draw,
    fit,
    least_width,
    slabs,
    view_of,
)
from fshard.show.pictures.picture_html import picture_html
from fshard.show.pictures.plots import plot_layout
from fshard.show.pictures.shard_owners import (
    coords_text,
    equations,
    index_text,
    states_in_words,
)

GAP = 2


@dataclass(frozen=True, slots=True, repr=False)
class LayoutPicture(Picture):
    """Picture of a layout; `str` is 80 columns wide, rich adds colours, notebooks show HTML.

    Attributes:
        spec: The layout.
        ranks: Ranks whose locals it was drawn from; empty for a spec.
        header: Line above the picture, "" for none.
        locals_of: Locals by rank whose values are shown, None for none.
        names_mesh: False to leave the mesh out of the title.

    >>> import fshard as fs
    >>> picture = fs.visualize(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)))
    >>> picture.spec
    f32[4@x]
    """

    spec: Spec
    ranks: tuple[int, ...] = ()
    header: str = ""
    locals_of: Mapping[int, torch.Tensor] | None = field(default=None, compare=False)
    names_mesh: bool = True

    @property
    def title(self) -> str:
        """The layout and its mesh."""
        return f"{self.spec} on {self.spec.mesh}" if self.names_mesh else str(self.spec)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences below the picture: states, local shapes, empty shards."""
        spec = self.spec
        if 0 in spec.shape:
            return ("the tensor has no elements: no rank holds anything",)
        notes = [*_dim_notes(spec, self.locals_of), *_local_notes(spec), *states_in_words(spec)]
        if len(self.ranks) == 1 and spec.mesh.size > 1:
            notes += [_one_local(spec, self.ranks[0])]
        elif self.ranks:
            notes += _relation(spec)
        return tuple(notes)

    @property
    def cell_text(self) -> CellText | None:
        """Function of the text in a cell; None for the ranks alone."""
        return None if self.locals_of is None else values_text(self.spec, self.locals_of)

    def lines(self, width: int = WIDTH) -> list[Line]:
        """Return the lines, of at most `width` columns."""
        lines = plain(self.header, width, bold=True) if self.header else []
        lines += plain(self.title, width, bold=True)
        lines += flow(legend(self.spec), width)
        if 0 not in self.spec.shape:
            lines += _grids(self.spec, width, self.cell_text)
        return lines + [line for note in self.notes for line in plain(note, width)]

    def plot(self, axes: Any = None) -> Any:
        """Draw the picture with matplotlib and return its `Axes`."""
        return plot_layout(self.spec, self.header or self.title, axes)

    def html(self) -> str:
        """Return self-contained HTML with inline styles, readable on light and dark pages."""
        titles = [self.header, self.title] if self.header else [self.title]
        return picture_html(self.spec, titles, self.notes, self.cell_text)


def _grids(spec: Spec, width: int, text: CellText | None) -> list[Line]:
    """Return the grids of all slabs, as many in a row as fit."""
    points = slabs(spec)
    for count in range(len(points), 0, -1):
        grid_width = (width - GAP * (count - 1)) // count
        grids = [None if slab is None else fit(spec, grid_width, slab, text) for slab in points]
        if count == 1 or all(least_width(grid) <= grid_width for grid in grids if grid is not None):
            blocks = [
                [[TextSpan("…")]] if slab is None or grid is None
                else [*_slab_heading(spec, slab, grid_width), *draw(grid, grid_width)]
                for slab, grid in zip(points, grids, strict=True)
            ]  # fmt: skip
            rows = (blocks[i : i + count] for i in range(0, len(blocks), count))
            return [line for row in rows for line in side_by_side(row, GAP)]
    return []


def _slab_heading(spec: Spec, slab: Sequence[Segment], width: int) -> list[Line]:
    """Return the indices of a slab, with its coordinates."""
    items = []
    for dim, segment in zip(view_of(spec).slabs, slab, strict=True):
        spans = coordinate_spans(spec.mesh, filter(None, segment.coords))
        items.append([TextSpan(f"dim {dim}  {segment.span}  "), *spans])
    return flow(items, width)


def _array(spec: Spec, shape: tuple[int, ...]) -> str:
    dtype = DTYPE_NAMES.get(spec.dtype, str(spec.dtype).removeprefix("torch."))
    return f"{dtype}[{','.join(map(str, shape))}]"


def _dim_notes(spec: Spec, locals_of: object) -> list[str]:
    """Return a sentence about the dims that the picture leaves out."""
    parts = [f"dim {dim} (0:{spec.shape[dim]})" for dim in view_of(spec).rest]
    if not parts:
        return []
    at = "" if locals_of is None else "; values are those at index 0"
    return [f"not drawn: {', '.join(parts)}, unsharded{at}"]


def _local_notes(spec: Spec) -> list[str]:
    """Return sentences about the shapes of the locals, uneven shard sizes and empty shards."""
    most = max_local_nbytes(spec)
    total = bytes_text(spec.nbytes)
    if spec.is_even:
        array = _array(spec, spec.local_shape(spec.mesh.ranks[0]))
        return [f"each rank holds {array}, {bytes_text(most)} of {total}"]
    notes = [f"uneven: the largest local has {bytes_text(most)} of {total}"]
    for dim, sizes in enumerate(spec.sizes):
        if sizes is None:
            continue
        notes.append(f"dim {dim} has shards of {listing(sizes, len(sizes), sizes[-1], 16)}")
        empty = [position for position, size in enumerate(sizes) if size == 0]
        if empty:
            axes = spec.partition.dims[dim]
            notes.append(f"empty: {_empty_shards(spec, axes, empty)}")
    return notes


def _empty_shards(spec: Spec, axes: tuple[str, ...], empty: list[int]) -> str:
    texts = [coords_text(index_coords(spec.mesh, axes, i)) for i in (*empty[:8], empty[-1])]
    *coords, last = [text if len(axes) == 1 else f"({text})" for text in texts]
    return f"{listing(coords, len(empty), last)}, where ranks hold nothing"


def _one_local(spec: Spec, rank: int) -> str:
    coords = coords_text(spec.mesh.coords(rank))
    kinds = spec.partition.unreduced_kinds
    relation = f"is a partial {kinds[-1][1]} of" if kinds else "="
    return (f"this is rank {rank} ({coords}): local {_array(spec, spec.local_shape(rank))} "
            f"{relation} global[{index_text(spec, rank)}]")  # fmt: skip


def _relation(spec: Spec) -> list[str]:
    """Return how the locals of a simulation make up the global tensor, for a few shards."""
    shards = list(_first_shards(spec))
    lines = [equations(spec, shard) for shard in shards]
    if spec.num_shards > len(shards):
        lines.append(f"… and {spec.num_shards - len(shards):,} more shards")
    return lines


def _first_shards(spec: Spec) -> Iterator[tuple[int, ...]]:
    """Yield the indices, dim by dim, of the first 8 shards that are not empty, row-major."""
    sizes = [spec.shard_sizes(dim) for dim in range(spec.ndim)]
    shards = itertools.product(*(range(len(dim_sizes)) for dim_sizes in sizes))
    filled = (index for index in shards if all(s[i] for s, i in zip(sizes, index, strict=True)))
    return itertools.islice(filled, 8)
