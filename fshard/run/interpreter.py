"""The one interpreter: what a rank does for each step, over any transport.

`begin` starts a step and returns the call that finishes it; local steps finish at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def launch(prog: Program, transport: Transport, x: torch.Tensor) -> Finish:
    """Start a program on this rank's local: it runs up to its last collective.

    A rank outside of the mesh gets an empty tensor and takes part in nothing.
    """
    if transport.rank not in prog.src.mesh:
        empty = x.new_empty((0,), dtype=prog.dst.dtype)
        return lambda: empty
    wire = prog.forward_dtype
    if wire is not None:
        x = x.to(wire)
    specs = prog.specs
    last = _last_launch(prog)
    finish: Finish = lambda x=x: x  # type: ignore[misc]  # noqa: E731
    for at, step in enumerate(prog.steps[: last + 1]):
        finish = _begin(step, specs[at], specs[at + 1], finish(), transport, wire)

    def rest() -> torch.Tensor:
        y = finish()
        for at in range(last + 1, len(prog.steps)):
            y = _begin(prog.steps[at], specs[at], specs[at + 1], y, transport, wire)()
        return y if wire is None else y.to(prog.dst.dtype)

    return rest


@lru_cache(maxsize=8192)
def _last_launch(prog: Program) -> int:
    """The place of the last step that communicates, or -1."""
    pairs = enumerate(zip(prog.steps, prog.specs, strict=False))
    return max(
        (at for at, (step, src) in pairs if _communicates(step, src, prog.specs[at + 1])),
        default=-1,
    )


@lru_cache(maxsize=8192)
def collectives(prog: Program) -> int:
    """How many steps of a program communicate."""
    steps = zip(prog.steps, prog.specs, prog.specs[1:], strict=False)
    return sum(_communicates(*each) for each in steps)


def _communicates(step: Step, src: Spec, dst: Spec) -> bool:
    return 0 not in src.shape and bool(_wire_axes(step, src, dst))


@lru_cache(maxsize=16384)
def _wire_axes(step: Step, src: Spec, dst: Spec) -> tuple[str, ...]:
    """The axes with more than one device that a collective step runs over; else none."""
    match step:
        case AllGather() | AllReduce() | ReduceScatter() | AllToAll() | CollectivePermute():
            return step_axes(step, src, dst)
        case _:
            return ()


def _begin(
    step: Step,
    src: Spec,
    dst: Spec,
    x: torch.Tensor,
    transport: Transport,
    wire: torch.dtype | None,
) -> Finish:
    """Start one step; `wire` is the dtype that replaces the casts, if any."""
    if 0 in src.shape:
        shape, dtype = dst.local_shape(transport.rank), wire or dst.dtype
        return lambda: x.new_empty(shape, dtype=dtype)
    axes = _wire_axes(step, src, dst)
    if axes:
        return _collective(step, src, dst, x, transport, axes)
    y = _local(step, src, dst, x, transport.rank, wire)
    return lambda: y


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


def _collective(
    step: Step, src: Spec, dst: Spec, x: torch.Tensor, transport: Transport, axes: tuple[str, ...]
) -> Finish:
    """Start one collective over `axes`, and put the local work around it."""
    group = src.mesh.group(transport.rank, axes)
    n = len(group)
    match step:
        case AllGather(_, dim, to, kind):
            gathered = _gather(src, x, dim, transport, axes, group)
            if to == "reduced" and kind == "avg":
                return lambda: gathered() / n
            return gathered
        case AllReduce(all_axes, to, kind):
            op = unreduced_kind(step, src, all_axes)
            sent = share(2 * (n - 1), x.numel(), n) * x.element_size()
            notify(step.name, axes, sent, transport.rank)
            reduced = transport.all_reduce(x, "sum" if op == "avg" else op, group)
            divisor = (n if op == "avg" else 1) * (n if to == "reduced" and kind == "avg" else 1)
            return reduced if divisor == 1 else lambda: reduced() / divisor
        case ReduceScatter(all_axes, dim):
            return _scatter(
                unreduced_kind(step, src, all_axes), dst, x, dim, transport, axes, group
            )
        case AllToAll(_, src_dim, dst_dim):
            rows = [src.local_shape(rank)[src_dim] for rank in group]
            cuts = [dst.local_shape(rank)[dst_dim] for rank in group]
            shape = list(dst.local_shape(transport.rank))
            if len({*rows}) == len({*cuts}) == 1:
                return _exchange_evenly(step, x, transport, axes, group)
            pieces = x.split(cuts, dst_dim)
            shapes = [[*shape[:src_dim], row, *shape[src_dim + 1 :]] for row in rows]
            return _exchange(step.name, pieces, shapes, src_dim, transport, axes, group)
        case CollectivePermute():
            to_rank = _permutation(src.mesh, src.partition, dst.partition, axes, group)
            here = group.index(transport.rank)
            origin = to_rank.index(here)
            send = [x.numel() if at == to_rank[here] else 0 for at in range(n)]
            receive = [0] * n
            receive[origin] = math.prod(src.local_shape(group[origin]))
            sent = 0 if origin == here else x.nbytes
            notify(step.name, axes, sent, transport.rank)
            moved = transport.all_to_all(x.reshape(-1), send, receive, group)
            shape_here = dst.local_shape(transport.rank)
            return lambda: moved().reshape(shape_here)
        case _:
            raise AssertionError(f"{step} is no collective")


def _gather(
    src: Spec, x: torch.Tensor, dim: int, transport: Transport, axes: tuple[str, ...], group: Group
) -> Finish:
    """All-gather along `dim`; uneven shards travel without padding."""
    shapes = [src.local_shape(rank) for rank in group]
    if len(set(shapes)) > 1:
        return _exchange("all_gather", [x] * len(group), shapes, dim, transport, axes, group)
    notify("all_gather", axes, (len(group) - 1) * x.nbytes, transport.rank)
    stacked = transport.all_gather(x, group)
    if dim == 0:
        return lambda: stacked().flatten(0, 1)
    return lambda: torch.cat(stacked().unbind(0), dim)


def _scatter(
    op: str,
    dst: Spec,
    x: torch.Tensor,
    dim: int,
    transport: Transport,
    axes: tuple[str, ...],
    group: Group,
) -> Finish:
    """Reduce-scatter along `dim`; uneven shards travel directly to the rank that adds them."""
    n = len(group)
    kind = "sum" if op == "avg" else op
    share = n if op == "avg" else 1
    cuts = [dst.local_shape(rank)[dim] for rank in group]
    blocks = x.split(cuts, dim)
    if len(set(cuts)) == 1:
        stacked = x.reshape(n, cuts[0], *x.shape[1:]) if dim == 0 else torch.stack(blocks)
        notify("reduce_scatter", axes, (n - 1) * x.nbytes // n, transport.rank)
        reduced = transport.reduce_scatter(stacked, kind, group)
        return reduced if share == 1 else lambda: reduced() / share
    shape = (1, *dst.local_shape(transport.rank))
    exchanged = _exchange("reduce_scatter", blocks, [shape] * n, 0, transport, axes, group)
    if share == 1:
        return lambda: REDUCE[kind](exchanged())
    return lambda: REDUCE[kind](exchanged()) / share


def _exchange(
    name: str,
    pieces: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
    dim: int,
    transport: Transport,
    axes: tuple[str, ...],
    group: Group,
) -> Finish:
    """Send a piece to every rank, receive pieces of `shapes`, concatenated along `dim`."""
    send = [piece.numel() for piece in pieces]
    receive = [math.prod(shape) for shape in shapes]
    here = group.index(transport.rank)
    nbytes = sum(p.nbytes for at, p in enumerate(pieces) if at != here)
    notify(name, axes, nbytes, transport.rank)
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    moved = transport.all_to_all(flat, send, receive, group)

    def finish() -> torch.Tensor:
        parts = moved().split(receive)
        return torch.cat([p.view(*s) for p, s in zip(parts, shapes, strict=True)], dim)

    return finish


def _exchange_evenly(
    step: AllToAll, x: torch.Tensor, transport: Transport, axes: tuple[str, ...], group: Group
) -> Finish:
    """An exchange of pieces of one shape: where they lie one after the other, nothing is copied."""
    n, (src_dim, dst_dim) = len(group), (step.src_dim, step.dst_dim)
    pieces = x.unflatten(dst_dim, (n, x.shape[dst_dim] // n)).movedim(dst_dim, 0)
    notify(step.name, axes, (n - 1) * x.nbytes // n, transport.rank)
    each = [x.numel() // n] * n
    moved = transport.all_to_all(pieces.reshape(-1), each, each, group)
    shape = pieces.shape
    return lambda: moved().view(shape).movedim(0, src_dim).flatten(src_dim, src_dim + 1)


@lru_cache(maxsize=8192)
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
