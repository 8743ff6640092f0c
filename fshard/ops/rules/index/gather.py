"""Rules of operations that read by indices: gather, take_along_dim, index_select, take, x[indices].

An indexed dim may be sharded: every rank looks up the indices in its shard and returns zeros for
the others, an unreduced sum. After Megatron-LM's vocabulary-parallel embedding (arXiv
1909.08053), which does so for rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import align_factors, dim_factors, wrap_dim
from fshard.ops.core.call import Meta, OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.index.local_indices import (
    dim_shard,
    factors_with,
    from_start,
    locate,
    ravel_index,
    select_modes,
    unravel_index,
    zero_fill_kind,
)
from fshard.ops.rules.shard_call import call_with
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, with_argument


def unsharded_rule(call: OpCall) -> Rule:
    """Return a rule without factors: every operand stays unsharded."""
    operands: tuple[Dims, ...] = tuple(((),) * meta.ndim for meta in call.operands)
    return Rule(operands, tuple(None if m is None else ((),) * m.ndim for m in call.results))


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape to which tensors of these shapes broadcast."""
    return tuple(torch.broadcast_shapes(*map(tuple, shapes)))


@dataclass(frozen=True, slots=True)
class LocalLookup:
    """Local lookup in a tensor sharded along `dim`: zeros for indices outside the shard.

    `index` names the index argument; the result has `after` dims after those of the indices. With
    `negative` indices may count from the end.
    """

    dim: int
    index: str
    after: int = 0
    negative: bool = False

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Look up the indices in this rank's shard."""
        shard = dim_shard(ctx, 0, self.dim)
        if shard.is_unsharded:
            return op(*args, **kwargs)
        x, index = argument(op, args, kwargs, "self"), argument(op, args, kwargs, self.index)
        if shard.is_empty:
            return x.new_zeros(ctx.shape())
        local_index, inside = locate(from_start(index, shard.size) if self.negative else index,
                                     shard)  # fmt: skip
        out = call_with(op, args, kwargs, **{self.index: local_index})
        return out.masked_fill(~inside.reshape((*inside.shape, *(1,) * self.after)), 0)


# -- gather and index_select ------------------------------------------------------------------


def _gather(call: OpCall) -> Rule:
    """Rule `d0 v d2,d0 k d2->d0 k d2` of `gather` along dim 1: `v` is summed.

    Other dims may be sharded if both operands have the same size there.
    """
    x, index = call.operands
    dim = wrap_dim(call.get("dim"), x.ndim)
    if x.ndim != index.ndim or not x.ndim:
        return _selected(call)
    is_equal = [i == dim or x.shape[i] == index.shape[i] for i in range(x.ndim)]
    dims = tuple(
        f if ok else () for f, ok in zip(factors_with(x.ndim, dim, "v"), is_equal, strict=True)
    )
    index_dims = tuple(
        f if ok else () for f, ok in zip(factors_with(x.ndim, dim, "k"), is_equal, strict=True)
    )
    rule = Rule((dims, index_dims), (index_dims,), (("v", zero_fill_kind(x)),),
                modes=select_modes(0), local=LocalLookup(dim, "index"))  # fmt: skip
    # A sparse gradient can be neither sharded nor summed.
    return replace(rule, no_grad=frozenset(rule.factors)) if call.get("sparse_grad") else rule


def _selected(call: OpCall) -> Rule:
    """Return the rule of a selection that cannot be sharded: unreduced operands of every kind."""
    return replace(unsharded_rule(call), modes=select_modes(0))


def _take_along_dim(call: OpCall) -> Rule:
    """Rule of `take_along_dim`: as `gather`, with dims that broadcast; without a dim, as `take`."""
    if call.get("dim") is None:
        return _take(call)
    x, index = call.operands
    result = call.result
    dim = wrap_dim(call.get("dim"), result.ndim)
    sizes = [1 if i == dim else size for i, size in enumerate(result.shape)]
    result_dims = factors_with(result.ndim, dim, "")
    dims, read_dims = (
        [f if meta.shape[i] == sizes[i] else () for i, f in enumerate(result_dims)]
        for meta in (x, index)
    )
    dims[dim], read_dims[dim], result_dims[dim] = ("v",), ("k",), ("k",)
    return Rule((tuple(dims), tuple(read_dims)), (tuple(result_dims),), (("v", zero_fill_kind(x)),),
                modes=select_modes(0),
                local=LocalLookup(dim, "indices", negative=True))  # fmt: skip


def _index_select(call: OpCall) -> Rule:
    """Rule `d0 v d2,k->d0 k d2` of `index_select` along dim 1: `v` is summed."""
    x, index = call.operands
    if not x.ndim:
        return _selected(call)
    dim = wrap_dim(call.get("dim"), x.ndim)
    result_dims = factors_with(x.ndim, dim, "k")
    result_dims[dim] = ("k",) if index.ndim else ()
    dims: Dims = tuple(factors_with(x.ndim, dim, "v"))
    return Rule((dims, (("k",),) if index.ndim else ()), (tuple(result_dims),),
                (("v", zero_fill_kind(x)),), modes=select_modes(0),
                local=LocalLookup(dim, "index", x.ndim - dim - 1))  # fmt: skip


# -- take: indices into the flattened tensor --------------------------------------------------


def _taken(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Look up flat indices in a tensor sharded along any of its dims."""
    name = "index" if schema_of(op).name == "aten::take" else "indices"
    x, index = argument(op, args, kwargs, "self"), argument(op, args, kwargs, name)
    shape = ctx.operands[0].shape
    shards = [dim_shard(ctx, 0, dim) for dim in range(len(shape))]
    if all(shard.is_unsharded for shard in shards):
        return op(*args, **kwargs)
    if any(shard.is_empty for shard in shards):
        return x.new_zeros(ctx.shape())
    if name == "index":
        index = from_start(index, math.prod(shape))
    local_index, inside = zip(*map(locate, unravel_index(index, shape), shards), strict=True)
    _, new_args, new_kwargs = with_argument(op, args, kwargs, name,
                                            ravel_index(local_index, x.shape))  # fmt: skip
    inside_all = functools.reduce(torch.logical_and, inside)
    return op(*new_args, **new_kwargs).masked_fill(~inside_all.reshape(ctx.shape()), 0)


def _take(call: OpCall) -> Rule:
    """Rule `v0 v1,k0->k0` of `take`: the dims of the tensor are summed."""
    x, index = call.operands
    dims, read_dims = dim_factors(x.ndim, "v"), dim_factors(index.ndim, "k")
    is_flat = schema_of(call.op).name == "aten::take_along_dim"
    result_dims: Dims = (tuple(f for (f,) in read_dims),) if is_flat else read_dims
    kind = zero_fill_kind(x)
    return Rule((dims, read_dims), (result_dims,), tuple((f, kind) for (f,) in dims),
                modes=select_modes(0), local=_taken)  # fmt: skip


# -- advanced indexing ------------------------------------------------------------------------


def index_dims(ndim: int, indices: Sequence[Meta | None]) -> tuple[Dims, Dims, list[Dims], int]:
    """Return factors of an indexed tensor, of the result and of each index; and the dims after.

    Factors are `v` for indexed dims, `b` for dims of the indices, and `d` for others.
    """
    dims = [(f"v{i}",) if i < len(indices) and indices[i] is not None else (f"d{i}",)
             for i in range(ndim)]  # fmt: skip
    indexed = [i for i, index in enumerate(indices) if index is not None]
    shape = broadcast_shape([index.shape for index in indices if index is not None])
    read_dims = dim_factors(len(shape), "b")
    per_index = [
        align_factors(index.shape, shape, read_dims) for index in indices if index is not None
    ]
    together = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    before = indexed[0] if together else 0
    others = [f for i, f in enumerate(dims) if i not in indexed]
    result = (*others[:before], *read_dims, *others[before:])
    return tuple(dims), result, per_index, len(others) - before


def _indexed(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Look up advanced indices in a tensor sharded along indexed dims."""
    x, indices = argument(op, args, kwargs, "self"), list(argument(op, args, kwargs, "indices"))
    sharded = [
        dim
        for dim, index in enumerate(indices)
        if index is not None and not ctx.is_unsharded(0, dim)
    ]
    shards = {dim: dim_shard(ctx, 0, dim) for dim in sharded}
    if all(shard.is_unsharded for shard in shards.values()):
        return op(*args, **kwargs)
    if any(shard.is_empty for shard in shards.values()):
        return x.new_zeros(ctx.shape())
    inside_all: Any = True
    for dim, shard in shards.items():
        indices[dim], inside = locate(from_start(indices[dim], shard.size), shard)
        inside_all = inside & inside_all
    after = index_dims(x.ndim, indices)[-1]
    out = call_with(op, args, kwargs, indices=indices)
    return out.masked_fill(~inside_all.reshape((*inside_all.shape, *(1,) * after)), 0)


def _index(call: OpCall) -> Rule:
    """Rule `d0 v1 d2,b0->d0 b0 d2` of `x[:, index]`: indexed dims are summed."""
    x, indices = call.operands[0], call.get("indices")
    if any(meta is not None and meta.dtype in (torch.bool, torch.uint8) for meta in indices):
        return _selected(call)
    dims, result, per_index, _ = index_dims(x.ndim, indices)
    kind = zero_fill_kind(x)
    indexed = [f for (f,) in dims if f.startswith("v")]
    return Rule((dims, *per_index), (result,), tuple((f, kind) for f in indexed),
                modes=select_modes(0), local=_indexed)  # fmt: skip


register_rule("gather")(_gather)
register_rule("take_along_dim")(_take_along_dim)
register_rule("index_select")(_index_select)
register_rule("take")(_take)
register_rule("index.Tensor", "_unsafe_index.Tensor")(_index)
register_rule("nonzero_static")(unsharded_rule)
