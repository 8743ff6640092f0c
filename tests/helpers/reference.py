"""The reference interpreter: steps as slices and concatenations of the tuple of all shards.

No threads, no transport, nothing shared with the interpreter that runs programs, and no use
of cost, search or transpose: it is the oracle that the tests hold everything else against.
Shards are always in the order of `mesh.ranks`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

import torch

from fshard.layout.spec import Spec
from fshard.program.infer import infer
from fshard.program.program import Program
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

__all__ = ["global_value", "pairing", "shards_of", "simulate", "simulate_step"]

Shards = tuple[torch.Tensor, ...]
ByRank = dict[int, torch.Tensor]

COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


# -- what shards mean -----------------------------------------------------------------


def shards_of(global_tensor: torch.Tensor, spec: Spec) -> Shards:
    """The canonical shards of a global tensor: its slices, neutral elements beside addends.

    An unreduced axis has the value on coordinate 0 and the reduction's neutral element
    elsewhere (an average has the value everywhere); one reduced by avg has the value over n.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> spec = Spec(Mesh(x=2), P(unreduced={"x"}), shape=(2,), dtype=torch.int64)
    >>> shards_of(torch.tensor([3, 4]), spec)
    (tensor([3, 4]), tensor([0, 0]))
    """
    _assert_fits(global_tensor, spec.shape, spec.dtype, "the global tensor")
    shards = []
    for rank in spec.mesh.ranks:
        shard = global_tensor[spec.index(rank)].clone()
        for axis, kind in spec.partition.unreduced_kinds:
            if kind != "avg" and spec.mesh.coords(rank)[axis] > 0:
                shard = _neutral(shard, kind)
        shards.append(_share(shard, _averaged(spec, spec.mesh.axes)))
    return tuple(shards)


def global_value(shards: Sequence[torch.Tensor], spec: Spec) -> torch.Tensor:
    """The global tensor that shards mean; asserts that they fit and that replicas agree.

    Unreduced axes are reduced in the order of their names, which only matters where one
    tensor is unreduced by reductions that do not commute.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> spec = Spec(Mesh(x=2), P("x"), shape=(3,), sizes={0: (1, 2)}, dtype=torch.int64)
    >>> global_value((torch.tensor([3]), torch.tensor([4, 5])), spec)
    tensor([3, 4, 5])
    """
    held = _by_rank(shards, spec)
    for axis in _replicated(spec):
        for first, *others in spec.mesh.groups(axis):
            for rank in others:
                assert _same(held[first], held[rank]), (
                    f"ranks {first} and {rank} hold different replicas along {axis!r} of {spec}"
                )
    for axis, kind in spec.partition.unreduced_kinds:
        for group in spec.mesh.groups(axis):
            held |= dict.fromkeys(group, _reduce([held[rank] for rank in group], kind))
    for dim, axes in enumerate(spec.partition.dims):
        for group in spec.mesh.groups(axes):
            held |= dict.fromkeys(group, torch.cat([held[rank] for rank in group], dim) if axes
                                  else held[group[0]])  # fmt: skip
    return _times(held[spec.mesh.ranks[0]], _averaged(spec, spec.mesh.axes))


def pairing(x: Sequence[torch.Tensor], y: Sequence[torch.Tensor], spec: Spec) -> torch.Tensor:
    """`<x, y>` of shards of `spec` with shards of its dual: a 0-dim tensor.

    The local products add up over the ranks; an invariant axis is one logical computation,
    so that only its coordinate 0 counts. For real tensors it is the inner product of the
    global values; no conjugate is taken.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> spec = Spec(Mesh(x=2), P(unreduced={"x"}), shape=(), dtype=torch.int64)
    >>> pairing(tuple(torch.tensor([3, 4])), tuple(torch.tensor([5, 5])), spec)
    tensor(35)
    """
    left, right = _by_rank(x, spec), _by_rank(y, spec.dual)
    invariant = [axis for axis in spec.mesh.axes if axis not in spec.partition.axes]
    total = torch.zeros((), dtype=spec.dtype)
    for rank in spec.mesh.ranks:
        if spec.mesh.index(rank, invariant) == 0:
            total = total + (left[rank] * right[rank]).sum(dtype=spec.dtype)
    return total


# -- what steps do --------------------------------------------------------------------


def simulate(prog: Program, shards: Sequence[torch.Tensor]) -> Shards:
    """The shards of `prog.dst` that a program makes of shards of `prog.src`.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2), P("x"), shape=(2,), dtype=torch.int64)
    >>> prog = Program(src, (AllGather("x", 0),))
    >>> simulate(prog, (torch.tensor([3]), torch.tensor([4])))
    (tensor([3, 4]), tensor([3, 4]))
    """
    spec, wire = prog.src, prog.forward_dtype
    now = tuple(shards)
    _by_rank(now, spec)
    if wire is not None:
        spec, now = spec.replace(dtype=wire), tuple(shard.to(wire) for shard in now)
    for step in prog.steps:
        if wire is None or not isinstance(step, Cast):
            now, spec = simulate_step(step, spec, now), infer(step, spec)
    return tuple(shard.to(prog.dst.dtype) for shard in now)


def simulate_step(step: Step, spec: Spec, shards: Sequence[torch.Tensor]) -> Shards:
    """The shards of `infer(step, spec)` that one step makes of shards of `spec`.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> spec = Spec(Mesh(x=2), P(), shape=(2,), dtype=torch.int64)
    >>> simulate_step(AllSlice("x", 0), spec, (torch.tensor([3, 4]),) * 2)
    (tensor([3]), tensor([4]))
    """
    after = infer(step, spec)
    held = _by_rank(shards, spec)
    if isinstance(step, CollectivePermute):
        made = _permute(spec, after, held)
    elif isinstance(step, Exchange):
        made = _exchange(spec, after, held)
    elif isinstance(step, Remesh):
        made = held
    elif isinstance(step, AllToAll):
        made = _all_to_all(step, spec, held)
    elif isinstance(step, ShardedToUnreduced) and step.by:
        made = _substitute(step, spec, after, held)
    elif isinstance(step, Cast):
        made = {rank: _cast(shard, step.dtype) for rank, shard in held.items()}
    else:
        made = {}
        for group in spec.mesh.groups(step.axes):
            parts = [held[rank] for rank in group]
            shapes = [after.local_shape(rank) for rank in group]
            made |= zip(group, _in_group(step, spec, parts, shapes), strict=True)
    result = tuple(made[rank] for rank in after.mesh.ranks)
    _by_rank(result, after)
    return result


def _in_group(
    step: Step, spec: Spec, parts: list[torch.Tensor], shapes: list[tuple[int, ...]]
) -> Iterable[torch.Tensor]:
    """What the ranks of one group hold after a step, major to minor; `shapes` are the results'."""
    assert not isinstance(step, AllToAll | CollectivePermute | Exchange | Remesh | Cast)
    n, unreduced = len(parts), dict(spec.partition.unreduced_kinds)
    scale = _averaged(spec, step.axes)
    match step:
        case AllGather(_, dim, to, kind):
            whole = torch.cat(parts, dim)
            return [_share(whole, n if (to, kind) == ("reduced", "avg") else 1)] * n
        case AllSlice(_, dim):
            return [
                _cut(_times(part, scale), dim, shapes)[place] for place, part in enumerate(parts)
            ]
        case AllReduce(axes, to, kind):
            total = _reduce(parts, unreduced[axes[0]])
            return [_share(total, n if (to, kind) == ("reduced", "avg") else 1)] * n
        case ReduceScatter(axes, dim):
            return _cut(_reduce(parts, unreduced[axes[0]]), dim, shapes)
        case InvariantToReduced(_, kind):
            return [_share(part, n if kind == "avg" else 1) for part in parts]
        case ReducedToInvariant():
            return [_times(part, scale) for part in parts]
        case ReplicatedToUnreduced(_, kind):
            first, *others = [_times(part, scale) for part in parts]
            return [first, *(part if kind == "avg" else _neutral(part, kind) for part in others)]
        case ShardedToUnreduced(_, dim, kind):
            times = n if kind == "avg" else 1
            rows = [[_neutral(part, kind) for part in parts] for _ in parts]
            for place, row in enumerate(rows):
                row[place] = _times(parts[place], times)
            return [torch.cat(row, dim) for row in rows]
        case _:
            assert_never(step)


def _all_to_all(step: AllToAll, spec: Spec, held: ByRank) -> ByRank:
    """First the shards become whole along the pairs' axes, the last pair's first, then cut."""
    for gather in (AllGather(pair.axes, pair.src_dim) for pair in reversed(step.pairs)):
        held, spec = _one(gather, spec, held), infer(gather, spec)
    for cut in (AllSlice(pair.axes, pair.dst_dim, pair.sizes) for pair in step.pairs):
        held, spec = _one(cut, spec, held), infer(cut, spec)
    return held


def _one(step: AllGather | AllSlice, spec: Spec, held: ByRank) -> ByRank:
    shards = simulate_step(step, spec, [held[rank] for rank in spec.mesh.ranks])
    return dict(zip(spec.mesh.ranks, shards, strict=True))


def _exchange(before: Spec, after: Spec, held: ByRank) -> ByRank:
    """Every rank's slice of the global value, of all addends that do not stay addends.

    Where the reductions are averages and sums, what all addends make is their sum, over the
    number of those that are averaged. What becomes reduced by avg is a share of it. Where shards
    become addends, a rank has the elements of the shards at its place among neutral elements.
    """
    old, new = before.partition, after.partition
    stay = [axis for axis in old.unreduced if axis in new.unreduced]
    gone = {axis: kind for axis, kind in old.unreduced_kinds if axis not in stay}
    made_of = {axis: kind for axis, kind in new.unreduced_kinds if axis not in stay}
    lost = [axis for axis in old.reduced if axis not in new.reduced]
    kind = next((kind for kind in gone.values() if kind not in ("sum", "avg")), "sum")
    sizes = before.mesh.shape
    shares = math.prod(sizes[axis] for axis, each in gone.items() if each == "avg")
    shares *= math.prod(
        after.mesh.shape[axis]
        for axis, each in new.reduced_kinds
        if each == "avg" and axis not in old.reduced
    )
    times = before.mesh.axis_size([axis for axis, each in made_of.items() if each == "avg"])
    times *= _averaged(before, lost)
    wholes: dict[tuple[int, int], torch.Tensor] = {}
    origin = torch.empty(before.shape, dtype=torch.int64)
    for rank, shard in held.items():
        origin[before.index(rank)] = before.mesh.index(rank, tuple(made_of))
        place = before.mesh.index(rank, stay), before.mesh.index(rank, tuple(gone))
        whole = wholes.setdefault(place, shard.new_empty(before.shape))
        whole[before.index(rank)] = shard
    made = {}
    for rank in after.mesh.ranks:
        here, n = after.mesh.index(rank, stay), before.mesh.axis_size(tuple(gone))
        total = _reduce([wholes[here, each][after.index(rank)] for each in range(n)], kind)
        made[rank] = _times(_share(total, shares), times).clone()
        if made_of:
            away = origin[after.index(rank)] != after.mesh.index(rank, tuple(made_of))
            neutral = _neutral(made[rank], next(iter(made_of.values())))
            made[rank] = torch.where(away, neutral, made[rank])
    return made


def _substitute(step: ShardedToUnreduced, before: Spec, after: Spec, held: ByRank) -> ByRank:
    """Every rank's block in an else neutral global tensor, of which it keeps its new part."""
    n = before.mesh.axis_size(step.axes) if step.kind == "avg" else 1
    made = {}
    for rank, block in held.items():
        whole = _neutral(block.new_empty(before.shape), step.kind)
        whole[before.index(rank)] = _times(block, n * _averaged(before, step.by))
        made[rank] = whole[after.index(rank)].clone()
    return made


def _permute(before: Spec, after: Spec, held: ByRank) -> ByRank:
    """Every rank receives the chunk it needs from a rank that holds it, each sent once.

    A rank that holds what it needs keeps it; the others pair up in rank-position order.
    """
    ranks = list(before.mesh.devices)
    stay = [axis for axis in before.mesh.axes if _role(before, axis) == _role(after, axis)]
    have = {rank: _chunk(before, rank, stay) for rank in ranks}
    need = {rank: _chunk(after, rank, stay) for rank in ranks}
    made = {rank: held[rank] for rank in ranks if have[rank] == need[rank]}
    spare = [rank for rank in ranks if rank not in made]
    for rank in ranks:
        if rank not in made:
            origin = next(each for each in spare if have[each] == need[rank])
            spare.remove(origin)
            made[rank] = held[origin]
    return made


def _role(spec: Spec, axis: str) -> object:
    """What a step along an axis changes: the shard's index in each dim, or its state's part."""
    p = spec.partition
    if spec.mesh.shape[axis] == 1:
        return None
    first, second, *_ = spec.mesh.groups(axis)[0]
    strides = [spec.mesh.index(second, dim) - spec.mesh.index(first, dim) for dim in p.dims]
    return strides, p.unreduced.get(axis), p.reduced.get(axis)


def _chunk(spec: Spec, rank: int, stay: list[str]) -> object:
    """The shard of the global tensor, and of it the addend among those that move.

    Along axes that stay, a rank exchanges nothing with the others: its place there is part of
    what it holds.
    """
    moving = [each for each in spec.partition.unreduced_kinds if each[0] not in stay]
    addends = {
        kind: spec.mesh.index(rank, [axis for axis, each in moving if each == kind])
        for _, kind in moving
    }
    shard = [spec.mesh.index(rank, axes) for axes in spec.partition.dims]
    return shard, addends, spec.mesh.index(rank, stay)


# -- parts ----------------------------------------------------------------------------


def _by_rank(shards: Sequence[torch.Tensor], spec: Spec) -> ByRank:
    """Shards by rank, after asserting that each has its spec's shape and dtype."""
    held = dict(zip(spec.mesh.ranks, shards, strict=True))
    for rank, shard in held.items():
        _assert_fits(shard, spec.local_shape(rank), spec.dtype, f"rank {rank} of {spec}")
    return held


def _assert_fits(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> None:
    assert (tuple(x.shape), x.dtype) == (shape, dtype), (
        f"{what} is {x.dtype} {tuple(x.shape)}, not {dtype} {shape}"
    )


def _replicated(spec: Spec) -> list[str]:
    """The axes along which all ranks hold the same: invariant and reduced ones."""
    p = spec.partition
    varied = {axis for axes in p.dims for axis in axes} | set(p.unreduced)
    return [axis for axis in spec.mesh.axes if axis not in varied]


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.allclose(_wide(x), _wide(y), rtol=0, atol=0, equal_nan=True)


def _averaged(spec: Spec, axes: Iterable[str]) -> int:
    """How many shares of an average make the value, along `axes`."""
    reduced = spec.partition.reduced
    return math.prod(spec.mesh.shape[axis] for axis in axes if reduced.get(axis) == "avg")


def _times(x: torch.Tensor, n: int) -> torch.Tensor:
    return x if n == 1 else (_wide(x) * n).to(x.dtype)  # a boolean times one would be an integer


def _share(x: torch.Tensor, n: int) -> torch.Tensor:
    return x if n == 1 else (_wide(x) / n).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """A tensor that every kernel takes: floats of 8 bits are moved, and not much else."""
    return x.float() if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x.real.clone() if x.dtype.is_complex and not dtype.is_complex else x).to(dtype)


def _reduce(parts: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    total = functools.reduce(COMBINE[kind], map(_wide, parts))
    return (total / len(parts) if kind == "avg" else total).to(parts[0].dtype)


def _cut(x: torch.Tensor, dim: int, shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    return torch.split(x, [shape[dim] for shape in shapes], dim)


def _neutral(x: torch.Tensor, kind: str) -> torch.Tensor:
    """A tensor like `x` of the number that the reduction ignores."""
    if kind in ("sum", "avg"):
        return torch.zeros_like(x)
    if kind == "product":
        return torch.ones_like(x)
    if x.dtype == torch.bool:
        return torch.full_like(x, kind == "min")
    if x.dtype.is_floating_point:
        limit = torch.full_like(_wide(x), -math.inf if kind == "max" else math.inf)
        return limit.to(x.dtype)  # the largest there is, where there is no infinity
    info = torch.iinfo(x.dtype)
    return torch.full_like(x, info.min if kind == "max" else info.max)
