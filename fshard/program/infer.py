"""Typing rules of the steps: `infer(step, spec)` returns the spec that a step results in."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from fshard._util.errors import raise_if
from fshard.layout.partition_spec import Kinds, PartitionSpec, chunk_sizes, remove_kinds
from fshard.layout.spec import Spec
from fshard.layout.validation import state_problems
from fshard.program.halo_boxes import infer_halo
from fshard.program.infer_exchange import infer_exchange, infer_remesh, pad_partition, refuse
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

Axes = tuple[str, ...]
DimSizes = tuple[int, ...] | None
NO_AXES = (Cast, CollectivePermute, Exchange, HaloExchange, HaloReduce, Remesh)
"""Steps that do not name the axes that change."""


def infer(step: Step, spec: Spec, /) -> Spec:
    """Return the spec that `step` results in, applied to `spec`; raise if it does not apply.

    >>> from fshard.layout.mesh import Mesh
    >>> spec = Spec(Mesh(x=2), PartitionSpec("x"), shape=(4,))
    >>> infer(AllGather("x", 0, to="reduced"), spec)
    f32[4]{reduced: x}
    """
    if isinstance(step, AllToAll):
        _check_all_to_all(step, spec)
    elif not isinstance(step, NO_AXES):
        spec.mesh.check_axes(step.axes, f"{step} on {spec}")
    match step:
        case AllGather() | AllReduce() if step.to not in ("invariant", "reduced"):
            refuse(step, spec, f"to must be invariant or reduced, not {step.to!r}", "leave it out")
        case AllGather():
            gathered = _remove_axes(step, spec, step.dim)
            return _add_state(step, gathered, "reduced" if step.to == "reduced" else "", step.kind)
        case AllSlice():
            replicated_kind(step, spec, step.axes)
            return _append_axes(step, _drop_states(spec, step.axes), step.dim, step.sizes)
        case AllReduce():
            unreduced_kind(step, spec, step.axes)
            reduced = _drop_states(spec, step.axes)
            return _add_state(step, reduced, "reduced" if step.to == "reduced" else "", step.kind)
        case ReduceScatter():
            unreduced_kind(step, spec, step.axes)
            return _append_axes(step, _drop_states(spec, step.axes), step.dim, step.sizes)
        case AllToAll():
            for pair in reversed(step.pairs):
                spec = _remove_axes(pair, spec, pair.src_dim)
            for pair in step.pairs:
                spec = _append_axes(pair, spec, pair.dst_dim, pair.sizes)
            return spec
        case CollectivePermute():
            return _infer_permute(step, spec)
        case Exchange():
            return infer_exchange(step, spec)
        case HaloExchange() | HaloReduce():
            return infer_halo(step, spec)
        case Remesh():
            return infer_remesh(step, spec)
        case InvariantToReduced():
            if replicated_kind(step, spec, step.axes) is not None:
                refuse(step, spec, "the axes must be invariant", "name axes that are not reduced")
            return _add_state(step, spec, "reduced", step.kind)
        case ReducedToInvariant():
            if replicated_kind(step, spec, step.axes) is None:
                refuse(step, spec, "the axes must be reduced", "invariant axes need no step")
            return _drop_states(spec, step.axes)
        case ReplicatedToUnreduced():
            replicated_kind(step, spec, step.axes)
            return _add_state(step, _drop_states(spec, step.axes), "unreduced", step.kind)
        case ShardedToUnreduced() if step.by:
            return _replace_axes(step, spec)
        case ShardedToUnreduced():
            return _add_state(step, _remove_axes(step, spec, step.dim), "unreduced", step.kind)
        case Cast():
            p = spec.partition
            raise_if(
                f"{step} on {spec}", state_problems(p.unreduced_kinds, p.reduced_kinds, step.dtype)
            )
            return spec._with(dtype=step.dtype)
        case _:
            assert_never(step)


def unreduced_kind(step: Step, spec: Spec, axes: tuple[str, ...]) -> str:
    """Return the reduction by which `spec` is unreduced on all of `axes`; raise without one."""
    kinds = dict(spec.partition.unreduced_kinds)
    distinct = {kinds.get(axis) for axis in axes}
    if len(distinct) != 1 or None in distinct:
        rule = f"the spec must be unreduced by one reduction on all of {axes}"
        refuse(step, spec, rule, "name axes that are unreduced, each reduction in its own step")
    return kinds[axes[0]]


def reduction_of(step: AllReduce | ReduceScatter, src: Spec) -> tuple[str, int]:
    """Return the reduction of the ranks' partial sums, and the divisor of the result.

    An average whose shares are kept is a sum, so that it is divided, and rounded, only once.
    """
    op, n = unreduced_kind(step, src, step.axes), src.mesh.axis_size(step.axes)
    if isinstance(step, ReduceScatter) or (step.to, step.kind) != ("reduced", "avg"):
        return op, 1
    return ("sum", n * n) if op == "avg" else (op, n)


def replicated_kind(step: Step, spec: Spec, axes: tuple[str, ...]) -> str | None:
    """Return the kind (sum, avg) by which all of `axes` are reduced, None if all are invariant."""
    p = spec.partition
    varied = {axis for dim in p.dims for axis in dim} | set(dict(p.unreduced_kinds))
    kinds = dict(p.reduced_kinds)
    distinct = {kinds.get(axis) for axis in axes}
    if len(distinct) != 1 or not varied.isdisjoint(axes):
        rule = f"the axes {axes} must be all invariant, or all reduced"
        fix = "name axes that shard nothing, invariant and reduced ones in steps of their own"
        refuse(step, spec, rule, fix)
    return distinct.pop()


def join_sizes(sizes: DimSizes, n: int) -> DimSizes:
    """Return the shard sizes of a dim after merging each `n` neighbours, None if equal."""
    if sizes is None:
        return None
    if n * n > len(sizes):
        joined = tuple([sum(sizes[i : i + n]) for i in range(0, len(sizes), n)])
    else:  # few long columns
        joined = sizes[::n]
        for column in (sizes[i::n] for i in range(1, n)):
            joined = tuple(map(operator.add, joined, column))
    return None if len(set(joined)) == 1 else joined


def split_sizes(size: int, shards: int, sizes: DimSizes, n: int, chunk: bool) -> DimSizes | str:
    """Return the shard sizes of a dim after each shard is split in `n`, None if they are equal.

    With `chunk` shards are split as `torch.chunk` does; without, a text is returned that gives the
    rule for equal parts if a shard cannot be split equally.
    """
    distinct = [size // shards] if sizes is None else [*dict.fromkeys(sizes)]
    odd = None if chunk else next((shard for shard in distinct if shard % n), None)
    if odd is not None:
        return f"each shard size must be divisible by {n}: {odd} % {n} = {odd % n}"
    chunks = {shard: chunk_sizes(shard, (n,)) for shard in distinct}
    if len({*itertools.chain(*chunks.values())}) == 1:
        return None
    parts: list[int] = []
    for shard, run in itertools.groupby(sizes) if sizes else [(size // shards, range(shards))]:
        parts += chunks[shard] * len([*run])
    return tuple(parts)


def reverse_all_to_all(step: AllToAll, spec: Spec) -> AllToAll:
    """Return the inverse of an all-to-all on `spec`: axes in the same order, dims swapped."""
    moves = []
    for pair in reversed(step.pairs):
        dims = pair.dst_dim, pair.src_dim
        moves.append(AllToAll(pair.axes, *dims, spec.sizes[pair.src_dim]))
        spec = _remove_axes(pair, spec, pair.src_dim)
    first, *rest = moves[::-1]
    return replace(first, also=tuple(rest))


def _check_all_to_all(step: AllToAll, spec: Spec) -> None:
    axes = tuple(axis for pair in step.pairs for axis in pair.axes)
    spec.mesh.check_axes(axes, f"{step} on {spec}")
    if all(pair.src_dim == pair.dst_dim for pair in step.pairs):
        refuse(step, spec, "the two dims must differ", "collective_permute reorders one dim")


def _check_dim(step: Step, spec: Spec, dim: int) -> None:
    if not 0 <= dim < spec.ndim:
        rule = f"dim {dim} must be one of the spec's {spec.ndim}"
        fix = f"a dim in 0..{spec.ndim - 1}" if spec.ndim else "a 0-dim tensor has none to shard"
        refuse(step, spec, rule, fix)


def _remove_axes(step: Step, spec: Spec, dim: int) -> Spec:
    """Return `spec` without the step's axes, which must be the most minor ones of `dim`."""
    assert not isinstance(step, NO_AXES)
    _check_dim(step, spec, dim)
    axes, dim_axes = step.axes, spec.partition.dims[dim]
    if not axes or dim_axes[-len(axes) :] != axes:
        rule = f"the axes must be the most minor of dim {dim}, which has {dim_axes}"
        fix = f"end with {dim_axes[-1:]}" if dim_axes else "name a dim that is sharded over them"
        refuse(step, spec, rule, fix)
    sizes = join_sizes(spec.sizes[dim], spec.mesh.axis_size(axes))
    return _with_dim(spec, dim, dim_axes[: -len(axes)], sizes)


def _append_axes(step: Step, spec: Spec, dim: int, sizes: DimSizes) -> Spec:
    """Return `spec` with the step's axes at the minor end of `dim`."""
    assert not isinstance(step, NO_AXES)
    _check_dim(step, spec, dim)
    shards, n = spec.dim_shards(dim), spec.mesh.axis_size(step.axes)
    if sizes is not None:
        before = spec.shard_sizes(dim)
        sums = [sum(sizes[i * n : (i + 1) * n]) for i in range(shards)]
        if len(sizes) != shards * n or tuple(sums) != before or min(sizes) < 0:
            rule = f"the {shards * n} sizes {sizes} must split shards of {before}, not {sums}"
            refuse(step, spec, rule, f"sizes whose groups of {n} sum to {before}")
        split: DimSizes | str = None if len(set(sizes)) == 1 else sizes
    else:
        split = split_sizes(spec.shape[dim], shards, spec.sizes[dim], n, chunk=False)
    if isinstance(split, str):
        refuse(step, spec, split, "give sizes=, one per shard of the result")
    return _with_dim(spec, dim, (*spec.partition.dims[dim], *step.axes), split)


def _with_dim(spec: Spec, dim: int, axes: tuple[str, ...], sizes: DimSizes) -> Spec:
    p = spec.partition
    dims = (*p.dims[:dim], axes, *p.dims[dim + 1 :])
    return spec._with(
        partition=PartitionSpec._of(dims, p.unreduced_kinds, p.reduced_kinds),
        sizes=(*spec.sizes[:dim], sizes, *spec.sizes[dim + 1 :]),
    )


def _drop_states(spec: Spec, axes: tuple[str, ...]) -> Spec:
    """Return `spec` with `axes` neither unreduced nor reduced."""
    p = spec.partition

    kinds = remove_kinds(p.unreduced_kinds, axes), remove_kinds(p.reduced_kinds, axes)
    return spec._with(partition=PartitionSpec._of(p.dims, *kinds))


def _add_state(step: Step, spec: Spec, word: str, kind: str) -> Spec:
    """Return `spec` with the step's axes in a state; the empty word is invariant."""
    assert not isinstance(step, NO_AXES)
    if not word:
        return spec
    p = spec.partition
    more = tuple((axis, kind) for axis in step.axes)
    unreduced = p.unreduced_kinds + more if word == "unreduced" else p.unreduced_kinds
    reduced = p.reduced_kinds + more if word == "reduced" else p.reduced_kinds
    # The constructor checks the reductions.
    checked = PartitionSpec(*p.partitions, unreduced=dict(unreduced), reduced=dict(reduced))
    raise_if(f"{step} on {spec}", state_problems(unreduced, reduced, spec.dtype))
    return spec._with(partition=checked)


def _replace_axes(step: ShardedToUnreduced, spec: Spec) -> Spec:
    """Return `spec` with reduced axes in the place of axes that become unreduced."""
    spec.mesh.check_axes((*step.axes, *step.by), f"{step} on {spec}")
    _check_dim(step, spec, step.dim)
    dim_axes, n = spec.partition.dims[step.dim], len(step.axes)
    start = next((i for i in range(len(dim_axes)) if dim_axes[i : i + n] == step.axes), None)
    if start is None:
        rule = f"the axes must be consecutive in dim {step.dim}, which has {dim_axes}"
        refuse(step, spec, rule, "name axes that shard the dim, major to minor")
    if replicated_kind(step, spec, step.by) is None:
        refuse(step, spec, f"{step.by} must be reduced", "insert fs.InvariantToReduced before")
    if spec.mesh.axis_size(step.axes) != spec.mesh.axis_size(step.by):
        refuse(
            step,
            spec,
            f"{step.by} must have as many ranks as {step.axes}: "
            f"{spec.mesh.axis_size(step.by)} is not {spec.mesh.axis_size(step.axes)}",
            "name axes of the same sizes",
        )
    axes = (*dim_axes[:start], *step.by, *dim_axes[start + n :])
    replaced = _with_dim(_drop_states(spec, step.by), step.dim, axes, spec.sizes[step.dim])
    return _add_state(step, replaced, "unreduced", step.kind)


def permute_signature(
    axis_sizes: Mapping[str, int], dims: Sequence[Axes], unreduced: Kinds, reduced: Kinds
) -> tuple[object, ...]:
    """Return what a permutation of devices keeps: shards per dim, ranks per state and reduction."""
    counts: dict[tuple[str, str], int] = {}
    for word, kinds in (("unreduced", unreduced), ("reduced", reduced)):
        for axis, kind in kinds:
            counts[word, kind] = counts.get((word, kind), 1) * axis_sizes[axis]
    shards = tuple([math.prod([axis_sizes[axis] for axis in axes]) for axes in dims])
    return shards, tuple(sorted([item for item in counts.items() if item[1] > 1]))


def _infer_permute(step: CollectivePermute, spec: Spec) -> Spec:
    spec.mesh.check_axes(step.partition.axes, f"{step} on {spec}")
    to = pad_partition(step, spec, step.partition)
    before, after = (permute_signature(spec.mesh.shape, *p._parts) for p in (spec.partition, to))
    if before != after:
        rule = "source and target must have as many shards on every dim, and as many partial sums"
        refuse(step, spec, rule, "use all_to_all or all_gather where the local shape changes")
    return spec._with(partition=to)
