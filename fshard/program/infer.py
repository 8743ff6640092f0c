"""`infer(step, spec) -> spec`: the typing rules of the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from fshard._util.errors import raise_if
from fshard.layout.partition_spec import Kinds, PartitionSpec, chunk_sizes
from fshard.layout.spec import Spec
from fshard.layout.validation import state_problems
from fshard.program.infer_exchange import exchanged, padded, refuse, remeshed
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
    "cut_sizes",
    "infer",
    "join_sizes",
    "permute_signature",
    "reduction_of",
    "replicated_kind",
    "unreduced_kind",
    "way_back",
]

DimSizes = tuple[int, ...] | None


def infer(step: Step, spec: Spec, /) -> Spec:
    """The spec that `step` makes of `spec`.

    Raises `ShardingError` where the step's rule does not hold for it.

    >>> from fshard.layout.mesh import Mesh
    >>> spec = Spec(Mesh(x=2), PartitionSpec("x"), shape=(4,))
    >>> infer(AllGather("x", 0, to="reduced"), spec)
    f32[4]{reduced: x}
    """
    if isinstance(step, AllToAll):
        _check_moves(step, spec)
    elif not isinstance(step, Cast | CollectivePermute | Exchange | Remesh):
        spec.mesh.check_axes(step.axes, f"{step} on {spec}")
    match step:
        case AllGather() | AllReduce() if step.to not in ("invariant", "reduced"):
            refuse(step, spec, f"to must be 'invariant' or 'reduced', not {step.to!r}", "leave it out")
        case AllGather():
            joined = _take(step, spec, step.dim)
            return _state(step, joined, "reduced" if step.to == "reduced" else "", step.kind)
        case AllSlice():
            replicated_kind(step, spec, step.axes)
            return _put(step, _drop_states(spec, step.axes), step.dim, step.sizes)
        case AllReduce():
            unreduced_kind(step, spec, step.axes)
            rest = _drop_states(spec, step.axes)
            return _state(step, rest, "reduced" if step.to == "reduced" else "", step.kind)
        case ReduceScatter():
            unreduced_kind(step, spec, step.axes)
            return _put(step, _drop_states(spec, step.axes), step.dim, step.sizes)
        case AllToAll():
            taken = spec
            for pair in reversed(step.pairs):
                taken = _take(pair, taken, pair.src_dim)
            for pair in step.pairs:
                taken = _put(pair, taken, pair.dst_dim, pair.sizes)
            return taken
        case CollectivePermute():
            return _permuted(step, spec)
        case Exchange():
            return exchanged(step, spec)
        case Remesh():
            return remeshed(step, spec)
        case InvariantToReduced():
            if replicated_kind(step, spec, step.axes) is not None:
                refuse(step, spec, "the axes must be invariant", "name axes that are not reduced")
            return _state(step, spec, "reduced", step.kind)
        case ReducedToInvariant():
            if replicated_kind(step, spec, step.axes) is None:
                refuse(step, spec, "the axes must be reduced", "invariant axes need no step")
            return _drop_states(spec, step.axes)
        case ReplicatedToUnreduced():
            replicated_kind(step, spec, step.axes)
            return _state(step, _drop_states(spec, step.axes), "unreduced", step.kind)
        case ShardedToUnreduced() if step.by:
            return _stand_in(step, spec)
        case ShardedToUnreduced():
            return _state(step, _take(step, spec, step.dim), "unreduced", step.kind)
        case Cast():
            p = spec.partition
            raise_if(
                f"{step} on {spec}", state_problems(p.unreduced_kinds, p.reduced_kinds, step.dtype)
            )
            return spec._with(dtype=step.dtype)
        case _:
            assert_never(step)


def unreduced_kind(step: Step, spec: Spec, axes: tuple[str, ...]) -> str:
    """The one reduction by which `spec` is unreduced on all of `axes`."""
    kinds = dict(spec.partition.unreduced_kinds)
    found = {kinds.get(axis) for axis in axes}
    if len(found) != 1 or None in found:
        refuse(
            step,
            spec,
            f"the spec must be unreduced by one reduction on all of {axes}",
            "name axes that are unreduced, each reduction in its own step",
        )
    return kinds[axes[0]]


def reduction_of(step: AllReduce | ReduceScatter, src: Spec) -> tuple[str, int]:
    """By what the ranks' addends are reduced, and what is divided by after that.

    An average whose shares are kept is a sum, so that it is divided, and rounded, once.
    """
    op, n = unreduced_kind(step, src, step.axes), src.mesh.axis_size(step.axes)
    if isinstance(step, ReduceScatter) or (step.to, step.kind) != ("reduced", "avg"):
        return op, 1
    return ("sum", n * n) if op == "avg" else (op, n)


def replicated_kind(step: Step, spec: Spec, axes: tuple[str, ...]) -> str | None:
    """None where `axes` are all invariant, else the kind (sum, avg) they are all reduced by."""
    p = spec.partition
    busy = {axis for dim in p.dims for axis in dim} | set(dict(p.unreduced_kinds))
    kinds = dict(p.reduced_kinds)
    found = {kinds.get(axis) for axis in axes}
    if len(found) != 1 or not busy.isdisjoint(axes):
        refuse(
            step,
            spec,
            f"the axes {axes} must be all invariant, or all reduced",
            "name axes that shard nothing, invariant and reduced ones in steps of their own",
        )
    return found.pop()


def join_sizes(sizes: DimSizes, n: int) -> DimSizes:
    """Shard sizes of a dim after each `n` neighbours have become one."""
    if sizes is None:
        return None
    joined = tuple(sum(sizes[at : at + n]) for at in range(0, len(sizes), n))
    return None if len(set(joined)) == 1 else joined


def cut_sizes(size: int, shards: int, sizes: DimSizes, n: int, chunk: bool) -> DimSizes | str:
    """Shard sizes of a dim after each shard is cut in `n`: equally, or as `torch.chunk` does.

    A text says why equal shares do not exist.
    """
    if sizes is None:
        if size % (shards * n) == 0:
            return None
        sizes = (size // shards,) * shards
    if all(each % n == 0 for each in sizes):
        return tuple(each // n for each in sizes for _ in range(n))
    if chunk:
        return tuple(part for each in sizes for part in chunk_sizes(each, (n,)))
    odd = next(each for each in sizes if each % n)
    return f"each shard size must be divisible by {n}: {odd} % {n} = {odd % n}"


def way_back(step: AllToAll, spec: Spec) -> AllToAll:
    """The all-to-all that undoes one of `spec`: the same axes in the same order, dims swapped."""
    moves = []
    for pair in reversed(step.pairs):
        dims = pair.dst_dim, pair.src_dim
        moves.append(AllToAll(pair.axes, *dims, spec.sizes[pair.src_dim]))
        spec = _take(pair, spec, pair.src_dim)
    first, *rest = moves[::-1]
    return replace(first, also=tuple(rest))


def _check_moves(step: AllToAll, spec: Spec) -> None:
    axes = tuple(axis for pair in step.pairs for axis in pair.axes)
    spec.mesh.check_axes(axes, f"{step} on {spec}")
    if all(pair.src_dim == pair.dst_dim for pair in step.pairs):
        refuse(step, spec, "the two dims must differ", "collective_permute reorders one dim")


def _check_dim(step: Step, spec: Spec, dim: int) -> None:
    if not 0 <= dim < spec.ndim:
        refuse(
            step,
            spec,
            f"dim {dim} must be one of the spec's {spec.ndim}",
            f"a dim in 0..{spec.ndim - 1}" if spec.ndim else "a 0-dim tensor has none to shard",
        )


def _take(step: Step, spec: Spec, dim: int) -> Spec:
    """`spec` without the step's axes, which are the most minor ones of `dim`."""
    assert not isinstance(step, Cast | CollectivePermute | Exchange | Remesh)
    _check_dim(step, spec, dim)
    axes, mine = step.axes, spec.partition.dims[dim]
    if not axes or mine[-len(axes) :] != axes:
        refuse(
            step,
            spec,
            f"the axes must be the most minor of dim {dim}, which has {mine}",
            f"end with {mine[-1:]}" if mine else "name a dim that is sharded over them",
        )
    return _with_dim(
        spec, dim, mine[: -len(axes)], join_sizes(spec.sizes[dim], spec.mesh.axis_size(axes))
    )


def _put(step: Step, spec: Spec, dim: int, sizes: DimSizes) -> Spec:
    """`spec` with the step's axes at the minor end of `dim`."""
    assert not isinstance(step, Cast | CollectivePermute | Exchange | Remesh)
    _check_dim(step, spec, dim)
    shards, n = spec.dim_shards(dim), spec.mesh.axis_size(step.axes)
    if sizes is not None:
        whole = spec.shard_sizes(dim)
        cut = [sum(sizes[at * n : (at + 1) * n]) for at in range(shards)]
        if len(sizes) != shards * n or tuple(cut) != whole or min(sizes) < 0:
            refuse(
                step,
                spec,
                f"the {shards * n} sizes {sizes} cut shards of {whole}, not {cut}",
                f"sizes whose groups of {n} sum to {whole}",
            )
        new: DimSizes | str = None if len(set(sizes)) == 1 else sizes
    else:
        new = cut_sizes(spec.shape[dim], shards, spec.sizes[dim], n, chunk=False)
    if isinstance(new, str):
        refuse(step, spec, new, "give sizes=, one per shard of the result")
    return _with_dim(spec, dim, (*spec.partition.dims[dim], *step.axes), new)


def _with_dim(spec: Spec, dim: int, axes: tuple[str, ...], sizes: DimSizes) -> Spec:
    p = spec.partition
    dims = (*p.dims[:dim], axes, *p.dims[dim + 1 :])
    return spec._with(
        partition=PartitionSpec._of(dims, p.unreduced_kinds, p.reduced_kinds),
        sizes=(*spec.sizes[:dim], sizes, *spec.sizes[dim + 1 :]),
    )


def _drop_states(spec: Spec, axes: tuple[str, ...]) -> Spec:
    """`spec` with `axes` neither unreduced nor reduced."""
    p = spec.partition

    def keep(kinds: Kinds) -> Kinds:
        return tuple(each for each in kinds if each[0] not in axes)

    return spec._with(
        partition=PartitionSpec._of(p.dims, keep(p.unreduced_kinds), keep(p.reduced_kinds))
    )


def _state(step: Step, spec: Spec, word: str, kind: str) -> Spec:
    """`spec` with the step's axes put into a state; the empty word is invariant."""
    assert not isinstance(step, Cast | CollectivePermute | Exchange | Remesh)
    if not word:
        return spec
    p = spec.partition
    more = tuple((axis, kind) for axis in step.axes)
    unreduced = p.unreduced_kinds + more if word == "unreduced" else p.unreduced_kinds
    reduced = p.reduced_kinds + more if word == "reduced" else p.reduced_kinds
    # Through the constructor: it knows the reductions and what the dtype allows.
    checked = PartitionSpec(*p.partitions, unreduced=dict(unreduced), reduced=dict(reduced))
    raise_if(f"{step} on {spec}", state_problems(unreduced, reduced, spec.dtype))
    return spec._with(partition=checked)


def _stand_in(step: ShardedToUnreduced, spec: Spec) -> Spec:
    """`spec` with reduced axes in the place of those that become unreduced."""
    spec.mesh.check_axes((*step.axes, *step.by), f"{step} on {spec}")
    _check_dim(step, spec, step.dim)
    mine, n = spec.partition.dims[step.dim], len(step.axes)
    at = next((at for at in range(len(mine)) if mine[at : at + n] == step.axes), None)
    if at is None:
        refuse(
            step,
            spec,
            f"the axes must be consecutive in dim {step.dim}, which has {mine}",
            "name axes that shard the dim, major to minor",
        )
    if replicated_kind(step, spec, step.by) is None:
        refuse(step, spec, f"{step.by} are reduced", "invariant_to_reduced makes them so")
    if spec.mesh.axis_size(step.axes) != spec.mesh.axis_size(step.by):
        refuse(
            step,
            spec,
            f"{step.by} has as many ranks as {step.axes}: "
            f"{spec.mesh.axis_size(step.by)} is not {spec.mesh.axis_size(step.axes)}",
            "name axes of the same sizes",
        )
    dims = (*mine[:at], *step.by, *mine[at + n :])
    moved = _with_dim(_drop_states(spec, step.by), step.dim, dims, spec.sizes[step.dim])
    return _state(step, moved, "unreduced", step.kind)


def permute_signature(
    size: Mapping[str, int], dims: Sequence[tuple[str, ...]], unreduced: Kinds, reduced: Kinds
) -> tuple[object, ...]:
    """What a permutation of devices keeps: shards per dim, addends and uses per reduction."""
    counts: dict[tuple[str, str], int] = {}
    for word, kinds in (("unreduced", unreduced), ("reduced", reduced)):
        for axis, kind in kinds:
            counts[word, kind] = counts.get((word, kind), 1) * size[axis]
    shards = tuple([math.prod([size[axis] for axis in axes]) for axes in dims])
    return shards, tuple(sorted([each for each in counts.items() if each[1] > 1]))


def _permuted(step: CollectivePermute, spec: Spec) -> Spec:
    spec.mesh.check_axes(step.partition.axes, f"{step} on {spec}")
    to, size = padded(step, spec, step.partition), spec.mesh.shape
    if permute_signature(size, *spec.partition._parts) != permute_signature(size, *to._parts):
        refuse(
            step,
            spec,
            "source and target must have the same number of shards on every dim, and of partial sums",
            "use all_to_all or all_gather where the local shape changes",
        )
    return spec._with(partition=to)
