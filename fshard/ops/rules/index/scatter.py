"""Rules of operations that write by indices.

scatter, scatter_add, scatter_reduce, index_add, index_copy, index_fill, index_reduce, index_put,
put, masked_scatter.

An indexed dim may be sharded: every rank writes the indices in its shard, and the others into a
spare row that is dropped. If values are added, the indices may be sharded too: the tensor that
is added to counts on the first rank, zeros on the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard._torch.operators import schema_of
from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import align_factors, dim_factors, wrap_dim
from fshard.ops.core.call import OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.rules.index.gather import index_dims, unsharded_rule
from fshard.ops.rules.index.local_indices import (
    dim_shard,
    factors_with,
    from_start,
    locate,
    ravel_index,
    select_modes,
    spare_row_index,
    sum_modes,
    unravel_index,
    with_spare_row,
    without_spare_row,
    zeros_after_first,
)
from fshard.ops.rules.shard_call import call_with
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext


@dataclass(frozen=True, slots=True)
class LocalWrite:
    """Local write along `dim`, which may be sharded, at indices that may be sharded.

    `counting` is the dim of the index operand that may be sharded if values are added; the written
    tensor is then counted once. With `negative` indices may count from the end. `values` names the
    argument of a product, replaced by ones outside the shard so that neither products nor their
    gradients overflow there.
    """

    dim: int
    counting: int | None = None
    negative: bool = False
    values: str = ""

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Write the indices in this rank's shard."""
        x, index = argument(op, args, kwargs, "self"), argument(op, args, kwargs, "index")
        if self.counting is not None:
            x = zeros_after_first(x, ctx, 1, (self.counting,))
        shard = dim_shard(ctx, 0, self.dim)
        if not shard.is_unsharded:
            index = spare_row_index(from_start(index, shard.size) if self.negative else index,
                                    shard)  # fmt: skip
            x = with_spare_row(x, self.dim)
        changed = {"self": x, "index": index}
        if self.values and not shard.is_unsharded:
            source = argument(op, args, kwargs, self.values)
            ones_dims = (1,) * (source.ndim - self.dim - 1) if index.ndim < source.ndim else ()
            inside = index.reshape((*index.shape, *ones_dims)) != 0
            changed[self.values] = torch.where(inside, source, 1)
        out = call_with(op, args, kwargs, **changed)
        return out if shard.is_unsharded else without_spare_row(out, self.dim)


def _reductions(call: OpCall) -> tuple[str, str]:
    """Return the operation's reduction of values, and that of partial results, if any."""
    name = schema_of(call.op).name.removeprefix("aten::")
    if name in ("scatter_add", "index_add"):
        return "sum", "sum"
    if name in ("scatter_reduce", "index_reduce"):
        kind = call.get("reduce")
        parts = {"sum": "sum", "amax": "max", "amin": "min"}.get(kind, "")
        return kind, parts if call.get("include_self") else ""
    if name == "scatter" and call.has("reduce"):
        return call.get("reduce"), ""
    return "copy", ""


def _modes(call: OpCall, kind: str, values: int | None) -> tuple[Mode, ...]:
    """Return the modes of a write: sums are linear in both operands, copies select elements."""
    integer_mean = kind == "mean" and not is_inexact(call.results[0])
    if kind in ("sum", "mean") and values is not None and not integer_mean:
        return sum_modes(0, values)
    if kind in ("amax", "amin") and values is not None:
        extreme = kind.removeprefix("a")
        return (Mode((0, values), extreme, (extreme,)),)
    if kind == "copy" and values is not None:
        return (select_modes(0, values) + select_modes(0, constant=True)
                + select_modes(values, constant=True))  # fmt: skip
    return select_modes(0, constant=True) if kind == "copy" else ()


# -- scatter: an index for every element ------------------------------------------------------


def _scatter(call: OpCall) -> Rule:
    """Rule `d0 v d2,d0 k d2,d0 k d2->d0 v d2` of `scatter` along dim 1.

    A dim is sharded in all operands if it has one size in them. `v`, the written dim, may be
    sharded; `k`, the indices, only if values are combined, which gives a partial result.
    """
    x, index = call.operands[:2]
    values = call.operands[2] if len(call.operands) > 2 else None
    kind, parts = _reductions(call)
    modes = _modes(call, kind, 2 if values is not None else None)
    tensors = [x, index] + ([] if values is None else [values])
    if not x.ndim or any(meta.ndim != x.ndim for meta in tensors):
        return replace(unsharded_rule(call), modes=modes)
    dim = wrap_dim(call.get("dim"), x.ndim)

    def dims(factor: str) -> Dims:
        factors = factors_with(x.ndim, dim, factor)
        is_equal = [i == dim or all(x.shape[i] == meta.shape[i] for meta in tensors)
                    for i in range(x.ndim)]  # fmt: skip
        return tuple(f if ok else () for f, ok in zip(factors, is_equal, strict=True))

    is_full = values is None or values.shape[dim] == index.shape[dim]
    read_dims = (
        dims("k") if is_full else tuple(() if i == dim else f for i, f in enumerate(dims("k")))
    )
    operands = (dims("v"), read_dims) + (() if values is None else (read_dims,))
    local = LocalWrite(dim, values="src" if kind == "prod" and values is not None else "")
    return _written(operands, dims("v"), parts if is_full else "", modes, local, dim)


def _written(
    operands: tuple[Dims, ...], result: Dims, parts: str, modes: tuple[Mode, ...],
    local: LocalWrite, index_dim: int,
) -> Rule:  # fmt: skip
    """Return the rule of a write; `parts` reduces partial results over sharded indices."""
    # Extremes share their gradient among ties, which may be in several shards.
    grad = frozenset({"k"} if parts in ("max", "min") else ())
    if parts == "sum":
        local = replace(local, counting=index_dim)
    return Rule(operands, (result,), (("k", parts),) if parts else (), modes=modes, no_grad=grad,
                local=local)  # fmt: skip


# -- index_add and its like: an index for every slice -----------------------------------------


def _index_write(call: OpCall) -> Rule:
    """Rule `d0 v d2,k,d0 k d2->d0 v d2` of `index_add` and the like along dim 1.

    Every dim may be sharded; `k`, the indices, only if values are combined, a partial result.
    """
    x, index = call.operands[:2]
    kind, parts = _reductions(call)
    name = next((name for name in ("source", "value") if call.has(name)), None)
    values = None if name is None else call.operand_index(name)
    modes = _modes(call, kind, values)
    name = schema_of(call.op).name.removeprefix("aten::")
    if not x.ndim:
        return replace(unsharded_rule(call), modes=modes)
    dim = wrap_dim(call.get("dim"), x.ndim)
    dims = tuple(factors_with(x.ndim, dim, "v"))
    read_dims: Dims = (("k",),) * index.ndim
    operands: tuple[Dims, ...] = (dims, read_dims)
    if values is not None:
        source = call.operands[values]
        source_dims = (
            tuple(factors_with(x.ndim, dim, "k")) if source.ndim == x.ndim else ((),) * source.ndim
        )
        if not index.ndim:
            source_dims = tuple(() if i == dim else f for i, f in enumerate(source_dims))
        operands += (source_dims if name != "index_fill" else (),)
    if values is not None and name != "index_fill" and call.operands[values].ndim != x.ndim:
        return replace(unsharded_rule(call), modes=modes)
    local = LocalWrite(dim, negative=name == "index_fill",
                       values="source" if kind == "prod" else "")  # fmt: skip
    return _written(operands, dims, parts if index.ndim else "", modes, local, 0)


# -- index_put --------------------------------------------------------------------------------


def _local_index_put(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Write by advanced indices into a tensor sharded along indexed dims."""
    x, indices = argument(op, args, kwargs, "self"), list(argument(op, args, kwargs, "indices"))
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    if argument(op, args, kwargs, "accumulate"):
        for operand in range(1, len(indexed) + 1):
            x = zeros_after_first(x, ctx, operand, range(len(ctx.operands[operand].shape)))
    sharded = [dim for dim in indexed if not dim_shard(ctx, 0, dim).is_unsharded]
    for dim in sharded:
        shard = dim_shard(ctx, 0, dim)
        indices[dim] = spare_row_index(from_start(indices[dim], shard.size), shard)
        x = with_spare_row(x, dim)
    out = call_with(op, args, kwargs, self=x, indices=indices)
    for dim in sharded:
        out = without_spare_row(out, dim)
    return out


def _index_put(call: OpCall) -> Rule:
    """Rule `d0 v1 d2,b0,d0 b0 d2->d0 v1 d2` of `index_put` with one index, at dim 1.

    Every dim may be sharded; `b0`, of the indices, only if it accumulates, a partial sum.
    """
    x, indices, values = call.operands[0], call.get("indices"), call.operands[-1]
    sums = call.get("accumulate")
    modes = _modes(call, "sum" if sums else "copy", len(call.operands) - 1)
    metas = [meta for meta in indices if meta is not None]
    if not metas:
        return replace(unsharded_rule(call), modes=modes)
    if any(meta.dtype in (torch.bool, torch.uint8) for meta in metas):
        return _masked_put(call, modes)
    dims, result, per_index, _ = index_dims(x.ndim, indices)
    sizes = _sizes(result, (dims, x.shape),
                   *zip(per_index, (meta.shape for meta in metas), strict=True))  # fmt: skip
    read_dims = align_factors(values.shape, sizes, result)
    summed = {f for dims in per_index for dim in dims for f in dim}
    reductions = tuple((f, "sum") for f in sorted(summed)) if sums else ()
    return Rule((dims, *per_index, read_dims), (dims,), reductions, modes=modes,
                local=_local_index_put)  # fmt: skip


def _sizes(dims: Dims, *tensors: tuple[Dims, Sequence[int]]) -> tuple[int, ...]:
    """Return the shape of a tensor with these factors, from tensors that have them."""
    sizes = {
        dim: size
        for tensor_dims, shape in tensors
        for dim, size in zip(tensor_dims, shape, strict=True)
        if dim
    }
    return tuple(sizes.get(dim, 1) for dim in dims)


def _masked_put(call: OpCall, modes: tuple[Mode, ...]) -> Rule:
    """Rule `d0 d1,d0 d1,->d0 d1` of `index_put` with one mask.

    Dims of the mask may be sharded only if every element gets the same value.
    """
    x, indices, values = call.operands[0], call.get("indices"), call.operands[-1]
    dim = next(i for i, index in enumerate(indices) if index is not None)
    mask = indices[dim]
    if len(call.operands) != 3 or mask.dtype != torch.bool:
        return replace(unsharded_rule(call), modes=modes)
    dims = dim_factors(x.ndim)
    slot = x.ndim - dim - mask.ndim
    same = values.ndim <= slot or values.shape[-slot - 1] == 1
    if not same:
        dims = (*dims[:dim], *((),) * mask.ndim, *dims[dim + mask.ndim :])
    covered = dims[dim : dim + mask.ndim]
    result = (*dims[:dim], (), *dims[dim + mask.ndim :])
    read_dims = align_factors(values.shape, (*x.shape[:dim], -1, *x.shape[dim + mask.ndim :]),
                              result)  # fmt: skip
    return Rule((dims, covered, read_dims), (dims,), modes=modes)


# -- put: indices into the flattened tensor ---------------------------------------------------


def _local_put(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Write by flat indices into a tensor sharded along any of its dims."""
    x, index = argument(op, args, kwargs, "self"), argument(op, args, kwargs, "index")
    shape = ctx.operands[0].shape
    if argument(op, args, kwargs, "accumulate"):
        x = zeros_after_first(x, ctx, 1, range(len(ctx.operands[1].shape)))
    parts = [dim_shard(ctx, 0, dim) for dim in range(len(shape))]
    if not all(shard.is_unsharded for shard in parts):
        per_dim = unravel_index(from_start(index, math.prod(shape)), shape)
        local_index, inside = zip(*map(locate, per_dim, parts), strict=True)
        inside_all = functools.reduce(torch.logical_and, inside)
        outside = local_index[0].clamp(max=0) * (x.numel() + 2)
        index = torch.where(inside_all, ravel_index(local_index, x.shape) + 1, outside)
        flat = with_spare_row(x.reshape(-1), 0)
        out = call_with(op, args, kwargs, self=flat, index=index)
        return without_spare_row(out, 0).reshape(x.shape)
    return call_with(op, args, kwargs, self=x)


def _put(call: OpCall) -> Rule:
    """Rule `v0 v1,k0,k0->v0 v1` of `put`.

    Every dim may be sharded; `k0`, of the index, only if it accumulates, a partial sum.
    """
    x, index, source = call.operands
    sums = call.get("accumulate")
    dims, read_dims = dim_factors(x.ndim, "v"), dim_factors(index.ndim, "k")
    modes = _modes(call, "sum" if sums else "copy", 2)
    if index.shape != source.shape:
        return replace(unsharded_rule(call), modes=modes)
    reductions = tuple((f, "sum") for (f,) in read_dims) if sums else ()
    return Rule((dims, read_dims, read_dims), (dims,), reductions, modes=modes, local=_local_put)


# -- masks -----------------------------------------------------------------------------------


def _masked_scatter(call: OpCall) -> Rule:
    """Rule of `masked_scatter`, whose source elements depend on all of the mask: unsharded."""
    return replace(unsharded_rule(call), modes=select_modes(0, 2) + select_modes(0, constant=True)
                   + select_modes(2, constant=True))  # fmt: skip


register_rule("masked_scatter")(_masked_scatter)
register_rule("scatter", "scatter_add", "scatter_reduce")(_scatter)
register_rule("index_add", "index_copy", "index_fill", "index_reduce")(_index_write)
register_rule("index_put", "_unsafe_index_put", "_index_put_impl")(_index_put)
register_rule("put")(_put)
