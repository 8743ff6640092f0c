"""Collectives of one rank: packing of its local, launch, and unpacking of the received elements.

A `Wire` is computed once per step and rank, from specs alone. It separates packing and unpacking
from the launch, so that the payloads of several wires can go in one launch. Payloads that are
contiguous already are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch

from fshard._util.cache import CACHE_SIZE
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.plan.batch.coalesce import has_equal_shards
from fshard.program.boxes import Box, box_shape, intersect, local_box, relative, volume
from fshard.program.cost.shard_overlap import shard_indices
from fshard.program.cost.traffic import ceil_share
from fshard.program.exchange_boxes import (
    converted_axes,
    exchange_axes,
    exchange_group,
    kept_box,
    receives,
    reduction_axes,
    sends,
)
from fshard.program.infer import reduction_of
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectivePermute,
    Exchange,
    ReduceScatter,
    Step,
)
from fshard.run.packing import Combine, Source, arrives_in_order, packer, unpacker
from fshard.run.transports.base import OBSERVERS, Finish, Group, Parts, Transport
from fshard.run.transports.observed_calls import ObservedLaunch, launch_of, notify
from fshard.run.transports.reduce_dtypes import TensorFunction, over

UNCHANGED = Combine()


@dataclass(frozen=True, slots=True)
class Wire:
    """One collective of one rank, as four functions of a `Transport` have it.

    `pack(x)` makes the payload of a local, `unpack(moved, x)` the local after the collective from
    the received elements and the local that was packed. With n ranks in `group`:

    - all_gather: a payload of m elements in any shape; received are `Parts`, m elements of each
      rank in any shape.
    - all_reduce: m elements in any shape, both sent and received.
    - reduce_scatter: a payload of shape (n, ...), with m elements in each row; received are m
      elements in any shape.
    - all_to_all: a flat payload with `send[i]` elements for rank i of the group; received is a flat
      tensor with `receive[i]` elements from rank i.

    A payload may be a view of the local, a result a view of the received tensor.

    Attributes:
        op: the transport's method.
        name: the step's name, for observers.
        axes: the mesh axes it communicates along, for observers.
        group: the ranks that take part.
        sent: elements that leave this rank.
        reduction: "sum", "avg", "max", "min" or "product" for the two that reduce.
        launches: its launches by dtype, for observers.
    """

    op: Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
    name: str
    axes: tuple[str, ...]
    group: Group
    sent: int
    pack: TensorFunction
    unpack: Callable[[Any, torch.Tensor], torch.Tensor]
    reduction: str = "sum"
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    launches: dict[torch.dtype, ObservedLaunch] = field(
        default_factory=dict, repr=False, compare=False
    )


def observed_launch(wire: Wire, payload: torch.Tensor, rank: int) -> ObservedLaunch:
    """Return the launch of a wire of a rank, for observers."""
    launch = wire.launches.get(payload.dtype)
    if launch is None:
        nbytes = wire.sent * payload.element_size()
        launch = launch_of(wire.name, wire.axes, nbytes, rank, payload.dtype)
        wire.launches[payload.dtype] = launch
    return launch


def launch_wire(
    wire: Wire, x: torch.Tensor, transport: Transport, *, owned: bool = False
) -> Finish:
    """Launch one collective on this rank's local; return the call that waits for its result.

    A local that is `owned` may be written: no one else has its memory.
    """
    payload = wire.pack(x)
    if observers := OBSERVERS.get():
        known = wire.launches.get(payload.dtype)  # without a call of Python's: see `notify`
        notify(known or observed_launch(wire, payload, transport.rank), observers)
    moved: Callable[[], Parts]
    match wire.op:
        case "all_gather":
            moved = transport.all_gather(payload, wire.group)
        case "all_reduce":
            moved = transport.all_reduce(payload, wire.reduction, wire.group, owned=owned)
        case "reduce_scatter":
            moved = transport.reduce_scatter(payload, wire.reduction, wire.group)
        case "all_to_all":
            moved = transport.all_to_all(payload, wire.send, wire.receive, wire.group)
    unpack = wire.unpack
    return lambda: unpack(moved(), x)


class _Member(NamedTuple):
    """One rank of one collective."""

    name: str
    axes: tuple[str, ...]
    group: Group
    rank: int


def wire_of(step: Step, src: Spec, dst: Spec, rank: int, axes: tuple[str, ...]) -> Wire:
    """Return the wire of a collective step over `axes`, which have several devices."""
    group = src.mesh.group(rank, axes)
    member, n = _Member(step.name, axes, group, rank), len(group)
    match step:
        case AllGather(_, dim, to, kind):
            divisor = n if (to, kind) == ("reduced", "avg") else 1
            if has_equal_shards(src, dim, n):
                return _gather(member, src, dim, divisor)
            return _all_to_all(member, src, dst, Combine(divisor=divisor))
        case AllReduce():
            return _reduce(member, src, *reduction_of(step, src))
        case ReduceScatter(_, dim):
            op, _ = reduction_of(step, src)
            if has_equal_shards(dst, dim, n):
                return _scatter(member, dst, dim, op)
            combine = Combine("sum", divisor=n) if op == "avg" else Combine(op)
            return _all_to_all(member, src, dst, combine, unreduced=True)
        case AllToAll():
            if _is_uniform(step, src, dst, group):
                return _uniform_all_to_all(member, step, src)
            return _all_to_all(member, src, dst)
        case CollectivePermute():
            return _permute(member, src, dst)
        case _:
            raise AssertionError(f"{step} is not a collective over axes")


@lru_cache(maxsize=CACHE_SIZE)
def _same_sizes(spec: Spec, group: Group, dims: frozenset[int]) -> bool:
    """Return True if the locals of a group's ranks have the same size along each of `dims`."""
    return len({tuple(spec.local_shape(rank)[dim] for dim in dims) for rank in group}) == 1


def _gather(member: _Member, src: Spec, dim: int, divisor: int) -> Wire:
    """Return the wire of an all-gather of equal shards, which are received as a stack.

    Here and in `_scatter` dims are permuted: `torch.cat` and `torch.stack` import the compiler for
    meta tensors, which a recording has.
    """
    n, shape = len(member.group), src.local_shape(member.rank)
    rows = (n * shape[0], *shape[1:])

    def unpack(moved: Parts, _: torch.Tensor) -> torch.Tensor:
        if not isinstance(moved, torch.Tensor):
            y = torch.cat([part.view(shape) for part in moved], dim)
        elif dim == 0:
            y = moved.reshape(rows)  # a coalesced stack is not contiguous
        else:
            y = moved.view(n, *shape).movedim(0, dim).flatten(dim, dim + 1)
        return y if divisor == 1 else over(y, divisor)

    sent = (n - 1) * math.prod(shape)
    return Wire("all_gather", *member[:3], sent, unchanged, unpack)


def _reduce(member: _Member, src: Spec, op: str, divisor: int) -> Wire:
    shape, n = src.local_shape(member.rank), len(member.group)

    def unpack(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        y = moved if moved.shape == shape else moved.view(shape)  # a view costs as much as an add
        return y if divisor == 1 else over(y, divisor)

    sent = ceil_share(2 * (n - 1), math.prod(shape), n)
    return Wire("all_reduce", *member[:3], sent, unchanged, unpack, op)


def _scatter(member: _Member, dst: Spec, dim: int, op: str) -> Wire:
    """Return the wire of a reduce-scatter into equal shards; along dim 0 nothing is copied."""
    n, shape = len(member.group), dst.local_shape(member.rank)
    rows = (n, *shape)

    def pack(x: torch.Tensor) -> torch.Tensor:
        if dim == 0:
            return x.reshape(rows)
        pieces: torch.Tensor = x.unflatten(dim, (n, shape[dim]))
        return pieces.movedim(dim, 0).contiguous()

    def unpack(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return moved if moved.shape == shape else moved.view(shape)

    sent = (n - 1) * math.prod(shape)
    return Wire("reduce_scatter", *member[:3], sent, pack, unpack, op)


def _permute(member: _Member, src: Spec, dst: Spec) -> Wire:
    group = member.group
    to_index = permutation(src.mesh, src.partition, dst.partition, member.axes, group)
    index = group.index(member.rank)
    origin = to_index.index(index)
    sent_size, received_size = (
        math.prod(src.local_shape(rank)) for rank in (member.rank, group[origin])
    )
    send = tuple(sent_size if i == to_index[index] else 0 for i in range(len(group)))
    receive = tuple(received_size if i == origin else 0 for i in range(len(group)))
    shape, sent = dst.local_shape(member.rank), 0 if origin == index else sent_size

    def unpack(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return moved.view(shape)

    return Wire("all_to_all", *member[:3], sent, _flat, unpack, send=send, receive=receive)


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """Return the argument: the packing of a payload, or a step, that needs no work."""
    return x


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1)


# -- all to all -----------------------------------------------------------------------


def _is_uniform(step: AllToAll, src: Spec, dst: Spec, group: Group) -> bool:
    """Return True if all pieces have one shape and no dim is both split and concatenated."""
    src_dims = frozenset([pair.src_dim for pair in step.pairs])
    dst_dims = frozenset([pair.dst_dim for pair in step.pairs])
    return (
        src_dims.isdisjoint(dst_dims)
        and _same_sizes(src, group, src_dims)
        and _same_sizes(dst, group, dst_dims)
    )


def _uniform_all_to_all(member: _Member, step: AllToAll, src: Spec) -> Wire:
    """Return the wire of an all-to-all with pieces of one shape, as permutations of dims.

    The group is in the order of the pairs, so that each pair's pieces are one dim of the payload.
    """
    counts = [src.mesh.axis_size(pair.axes) for pair in step.pairs]
    shape = list(src.local_shape(member.rank))
    split_shape, order = _split_dims(shape, [pair.dst_dim for pair in step.pairs], counts)
    for pair, count in zip(step.pairs, counts, strict=True):
        shape[pair.dst_dim] //= count
    src_dims = [pair.src_dim for pair in step.pairs]
    _, places = _split_dims(shape, src_dims, [1] * len(src_dims))
    inverse = sorted(range(len(places)), key=places.__getitem__)
    result_shape = list(shape)
    for dim, count in zip(src_dims, counts, strict=True):
        result_shape[dim] *= count

    def pack(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(split_shape).permute(order).reshape(-1)

    def unpack(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return moved.view(*counts, *shape).permute(inverse).reshape(result_shape)

    n, size = len(member.group), math.prod(shape)
    return Wire("all_to_all", *member[:3], (n - 1) * size, pack, unpack,
                send=(size,) * n, receive=(size,) * n)  # fmt: skip


def _split_dims(
    shape: Sequence[int], dims: Sequence[int], counts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Split each of `dims` into its count of pieces, major to minor within a dim.

    Returns:
        The shape with the new dims, and the permutation that moves them to the front in the order
        of `dims`.
    """
    split_shape: list[int] = []
    front, rest = [0] * len(dims), []
    for dim, size in enumerate(shape):
        pieces = [i for i, split_dim in enumerate(dims) if split_dim == dim]
        for i in pieces:
            front[i] = len(split_shape)
            split_shape.append(counts[i])
        rest.append(len(split_shape))
        split_shape.append(size // math.prod(counts[i] for i in pieces))
    return split_shape, front + rest


def _all_to_all(
    member: _Member, src: Spec, dst: Spec, combine: Combine = UNCHANGED, *, unreduced: bool = False
) -> Wire:
    """Return the wire in which each rank of the group sends the boxes that the others need.

    With `unreduced` every rank sends its own term of the reduction.
    """
    held_box, needed, group = local_box(src, member.rank), local_box(dst, member.rank), member.group
    sends_ = [(i, intersect(held_box, local_box(dst, rank))) for i, rank in enumerate(group)]
    receives_ = [(i, intersect(local_box(src, rank), needed)) for i, rank in enumerate(group)]
    return _box_exchange(
        member,
        held_box,
        needed,
        [(i, box) for i, box in sends_ if box is not None],
        [Source(i, box, i if unreduced else 0) for i, box in receives_ if box is not None],
        combine,
    )


def exchange(step: Exchange, src: Spec, dst: Spec, rank: int) -> Wire | TensorFunction:
    """Return the wire of an exchange for a rank of `src` or `dst`.

    A local function if no rank of its group receives anything.
    """
    held_box = local_box(src, rank) if rank in src.mesh else ((0, 0),)
    needed = local_box(dst, rank) if rank in dst.mesh else ((0, 0),)
    axes_reduced, kept = reduction_axes(src, dst), kept_box(src, dst, rank)
    combine = _combine(src, dst, axes_reduced)
    group = exchange_group(src, dst, rank)
    if not any(receives(src, dst, member) for member in group):
        own = []
        if kept is not None:
            own = [Source(0, relative(kept, needed), 0, relative(kept, held_box))]
        unpack = unpacker(box_shape(needed), own, combine)
        return lambda x: unpack(x.new_empty(0), x)
    axes = exchange_axes(src, dst) if src.mesh == dst.mesh else ()
    index = {member: i for i, member in enumerate(group)}
    own_boxes = [] if kept is None else [(rank, kept)]
    sources = [
        Source(index[peer], box, src.mesh.index(peer, axes_reduced))
        for peer, box in (*receives(src, dst, rank), *own_boxes)
    ]
    out = sorted((index[peer], box) for peer, box in (*sends(src, dst, rank), *own_boxes))
    return _box_exchange(
        _Member(step.name, axes, group, rank), held_box, needed, out, sorted(sources), combine
    )


def _combine(src: Spec, dst: Spec, axes_reduced: tuple[str, ...]) -> Combine:
    """Return the formula of an exchange's elements.

    An average over reduced axes divides by their size, and so does a new `reduced` axis of kind
    `avg`; turning one into a shard, or a shard into an unreduced average, multiplies.
    """
    p, q, turned = src.partition, dst.partition, converted_axes(src, dst)
    kinds = {axis: p.unreduced[axis] for axis in axes_reduced}
    op = next((kind for kind in kinds.values() if kind != "avg"), "sum")
    averaged = tuple(axis for axis, kind in kinds.items() if kind == "avg")
    shared = tuple(a for a, kind in q.reduced_kinds if kind == "avg" and a not in p.reduced)
    multiplied = tuple(a for a in turned if "avg" in (p.reduced.get(a), q.unreduced.get(a)))
    factor = src.mesh.axis_size(multiplied)
    divisor = src.mesh.axis_size(averaged) * dst.mesh.axis_size(shared)
    common = math.gcd(factor, divisor)
    fill = next((q.unreduced[axis] for axis in turned if axis in q.unreduced), "")
    return Combine(op, factor // common, divisor // common, fill)


def _box_exchange(
    member: _Member,
    held: Box,
    needed: Box,
    out: list[tuple[int, Box]],
    sources: list[Source],
    combine: Combine,
) -> Wire:
    """Return the wire of an all-to-all of boxes, all in global coordinates.

    Args:
        member: the rank.
        held: the box of its local before.
        needed: the box of its local after.
        out: the boxes to send, with the receivers' indices, in the group's order.
        sources: the boxes to receive, in the group's order.
        combine: how terms of one box are combined.

    The rank's own box is in `out` and `sources`. It is sent to itself only if the received tensor,
    as it arrives, is the result; else it is copied from the local.
    """
    index = member.group.index(member.rank)
    parts = [source._replace(box=relative(source.box, needed)) for source in sources]
    if not arrives_in_order(box_shape(needed), parts):
        out = [(i, box) for i, box in out if i != index]
        parts = [
            part._replace(own=relative(source.box, held)) if part.peer == index else part
            for part, source in zip(parts, sources, strict=True)
        ]
    send, receive = [0] * len(member.group), [0] * len(member.group)
    for i, box in out:
        send[i] += volume(box)
    for i, box, _, own in parts:
        receive[i] += volume(box) if own is None else 0
    pack = packer(box_shape(held), [relative(box, held) for _, box in out])
    unpack = unpacker(box_shape(needed), parts, combine)
    return Wire("all_to_all", *member[:3], sum(send) - send[index], pack, unpack,
                send=tuple(send), receive=tuple(receive))  # fmt: skip


# -- permutations ---------------------------------------------------------------------


@lru_cache(maxsize=64)
def permutation(
    mesh: Mesh, before: PartitionSpec, after: PartitionSpec, axes: tuple[str, ...], group: Group
) -> tuple[int, ...]:
    """Return for each index in the group the index that its shard moves to.

    A rank that already holds the shard it needs keeps it; the other holders and receivers of one
    shard are paired in order, so that the inverse step has the inverse permutation.
    """
    owned, needed = (_shards_of(mesh, p, axes, group) for p in (before, after))
    to = [*range(len(group))]
    moved = [i for i, (has, needs) in enumerate(zip(owned, needed, strict=True)) if has != needs]
    sources, targets = (sorted(moved, key=shards.__getitem__) for shards in (owned, needed))
    for index, target in zip(sources, targets, strict=True):
        to[index] = target
    return tuple(to)


def _shards_of(mesh: Mesh, p: PartitionSpec, moving: tuple[str, ...], group: Group) -> list[int]:
    """Return a number for each rank of a group: of its shard and its moving unreduced value."""
    kind_of = [(axis, kind) for axis, kind in p.unreduced_kinds if axis in moving]
    terms = [tuple(axis for axis, axis_kind in kind_of if axis_kind == kind)
             for kind in sorted({kind for _, kind in kind_of})]  # fmt: skip
    numbers = [0] * mesh.size
    for axes in (*p.dims, *terms):
        if axes:
            n, indices = mesh.axis_size(axes), shard_indices(mesh, axes)
            numbers = [n * number + index for number, index in zip(numbers, indices, strict=True)]
    number_of = dict(zip(mesh.devices, numbers, strict=True))
    return [number_of[rank] for rank in group]
