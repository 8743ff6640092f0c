"""`visualize`: a picture of a layout in plain text, in a terminal and in a notebook."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fshard._util.errors import fail
from fshard._util.text import WIDTH, bytes_text, colour, listing, wrap
from fshard.layout.sharded import Pair
from fshard.layout.spec import DTYPE_NAMES, Spec
from fshard.layout.tree import is_pair
from fshard.program.cost.traffic import max_local_nbytes
from fshard.run.execute import check_local, check_shards
from fshard.run.transports.base import current_rank
from fshard.show.pictures.picture_grid import draw, fit
from fshard.show.pictures.picture_html import picture_html
from fshard.show.pictures.shard_owners import (
    coords_text,
    equations,
    holders_text,
    index_coords,
    index_text,
    members,
    shard_coords,
    states_in_words,
)  # fmt: skip
from fshard.show.table import Column, Table


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """Picture of a layout; `str` is 80 columns wide, rich adds colours, notebooks show HTML.

    Attributes:
        spec: The layout.
        ranks: Ranks whose locals it was drawn from; empty for a spec.

    >>> import fshard as fs
    >>> picture = fs.visualize(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)))
    >>> picture.spec
    f32[4@x]
    """

    spec: Spec
    ranks: tuple[int, ...] = ()

    def text(self, width: int = WIDTH) -> str:
        """Return plain text of at most `width` columns."""
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self._lines(width))

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def html(self) -> str:
        """Return self-contained HTML with inline styles, readable on light and dark pages."""
        if not _is_drawn(self.spec):
            return _shard_table(self.spec, self.notes).html()
        return picture_html(self.spec, _title(self.spec), self.notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences below the picture: states, local shapes, empty shards."""
        spec = self.spec
        if 0 in spec.shape:
            return ("the tensor has no elements: no rank holds anything",)
        notes = [*_local_notes(spec), *states_in_words(spec)]
        if len(self.ranks) == 1 and spec.mesh.size > 1:
            notes += [_one_local(spec, self.ranks[0])]
        elif self.ranks:
            notes += _relation(spec)
        return tuple(notes)

    def _lines(self, width: int) -> list[list[tuple[str, int | None]]]:
        if not _is_drawn(self.spec):
            return [[(line, None)] for line in
                    _shard_table(self.spec, self.notes).text(width).splitlines()]  # fmt: skip
        lines: list[list[tuple[str, int | None]]] = [
            [(line, None)] for line in wrap(_title(self.spec), width)
        ]
        if 0 not in self.spec.shape:
            lines += draw(self.spec, fit(self.spec, width), width)
        return lines + [[(line, None)] for note in self.notes for line in wrap(note, width)]

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        if not _is_drawn(self.spec):
            yield _shard_table(self.spec, self.notes)
            return
        width = max(40, min(WIDTH, options.max_width))
        output = Text(no_wrap=True, overflow="ignore")
        title_lines = len(wrap(_title(self.spec), width))
        for i, line in enumerate(self._lines(width)):
            for text, shard in line:
                style = f"#111111 on {colour(shard)}" if shard is not None else ""
                output.append(text, "bold" if i < title_lines else style)
            output.append("\n")
        output.right_crop(1)
        yield output

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.html()}


def visualize(value: Spec | Pair, /) -> Picture:
    """Draw the layout of a spec or of a pair on its mesh.

    Layouts of up to 2 dims are drawn in proportion, one cell per distinct shard with the ranks that
    hold it: a comma between replicas, a plus between unreduced values. Layouts of more dims are
    listed in a table. Of many shards only the first and the last are shown.

    Args:
        value: A `Spec`, or a (local, spec) pair, which also shows how its locals make up the global
            tensor.

    Returns:
        A `Picture`, which prints as text, in `rich` and as HTML in a notebook.

    Raises:
        ShardingError: If a local does not fit its spec, or `value` is neither a spec nor a pair.

    >>> import fshard as fs
    >>> print(fs.visualize(fs.Spec(fs.Mesh(dp=2, tp=2), fs.P("tp"), shape=(4,))))
    f32[4@tp] on Mesh(dp=2, tp=2)
                     tp=0                     tp=1
    dim 0            0:2                      2:4
          ┌────────────────────────┬────────────────────────┐
          │          0, 2          │          1, 3          │
          └────────────────────────┴────────────────────────┘
    each rank holds f32[2], 8 B of 16 B
    invariant over dp: ranks such as 0, 2 hold the same
    """
    if isinstance(value, Spec):
        return Picture(value)
    if not is_pair(value):
        fail("fs.visualize", f"a {type(value).__name__}", "the value must be a Spec or a "
             "(local, spec) pair", "fs.visualize(spec) or fs.visualize((local, spec))")  # fmt: skip
    local, spec = value
    if not isinstance(local, torch.Tensor):
        check_shards(local, spec, "fs.visualize")
        return Picture(spec, tuple(spec.mesh.ranks))
    transport = current_rank(spec.mesh, "fs.visualize")
    check_local(local, spec, transport, "fs.visualize")
    return Picture(spec, (transport.rank,) if transport.rank in spec.mesh else ())


def _is_drawn(spec: Spec) -> bool:
    return spec.ndim <= 2


def _title(spec: Spec) -> str:
    return f"{spec} on {spec.mesh}"


def _array(spec: Spec, shape: tuple[int, ...]) -> str:
    dtype = DTYPE_NAMES.get(spec.dtype, str(spec.dtype).removeprefix("torch."))
    return f"{dtype}[{','.join(map(str, shape))}]"


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
    shards = list(_first_shards(spec, 8))
    lines = [equations(spec, shard) for shard in shards]
    if spec.num_shards > len(shards):
        lines.append(f"… and {spec.num_shards - len(shards):,} more shards")
    return lines


def _first_shards(spec: Spec, count: int) -> Iterator[tuple[int, ...]]:
    """Yield the indices, dim by dim, of the first `count` shards that are not empty, row-major."""
    sizes = [spec.shard_sizes(dim) for dim in range(spec.ndim)]
    shards = itertools.product(*(range(len(dim_sizes)) for dim_sizes in sizes))
    filled = (index for index in shards if all(s[i] for s, i in zip(sizes, index, strict=True)))
    return itertools.islice(filled, count)


def _shard_table(spec: Spec, notes: tuple[str, ...]) -> Table:
    """Return a table of the shards, for layouts of any number of dims."""
    rows = []
    for shard in _first_shards(spec, 16):
        fixed = shard_coords(spec, shard)
        rank = next(members(spec.mesh, fixed))
        rows.append((holders_text(spec, shard), coords_text(fixed),
                     f"[{index_text(spec, rank)}]"))  # fmt: skip
    if spec.num_shards > len(rows) and rows:
        rows.append((f"… {spec.num_shards - len(rows):,} more", "", ""))
    columns = (Column("ranks", wrap=True), Column("at", wrap=True), Column("index", wrap=True))
    return Table(_title(spec), columns, tuple(rows), notes=notes)
