"""`single_steps(src, dst)`: the steps that lead from one spec to another all by themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from fshard._util.errors import ShardingError
from fshard.layout.spec import Spec
from fshard.program.infer import infer, join_sizes, permute_signature
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    Remesh,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)

__all__ = ["one_order", "single_steps"]

Axes = tuple[str, ...]
Moved = dict[int, Axes]


@lru_cache(maxsize=65536)
def single_steps(src: Spec, dst: Spec, /) -> tuple[Step, ...]:
    """Every single step from `src` to `dst`, the plain ones before those that do anything.

    What a step does to each axis is read off the two layouts; `infer` has the last word.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2), P("x", "y"), shape=(4, 4))
    >>> for step in single_steps(src, src.replace(partition=P("y", "x"))):
    ...     print(step)
    all_to_all(x, dim 0 -> 1; y, dim 1 -> 0)
    collective_permute(P('y', 'x'))
    exchange(P('y', 'x'))
    """
    if src.shape != dst.shape:
        return ()
    if src.mesh != dst.mesh:
        found: Iterator[Step] = iter(
            (
                Remesh(dst.mesh, dst.partition),
                Exchange(dst.partition, dst.sizes, dst.mesh),
            )
        )
    elif src.dtype != dst.dtype:
        found = iter((Cast(dst.dtype),))
    else:
        found = _on_one_mesh(src, dst)
    return tuple(step for step in found if _leads(step, src, dst))


def _leads(step: Step, src: Spec, dst: Spec) -> bool:
    try:
        return infer(step, src) == dst
    except ShardingError:
        return False


def _on_one_mesh(src: Spec, dst: Spec) -> Iterator[Step]:
    lost, gained = _moved(src, dst)
    if not lost and not gained:
        yield from _changes_of_state(src, dst)
    elif not gained:
        yield from _gathers(dst, lost)
    elif not lost:
        yield from _slices(src, dst, gained)
    else:
        yield from _all_to_alls(dst, lost, gained)
        yield from _stand_ins(src, dst)
    size, p, q = src.mesh.shape, src.partition, dst.partition
    if permute_signature(size, *p._parts) == permute_signature(size, *q._parts):
        yield CollectivePermute(q)
    yield Exchange(q, dst.sizes)


def _moved(src: Spec, dst: Spec) -> tuple[Moved, Moved]:
    """By dim the axes after the common ones: those that leave and those that come."""
    lost, gained = {}, {}
    for dim, (before, after) in enumerate(zip(src.partition.dims, dst.partition.dims, strict=True)):
        same = next(
            (at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
            min(len(before), len(after)),
        )
        if before[same:]:
            lost[dim] = before[same:]
        if after[same:]:
            gained[dim] = after[same:]
    return lost, gained


def _changes_of_state(src: Spec, dst: Spec) -> Iterator[Step]:
    """Where no dim changes: one step for all axes whose state does."""
    p, q = src.partition, dst.partition
    axes = tuple(
        axis
        for axis in src.mesh.axes
        if (p.unreduced.get(axis), p.reduced.get(axis))
        != (q.unreduced.get(axis), q.reduced.get(axis))
    )
    if not axes:
        return
    first = axes[0]
    if first in p.unreduced:
        to = q.reduced.get(first)
        yield AllReduce(axes, "reduced", to) if to else AllReduce(axes)
    elif first in q.unreduced:
        yield ReplicatedToUnreduced(axes, q.unreduced[first])
    elif first in q.reduced:
        yield InvariantToReduced(axes, q.reduced[first])
    else:
        yield ReducedToInvariant(axes)


def _gathers(dst: Spec, lost: Moved) -> Iterator[Step]:
    (dim, axes), *others = lost.items()
    q, first = dst.partition, axes[0]
    if others:
        return
    if first in q.unreduced:
        yield ShardedToUnreduced(axes, dim, q.unreduced[first])
    elif first in q.reduced:
        yield AllGather(axes, dim, "reduced", q.reduced[first])
    else:
        yield AllGather(axes, dim)


def _slices(src: Spec, dst: Spec, gained: Moved) -> Iterator[Step]:
    (dim, axes), *others = gained.items()
    if others:
        return
    if axes[0] in src.partition.unreduced:
        yield ReduceScatter(axes, dim, dst.sizes[dim])
    else:
        yield AllSlice(axes, dim, dst.sizes[dim])


def _all_to_alls(dst: Spec, lost: Moved, gained: Moved) -> Iterator[Step]:
    """Axes that all leave one dim for another, where one order of the moves serves both ends."""
    leaves = {axis: dim for dim, axes in lost.items() for axis in axes}
    comes = {axis: dim for dim, axes in gained.items() for axis in axes}
    order = one_order([*lost.values(), *gained.values()])
    if leaves.keys() != comes.keys() or order is None:
        return
    moves: list[AllToAll] = []
    for (src_dim, dst_dim), run in itertools.groupby(order, lambda a: (leaves[a], comes[a])):
        axes = tuple(run)
        mine = gained[dst_dim]
        after = dst.mesh.axis_size(mine[mine.index(axes[-1]) + 1 :])
        moves.append(AllToAll(axes, src_dim, dst_dim, join_sizes(dst.sizes[dst_dim], after)))
    first, *rest = moves
    yield AllToAll(first.axes, first.src_dim, first.dst_dim, first.sizes, also=tuple(rest))


def one_order(chains: list[Axes]) -> Axes | None:
    """The axes in an order that every chain keeps, or None where they contradict each other."""
    left = [chain for chain in chains if chain]
    order: list[str] = []
    while left:
        later = {axis for chain in left for axis in chain[1:]}
        axis = next((chain[0] for chain in left if chain[0] not in later), None)
        if axis is None:
            return None
        order.append(axis)
        left = [chain[chain[0] == axis :] for chain in left if chain != (axis,)]
    return tuple(order)


def _stand_ins(src: Spec, dst: Spec) -> Iterator[Step]:
    """Reduced axes that take the place of others, which become unreduced."""
    dims = zip(src.partition.dims, dst.partition.dims, strict=True)
    changed = [(dim, *each) for dim, each in enumerate(dims) if each[0] != each[1]]
    if len(changed) != 1:
        return
    dim, before, after = changed[0]
    while before[:1] == after[:1]:
        before, after = before[1:], after[1:]
    while before[-1:] == after[-1:] and before:
        before, after = before[:-1], after[:-1]
    if before and after and before[0] in dst.partition.unreduced:
        yield ShardedToUnreduced(before, dim, dst.partition.unreduced[before[0]], after)
