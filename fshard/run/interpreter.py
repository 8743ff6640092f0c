"""The one interpreter: what a rank does for each step, over any transport.

What of a step depends on no numbers (groups, shapes, bytes) is worked out once for each rank. A
step that is begun returns the call that finishes it; local steps finish at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import assert_never

import torch

from fshard.mesh import Mesh
from fshard.partition import PartitionSpec
from fshard.program.cost import share, step_axes
from fshard.program.infer import unreduced_kind
from fshard.program.program import Program
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from fshard.run.numbers import REDUCE
from fshard.run.transport import Finish, Group, Transport, notify
from fshard.spec import Spec

__all__ = ["collectives", "launch", "neutral_like"]

Begin = Callable[[torch.Tensor, Transport], Finish]
"""Begins one step as one rank."""


def launch(prog: Program, transport: Transport, x: torch.Tensor) -> Finish:
    """Start a program on this rank's local: it runs up to its last collective.

    A rank outside of the mesh gets an empty tensor and takes part in nothing.
    """
    if transport.rank not in prog.src.mesh:
        empty = x.new_empty((0,), dtype=prog.dst.dtype)
        return lambda: empty
    before, last, after = _ready(prog, transport.rank)
    wire = prog.forward_dtype
    if wire is not None:
        x = x.to(wire)
    for begin in before:
        x = begin(x, transport)()
    finish: Finish = (lambda x=x: x) if last is None else last(x, transport)  # type: ignore[misc]
    if not after and wire is None:
        return finish

    def rest() -> torch.Tensor:
        y = finish()
        for begin in after:
            y = begin(y, transport)()
        return y if wire is None else y.to(prog.dst.dtype)

    return rest


@lru_cache(maxsize=8192)
def _ready(prog: Program, rank: int) -> tuple[tuple[Begin, ...], Begin | None, tuple[Begin, ...]]:
    """A program's steps as one rank: those before the last that communicates, it, the others."""
    rows = list(zip(prog.steps, prog.specs, prog.specs[1:], strict=False))
    begins = tuple(_begin(*row, rank, prog.forward_dtype) for row in rows)
    last = max((at for at, row in enumerate(rows) if _communicates(*row)), default=-1)
    return begins[: max(last, 0)], begins[last] if last >= 0 else None, begins[last + 1 :]


@lru_cache(maxsize=8192)
def collectives(prog: Program) -> int:
    """How many steps of a program communicate."""
    steps = zip(prog.steps, prog.specs, prog.specs[1:], strict=False)
    return sum(_communicates(*each) for each in steps)


def _communicates(step: Step, src: Spec, dst: Spec) -> bool:
    return 0 not in src.shape and bool(_wire_axes(step, src, dst))


def _wire_axes(step: Step, src: Spec, dst: Spec) -> tuple[str, ...]:
    """The axes with more than one device that a collective step runs over; else none."""
    match step:
        case AllGather() | AllReduce() | ReduceScatter() | AllToAll() | CollectivePermute():
            return step_axes(step, src, dst)
        case _:
            return ()


def _begin(step: Step, src: Spec, dst: Spec, rank: int, wire: torch.dtype | None) -> Begin:
    """One step; `wire` is the dtype that replaces the casts, if any."""
    shape, dtype = dst.local_shape(rank), wire or dst.dtype
    if 0 in src.shape:
        return lambda x, _: lambda: x.new_empty(shape, dtype=dtype)
    axes = _wire_axes(step, src, dst)
    if axes:
        return _collective(step, src, dst, rank, axes)

    def begin(x: torch.Tensor, _: Transport) -> Finish:
        y = _local(step, src, dst, x, rank, wire)
        return lambda: y

    return begin


# -- local steps ----------------------------------------------------------------------


def _local(
    step: Step, src: Spec, dst: Spec, x: torch.Tensor, rank: int, wire: torch.dtype | None
) -> torch.Tensor:
    """A step that moves nothing; a collective over axes of one device is its share of one."""
    mesh = src.mesh
    match step:
        case AllGather() | AllReduce() | ReduceScatter() | AllToAll() | CollectivePermute():
            return x.clone()  # a collective's result is memory of its own, of one device too
        case AllSlice(axes, dim):
            offset = dst.offsets(rank)[dim] - src.offsets(rank)[dim]
            mine = x.narrow(dim, offset, dst.local_shape(rank)[dim])
            return _times(mine, _averaged(src, axes)).clone(memory_format=torch.contiguous_format)
        case InvariantToReduced(axes, kind):
            return x / mesh.axis_size(axes) if kind == "avg" else x
        case ReducedToInvariant(axes):
            return _times(x, _averaged(src, axes))
        case ReplicatedToUnreduced(axes, kind):
            x = _times(x, _averaged(src, axes))
            if kind == "avg" or mesh.index(rank, axes) == 0:
                return x
            return neutral_like(x, kind)
        case ShardedToUnreduced(axes, dim, kind, by):
            share = mesh.axis_size(axes) if kind == "avg" else 1
            if by:
                agree = mesh.index(rank, axes) == mesh.index(rank, by)
                mine = _times(x, share * _averaged(src, by))
                return mine if agree else neutral_like(x, kind, dst.local_shape(rank))
            whole = neutral_like(x, kind, dst.local_shape(rank))
            offset = src.offsets(rank)[dim] - dst.offsets(rank)[dim]
            whole.narrow(dim, offset, x.shape[dim]).copy_(_times(x, share))
            return whole
        case Cast(dtype):
            return x if wire is not None else x.to(dtype)
        case _:
            assert_never(step)


def _averaged(src: Spec, axes: Sequence[str]) -> int:
    """What undoes the shares of an average: the devices along the axes reduced by it."""
    kinds = dict(src.partition.reduced_kinds)
    return math.prod(src.mesh.shape[axis] for axis in axes if kinds.get(axis) == "avg")


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    return x if factor == 1 else x * factor


def neutral_like(x: torch.Tensor, kind: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor of the reduction's neutral element, of `x`'s shape unless another is given."""
    value: float | int | bool
    if kind in ("sum", "avg"):
        value = 0
    elif kind == "product":
        value = 1
    elif x.dtype == torch.bool:
        value = kind == "min"
    elif x.dtype.is_floating_point:
        value = -math.inf if kind == "max" else math.inf
    else:
        info = torch.iinfo(x.dtype)
        value = info.min if kind == "max" else info.max
    return x.new_full(x.shape if shape is None else shape, value)


# -- collectives ----------------------------------------------------------------------


def _collective(step: Step, src: Spec, dst: Spec, rank: int, axes: tuple[str, ...]) -> Begin:
    """One collective over `axes`, with the local work around it."""
    group = src.mesh.group(rank, axes)
    n = len(group)
    match step:
        case AllGather(_, dim, to, kind):
            gather = _gather(src, rank, dim, axes, group)
            return _divided(gather, n if to == "reduced" and kind == "avg" else 1)
        case AllReduce(all_axes, to, kind):
            op = unreduced_kind(step, src, all_axes)
            reduce = _reduce("sum" if op == "avg" else op, src, rank, axes, group)
            both = n if to == "reduced" and kind == "avg" else 1
            return _divided(reduce, both * (n if op == "avg" else 1))
        case ReduceScatter(all_axes, dim):
            op = unreduced_kind(step, src, all_axes)
            scatter = _scatter("sum" if op == "avg" else op, dst, rank, dim, axes, group)
            return _divided(scatter, n if op == "avg" else 1)
        case AllToAll(_, src_dim, dst_dim):
            rows = [src.local_shape(each)[src_dim] for each in group]
            cuts = [dst.local_shape(each)[dst_dim] for each in group]
            if len({*rows}) == len({*cuts}) == 1:
                return _exchange_evenly(step, rank, axes, group)
            shape = list(dst.local_shape(rank))
            shapes = [[*shape[:src_dim], row, *shape[src_dim + 1 :]] for row in rows]
            exchange = _exchange(step.name, shapes, src_dim, rank, axes, group)
            return lambda x, transport: exchange(x.split(cuts, dst_dim), transport)
        case CollectivePermute():
            return _permute(step, src, dst, rank, axes, group)
        case _:
            raise AssertionError(f"{step} is no collective")


def _divided(begin: Begin, divisor: int) -> Begin:
    if divisor == 1:
        return begin

    def divided(x: torch.Tensor, transport: Transport) -> Finish:
        finish = begin(x, transport)
        return lambda: finish() / divisor

    return divided


def _reduce(op: str, src: Spec, rank: int, axes: tuple[str, ...], group: Group) -> Begin:
    elements = share(2 * (len(group) - 1), math.prod(src.local_shape(rank)), len(group))

    def begin(x: torch.Tensor, transport: Transport) -> Finish:
        notify("all_reduce", axes, elements * x.element_size(), rank)
        return transport.all_reduce(x, op, group)

    return begin


def _gather(src: Spec, rank: int, dim: int, axes: tuple[str, ...], group: Group) -> Begin:
    """All-gather along `dim`; uneven shards travel without padding."""
    shapes = [src.local_shape(each) for each in group]
    n = len(group)
    if len({*shapes}) > 1:
        exchange = _exchange("all_gather", shapes, dim, rank, axes, group)
        return lambda x, transport: exchange([x] * n, transport)

    def begin(x: torch.Tensor, transport: Transport) -> Finish:
        notify("all_gather", axes, (n - 1) * x.nbytes, rank)
        stacked = transport.all_gather(x, group)
        if dim == 0:
            return lambda: stacked().flatten(0, 1)
        return lambda: torch.cat(stacked().unbind(0), dim)

    return begin


def _scatter(op: str, dst: Spec, rank: int, dim: int, axes: tuple[str, ...], group: Group) -> Begin:
    """Reduce-scatter along `dim`; uneven shards travel directly to the rank that adds them."""
    n = len(group)
    cuts = [dst.local_shape(each)[dim] for each in group]
    if len({*cuts}) > 1:
        shape = (1, *dst.local_shape(rank))
        exchange = _exchange("reduce_scatter", [shape] * n, 0, rank, axes, group)

        def send(x: torch.Tensor, transport: Transport) -> Finish:
            exchanged = exchange(x.split(cuts, dim), transport)
            return lambda: REDUCE[op](exchanged())

        return send

    def begin(x: torch.Tensor, transport: Transport) -> Finish:
        rows = (n, cuts[0], *x.shape[1:])
        stacked = x.reshape(rows) if dim == 0 else torch.stack(x.split(cuts, dim))
        notify("reduce_scatter", axes, (n - 1) * x.nbytes // n, rank)
        return transport.reduce_scatter(stacked, op, group)

    return begin


def _permute(
    step: CollectivePermute, src: Spec, dst: Spec, rank: int, axes: tuple[str, ...], group: Group
) -> Begin:
    to_rank = _permutation(src.mesh, src.partition, dst.partition, axes, group)
    here = group.index(rank)
    origin = to_rank.index(here)
    mine, theirs = (math.prod(src.local_shape(each)) for each in (rank, group[origin]))
    send = [mine if at == to_rank[here] else 0 for at in range(len(group))]
    receive = [theirs if at == origin else 0 for at in range(len(group))]
    shape = dst.local_shape(rank)

    def begin(x: torch.Tensor, transport: Transport) -> Finish:
        notify(step.name, axes, 0 if origin == here else x.nbytes, rank)
        moved = transport.all_to_all(x.reshape(-1), send, receive, group)
        return lambda: moved().reshape(shape)

    return begin


def _exchange(
    name: str,
    shapes: Sequence[Sequence[int]],
    dim: int,
    rank: int,
    axes: tuple[str, ...],
    group: Group,
) -> Callable[[Sequence[torch.Tensor], Transport], Finish]:
    """Send a piece to every rank, receive pieces of `shapes`, concatenated along `dim`."""
    receive = [math.prod(shape) for shape in shapes]
    here = group.index(rank)

    def begin(pieces: Sequence[torch.Tensor], transport: Transport) -> Finish:
        send = [piece.numel() for piece in pieces]
        notify(name, axes, sum(p.nbytes for at, p in enumerate(pieces) if at != here), rank)
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        moved = transport.all_to_all(flat, send, receive, group)

        def finish() -> torch.Tensor:
            parts = moved().split(receive)
            return torch.cat([p.view(*s) for p, s in zip(parts, shapes, strict=True)], dim)

        return finish

    return begin


def _exchange_evenly(step: AllToAll, rank: int, axes: tuple[str, ...], group: Group) -> Begin:
    """An exchange of pieces of one shape: where they lie one after the other, nothing is copied."""
    n, (src_dim, dst_dim) = len(group), (step.src_dim, step.dst_dim)

    def begin(x: torch.Tensor, transport: Transport) -> Finish:
        pieces = x.unflatten(dst_dim, (n, x.shape[dst_dim] // n)).movedim(dst_dim, 0)
        notify(step.name, axes, (n - 1) * x.nbytes // n, rank)
        each = [x.numel() // n] * n
        moved = transport.all_to_all(pieces.reshape(-1), each, each, group)
        shape = pieces.shape
        return lambda: moved().view(shape).movedim(0, src_dim).flatten(src_dim, src_dim + 1)

    return begin


def _permutation(
    mesh: Mesh, before: PartitionSpec, after: PartitionSpec, axes: tuple[str, ...], group: Group
) -> tuple[int, ...]:
    """For each place in the group, the place its shard moves to.

    A rank that already holds what it needs keeps it; the other holders and needers of one
    shard pair up in order, so that the inverse permutation is that of the inverse step.
    """
    holders: dict[object, list[int]] = {}
    needers: dict[object, list[int]] = {}
    for at, rank in enumerate(group):
        holders.setdefault(_shard_id(mesh, before, rank, axes), []).append(at)
        needers.setdefault(_shard_id(mesh, after, rank, axes), []).append(at)
    to = [0] * len(group)
    for shard, have in holders.items():
        need = needers[shard]
        both = set(have) & set(need)
        moving = [at for at in have if at not in both]
        wanting = [at for at in need if at not in both]
        for at, goal in (*zip(both, both, strict=True), *zip(moving, wanting, strict=True)):
            to[at] = goal
    return tuple(to)


def _shard_id(mesh: Mesh, p: PartitionSpec, rank: int, moving: tuple[str, ...]) -> object:
    """Which shard, and which addend of it along the moving axes, a rank holds."""
    counts = [(axis, kind) for axis, kind in p.unreduced_kinds if axis in moving]
    kinds = sorted({kind for _, kind in counts})
    addends = tuple(
        mesh.index(rank, tuple(axis for axis, each in counts if each == kind)) for kind in kinds
    )
    return tuple(mesh.index(rank, dim) for dim in p.dims), addends
