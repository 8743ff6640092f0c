"""What a step moves, and what a program costs: bytes, launches, messages, time, memory.

`step_time` is the one measure of time: of a program, of planning and of whatever weighs layouts.
Its parts for even layouts are functions of a few numbers, for searches to call on light values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, assert_never

from fshard._util.text import bytes_text, plural, time_text
from fshard.layout.partition_spec import Kinds
from fshard.layout.spec import Spec
from fshard.program.cost.overlap import (
    NONE,
    even_dim,
    on_one_mesh,
    overlaps,
    pieces,
    pieces_even,
)
from fshard.program.cost.topology import Link, Topology
from fshard.program.exchange_boxes import moving_axes, reduced_axes, turned_axes
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

__all__ = [
    "NOTHING", "Cost", "Parts", "Traffic", "all_reduced", "copies", "copy_passes", "dim_parts",
    "exchanged", "gathered", "joined", "max_local_nbytes", "seconds", "share", "spread",
    "step_axes", "step_link", "step_time", "swapped", "traffic",
]  # fmt: skip

Dims = Sequence[tuple[str, ...]]
Parts = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one program: `time` in seconds, bytes of the busiest rank, launches and messages.

    `peak_memory` is the largest local on the way, the measure of Rink et al. (arXiv 2112.01075):
    while a step runs, its input and its output are both there, so up to twice that is held.

    >>> print(Cost(8.4e-6, 196608, 196608, 262144, launches=1, messages=3))
    8.40 µs, 196,608 B sent, 196,608 B received, 262,144 B peak, 1 launch, 3 messages
    """

    time: float
    bytes_sent: int
    bytes_received: int
    peak_memory: int
    launches: int
    messages: int

    @staticmethod
    def in_turn(costs: Iterable[Cost]) -> Cost:
        """The cost of programs that run one after the other.

        >>> Cost.in_turn([Cost(1.0, 2, 3, 4, 5, 6)] * 2)
        Cost(time=2.0, bytes_sent=4, bytes_received=6, peak_memory=4, launches=10, messages=12)
        """
        each = tuple(costs)
        return Cost(
            time=sum(cost.time for cost in each),
            bytes_sent=sum(cost.bytes_sent for cost in each),
            bytes_received=sum(cost.bytes_received for cost in each),
            peak_memory=max((cost.peak_memory for cost in each), default=0),
            launches=sum(cost.launches for cost in each),
            messages=sum(cost.messages for cost in each),
        )

    def __str__(self) -> str:
        sent, received, peak = map(
            bytes_text, (self.bytes_sent, self.bytes_received, self.peak_memory)
        )
        counts = f"{plural(self.launches, 'launch')}, {plural(self.messages, 'message')}"
        return f"{time_text(self.time)}, {sent} sent, {received} received, {peak} peak, {counts}"


class Traffic(NamedTuple):
    """Of one step: bytes that the busiest rank sends and receives, its messages, and rounds.

    In a round messages go out together: each costs its overhead, the round one latency.
    """

    sent: int = 0
    received: int = 0
    messages: int = 0
    rounds: int = 0

    @property
    def launches(self) -> int:
        """1 where the step is a collective that runs, else 0."""
        return int(self.messages > 0)


NOTHING = Traffic()


# -- of numbers: equal shards --------------------------------------------------------------


DIRECT = 16
"""Of that many ranks at most everyone sends to everyone at once; of more, along trees."""


def spread(n: int) -> tuple[int, int]:
    """Messages of a rank and rounds in which `n` ranks tell each other all there is.

    Among few directly, among many by doubling (Thakur, Rabenseifner and Gropp 2005) or along
    trees: as the libraries choose, for small tensors, where it matters.
    """
    return (n - 1, 1) if n <= DIRECT else ((n - 1).bit_length(),) * 2


def share(parts: int, numel: int, n: int) -> int:
    """`parts` n-ths of `numel`, in whole elements."""
    return -(-parts * numel // n)


def gathered(n: int, shard: int) -> Traffic:
    """An all-gather of `n` shards of `shard` bytes each, or a reduce-scatter to such."""
    return Traffic((n - 1) * shard, (n - 1) * shard, *spread(n))


def all_reduced(n: int, local: int, item: int) -> Traffic:
    """An all-reduce of `n` locals of `local` bytes each, whose elements have `item` bytes.

    Small tensors go to all of few ranks in one round, along trees there and back.
    """
    moved = share(2 * (n - 1), local // item, n) * item
    messages, rounds = spread(n)
    twice = 1 if n <= DIRECT else 2
    return Traffic(moved, moved, twice * messages, twice * rounds)


def swapped(n: int, local: int) -> Traffic:
    """An all-to-all of `n` locals of `local` bytes each, of which each rank keeps an n-th."""
    return Traffic(local - local // n, local - local // n, n - 1, 1)


def exchanged(
    shape: Sequence[int],
    item: int,
    size: Mapping[str, int],
    have: Dims,
    need: Dims,
    addends: int = 1,
    turned: Set[str] = NONE,
) -> Traffic | None:
    """An exchange of a tensor of equal shards before and after.

    `item` are the bytes of an element, `size` the devices along each axis, `have` and `need` the
    axes of each dim; `addends` of every element are reduced where they arrive. Where dims are cut
    by `turned` axes on one side and by others on the other, ranks do not move alike: None.

    >>> exchanged((8, 8), 4, {"x": 4}, [("x",), ()], [(), ("x",)])
    Traffic(sent=48, received=48, messages=3, rounds=1)
    """
    dims = zip(shape, have, need, strict=True)
    parts = [dim_parts(length, size, mine, theirs, turned) for length, mine, theirs in dims]
    known = [part for part in parts if part is not None]
    return joined(known, item, addends) if len(known) == len(parts) else None


def dim_parts(
    length: int,
    size: Mapping[str, int],
    have: tuple[str, ...],
    need: tuple[str, ...],
    turned: Set[str] = NONE,
) -> Parts | None:
    """One dim's part in `exchanged`: of a target's box, of what is held of it, of its pieces."""
    box, part = even_dim(length, size, have, need, (), turned)
    if part < 0 or (turned and even_dim(length, size, need, have, (), turned)[1] < 0):
        return None
    before, after = [math.prod([size[axis] for axis in axes]) for axes in (have, need)]
    alike = math.prod([size[axis] for axis in have if axis in turned]) if turned else 1
    return box, part, pieces_even((before,), (after,)) // alike


def joined(dims: Iterable[Parts], item: int, addends: int = 1) -> Traffic:
    """An exchange by its `dim_parts`, which searches remember of each dim."""
    whole = held = pieces = 1
    for box, part, count in dims:
        whole *= box
        held *= part
        pieces *= count
    moved = (addends * whole - held) * item
    if moved == 0:
        return NOTHING
    return Traffic(moved, moved, max(1, addends * pieces - (held > 0)), 1)


def seconds(topology: Topology, link: Link, moved: Traffic, copied: int) -> float:
    """Time of a collective: a launch, rounds, messages, bytes on the wire, and local copies.

    LogGP's (Alexandrov et al. 1995), of which alpha-beta counts rounds and bytes alone.
    """
    return (
        topology.launch
        + moved.rounds * link.latency
        + moved.messages * topology.message
        + max(moved.sent, moved.received) / link.bandwidth
        + copied / topology.memory
    )


# -- of steps ------------------------------------------------------------------------------


def step_time(topology: Topology, step: Step, src: Spec, dst: Spec) -> float:
    """Seconds of one step: its collective with the copies around it, or a local copy."""
    moved = traffic(step, src, dst)
    copied = copies(step, src, dst, moved.launches)
    if not moved.launches:
        return copied / topology.memory
    return seconds(topology, step_link(topology, step, src, dst), moved, copied)


def step_link(topology: Topology, step: Step, src: Spec, dst: Spec) -> Link:
    """The link that a collective step is as slow as."""
    if src.mesh == dst.mesh:
        return topology.link(src.mesh, step_axes(step, src, dst))
    return topology.between(src.mesh, dst.mesh)


@lru_cache(maxsize=65536)
def max_local_nbytes(spec: Spec) -> int:
    """Bytes of the largest local: dims are cut independently, so the largest parts meet."""
    return math.prod(_widest(spec, dim) for dim in range(spec.ndim)) * spec.dtype.itemsize


def _widest(spec: Spec, dim: int) -> int:
    sizes = spec.sizes[dim]
    return max(sizes) if sizes is not None else spec.shape[dim] // spec.dim_shards(dim)


def step_axes(step: Step, src: Spec, dst: Spec) -> tuple[str, ...]:
    """The axes of several devices along which ranks talk to each other.

    Those of a permutation and of an exchange are in mesh order. An exchange between two meshes
    has none: who talks there is no group of an axis.
    """
    shape = src.mesh.shape
    match step:
        case Cast() | Remesh():
            return ()
        case CollectivePermute():
            before, after = (axis_roles(shape, *spec.partition._parts) for spec in (src, dst))
            return tuple(axis for axis, role in before.items() if role != after[axis])
        case Exchange():
            return moving_axes(src, dst) if src.mesh == dst.mesh else ()
        case AllToAll():
            return tuple(axis for pair in step.pairs for axis in pair.axes if shape[axis] > 1)
        case _:
            return tuple(axis for axis in step.axes if shape[axis] > 1)


def axis_roles(
    sizes: Mapping[str, int], dims: Sequence[tuple[str, ...]], unreduced: Kinds, reduced: Kinds
) -> dict[str, object]:
    """What each axis of several devices does: the dim it cuts and its stride, or its state."""
    roles: dict[str, object] = {}
    for dim, axes in enumerate(dims):
        stride = 1
        for axis in reversed(axes):
            roles[axis] = (dim, stride)
            stride *= sizes[axis]
    roles |= {axis: ("unreduced", kind) for axis, kind in unreduced}
    roles |= {axis: ("reduced", kind) for axis, kind in reduced}
    return {axis: roles.get(axis) for axis, size in sizes.items() if size > 1}


def traffic(step: Step, src: Spec, dst: Spec) -> Traffic:
    """What the busiest rank moves in a step from `src` to `dst`, exact for uneven shards.

    All-gather and reduce-scatter move (n-1)/n of the whole, all-reduce twice that
    (Patarasu and Yuan 2009), in the messages of `spread`. All-to-all moves (n-1)/n of the
    local in n-1 messages, as do gathers and scatters of unequal shards, which run as one. An
    exchange receives what is missing, of each addend; holders of one shard send alike.
    """
    if 0 in src.shape:
        return NOTHING
    if isinstance(step, Exchange):
        return _of_exchange(src, dst)
    n = math.prod(src.mesh.shape[axis] for axis in step_axes(step, src, dst))
    if n == 1:
        return NOTHING
    match step:
        case AllGather():
            return _of_gather(src, step.dim, n)
        case AllReduce():
            return all_reduced(n, max_local_nbytes(src), src.dtype.itemsize)
        case ReduceScatter():
            back = _of_gather(dst, step.dim, n)
            return Traffic(back.received, back.sent, back.messages, back.rounds)
        case AllToAll():
            return _of_all_to_all(step, src, dst, n)
        case CollectivePermute():
            moved = max_local_nbytes(src)
            return Traffic(moved, moved, 1, 1)
        case (
            AllSlice()
            | InvariantToReduced()
            | ReducedToInvariant()
            | ReplicatedToUnreduced()
            | ShardedToUnreduced()
            | Cast()
            | Remesh()
        ):
            return NOTHING
        case _:
            assert_never(step)


def _of_gather(src: Spec, dim: int, n: int) -> Traffic:
    """An all-gather of shards of `src`: sent to all others, received from all others."""
    if src.sizes[dim] is None:
        return gathered(n, max_local_nbytes(src))
    rest = math.prod(_widest(src, each) for each in range(src.ndim) if each != dim)
    groups = _groups(src, dim, n)
    got = max(whole - min(parts) for whole, parts in groups)
    alike = all(len(set(parts)) == 1 for _, parts in groups)
    item = rest * src.dtype.itemsize
    rounds = spread(n) if alike else (n - 1, 1)
    return Traffic((n - 1) * _widest(src, dim) * item, got * item, *rounds)


def _of_all_to_all(step: AllToAll, src: Spec, dst: Spec, n: int) -> Traffic:
    if step.also:
        # Several dims at once: what is kept of one may depend on what is kept of another.
        sent = max(total - held for total, held in overlaps(dst, src))
        received = max(total - held for total, held in overlaps(src, dst))
        return Traffic(sent * src.dtype.itemsize, received * src.dtype.itemsize, n - 1, 1)
    if src.sizes[step.src_dim] is dst.sizes[step.dst_dim] is None:
        return swapped(n, max_local_nbytes(src))
    dims = (step.src_dim, step.dst_dim)
    rest = math.prod(_widest(src, dim) for dim in range(src.ndim) if dim not in dims)
    pairs = [
        (mine * (width - cut), cut * (whole - mine))
        for whole, rows in _groups(src, step.src_dim, n)
        for width, cuts in _groups(dst, step.dst_dim, n)
        for mine, cut in _zip(rows, cuts)
    ]
    sent, received = (max(each) * rest for each in zip(*pairs, strict=True))
    return Traffic(sent * src.dtype.itemsize, received * src.dtype.itemsize, n - 1, 1)


def _groups(spec: Spec, dim: int, n: int) -> list[tuple[int, tuple[int, ...]]]:
    """The distinct groups of `n` neighbouring shards of a dim: their total and their sizes.

    Equal shards are given once, so that the work does not grow with the devices of an axis.
    """
    sizes = spec.sizes[dim]
    if sizes is None:
        width = spec.shape[dim] // spec.dim_shards(dim)
        return [(n * width, (width,))]
    runs = {sizes[at : at + n] for at in range(0, len(sizes), n)}
    return [(sum(run), run) for run in runs]


def _zip(rows: tuple[int, ...], cuts: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    if len(rows) == 1 or len(cuts) == 1:
        return itertools.product(rows, cuts)
    return zip(rows, cuts, strict=True)


@lru_cache(maxsize=8192)
def _of_exchange(src: Spec, dst: Spec) -> Traffic:
    src, dst = on_one_mesh(src, dst)
    p, q = src.partition, dst.partition
    addends = src.mesh.axis_size(reduced_axes(src, dst))
    turned = frozenset(turned_axes(src, dst))
    item = src.dtype.itemsize
    if src.mesh == dst.mesh and not any(src.sizes) and not any(dst.sizes):
        size = src.mesh.shape
        moved = exchanged(src.shape, item, size, p.dims, q.dims, addends, turned)
        if moved is not None:
            return moved
    targets = overlaps(src, dst, turned=turned)
    received = max(addends * total - held for total, held in targets)
    if received == 0:
        return NOTHING
    # What all ranks together need is sent by the holders in equal parts.
    needers = dst.mesh.size // (dst.num_shards * dst.mesh.axis_size(tuple(q.unreduced)))
    lent = tuple(axis for axis in turned if axis in p.reduced)
    holders = src.mesh.size // (
        src.num_shards * src.mesh.axis_size(tuple(p.unreduced)) * src.mesh.axis_size(lent)
    )
    shards = overlaps(dst, src, turned=turned)
    sent = max(share(needers, total, holders) - held for total, held in shards)
    keep_own, keep_theirs = (
        min(held for total, held in each if total) > 0 for each in (targets, shards)
    )
    come = addends * pieces(src, dst, turned) - keep_own
    go = share(needers, pieces(dst, src, turned), holders) - keep_theirs
    return Traffic(sent * item, received * item, max(1, come, go), 1)


# -- local copies --------------------------------------------------------------------------


def copies(step: Step, src: Spec, dst: Spec, launches: int) -> int:
    """Bytes that the busiest rank reads and writes in its own memory around a step."""
    packed, unpacked = copy_passes(step, src, dst, launches)
    return packed * max_local_nbytes(src) + unpacked * max_local_nbytes(dst)


def copy_passes(step: Step, src: Spec, dst: Spec, launches: int) -> tuple[int, int]:
    """How often a rank reads or writes its local of `src` around a step, and its local of `dst`.

    Along dim 0 pieces lie in memory as they travel. What an exchange reduces is read once more.
    A collective that is none, of one device or where nothing is missing, copies its result.
    """
    match step:
        case Remesh():
            return 0, 0
        case InvariantToReduced() | ReducedToInvariant():
            return 0, 0 if _only_sums(step, src) else 2
        case Cast():
            return (0, 0) if step.dtype == src.dtype else (1, 1)
        case _ if not launches:
            return 0, 2
        case AllGather():
            return 0, 2 if step.dim else 0
        case ReduceScatter():
            return 2 if step.dim else 0, 0
        case AllToAll():
            packs, unpacks = bool(step.also or step.dst_dim), bool(step.also or step.src_dim)
            return 2 * packs, 2 * unpacks
        case Exchange():
            return 2, 1 + src.mesh.axis_size(reduced_axes(src, dst))
        case _:
            return 0, 0


def _only_sums(step: InvariantToReduced | ReducedToInvariant, src: Spec) -> bool:
    """Whether the step multiplies nothing: shares of an average are other numbers."""
    if isinstance(step, InvariantToReduced):
        return step.kind == "sum"
    return all(kind == "sum" for axis, kind in src.partition.reduced_kinds if axis in step.axes)
