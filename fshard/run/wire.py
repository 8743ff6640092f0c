"""Collectives as one rank runs them: how its local is packed, what is launched, what comes back.

A `Wire` is worked out once for a step and a rank, of specs alone. Packing and unpacking is all
the local work there is, so that the payloads of several wires can travel in one launch. What
lies already as it travels is not copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from fshard.mesh import Mesh
from fshard.partition import PartitionSpec
from fshard.program.cost import share
from fshard.program.infer import unreduced_kind
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectivePermute,
    ReduceScatter,
    Step,
)
from fshard.run.packing import (
    Box,
    Source,
    Tensors,
    Unpack,
    lands,
    lengths,
    meet,
    over,
    packer,
    relative,
    unpacker,
)
from fshard.run.transport import Finish, Group, Transport, notify
from fshard.spec import Spec

__all__ = ["Wire", "begin", "wire_of"]


@dataclass(frozen=True, slots=True)
class Wire:
    """One collective of one rank.

    `pack(x)` makes of the local what travels, `unpack(moved, x)` of what has come, and of the
    local that was packed, the local afterwards:

    - all_gather: a payload of m elements in any shape; what comes is (n, m), n the ranks of
      `group`, or (n, *the payload's shape).
    - all_reduce: m elements in any shape; what comes is m elements in any shape.
    - reduce_scatter: (n, m), m in any shape; what comes is m elements in any shape.
    - all_to_all: a flat payload, of which `send[i]` elements are for place i of `group`; what
      comes is flat, and `receive[i]` elements of it are from place i.

    A payload may be the local or a view of it, a result a view of what has come. `sent` are the
    elements that leave this rank, of which observers are told under `name` and `axes`.
    """

    op: Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
    name: str
    axes: tuple[str, ...]
    group: Group
    sent: int
    pack: Tensors
    unpack: Unpack
    reduction: str = "sum"
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()


def begin(wire: Wire, x: torch.Tensor, transport: Transport) -> Finish:
    """Launch one collective on this rank's local; the call that waits for its result."""
    payload = wire.pack(x)
    notify(wire.name, wire.axes, wire.sent * payload.element_size(), transport.rank)
    match wire.op:
        case "all_gather":
            moved = transport.all_gather(payload, wire.group)
        case "all_reduce":
            moved = transport.all_reduce(payload, wire.reduction, wire.group)
        case "reduce_scatter":
            moved = transport.reduce_scatter(payload, wire.reduction, wire.group)
        case "all_to_all":
            moved = transport.all_to_all(payload, wire.send, wire.receive, wire.group)
    unpack = wire.unpack
    return lambda: unpack(moved(), x)


def wire_of(step: Step, src: Spec, dst: Spec, rank: int, axes: tuple[str, ...]) -> Wire:
    """The wire of a collective step over `axes`, those that have several devices."""
    group = src.mesh.group(rank, axes)
    n = len(group)
    match step:
        case AllGather(_, dim, to, kind):
            divisor = n if (to, kind) == ("reduced", "avg") else 1
            if _alike(src, group, [dim]):
                return _gather(step, src, rank, dim, axes, group, divisor)
            return _all_to_all(step, src, dst, rank, axes, group, "sum", divisor)
        case AllReduce(all_axes, to, kind):
            op = unreduced_kind(step, src, all_axes)
            both = n if (to, kind) == ("reduced", "avg") else 1
            return _reduce(step, src, rank, axes, group, op, both * (n if op == "avg" else 1))
        case ReduceScatter(all_axes, dim):
            op = unreduced_kind(step, src, all_axes)
            op, divisor = ("sum", n) if op == "avg" else (op, 1)
            if _alike(dst, group, [dim]):
                return _scatter(step, dst, rank, dim, axes, group, op, divisor)
            return _all_to_all(step, src, dst, rank, axes, group, op, divisor)
        case AllToAll(_, src_dim, dst_dim):
            if _alike(src, group, [src_dim]) and _alike(dst, group, [dst_dim]):
                return _all_to_all_evenly(step, src, rank, axes, group)
            return _all_to_all(step, src, dst, rank, axes, group)
        case CollectivePermute():
            return _permute(step, src, dst, rank, axes, group)
        case _:
            raise AssertionError(f"{step} is no collective")


def _alike(spec: Spec, group: Group, dims: list[int]) -> bool:
    """Whether all ranks of a group hold equally much of each of `dims`."""
    return len({tuple(spec.local_shape(each)[dim] for dim in dims) for each in group}) == 1


def _gather(
    step: Step, src: Spec, rank: int, dim: int, axes: tuple[str, ...], group: Group, divisor: int
) -> Wire:
    """All-gather of equal shards; along dim 0 they come as they lie."""
    shape = (len(group), *src.local_shape(rank))

    def unpack(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        stacked = moved.view(shape)
        return over(stacked.flatten(0, 1) if dim == 0 else torch.cat(stacked.unbind(0), dim),
                    divisor)  # fmt: skip

    sent = math.prod(shape[1:]) * (len(group) - 1)
    return Wire("all_gather", step.name, axes, group, sent, lambda x: x, unpack)


def _reduce(
    step: Step, src: Spec, rank: int, axes: tuple[str, ...], group: Group, op: str, divisor: int
) -> Wire:
    shape = src.local_shape(rank)
    sent = share(2 * (len(group) - 1), math.prod(shape), len(group))
    unpack: Unpack = lambda moved, _: over(moved.view(shape), divisor)  # noqa: E731
    return Wire("all_reduce", step.name, axes, group, sent, lambda x: x, unpack,
                "sum" if op == "avg" else op)  # fmt: skip


def _scatter(
    step: Step,
    dst: Spec,
    rank: int,
    dim: int,
    axes: tuple[str, ...],
    group: Group,
    op: str,
    divisor: int,
) -> Wire:
    """Reduce-scatter into equal shards; along dim 0 they travel as they lie."""
    n, shape = len(group), dst.local_shape(rank)
    rows = (n, *shape)

    def pack(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(rows) if dim == 0 else torch.stack(x.chunk(n, dim))

    unpack: Unpack = lambda moved, _: over(moved.view(shape), divisor)  # noqa: E731
    sent = (n - 1) * math.prod(shape)
    return Wire("reduce_scatter", step.name, axes, group, sent, pack, unpack, op)


def _permute(
    step: CollectivePermute, src: Spec, dst: Spec, rank: int, axes: tuple[str, ...], group: Group
) -> Wire:
    to_rank = _permutation(src.mesh, src.partition, dst.partition, axes, group)
    here = group.index(rank)
    origin = to_rank.index(here)
    mine, theirs = (math.prod(src.local_shape(each)) for each in (rank, group[origin]))
    send = tuple(mine if at == to_rank[here] else 0 for at in range(len(group)))
    receive = tuple(theirs if at == origin else 0 for at in range(len(group)))
    shape = dst.local_shape(rank)
    return Wire(
        "all_to_all",
        step.name,
        axes,
        group,
        0 if origin == here else mine,
        lambda x: x.reshape(-1),
        lambda moved, _: moved.view(shape),
        send=send,
        receive=receive,
    )


def _all_to_all_evenly(
    step: AllToAll, src: Spec, rank: int, axes: tuple[str, ...], group: Group
) -> Wire:
    """An exchange of pieces of one shape: where they lie one after the other, nothing is copied."""
    n, (src_dim, dst_dim) = len(group), (step.src_dim, step.dst_dim)
    shape = list(src.local_shape(rank))
    shape[dst_dim] //= n
    each = math.prod(shape)

    def pack(x: torch.Tensor) -> torch.Tensor:
        pieces: torch.Tensor = x.unflatten(dst_dim, (n, shape[dst_dim]))
        return pieces.movedim(dst_dim, 0).reshape(-1)

    def unpack(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        stacked = moved.view(n, *shape).movedim(0, src_dim)
        return stacked.flatten(src_dim, src_dim + 1)

    return Wire("all_to_all", step.name, axes, group, (n - 1) * each, pack, unpack,
                send=(each,) * n, receive=(each,) * n)  # fmt: skip


def _all_to_all(
    step: Step,
    src: Spec,
    dst: Spec,
    rank: int,
    axes: tuple[str, ...],
    group: Group,
    op: str = "sum",
    divisor: int = 1,
) -> Wire:
    """A collective of unequal shards: each rank of the group sends what each other one needs.

    Where they hold addends, each sends its own.
    """
    whole, target = _box(src, rank), _box(dst, rank)
    addends = isinstance(step, ReduceScatter)
    sends = [(at, meet(whole, _box(dst, each))) for at, each in enumerate(group)]
    sources = [(at, meet(_box(src, each), target)) for at, each in enumerate(group)]
    return boxed(
        step,
        axes,
        group,
        rank,
        whole,
        target,
        [(at, box) for at, box in sends if box is not None],
        [(at, box, at if addends else 0) for at, box in sources if box is not None],
        op,
        divisor,
    )


def boxed(
    step: Step,
    axes: tuple[str, ...],
    group: Group,
    rank: int,
    whole: Box,
    target: Box,
    sends: list[tuple[int, Box]],
    sources: list[tuple[int, Box, int]],
    op: str,
    divisor: int,
) -> Wire:
    """An all-to-all of boxes: of the box `whole` that a rank holds to the `target` it needs.

    `sends` are places of the group and boxes, `sources` with the addend that they are too, both
    in the group's order. This rank is among both with what it keeps: that goes through the
    collective only where what comes is then the result as it lies.
    """
    here = group.index(rank)
    came = [Source(at, relative(box, target), addend) for at, box, addend in sources]
    if not lands(lengths(target), came):
        sends = [each for each in sends if each[0] != here]
        came = [
            each._replace(own=relative(box, whole)) if each.place == here else each
            for each, (_, box, _) in zip(came, sources, strict=True)
        ]
    send, receive = [0] * len(group), [0] * len(group)
    for at, box in sends:
        send[at] += math.prod(lengths(box))
    for each in came:
        receive[each.place] += math.prod(lengths(each.box)) if each.own is None else 0
    return Wire(
        "all_to_all",
        step.name,
        axes,
        group,
        sum(send) - send[here],
        packer(lengths(whole), [relative(box, whole) for _, box in sends]),
        unpacker(lengths(target), came, op, divisor),
        send=tuple(send),
        receive=tuple(receive),
    )


def _box(spec: Spec, rank: int) -> Box:
    """What a rank holds, in global coordinates."""
    return tuple((each.start, each.stop) for each in spec.index(rank))


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
