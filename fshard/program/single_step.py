"""Single steps between two specs: `single_steps(src, dst)` lists every step that suffices alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
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

Axes = tuple[str, ...]
AxesByDim = dict[int, Axes]


@lru_cache(maxsize=65536)
def single_steps(src: Spec, dst: Spec, /) -> tuple[Step, ...]:
    """Return every single step from `src` to `dst`, specific steps before permutes and exchanges.

    Candidates follow from the change of each axis between the two layouts; `infer` checks them.

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
        exchange = Exchange(dst.partition, dst.sizes, dst.mesh)
        candidates: Iterable[Step] = (Remesh(dst.mesh, dst.partition), exchange)
    elif src.dtype != dst.dtype:
        candidates = (Cast(dst.dtype),)
    else:
        candidates = _on_one_mesh(src, dst)
    return tuple(step for step in candidates if _results_in(step, src, dst))


def _results_in(step: Step, src: Spec, dst: Spec) -> bool:
    try:
        return infer(step, src) == dst
    except ShardingError:
        return False


def _on_one_mesh(src: Spec, dst: Spec) -> Iterator[Step]:
    lost, gained = _lost_and_gained(src, dst)
    if not lost and not gained:
        yield from _state_changes(src, dst)
    elif not gained:
        yield from _gathers(dst, lost)
    elif not lost:
        yield from _slices(src, dst, gained)
    else:
        yield from _all_to_alls(dst, lost, gained)
        yield from _replacements(src, dst)
    size, p, q = src.mesh.shape, src.partition, dst.partition
    if permute_signature(size, *p._parts) == permute_signature(size, *q._parts):
        yield CollectivePermute(q)
    yield Exchange(q, dst.sizes)


def _lost_and_gained(src: Spec, dst: Spec) -> tuple[AxesByDim, AxesByDim]:
    """Return by dim the axes it loses and those it gains, behind the common major axes."""
    lost, gained = {}, {}
    for dim, (before, after) in enumerate(zip(src.partition.dims, dst.partition.dims, strict=True)):
        pairs = zip(before, after, strict=False)
        common = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        if before[common:]:
            lost[dim] = before[common:]
        if after[common:]:
            gained[dim] = after[common:]
    return lost, gained


def _state_changes(src: Spec, dst: Spec) -> Iterator[Step]:
    """Yield one step for all axes whose state changes, if no dim does."""
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


def _gathers(dst: Spec, lost: AxesByDim) -> Iterator[Step]:
    (dim, axes), *more = lost.items()
    q, first = dst.partition, axes[0]
    if more:
        return
    if first in q.unreduced:
        yield ShardedToUnreduced(axes, dim, q.unreduced[first])
    elif first in q.reduced:
        yield AllGather(axes, dim, "reduced", q.reduced[first])
    else:
        yield AllGather(axes, dim)


def _slices(src: Spec, dst: Spec, gained: AxesByDim) -> Iterator[Step]:
    (dim, axes), *more = gained.items()
    if more:
        return
    if axes[0] in src.partition.unreduced:
        yield ReduceScatter(axes, dim, dst.sizes[dim])
    else:
        yield AllSlice(axes, dim, dst.sizes[dim])


def _all_to_alls(dst: Spec, lost: AxesByDim, gained: AxesByDim) -> Iterator[Step]:
    """Yield an all-to-all if all lost axes are gained and one order of moves suits both ends."""
    src_dims = {axis: dim for dim, axes in lost.items() for axis in axes}
    dst_dims = {axis: dim for dim, axes in gained.items() for axis in axes}
    order = common_order([*lost.values(), *gained.values()])
    if src_dims.keys() != dst_dims.keys() or order is None:
        return
    moves: list[AllToAll] = []
    for dims, run in itertools.groupby(order, lambda axis: (src_dims[axis], dst_dims[axis])):
        axes, new = tuple(run), gained[dims[1]]
        minor = dst.mesh.axis_size(new[new.index(axes[-1]) + 1 :])
        moves.append(AllToAll(axes, *dims, join_sizes(dst.sizes[dims[1]], minor)))
    first, *rest = moves
    yield AllToAll(first.axes, first.src_dim, first.dst_dim, first.sizes, also=tuple(rest))


def common_order(chains: list[Axes]) -> Axes | None:
    """Return the axes in an order that every chain keeps, None if chains contradict each other."""
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


def _replacements(src: Spec, dst: Spec) -> Iterator[Step]:
    """Yield the step by which reduced axes take the place of others, which become unreduced."""
    dims = zip(src.partition.dims, dst.partition.dims, strict=True)
    changed = [(dim, *ends) for dim, ends in enumerate(dims) if ends[0] != ends[1]]
    if len(changed) != 1:
        return
    dim, before, after = changed[0]
    while before[:1] == after[:1]:
        before, after = before[1:], after[1:]
    while before[-1:] == after[-1:] and before:
        before, after = before[:-1], after[:-1]
    if before and after and before[0] in dst.partition.unreduced:
        yield ShardedToUnreduced(before, dim, dst.partition.unreduced[before[0]], after)
