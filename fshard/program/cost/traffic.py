"""Traffic of a step: bytes, messages and rounds of the busiest rank.

The formulas for even layouts take a few numbers, so that searches need not build specs to
evaluate them. `shard_overlap.py` explains the words, and counts elements for uneven layouts.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from typing import NamedTuple, assert_never

from fshard.layout.partition_spec import Kinds
from fshard.layout.refinement import common_refinement
from fshard.layout.spec import Spec
from fshard.program.cost.shard_overlap import (
    NO_AXES,
    Overlap,
    even_dim_overlap,
    even_pieces,
    overlaps,
    pieces,
)
from fshard.program.exchange_boxes import converted_axes, exchange_axes, reduction_axes
from fshard.program.halo_boxes import dim_shares, halo_axes, join_shares, owners_of
from fshard.program.halo_steps import HaloStep
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    HaloExchange,
    HaloReduce,
    LocalStep,
    ReduceScatter,
    Remesh,
    Step,
)

Dims = Sequence[tuple[str, ...]]
DimTraffic = tuple[int, int, int]
"""One dim's factors in an even exchange: elements needed, elements held, pieces met."""


class Traffic(NamedTuple):
    """Bytes that the busiest rank sends and receives in one step, its messages, and rounds.

    The messages of a round go out together: each costs its overhead, the round one latency.
    """

    sent: int = 0
    received: int = 0
    messages: int = 0
    rounds: int = 0

    @property
    def launches(self) -> int:
        """1 if the step communicates, else 0."""
        return int(self.messages > 0)

    def scaled(self, factor: int) -> Traffic:
        """Return as many messages, of `factor` times as many bytes."""
        return self._replace(sent=factor * self.sent, received=factor * self.received)

    def transposed(self) -> Traffic:
        """Return the traffic in the other direction."""
        return self._replace(sent=self.received, received=self.sent)


NO_TRAFFIC = Traffic()


# -- even shards, by numbers ----------------------------------------------------------------


MAX_DIRECT = 16
"""Up to so many ranks send to each other directly in one round; more use trees."""


def gather_rounds(n: int) -> tuple[int, int]:
    """Return the messages of a rank, and the rounds, until `n` ranks have what all of them have.

    Few ranks send directly, many by doubling (Thakur, Rabenseifner and Gropp 2005) or along
    trees, as the libraries choose for small tensors, where it matters.
    """
    return (n - 1, 1) if n <= MAX_DIRECT else ((n - 1).bit_length(),) * 2


def ceil_share(parts: int, numel: int, n: int) -> int:
    """Return `parts` n-ths of `numel` elements, rounded up."""
    return -(-parts * numel // n)


def all_gather_traffic(n: int, shard: int) -> Traffic:
    """Return the traffic of an all-gather of `n` shards of `shard` bytes, or of its transpose."""
    return Traffic((n - 1) * shard, (n - 1) * shard, *gather_rounds(n))


def all_reduce_traffic(n: int, local: int, item: int) -> Traffic:
    """Return the traffic of an all-reduce over `n` ranks.

    Each rank has `local` bytes, in elements of `item` bytes. Small tensors go from each of few
    ranks to all in one round, and of many up and down trees.
    """
    moved = ceil_share(2 * (n - 1), local // item, n) * item
    messages, rounds = gather_rounds(n)
    passes = 1 if n <= MAX_DIRECT else 2
    return Traffic(moved, moved, passes * messages, passes * rounds)


def all_to_all_traffic(n: int, local: int) -> Traffic:
    """Return the traffic of an all-to-all of `n` locals of `local` bytes; a rank keeps 1/n."""
    return Traffic(local - local // n, local - local // n, n - 1, 1)


def even_exchange_traffic(
    shape: Sequence[int],
    item: int,
    axis_sizes: Mapping[str, int],
    have: Dims,
    need: Dims,
    num_partials: int = 1,
    converted: Set[str] = NO_AXES,
) -> Traffic | None:
    """Return the traffic of an exchange between two even layouts on one mesh.

    None if ranks have different loads: a dim is sharded over `converted` axes in one layout and
    over other axes in the other.

    Args:
        shape: The global shape.
        item: Bytes of an element.
        axis_sizes: Ranks along each mesh axis.
        have: The axes of each dim of the source.
        need: The axes of each dim of the target.
        num_partials: Partial sums of each element that are reduced where they arrive.
        converted: The `converted_axes` of the two layouts.

    >>> even_exchange_traffic((8, 8), 4, {"x": 4}, [("x",), ()], [(), ("x",)])
    Traffic(sent=48, received=48, messages=3, rounds=1)
    """
    dims = zip(shape, have, need, strict=True)
    factors = [dim_traffic(n, axis_sizes, a, b, converted) for n, a, b in dims]
    exact = [dim for dim in factors if dim is not None]
    return join_dims(exact, item, num_partials) if len(exact) == len(factors) else None


def dim_traffic(
    length: int,
    axis_sizes: Mapping[str, int],
    have: tuple[str, ...],
    need: tuple[str, ...],
    converted: Set[str] = NO_AXES,
) -> DimTraffic | None:
    """Return one dim's factors in `even_exchange_traffic`, if ranks have the same load."""
    needs, holds, exact = even_dim_overlap(length, axis_sizes, have, need, (), converted)
    if exact and converted:
        exact = even_dim_overlap(length, axis_sizes, need, have, (), converted)[2]
    if not exact:
        return None
    before, after = [math.prod([axis_sizes[axis] for axis in axes]) for axes in (have, need)]
    apart = math.prod([axis_sizes[axis] for axis in have if axis in converted]) if converted else 1
    return needs, holds, even_pieces(before, after) // apart


def join_dims(dims: Iterable[DimTraffic], item: int, num_partials: int = 1) -> Traffic:
    """Return the traffic of an even exchange from the factors of its dims."""
    needs = holds = count = 1
    for dim_needs, dim_holds, dim_count in dims:
        needs *= dim_needs
        holds *= dim_holds
        count *= dim_count
    moved = (num_partials * needs - holds) * item
    if moved == 0:
        return NO_TRAFFIC
    return Traffic(moved, moved, max(1, num_partials * count - (holds > 0)), 1)


# -- steps between specs --------------------------------------------------------------------


@lru_cache(maxsize=65536)
def max_local_nbytes(spec: Spec) -> int:
    """Return the bytes of the largest local; it has the largest shard of every dim."""
    return math.prod(_widest(spec, dim) for dim in range(spec.ndim)) * spec.dtype.itemsize


def _widest(spec: Spec, dim: int) -> int:
    sizes = spec.sizes[dim]
    return max(sizes) if sizes is not None else spec.shape[dim] // spec.dim_shards(dim)


def step_axes(step: Step, src: Spec, dst: Spec) -> tuple[str, ...]:
    """Return the axes of size > 1 along which ranks communicate.

    They are in mesh order for a permutation and an exchange. An exchange between two meshes has
    none: its ranks are not a group along axes.
    """
    shape = src.mesh.shape
    match step:
        case Cast() | Remesh():
            return ()
        case CollectivePermute():
            before, after = (axis_roles(shape, *spec.partition._parts) for spec in (src, dst))
            return tuple(axis for axis, role in before.items() if role != after[axis])
        case Exchange():
            return exchange_axes(src, dst) if src.mesh == dst.mesh else ()
        case HaloExchange() | HaloReduce():
            return halo_axes(step, src)
        case AllToAll():
            return tuple(axis for pair in step.pairs for axis in pair.axes if shape[axis] > 1)
        case _:
            return tuple(axis for axis in step.axes if shape[axis] > 1)


def axis_roles(
    axis_sizes: Mapping[str, int], dims: Dims, unreduced: Kinds, reduced: Kinds
) -> dict[str, object]:
    """Return what each axis of size > 1 does: its dim and its stride there, or its state."""
    roles: dict[str, object] = {}
    for dim, axes in enumerate(dims):
        stride = 1
        for axis in reversed(axes):
            roles[axis] = (dim, stride)
            stride *= axis_sizes[axis]
    roles |= {axis: ("unreduced", kind) for axis, kind in unreduced}
    roles |= {axis: ("reduced", kind) for axis, kind in reduced}
    return {axis: roles.get(axis) for axis, n in axis_sizes.items() if n > 1}


def traffic(step: Step, src: Spec, dst: Spec) -> Traffic:
    """Return the traffic of the busiest rank in a step from `src` to `dst`, also if uneven.

    All-gather and reduce-scatter move (n-1)/n of the global tensor, all-reduce twice as much
    (Patarasu and Yuan 2009), in the messages of `gather_rounds`. All-to-all moves (n-1)/n of the
    local in n-1 messages, as do gathers and scatters of uneven shards, which run as all-to-alls.
    In an exchange a rank receives what it lacks, and the holders of a shard send equal parts.
    """
    if 0 in src.shape or isinstance(step, LocalStep):
        return NO_TRAFFIC
    if isinstance(step, Exchange):
        return _exchange_traffic(src, dst)
    n = math.prod(src.mesh.shape[axis] for axis in step_axes(step, src, dst))
    if n == 1:
        return NO_TRAFFIC
    match step:
        case AllGather():
            return _gather_traffic(src, step.dim, n)
        case AllReduce():
            return all_reduce_traffic(n, max_local_nbytes(src), src.dtype.itemsize)
        case ReduceScatter():
            return _gather_traffic(dst, step.dim, n).transposed()
        case AllToAll():
            return _all_to_all_traffic(step, src, dst, n)
        case CollectivePermute():
            moved = max_local_nbytes(src)
            return Traffic(moved, moved, 1, 1)
        case HaloExchange() | HaloReduce():
            return _halo_traffic(step, src, dst)
        case _:
            assert_never(step)


def _halo_traffic(step: HaloStep, src: Spec, dst: Spec) -> Traffic:
    owners, item = owners_of(step, src, dst), src.dtype.itemsize
    # Ranks have every choice of one shard per dim; few shards of a dim differ.
    choices = [{*dim_shares(step, owners, dim)} for dim in range(owners.ndim)]
    counts = map(join_shares, itertools.product(*choices))
    sent, received, peers = map(max, zip(*counts, strict=True))
    if isinstance(step, HaloReduce):
        sent, received = received, sent
    return Traffic(sent * item, received * item, peers, 1) if peers else NO_TRAFFIC


def _gather_traffic(src: Spec, dim: int, n: int) -> Traffic:
    """Return the traffic of an all-gather of shards of `src`: all send to all others."""
    if src.sizes[dim] is None:
        return all_gather_traffic(n, max_local_nbytes(src))
    rest = math.prod(_widest(src, other) for other in range(src.ndim) if other != dim)
    return uneven_gather_traffic(src.shard_sizes(dim), n).scaled(rest * src.dtype.itemsize)


def uneven_gather_traffic(sizes: tuple[int, ...], n: int) -> Traffic:
    """Return the traffic of an all-gather of each `n` neighbours, in elements instead of bytes."""
    groups = _groups(sizes, n)
    received = max(total - min(group) for total, group in groups)
    alike = all(len(set(group)) == 1 for _, group in groups)
    rounds = gather_rounds(n) if alike else (n - 1, 1)
    widest = max(max(group) for _, group in groups)
    return Traffic((n - 1) * widest, received, *rounds)


def _all_to_all_traffic(step: AllToAll, src: Spec, dst: Spec, n: int) -> Traffic:
    item = src.dtype.itemsize
    if step.also:
        # Several dims at once: the part kept of one may depend on the part kept of another.
        sent, received = (
            max(needs - holds for needs, holds in overlaps(*ends))
            for ends in ((dst, src), (src, dst))
        )
        return Traffic(sent * item, received * item, n - 1, 1)
    if src.sizes[step.src_dim] is dst.sizes[step.dst_dim] is None:
        return all_to_all_traffic(n, max_local_nbytes(src))
    dims = (step.src_dim, step.dst_dim)
    rest = math.prod(_widest(src, dim) for dim in range(src.ndim) if dim not in dims)
    src_own, src_rest = _peaks(src, step.src_dim, n)
    dst_own, dst_rest = _peaks(dst, step.dst_dim, n)
    sent, received = (
        rest * max(map(operator.mul, own, other))
        for own, other in ((src_own, dst_rest), (dst_own, src_rest))
    )
    return Traffic(sent * item, received * item, n - 1, 1)


def _groups(sizes: tuple[int, ...], n: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return the distinct groups of `n` neighbouring shards of an uneven dim, and their totals."""
    groups = {sizes[i : i + n] for i in range(0, len(sizes), n)}
    return [(sum(group), group) for group in groups]


def _peaks(spec: Spec, dim: int, n: int) -> tuple[list[int], list[int]]:
    """Return the largest shard of a dim, and the most in all other shards, by place in its group.

    Groups of two dims meet in all pairs, so that these maxima meet.
    """
    if spec.sizes[dim] is None:
        width = spec.shape[dim] // spec.dim_shards(dim)
        return [width] * n, [(n - 1) * width] * n
    groups = _groups(spec.shard_sizes(dim), n)
    others = [[total - size for size in sizes] for total, sizes in groups]
    return _largest([sizes for _, sizes in groups]), _largest(others)


def _largest(rows: Sequence[Sequence[int]]) -> list[int]:
    return [*map(max, *rows)] if len(rows) > 1 else [*rows[0]]


def on_one_mesh(src: Spec, dst: Spec) -> tuple[Spec, Spec]:
    """Return both specs on the common refinement of their meshes, or unchanged without one.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src, dst = (Spec(mesh, P(mesh.axes), shape=(8,)) for mesh in (Mesh(x=4), Mesh(a=2, b=2)))
    >>> on_one_mesh(src, dst)
    (f32[8@(x_0,x_1)], f32[8@(x_0,x_1)])
    """
    fine = None if src.mesh == dst.mesh else common_refinement(src.mesh, dst.mesh)
    if fine is None:
        return src, dst
    partitions = (fine.refine(spec.partition, which=i) for i, spec in enumerate((src, dst)))
    refined_src, refined_dst = (
        Spec._of(fine.mesh, partition, spec.shape, spec.dtype, spec.sizes)
        for partition, spec in zip(partitions, (src, dst), strict=True)
    )
    return refined_src, refined_dst


@lru_cache(maxsize=8192)
def _exchange_traffic(src: Spec, dst: Spec) -> Traffic:
    src, dst = on_one_mesh(src, dst)
    num_partials = src.mesh.axis_size(reduction_axes(src, dst))
    converted = frozenset(converted_axes(src, dst))
    item = src.dtype.itemsize
    if src.mesh == dst.mesh and not any(src.sizes) and not any(dst.sizes):
        dims = src.partition.dims, dst.partition.dims
        moved = even_exchange_traffic(
            src.shape, item, src.mesh.shape, *dims, num_partials, converted
        )
        if moved is not None:
            return moved
    targets, shards = (overlaps(*ends, converted=converted) for ends in ((src, dst), (dst, src)))
    counts = pieces(src, dst, converted), pieces(dst, src, converted)
    return busiest_exchange(targets, shards, item, num_partials, *exchange_peers(src, dst), *counts)


def exchange_peers(src: Spec, dst: Spec) -> tuple[int, int]:
    """Return how many ranks need each target shard, and how many hold each source shard."""
    p, q = src.partition, dst.partition
    needers = dst.mesh.size // (dst.num_shards * dst.mesh.axis_size(tuple(q.unreduced)))
    lent = tuple(axis for axis in converted_axes(src, dst) if axis in p.reduced)
    shards = src.num_shards * src.mesh.axis_size(tuple(p.unreduced))
    return needers, src.mesh.size // (shards * src.mesh.axis_size(lent))


def busiest_exchange(
    targets: Collection[Overlap],
    shards: Collection[Overlap],
    item: int,
    num_partials: int,
    needers: int,
    holders: int,
    incoming: int,
    outgoing: int,
) -> Traffic:
    """Return the traffic of the busiest rank of an exchange.

    Args:
        targets: Elements that a rank needs, and those of them that it holds, for each rank.
        shards: For each rank, elements of its source shard that any rank needs, and those that it
            needs itself.
        item: Bytes of an element.
        num_partials: Partial sums of each element that are reduced where they arrive.
        needers: Ranks that need each target shard.
        holders: Ranks that hold each source shard; they send equal parts of what is needed.
        incoming: Source shards that a target shard meets, at most.
        outgoing: Target shards that a source shard meets, at most.
    """
    received = max([num_partials * needs - holds for needs, holds in targets])
    if received == 0:
        return NO_TRAFFIC
    sent = max([ceil_share(needers, needs, holders) - holds for needs, holds in shards])
    keeps_in, keeps_out = (
        all(holds > 0 for needs, holds in pairs if needs) for pairs in (targets, shards)
    )
    messages = (
        num_partials * incoming - keeps_in, ceil_share(needers, outgoing, holders) - keeps_out
    )  # fmt: skip
    return Traffic(sent * item, received * item, max(1, *messages), 1)
