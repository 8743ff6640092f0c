"""What a step moves, and what a program costs: bytes, launches, time, memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from fshard.partition import PartitionSpec
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
from fshard.program.topology import Link, Topology
from fshard.spec import Spec

__all__ = ["Cost", "Traffic", "max_local_nbytes", "seconds", "step_time", "traffic"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one program: `time` in seconds, bytes of the busiest rank, and collective launches.

    `peak_memory` is what the busiest rank holds at once: the input and the output of a step.
    """

    time: float
    bytes_sent: int
    bytes_received: int
    peak_memory: int
    launches: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one step: bytes that the busiest rank sends and receives, and hops in a row."""

    sent: int = 0
    received: int = 0
    hops: int = 0

    @property
    def launches(self) -> int:
        """1 where the step is a collective that runs, else 0."""
        return int(self.hops > 0)


NOTHING = Traffic()


def hops(n: int) -> int:
    """Rounds in a row that a collective of `n` ranks needs: halving and doubling, or a tree."""
    return (n - 1).bit_length()


def share(parts: int, numel: int, n: int) -> int:
    """`parts` n-ths of `numel`, in whole elements."""
    return -(-parts * numel // n)


def max_local_nbytes(spec: Spec) -> int:
    """Bytes of the largest local: dims are cut independently, so the largest parts meet."""
    return math.prod(_widest(spec, dim) for dim in range(spec.ndim)) * spec.dtype.itemsize


def _widest(spec: Spec, dim: int) -> int:
    sizes = spec.sizes[dim]
    return max(sizes) if sizes is not None else spec.shape[dim] // spec.dim_shards(dim)


def step_axes(step: Step, src: Spec, dst: Spec) -> tuple[str, ...]:
    """The axes a step acts along that have more than one device; a permutation's in mesh order."""
    shape = src.mesh.shape
    if isinstance(step, Cast | Remesh):
        return ()
    if isinstance(step, Exchange):
        return tuple(axis for axis, size in shape.items() if size > 1)
    if isinstance(step, AllToAll):
        return tuple(axis for pair in step.pairs for axis in pair.axes if shape[axis] > 1)
    if isinstance(step, CollectivePermute):
        before, after = (axis_roles(shape, spec.partition) for spec in (src, dst))
        return tuple(axis for axis, role in before.items() if role != after[axis])
    return tuple(axis for axis in step.axes if shape[axis] > 1)


def axis_roles(sizes: Mapping[str, int], p: PartitionSpec) -> dict[str, object]:
    """What each axis of several devices does: the dim it cuts and its stride, or its state."""
    roles: dict[str, object] = {}
    for dim, axes in enumerate(p.dims):
        stride = 1
        for axis in reversed(axes):
            roles[axis] = (dim, stride)
            stride *= sizes[axis]
    roles |= {axis: ("unreduced", kind) for axis, kind in p.unreduced_kinds}
    roles |= {axis: ("reduced", kind) for axis, kind in p.reduced_kinds}
    return {axis: roles.get(axis) for axis, size in sizes.items() if size > 1}


def traffic(step: Step, src: Spec, dst: Spec) -> Traffic:
    """Bytes per rank of a step from `src` to `dst`, exact for uneven shards.

    All-gather and reduce-scatter move (n-1)/n of the whole, all-reduce twice that
    (Patarasu and Yuan 2009), all-to-all (n-1)/n of the local; in log2(n) rounds, as halving
    and doubling (Thakur, Rabenseifner and Gropp 2005) and double trees (NCCL) do.
    """
    n = math.prod(src.mesh.shape[axis] for axis in step_axes(step, src, dst))
    if n == 1 or 0 in src.shape:
        return NOTHING
    item = src.dtype.itemsize
    match step:
        case AllGather():
            rest = _others(src, [step.dim])
            got = max(whole - min(parts) for whole, parts in _groups(src, step.dim, n))
            most = _widest(src, step.dim)
            return Traffic((n - 1) * most * rest * item, got * rest * item, hops(n))
        case AllReduce():
            moved = share(2 * (n - 1), max_local_nbytes(src) // item, n) * item
            return Traffic(moved, moved, 2 * hops(n))
        case ReduceScatter():
            rest = _others(dst, [step.dim])
            sent = max(whole - min(parts) for whole, parts in _groups(dst, step.dim, n))
            most = _widest(dst, step.dim)
            return Traffic(sent * rest * item, (n - 1) * most * rest * item, hops(n))
        case AllToAll():
            rest = _others(src, [step.src_dim, step.dst_dim]) * item
            pairs = [
                (mine * (width - cut), cut * (whole - mine))
                for whole, rows in _groups(src, step.src_dim, n)
                for width, cuts in _groups(dst, step.dst_dim, n)
                for mine, cut in _zip(rows, cuts)
            ]
            sent, received = (max(each) * rest for each in zip(*pairs, strict=True))
            return Traffic(sent, received, hops(n))
        case CollectivePermute() | Exchange():
            moved = max_local_nbytes(src)
            return Traffic(moved, moved, 1)
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


def _others(spec: Spec, dims: list[int]) -> int:
    return math.prod(_widest(spec, dim) for dim in range(spec.ndim) if dim not in dims)


def _groups(spec: Spec, dim: int, n: int) -> Iterable[tuple[int, tuple[int, ...]]]:
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


def seconds(topology: Topology, link: Link, moved: Traffic) -> float:
    """Alpha-beta time of one collective: a launch, hops in a row, and bytes on the wire."""
    return (
        topology.launch
        + moved.hops * link.latency
        + max(moved.sent, moved.received) / link.bandwidth
    )


def step_time(topology: Topology, step: Step, src: Spec, dst: Spec) -> float:
    """Seconds of one step: its collective, or the local copy."""
    moved = traffic(step, src, dst)
    if moved.launches:
        return seconds(topology, topology.link(src.mesh, step_axes(step, src, dst)), moved)
    if shares_memory(step, src):
        return 0.0
    return (max_local_nbytes(src) + max_local_nbytes(dst)) / topology.memory


def shares_memory(step: Step, src: Spec) -> bool:
    """Whether the step hands its input on as it is."""
    match step:
        case InvariantToReduced():
            return step.kind == "sum"
        case ReducedToInvariant(axes):
            return all(kind == "sum" for axis, kind in src.partition.reduced_kinds if axis in axes)
        case Cast():
            return step.dtype == src.dtype
        case _:
            return False


def held(step: Step, src: Spec, dst: Spec) -> int:
    """Bytes of the busiest rank's input and output of one step."""
    if shares_memory(step, src):
        return max_local_nbytes(src)
    return max_local_nbytes(src) + max_local_nbytes(dst)
