"""Ring of the ranks along axes, on which blocks of different sizes move; one launch per dtype.

Operations of bodies need the size of every rank's block. `sizes_along` returns the sizes that an
argument lists; if it is left out and shards may be uneven, the ranks exchange their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fshard._util.errors import fail
from fshard._util.text import plural
from fshard.layout.mesh import Mesh
from fshard.layout.validation import as_ints
from fshard.run.autograd.linear_function import FinishAll, Tensors, apply_linear, launch_linear
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
    ) -> Callable[[], Tensors]:
        """Send `leaves` of a block `by` places on, without gradient; return the wait for them.

        The block on an index began `age` places before it.
        """
        with labelled(self.label):
            started = [
                (indices, launch_linear(op, tuple(xs[i] for i in indices), self.name))
                for indices, op in self._ops(xs, by, age, leaves)
            ]
        return with_label(self.label, lambda: _in_order(len(xs), started))

    def send(self, xs: Tensors, by: int, age: int) -> Callable[[], Tensors]:
        """Send the leaves of a block `by` places on, differentiably."""
        with labelled(self.label):
            results = [
                (indices, apply_linear(op, tuple(xs[i] for i in indices), False))
                for indices, op in self._ops(xs, by, age, None)
            ]
        return lambda: _in_order(len(xs), [(i, partial(_same, ys)) for i, ys in results])

    def _ops(
        self, xs: Tensors, by: int, age: int, leaves: Sequence[int] | None
    ) -> list[tuple[list[int], PermuteOp]]:
        """Return for each dtype the indices of tensors, and the operation that sends them.

        `leaves` has for every tensor its number among the leaves of a block, None if it is its own.
        """
        groups: dict[Hashable, list[int]] = {}
        for i, x in enumerate(xs):
            groups.setdefault((x.dtype, x.device), []).append(i)
        n, perm = self.n, tuple((i, (i + by) % self.n) for i in range(self.n))
        launches = []
        for indices in groups.values():
            shapes = None
            if self.shapes is not None:
                numbers = [i if leaves is None else leaves[i] for i in indices]
                rows = (self.shapes[(i - age) % n] for i in range(n))
                shapes = tuple(tuple(row[leaf] for leaf in numbers) for row in rows)
            launches.append((indices, PermuteOp(self.mesh, self.axes, perm, shapes)))
        return launches


def _same(xs: Tensors) -> Tensors:
    return xs


def _in_order(count: int, launches: Sequence[tuple[list[int], FinishAll]]) -> Tensors:
    """Wait for launches, and return their results in the order of their indices."""
    results: list[Any] = [None] * count
    for indices, finish in launches:
        for i, y in zip(indices, finish(), strict=True):
            results[i] = y
    return tuple(results)


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
