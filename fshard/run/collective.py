"""Collectives as one rank runs them: how its local is packed, what is launched, what comes back.

A `Wire` is worked out once for a step and a rank, of specs alone. Packing and unpacking is all
the local work there is, so that the payloads of several wires can travel in one launch. What
lies already as it travels is not copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.plan.batch.coalesce import is_even
from fshard.program.cost.model import share
from fshard.program.exchange_boxes import (
    exchange_group,
    kept,
    moving_axes,
    receives,
    reduced_axes,
    sends,
    turned_axes,
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
from fshard.run.packing import (
    Box,
    Made,
    Source,
    Tensors,
    lands,
    lengths,
    meet,
    packer,
    relative,
    unpacker,
)
from fshard.run.transports.base import Finish, Group, Parts, Transport, notify
from fshard.run.transports.reduce_dtypes import over

__all__ = ["Wire", "begin", "exchange", "wire_of"]

PLAIN = Made()


@dataclass(frozen=True, slots=True)
class Wire:
    """One collective of one rank.

    `pack(x)` makes of the local what travels, `unpack(moved, x)` of what has come, and of the
    local that was packed, the local afterwards:

    - all_gather: a payload of m elements in any shape; what comes are `Parts` of m elements in
      any shape, one of each of the n ranks of `group`.
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
    unpack: Callable[[Any, torch.Tensor], torch.Tensor]
    reduction: str = "sum"
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()


def begin(wire: Wire, x: torch.Tensor, transport: Transport) -> Finish:
    """Launch one collective on this rank's local; the call that waits for its result."""
    payload = wire.pack(x)
    notify(wire.name, wire.axes, wire.sent * payload.element_size(), transport.rank)
    moved: Callable[[], Parts]
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


class _Place(NamedTuple):
    """A rank in a collective."""

    name: str
    axes: tuple[str, ...]
    group: Group
    rank: int


def wire_of(step: Step, src: Spec, dst: Spec, rank: int, axes: tuple[str, ...]) -> Wire:
    """The wire of a collective step over `axes`, those that have several devices."""
    group = src.mesh.group(rank, axes)
    at, n = _Place(step.name, axes, group, rank), len(group)
    match step:
        case AllGather(_, dim, to, kind):
            divisor = n if (to, kind) == ("reduced", "avg") else 1
            if is_even(src, dim, n):
                return _gather(at, src, dim, divisor)
            return _all_to_all(at, src, dst, Made(divisor=divisor))
        case AllReduce():
            return _reduce(at, src, *reduction_of(step, src))
        case ReduceScatter(_, dim):
            op, _ = reduction_of(step, src)
            if is_even(dst, dim, n):
                return _scatter(at, dst, dim, op)
            made = Made("sum", divisor=n) if op == "avg" else Made(op)
            return _all_to_all(at, src, dst, made, added=True)
        case AllToAll():
            if _evenly(step, src, dst, group):
                return _all_to_all_evenly(at, step, src)
            return _all_to_all(at, src, dst)
        case CollectivePermute():
            return _permute(at, src, dst)
        case _:
            raise AssertionError(f"{step} is no collective over axes")


def _alike(spec: Spec, group: Group, dims: Iterable[int]) -> bool:
    """Whether all ranks of a group hold equally much of each of `dims`."""
    return len({tuple(spec.local_shape(each)[dim] for dim in dims) for each in group}) == 1


def _gather(at: _Place, src: Spec, dim: int, divisor: int) -> Wire:
    """All-gather of equal shards; stacked ones lie along dim 0 as they come."""
    n, shape = len(at.group), src.local_shape(at.rank)

    def unpack(moved: Parts, _: torch.Tensor) -> torch.Tensor:
        if not isinstance(moved, torch.Tensor):
            y = torch.cat([part.view(shape) for part in moved], dim)
        elif dim == 0:
            y = moved.view(n, *shape).flatten(0, 1)
        else:
            y = torch.cat(moved.view(n, *shape).unbind(0), dim)
        return over(y, divisor)

    sent = (n - 1) * math.prod(shape)
    return Wire("all_gather", at.name, at.axes, at.group, sent, _itself, unpack)


def _reduce(at: _Place, src: Spec, op: str, divisor: int) -> Wire:
    shape, n = src.local_shape(at.rank), len(at.group)

    def unpack(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return over(_shaped(moved, shape), divisor)

    sent = share(2 * (n - 1), math.prod(shape), n)
    return Wire("all_reduce", at.name, at.axes, at.group, sent, _itself, unpack, op)


def _scatter(at: _Place, dst: Spec, dim: int, op: str) -> Wire:
    """Reduce-scatter into equal shards; along dim 0 they travel as they lie."""
    n, shape = len(at.group), dst.local_shape(at.rank)
    rows = (n, *shape)

    def pack(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(rows) if dim == 0 else torch.stack(x.chunk(n, dim))

    def unpack(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return _shaped(moved, shape)

    sent = (n - 1) * math.prod(shape)
    return Wire("reduce_scatter", at.name, at.axes, at.group, sent, pack, unpack, op)


def _permute(at: _Place, src: Spec, dst: Spec) -> Wire:
    group = at.group
    to_rank = _permutation(src.mesh, src.partition, dst.partition, at.axes, group)
    here = group.index(at.rank)
    origin = to_rank.index(here)
    mine, theirs = (math.prod(src.local_shape(each)) for each in (at.rank, group[origin]))
    send = tuple(mine if each == to_rank[here] else 0 for each in range(len(group)))
    receive = tuple(theirs if each == origin else 0 for each in range(len(group)))
    shape, sent = dst.local_shape(at.rank), 0 if origin == here else mine

    def unpack(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return moved.view(shape)

    return Wire("all_to_all", at.name, at.axes, group, sent, _flat, unpack,
                send=send, receive=receive)  # fmt: skip


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _shaped(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`x` in a shape, itself where that is its own: a view costs as much as a small sum."""
    return x if x.shape == shape else x.view(shape)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1)


# -- all to all -----------------------------------------------------------------------


def _evenly(step: AllToAll, src: Spec, dst: Spec, group: Group) -> bool:
    """Whether all pieces are of one shape, and each cut along dims that nothing is joined along."""
    taken = {pair.src_dim for pair in step.pairs}
    put = {pair.dst_dim for pair in step.pairs}
    return taken.isdisjoint(put) and _alike(src, group, taken) and _alike(dst, group, put)


def _all_to_all_evenly(at: _Place, step: AllToAll, src: Spec) -> Wire:
    """Pieces of one shape: where they lie one after the other, nothing is copied.

    The group is in the order of the pairs, so that each pair's pieces are one dim of the payload.
    """
    counts = [src.mesh.axis_size(pair.axes) for pair in step.pairs]
    shape = list(src.local_shape(at.rank))
    cuts, order = _unfolded(shape, [pair.dst_dim for pair in step.pairs], counts)
    for pair, count in zip(step.pairs, counts, strict=True):
        shape[pair.dst_dim] //= count
    joins = [pair.src_dim for pair in step.pairs]
    _, places = _unfolded(shape, joins, [1] * len(joins))
    back = sorted(range(len(places)), key=places.__getitem__)
    joined = list(shape)
    for dim, count in zip(joins, counts, strict=True):
        joined[dim] *= count

    def pack(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(cuts).permute(order).reshape(-1)

    def unpack(moved: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return moved.view(*counts, *shape).permute(back).reshape(joined)

    n, each = len(at.group), math.prod(shape)
    return Wire("all_to_all", at.name, at.axes, at.group, (n - 1) * each, pack, unpack,
                send=(each,) * n, receive=(each,) * n)  # fmt: skip


def _unfolded(
    shape: Sequence[int], dims: Sequence[int], counts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """A shape with each of `dims` cut in `counts`, those of one dim major to minor.

    And the permutation that brings these cuts to the front, in the order of `dims`.
    """
    unfolded: list[int] = []
    front, rest = [0] * len(dims), []
    for dim, size in enumerate(shape):
        mine = [each for each, its in enumerate(dims) if its == dim]
        for each in mine:
            front[each] = len(unfolded)
            unfolded.append(counts[each])
        rest.append(len(unfolded))
        unfolded.append(size // math.prod(counts[each] for each in mine))
    return unfolded, front + rest


def _all_to_all(
    at: _Place, src: Spec, dst: Spec, made: Made = PLAIN, *, added: bool = False
) -> Wire:
    """A collective of unequal shards: each rank of the group sends what each other one needs.

    Where these are `added` they hold addends, and each sends its own.
    """
    whole, target = _box(src, at.rank), _box(dst, at.rank)
    out = [(place, meet(whole, _box(dst, each))) for place, each in enumerate(at.group)]
    come = [(place, meet(_box(src, each), target)) for place, each in enumerate(at.group)]
    return _boxed(
        at,
        whole,
        target,
        [(place, box) for place, box in out if box is not None],
        [Source(place, box, place if added else 0) for place, box in come if box is not None],
        made,
    )


def exchange(step: Exchange, src: Spec, dst: Spec, rank: int) -> Wire | Tensors:
    """What makes `dst` of `src` for a rank of one of them, by the tables of what each one lacks.

    A function where nobody in the rank's group lacks anything.
    """
    whole = _box(src, rank) if rank in src.mesh else ((0, 0),)
    target = _box(dst, rank) if rank in dst.mesh else ((0, 0),)
    added, held = reduced_axes(src, dst), kept(src, dst, rank)
    made = _made(src, dst, added)
    group = exchange_group(src, dst, rank)
    if not any(receives(src, dst, each) for each in group):
        own = [] if held is None else [Source(0, relative(held, target), 0, relative(held, whole))]
        unpack = unpacker(lengths(target), own, made)
        return lambda x: unpack(x.new_empty(0), x)
    axes = moving_axes(src, dst) if src.mesh == dst.mesh else ()
    places = {each: place for place, each in enumerate(group)}
    here = [] if held is None else [(rank, held)]
    come = [
        Source(places[peer], box, src.mesh.index(peer, added))
        for peer, box in (*receives(src, dst, rank), *here)
    ]
    out = sorted((places[peer], box) for peer, box in (*sends(src, dst, rank), *here))
    at = _Place(step.name, axes, group, rank)
    return _boxed(at, whole, target, out, sorted(come), made)


def _made(src: Spec, dst: Spec, added: tuple[str, ...]) -> Made:
    """How an exchange makes elements of what comes.

    It divides by addends of averages, and by ranks that each get a share of one; where such
    shares become shards, or shards averages' addends, it multiplies.
    """
    p, q, turned = src.partition, dst.partition, turned_axes(src, dst)
    kinds = {axis: p.unreduced[axis] for axis in added}
    op = next((kind for kind in kinds.values() if kind != "avg"), "sum")
    less = tuple(axis for axis, kind in kinds.items() if kind == "avg")
    shares = tuple(a for a, kind in q.reduced_kinds if kind == "avg" and a not in p.reduced)
    more = tuple(a for a in turned if "avg" in (p.reduced.get(a), q.unreduced.get(a)))
    factor = src.mesh.axis_size(more)
    divisor = src.mesh.axis_size(less) * dst.mesh.axis_size(shares)
    common = math.gcd(factor, divisor)
    rest = next((q.unreduced[axis] for axis in turned if axis in q.unreduced), "")
    return Made(op, factor // common, divisor // common, rest)


def _boxed(
    at: _Place,
    whole: Box,
    target: Box,
    out: list[tuple[int, Box]],
    come: list[Source],
    made: Made,
) -> Wire:
    """An all-to-all of boxes: of the box `whole` that a rank holds to the `target` it needs.

    Both lists are in the group's order, with what this rank keeps: that goes through the
    collective only where what comes is then the result as it lies.
    """
    here = at.group.index(at.rank)
    sources = [each._replace(box=relative(each.box, target)) for each in come]
    if not lands(lengths(target), sources):
        out = [each for each in out if each[0] != here]
        sources = [
            each._replace(own=relative(box, whole)) if place == here else each
            for each, (place, box, *_) in zip(sources, come, strict=True)
        ]
    send, receive = [0] * len(at.group), [0] * len(at.group)
    for place, box in out:
        send[place] += math.prod(lengths(box))
    for place, box, _, own in sources:
        receive[place] += math.prod(lengths(box)) if own is None else 0
    sent = sum(send) - send[here]
    pack = packer(lengths(whole), [relative(box, whole) for _, box in out])
    unpack = unpacker(lengths(target), sources, made)
    return Wire("all_to_all", at.name, at.axes, at.group, sent, pack, unpack,
                send=tuple(send), receive=tuple(receive))  # fmt: skip


def _box(spec: Spec, rank: int) -> Box:
    """What a rank holds, in global coordinates."""
    return tuple((each.start, each.stop) for each in spec.index(rank))


# -- permutations ---------------------------------------------------------------------


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
