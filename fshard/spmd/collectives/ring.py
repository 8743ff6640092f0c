"""Ring of the ranks along axes, on which blocks of different sizes move; one launch per dtype.

Operations of bodies need the size of every rank's block. `sizes_along` returns the sizes that an
argument lists; if it is left out and shards may be uneven, the ranks exchange their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import fail
from fshard._util.text import plural
from fshard.layout.mesh import Mesh
from fshard.layout.validation import as_ints
from fshard.run.autograd.linear_function import Tensors, apply_linear, launch_linear
from fshard.run.packing import concat_flat
from fshard.run.transports.agreement import compare_shapes
from fshard.run.transports.base import Label, current_rank, labelled, with_label
from fshard.run.transports.shape_only import is_abstract, shape_transport
from fshard.spmd.axis_env import current_axes, current_tracker
from fshard.spmd.collectives.gather_scatter import all_gather
from fshard.spmd.collectives.permutations import PermuteOp


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """Ring of the ranks along axes; `shapes` has the shapes of each index's block, if they differ.

    `index` is this rank's, of `n`; `name` is the public function's.
    """

    name: str
    mesh: Mesh
    axes: tuple[str, ...]
    index: int
    n: int
    shapes: tuple[tuple[torch.Size, ...], ...] | None
    label: Label

    def launch(
        self, xs: Tensors, by: int, age: int, leaves: Sequence[int] | None = None
    ) -> Callable[[], Leaves]:
        """Send `leaves` of a block `by` places on, without gradient; return the wait for them.

        The block on an index began `age` places before it. A block that arrives and is sent on is
        not copied.
        """
        groups = _by_dtype(xs)
        flats = xs.flats if isinstance(xs, Leaves) else None
        if flats is None:
            flats = tuple(concat_flat([xs[i] for i in indices]) for indices in groups)
        shapes = [self._shapes(xs, indices, age, leaves) for indices in groups]
        waits = []
        with labelled(self.label):
            for flat, rows in zip(flats, shapes, strict=True):
                sizes = rows and tuple((torch.Size([_total(row)]),) for row in rows)
                op = _rotation(self.mesh, self.axes, by, sizes)
                waits.append(launch_linear(op, (flat,), self.name))
        source = (self.index - by) % self.n
        arriving = [
            [xs[i].shape for i in indices] if rows is None else rows[source]
            for indices, rows in zip(groups, shapes, strict=True)
        ]
        return with_label(self.label, lambda: Leaves.of([w()[0] for w in waits], groups, arriving))

    def send(self, xs: Tensors, by: int, age: int) -> Callable[[], Tensors]:
        """Send the leaves of a block `by` places on, differentiably."""
        results: list[Any] = [None] * len(xs)
        with labelled(self.label):
            for indices in _by_dtype(xs):
                shapes = self._shapes(xs, indices, age, None)
                op = _rotation(self.mesh, self.axes, by, shapes)
                ys = apply_linear(op, tuple(xs[i] for i in indices), False)
                for i, y in zip(indices, ys, strict=True):
                    results[i] = y
        return lambda: tuple(results)

    def _shapes(
        self, xs: Tensors, indices: Sequence[int], age: int, leaves: Sequence[int] | None
    ) -> tuple[tuple[torch.Size, ...], ...] | None:
        """Return the shapes of tensors on each index, None if they are this rank's.

        `leaves` has for every tensor its number among the leaves of a block, None if it is its own.
        """
        if self.shapes is None:
            return None
        numbers = [i if leaves is None else leaves[i] for i in indices]
        rows = (self.shapes[(i - age) % self.n] for i in range(self.n))
        return tuple(tuple(row[leaf] for leaf in numbers) for row in rows)


@lru_cache(maxsize=CACHE_SIZE)
def _rotation(
    mesh: Mesh, axes: tuple[str, ...], by: int, shapes: tuple[tuple[torch.Size, ...], ...] | None
) -> PermuteOp:
    """Return the permutation that sends each index's tensors, of these shapes, `by` places on."""
    n = mesh.axis_size(axes)
    return PermuteOp(mesh, axes, tuple((i, (i + by) % n) for i in range(n)), shapes)


class Leaves(tuple[torch.Tensor, ...]):  # noqa: SLOT001 - tuples have no slots
    """Leaves of a block as views of the flat tensors in which they have arrived.

    Attributes:
        flats: one flat tensor for each dtype and device.
    """

    flats: Tensors

    @staticmethod
    def of(
        flats: Sequence[torch.Tensor],
        groups: Sequence[Sequence[int]],
        shapes: Sequence[Sequence[torch.Size]],
    ) -> Leaves:
        """Return the views of `flats` with these indices and shapes."""
        views: dict[int, torch.Tensor] = {}
        for flat, indices, row in zip(flats, groups, shapes, strict=True):
            parts = flat.split([*map(math.prod, row)])
            views.update(zip(indices, map(torch.Tensor.view, parts, row), strict=True))
        leaves = Leaves(views[i] for i in range(len(views)))
        leaves.flats = tuple(flats)
        return leaves

    def add_(self, others: Sequence[torch.Tensor]) -> Leaves:
        """Add tensors to the leaves in place."""
        for x, other in zip(self, others, strict=True):
            x.add_(other)
        return self


def _by_dtype(xs: Tensors) -> list[list[int]]:
    """Return the indices of tensors of one dtype and device, for each."""
    groups: dict[Hashable, list[int]] = {}
    for i, x in enumerate(xs):
        groups.setdefault((x.dtype, x.device), []).append(i)
    return list(groups.values())


def _total(shapes: Sequence[torch.Size]) -> int:
    return sum(map(math.prod, shapes))


def sizes_along(
    where: str, name: str, given: Sequence[int] | None, mesh: Mesh, axes: tuple[str, ...],
    x: torch.Tensor, own: int,
) -> tuple[int, ...]:  # fmt: skip
    """Return the sizes of all ranks' blocks along axes, of which this rank's is `own`.

    Without `given` they are equal if all arguments of the running mapped function are even along
    the axes, else the ranks exchange them.

    Args:
        where: the public function.
        name: the name of its argument.
        given: the argument.
        mesh: the mesh of the axes.
        axes: the axes.
        x: this rank's block, of which `own` is a size.
        own: the size.

    Raises:
        ShardingError: sizes that are not one for each index, or not `own` on this one.
    """
    n = mesh.axis_size(axes)
    numbers, index = as_ints(given), mesh.index(current_rank(mesh, where).rank, axes)
    if given is None:
        bound = current_axes()
        numbers = (own,) * n
        if not (bound is None or bound.uneven.isdisjoint(axes) or is_abstract(x)):
            tracker = current_tracker()
            with nullcontext() if tracker is None else tracker.pause():
                sizes = all_gather(torch.tensor(own, device=x.device), axes)
            numbers = tuple(map(int, sizes.tolist()))
    if numbers is None or len(numbers) != n or numbers[index] != own or min(numbers) < 0:
        fail(where, f"{name}={given!r}, and {own} on index {index}",
             f"{name} must be {plural(n, 'number')} of at least 0, one for each index along the "
             "axes, and that of this rank", f"{name}=spec.shard_sizes(dim)")  # fmt: skip
    return numbers


def ring_index(name: str, mesh: Mesh, axes: tuple[str, ...], block: Sequence[torch.Tensor]) -> int:
    """Return the index of this rank along axes; for tensors without values that of a first rank."""
    is_planned = bool(block) and is_abstract(block[0])
    transport = shape_transport(mesh, name) if is_planned else current_rank(mesh, name)
    return mesh.index(transport.rank, axes)


def ring_of(
    name: str, mesh: Mesh, axes: tuple[str, ...], block: Sequence[torch.Tensor], dim: int,
    sizes: Sequence[int] | None,
) -> Ring:  # fmt: skip
    """Return the ring of this rank, whose block has the size `sizes[index]` along `dim`.

    Raises:
        ShardingError: sizes that are not one for each rank, or not those of the block.
    """
    n, index = mesh.axis_size(axes), ring_index(name, mesh, axes, block)
    if sizes is None:
        label = Label(name, mesh, shapes=tuple(x.shape for x in block))
        if not any(map(is_abstract, block)):
            compare_shapes(label, axes, block[0].dtype)
        return Ring(name, mesh, axes, index, n, None, label)
    numbers = as_ints(sizes)
    if numbers is None or len(numbers) != n or min(numbers, default=0) < 0:
        rule = (f"sizes must be {plural(n, 'number')} of at least 0, one for each index along "
                f"{', '.join(axes)}")  # fmt: skip
        fail(name, f"sizes={sizes!r}", rule, "sizes=spec.shard_sizes(dim)")
    for x in block:
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != numbers[index]:
            fail(name, f"a block of shape {tuple(x.shape)} on index {index}",
                 f"its dim {dim} must have the size {numbers[index]} that sizes={numbers} says",
                 "sizes=spec.shard_sizes(dim) of the sharded tensor")  # fmt: skip
    shapes = tuple(tuple(_with_size(x.shape, dim, size) for x in block) for size in numbers)
    label = Label(name, mesh, arguments=f"(sizes={list(numbers)})")
    return Ring(name, mesh, axes, index, n, shapes, label)


def _with_size(shape: torch.Size, dim: int, size: int) -> torch.Size:
    sizes = list(shape)
    sizes[dim] = size
    return torch.Size(sizes)
