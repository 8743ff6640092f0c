"""Reference interpreter: steps as slices and concatenations of the tuple of all shards.

It has no threads and no transport, shares nothing with the interpreter that runs programs, and uses
neither cost, search nor transpose: tests compare everything else with it. Shards are in the order
of `mesh.ranks`.
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
    HaloExchange,
    HaloReduce,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    Remesh,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)

__all__ = ["check", "global_value", "pairing", "shards_of", "simulate", "simulate_step"]

Shards = tuple[torch.Tensor, ...]
ByRank = dict[int, torch.Tensor]

COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def check(prog: Program) -> None:
    """Type-check a program again; raise `ShardingError` if a step does not apply."""
    Program(prog.src, prog.steps, prog.dst)


# -- shards and global values ---------------------------------------------------------


def shards_of(global_tensor: torch.Tensor, spec: Spec) -> Shards:
    """Return the canonical shards of a global tensor: slices, and neutral elements if unreduced.

    An unreduced axis has the value on coordinate 0 and the reduction's neutral element elsewhere;
    for an average it has the value everywhere. An axis reduced by avg has the value over n.

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
    """Return the global tensor of shards, and assert that they fit and that replicas agree.

    Unreduced axes are reduced in the order of their names, which only matters if one tensor is
    unreduced by reductions that do not commute.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> spec = Spec(Mesh(x=2), P("x"), shape=(3,), sizes={0: (1, 2)}, dtype=torch.int64)
    >>> global_value((torch.tensor([3]), torch.tensor([4, 5])), spec)
    tensor([3, 4, 5])
    """
    shards_by_rank = _by_rank(shards, spec)
    for axis in _replicated(spec):
        for first, *rest in spec.mesh.groups(axis):
            for rank in rest:
                assert _same(shards_by_rank[first], shards_by_rank[rank]), (
                    f"ranks {first} and {rank} hold different replicas along {axis!r} of {spec}"
                )
    for axis, kind in spec.partition.unreduced_kinds:
        for group in spec.mesh.groups(axis):
            shards_by_rank |= dict.fromkeys(
                group, _reduce([shards_by_rank[rank] for rank in group], kind)
            )
    for dim, axes in enumerate(spec.partition.dims):
        for group in spec.mesh.groups(axes):
            parts = [shards_by_rank[rank] for rank in group]
            shards_by_rank |= dict.fromkeys(group, torch.cat(parts, dim) if axes else parts[0])
    return _times(shards_by_rank[spec.mesh.ranks[0]], _averaged(spec, spec.mesh.axes))


def pairing(x: Sequence[torch.Tensor], y: Sequence[torch.Tensor], spec: Spec) -> torch.Tensor:
    """Return `<x, y>` of shards of `spec` with shards of its dual, as a 0-dim tensor.

    The local products add up over the ranks; an invariant axis is one logical computation, so that
    only its coordinate 0 counts. For real tensors this is the inner product of the global values;
    no conjugate is taken.

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


# -- steps ----------------------------------------------------------------------------


def simulate(prog: Program, shards: Sequence[torch.Tensor]) -> Shards:
    """Return the shards of `prog.dst` that result from shards of `prog.src`.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2), P("x"), shape=(2,), dtype=torch.int64)
    >>> prog = Program(src, (AllGather("x", 0),))
    >>> simulate(prog, (torch.tensor([3]), torch.tensor([4])))
    (tensor([3, 4]), tensor([3, 4]))
    """
    spec, wire = prog.src, prog.forward_dtype
    shards = tuple(shards)
    _by_rank(shards, spec)
    if wire is not None:
        spec, shards = spec.replace(dtype=wire), tuple(shard.to(wire) for shard in shards)
    for step in prog.steps:
        if wire is None or not isinstance(step, Cast):
            shards, spec = simulate_step(step, spec, shards), infer(step, spec)
    return tuple(shard.to(prog.dst.dtype) for shard in shards)


def simulate_step(step: Step, spec: Spec, shards: Sequence[torch.Tensor]) -> Shards:
    """Return the shards of `infer(step, spec)` that one step makes from shards of `spec`.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> spec = Spec(Mesh(x=2), P(), shape=(2,), dtype=torch.int64)
    >>> simulate_step(AllSlice("x", 0), spec, (torch.tensor([3, 4]),) * 2)
    (tensor([3]), tensor([4]))
    """
    after = infer(step, spec)
    shards_by_rank = _by_rank(shards, spec)
    if isinstance(step, CollectivePermute):
        outputs = _permute(spec, after, shards_by_rank)
    elif isinstance(step, Exchange):
        outputs = _exchange(spec, after, shards_by_rank)
    elif isinstance(step, Remesh):
        outputs = shards_by_rank
    elif isinstance(step, HaloExchange | HaloReduce):
        outputs = _halo(step, spec, after, shards_by_rank)
    elif isinstance(step, AllToAll):
        outputs = _all_to_all(step, spec, shards_by_rank)
    elif isinstance(step, ShardedToUnreduced) and step.by:
        outputs = _substitute(step, spec, after, shards_by_rank)
    elif isinstance(step, Cast):
        outputs = {rank: _cast(shard, step.dtype) for rank, shard in shards_by_rank.items()}
    else:
        outputs = {}
        for group in spec.mesh.groups(step.axes):
            parts = [shards_by_rank[rank] for rank in group]
            shapes = [after.local_shape(rank) for rank in group]
            outputs |= zip(group, _in_group(step, spec, parts, shapes), strict=True)
    result = tuple(outputs[rank] for rank in after.mesh.ranks)
    _by_rank(result, after)
    return result


def _in_group(
    step: Step, spec: Spec, parts: list[torch.Tensor], shapes: list[tuple[int, ...]]
) -> Iterable[torch.Tensor]:
    """Return the outputs of one group, major to minor; `shapes` are those of the outputs."""
    assert not isinstance(step, AllToAll | CollectivePermute | Exchange | Remesh | Cast)
    assert not isinstance(step, HaloExchange | HaloReduce)
    n, unreduced = len(parts), dict(spec.partition.unreduced_kinds)
    scale = _averaged(spec, step.axes)
    match step:
        case AllGather(_, dim, to, kind):
            gathered = torch.cat(parts, dim)
            return [_share(gathered, n if (to, kind) == ("reduced", "avg") else 1)] * n
        case AllSlice(_, dim):
            return [_split(_times(part, scale), dim, shapes)[i] for i, part in enumerate(parts)]
        case AllReduce(axes, to, kind):
            total = _reduce(parts, unreduced[axes[0]])
            return [_share(total, n if (to, kind) == ("reduced", "avg") else 1)] * n
        case ReduceScatter(axes, dim):
            return _split(_reduce(parts, unreduced[axes[0]]), dim, shapes)
        case InvariantToReduced(_, kind):
            return [_share(part, n if kind == "avg" else 1) for part in parts]
        case ReducedToInvariant():
            return [_times(part, scale) for part in parts]
        case ReplicatedToUnreduced(_, kind):
            first, *rest = [_times(part, scale) for part in parts]
            return [first, *(part if kind == "avg" else _neutral(part, kind) for part in rest)]
        case ShardedToUnreduced(_, dim, kind):
            times = n if kind == "avg" else 1
            rows = [[_neutral(part, kind) for part in parts] for _ in parts]
            for i, row in enumerate(rows):
                row[i] = _times(parts[i], times)
            return [torch.cat(row, dim) for row in rows]
        case _:
            assert_never(step)


def _all_to_all(step: AllToAll, spec: Spec, shards_by_rank: ByRank) -> ByRank:
    """Gather the shards along the axes of all pairs, the last pair first, then slice them."""
    for gather in (AllGather(pair.axes, pair.src_dim) for pair in reversed(step.pairs)):
        shards_by_rank, spec = _apply_step(gather, spec, shards_by_rank), infer(gather, spec)
    for slice_ in (AllSlice(pair.axes, pair.dst_dim, pair.sizes) for pair in step.pairs):
        shards_by_rank, spec = _apply_step(slice_, spec, shards_by_rank), infer(slice_, spec)
    return shards_by_rank


def _apply_step(step: AllGather | AllSlice, spec: Spec, shards_by_rank: ByRank) -> ByRank:
    shards = simulate_step(step, spec, [shards_by_rank[rank] for rank in spec.mesh.ranks])
    return dict(zip(spec.mesh.ranks, shards, strict=True))


def _exchange(before: Spec, after: Spec, shards_by_rank: ByRank) -> ByRank:
    """Return every rank's slice of the global value, of all partial sums that do not stay so.

    If the reductions are averages and sums, the partial sums add up to their sum, divided by the
    number of those that are averaged. A value that becomes reduced by avg is divided too. If shards
    become unreduced, a rank has the elements of the shards at its own coordinate, and neutral
    elements elsewhere.
    """
    old, new = before.partition, after.partition
    stay = [axis for axis in old.unreduced if axis in new.unreduced]
    summed = {axis: kind for axis, kind in old.unreduced_kinds if axis not in stay}
    embedded = {axis: kind for axis, kind in new.unreduced_kinds if axis not in stay}
    lost = [axis for axis in old.reduced if axis not in new.reduced]
    kind = next((kind for kind in summed.values() if kind not in ("sum", "avg")), "sum")
    sizes = before.mesh.shape
    shares = math.prod(sizes[axis] for axis, by in summed.items() if by == "avg")
    shares *= math.prod(
        after.mesh.shape[axis]
        for axis, by in new.reduced_kinds
        if by == "avg" and axis not in old.reduced
    )
    times = before.mesh.axis_size([axis for axis, by in embedded.items() if by == "avg"])
    times *= _averaged(before, lost)
    partials: dict[tuple[int, int], torch.Tensor] = {}
    origin = torch.empty(before.shape, dtype=torch.int64)
    for rank, shard in shards_by_rank.items():
        origin[before.index(rank)] = before.mesh.index(rank, tuple(embedded))
        key = before.mesh.index(rank, stay), before.mesh.index(rank, tuple(summed))
        partial = partials.setdefault(key, shard.new_empty(before.shape))
        partial[before.index(rank)] = shard
    outputs = {}
    for rank in after.mesh.ranks:
        index, n = after.mesh.index(rank, stay), before.mesh.axis_size(tuple(summed))
        total = _reduce([partials[index, i][after.index(rank)] for i in range(n)], kind)
        outputs[rank] = _times(_share(total, shares), times).clone()
        if embedded:
            elsewhere = origin[after.index(rank)] != after.mesh.index(rank, tuple(embedded))
            neutral = _neutral(outputs[rank], next(iter(embedded.values())))
            outputs[rank] = torch.where(elsewhere, neutral, outputs[rank])
    return outputs


def _halo(
    step: HaloExchange | HaloReduce, before: Spec, after: Spec, shards_by_rank: ByRank
) -> ByRank:
    """Index the tensor of each group of owners by the windows, or add the windows to it."""
    owners = before if isinstance(step, HaloExchange) else after
    axes = tuple(axis for dim in owners.partition.dims for axis in dim)
    outputs = {}
    for group in owners.mesh.groups(axes):
        shape = [size + (step.boundary == "zeros") for size in owners.shape]  # one more element
        full = next(iter(shards_by_rank.values())).new_zeros(shape)
        positions = {}
        for rank in group:
            rows = []
            for dim, part in enumerate(owners.index(rank)):
                windows = step.windows[dim] if dim < len(step.windows) else None
                start, stop = part.start, part.stop
                if windows is not None:
                    start, stop = windows[owners.mesh.index(rank, owners.partition.dims[dim])]
                row, size = torch.arange(start, stop), owners.shape[dim]
                inside = (row >= 0) & (row < size)
                wrapped = row % max(size, 1)
                rows.append(wrapped if step.boundary == "circular" else row.where(inside, size))
            positions[rank] = torch.meshgrid(*rows, indexing="ij") if rows else ()
        if isinstance(step, HaloExchange):
            for rank in group:
                full[owners.index(rank)] = shards_by_rank[rank]
            outputs |= {rank: full[positions[rank]] for rank in group}
        else:
            for rank in group:
                full.index_put_(positions[rank], shards_by_rank[rank], accumulate=True)
            outputs |= {rank: full[owners.index(rank)].clone() for rank in group}
    return outputs


def _substitute(
    step: ShardedToUnreduced, before: Spec, after: Spec, shards_by_rank: ByRank
) -> ByRank:
    """Embed every rank's shard in a neutral global tensor, and slice that by the new layout."""
    n = before.mesh.axis_size(step.axes) if step.kind == "avg" else 1
    outputs = {}
    for rank, block in shards_by_rank.items():
        full = _neutral(block.new_empty(before.shape), step.kind)
        full[before.index(rank)] = _times(block, n * _averaged(before, step.by))
        outputs[rank] = full[after.index(rank)].clone()
    return outputs


def _permute(before: Spec, after: Spec, shards_by_rank: ByRank) -> ByRank:
    """Give every rank the shard it needs from a rank that holds it; each shard is sent once.

    A rank that holds the shard it needs keeps it; the others pair up in mesh order.
    """
    ranks = list(before.mesh.devices)
    stay = [axis for axis in before.mesh.axes if _role(before, axis) == _role(after, axis)]
    have = {rank: _chunk(before, rank, stay) for rank in ranks}
    need = {rank: _chunk(after, rank, stay) for rank in ranks}
    outputs = {rank: shards_by_rank[rank] for rank in ranks if have[rank] == need[rank]}
    spare = [rank for rank in ranks if rank not in outputs]
    for rank in ranks:
        if rank not in outputs:
            origin = next(holder for holder in spare if have[holder] == need[rank])
            spare.remove(origin)
            outputs[rank] = shards_by_rank[origin]
    return outputs


def _role(spec: Spec, axis: str) -> object:
    """Return the role of an axis: its stride in the shard index of each dim, and its states."""
    p = spec.partition
    if spec.mesh.shape[axis] == 1:
        return None
    first, second, *_ = spec.mesh.groups(axis)[0]
    strides = [spec.mesh.index(second, dim) - spec.mesh.index(first, dim) for dim in p.dims]
    return strides, p.unreduced.get(axis), p.reduced.get(axis)


def _chunk(spec: Spec, rank: int, stay: list[str]) -> object:
    """Identify the shard of a rank, its partial sum, and its index along the axes that stay."""
    moving = [pair for pair in spec.partition.unreduced_kinds if pair[0] not in stay]
    partials = {
        kind: spec.mesh.index(rank, [axis for axis, by in moving if by == kind])
        for _, kind in moving
    }
    shard = [spec.mesh.index(rank, axes) for axes in spec.partition.dims]
    return shard, partials, spec.mesh.index(rank, stay)


# -- parts ----------------------------------------------------------------------------


def _by_rank(shards: Sequence[torch.Tensor], spec: Spec) -> ByRank:
    """Return shards by rank, and assert that each has its spec's shape and dtype."""
    shards_by_rank = dict(zip(spec.mesh.ranks, shards, strict=True))
    for rank, shard in shards_by_rank.items():
        _assert_fits(shard, spec.local_shape(rank), spec.dtype, f"rank {rank} of {spec}")
    return shards_by_rank


def _assert_fits(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> None:
    assert (tuple(x.shape), x.dtype) == (shape, dtype), (
        f"{what} is {x.dtype} {tuple(x.shape)}, not {dtype} {shape}"
    )


def _replicated(spec: Spec) -> list[str]:
    """Return the axes along which all ranks hold the same values: invariant and reduced ones."""
    p = spec.partition
    varied = {axis for axes in p.dims for axis in axes} | set(p.unreduced)
    return [axis for axis in spec.mesh.axes if axis not in varied]


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.allclose(_wide(x), _wide(y), rtol=0, atol=0, equal_nan=True)


def _averaged(spec: Spec, axes: Iterable[str]) -> int:
    """Return the number of shares of an average along `axes` that add up to the value."""
    reduced = spec.partition.reduced
    return math.prod(spec.mesh.shape[axis] for axis in axes if reduced.get(axis) == "avg")


def _times(x: torch.Tensor, n: int) -> torch.Tensor:
    return x if n == 1 else (_wide(x) * n).to(x.dtype)  # a boolean times one would be an integer


def _share(x: torch.Tensor, n: int) -> torch.Tensor:
    return x if n == 1 else (_wide(x) / n).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return floats of 8 bits as float32, since few kernels support them."""
    return x.float() if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x.real.clone() if x.dtype.is_complex and not dtype.is_complex else x).to(dtype)


def _reduce(parts: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    total = functools.reduce(COMBINE[kind], map(_wide, parts))
    return (total / len(parts) if kind == "avg" else total).to(parts[0].dtype)


def _split(
    x: torch.Tensor, dim: int, shapes: Sequence[tuple[int, ...]]
) -> tuple[torch.Tensor, ...]:
    return torch.split(x, [shape[dim] for shape in shapes], dim)


def _neutral(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a tensor like `x`, filled with the neutral element of the reduction."""
    if kind in ("sum", "avg"):
        return torch.zeros_like(x)
    if kind == "product":
        return torch.ones_like(x)
    if x.dtype == torch.bool:
        return torch.full_like(x, kind == "min")
    if x.dtype.is_floating_point:
        limit = torch.full_like(_wide(x), -math.inf if kind == "max" else math.inf)
        return limit.to(x.dtype)  # the largest value of dtypes without infinity
    info = torch.iinfo(x.dtype)
    return torch.full_like(x, info.min if kind == "max" else info.max)
