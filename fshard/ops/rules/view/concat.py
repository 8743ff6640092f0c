"""Rules of operations that join tensors, or broadcast them to each other.

cat, stack, hstack, vstack, dstack, column_stack, pad_sequence, block_diag, cartesian_prod,
combinations, meshgrid, broadcast_tensors. The dim along which tensors are joined stays
unsharded: a tensor does not end where a shard ends. But where few elements are put before or after
one long tensor, as a class token before a sequence, its first and last shard are extended by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard.layout.partition_spec import REDUCTIONS
from fshard.ops.core.builders import align_factors, all_modes, wrap_dim
from fshard.ops.core.call import OpCall, base_name
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule, Slice
from fshard.ops.rules.view.view_factors import factor_names, letter_dims
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

DimMap = Sequence[int]
"""The result's dim of each dim of an operand."""


def join_rule(call: OpCall, dim_maps: Sequence[DimMap], along: int | None) -> Rule:
    """Return the rule of operands whose dims are dims of one result, all but `along`.

    `dim_maps` lists the result's dim of each dim of each operand.
    """
    result = call.result
    factors = letter_dims(result.ndim)
    # A dim of size 1 may be added to operands with fewer dims, for which it is unsharded.
    shardable = [
        any(dim in dim_map for dim_map in dim_maps)
        and (size != 1 or all(dim in dim_map for dim_map in dim_maps))
        and (dim != along or len(dim_maps) == 1)
        for dim, size in enumerate(result.shape)
    ]
    result_dims: Dims = tuple(
        dim_map if ok else () for dim_map, ok in zip(factors, shardable, strict=True)
    )
    operands = tuple(tuple(result_dims[dim] for dim in dim_map) for dim_map in dim_maps)
    return Rule(operands, (result_dims,), modes=all_modes(*range(len(call.operands))))


LONG = 8
"""Times by which a tensor is longer than all others together that extend its shards."""


@dataclass(frozen=True, slots=True)
class _LocalExtension:
    """Local concatenation of a shard of the operand `long`, and of the others where it ends.

    The first rank has all operands before it, the last one all after it, other ranks none of them.
    """

    dim: int
    long: int

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
        """Run the operation on one rank."""
        begin, count = ctx.result_offset(self.dim), ctx.shape()[self.dim]
        ends = begin == 0 and count > 0, begin + count == self._length(ctx) and count > 0
        sides = [ends[i > self.long] if i != self.long else True for i in range(len(args[0]))]
        # A slice without elements, since gradients of an operand are summed over all ranks.
        pieces = [
            x if is_read else x.narrow(self.dim, 0, 0)
            for x, is_read in zip(args[0], sides, strict=True)
        ]
        return torch.cat(pieces, self.dim)

    def _length(self, ctx: RankContext) -> int:
        return sum(spec.shape[self.dim] for spec in ctx.operands)


def _long_operand(call: OpCall, dim: int) -> int | None:
    """Return the index of the operand that is much longer than all others, None without one."""
    lengths = [meta.shape[dim] if meta.ndim == call.result.ndim else 0 for meta in call.operands]
    longest = max(lengths)
    is_long = longest >= LONG * (sum(lengths) - longest) > 0
    is_plain = all(meta.ndim == call.result.ndim for meta in call.operands)
    return lengths.index(longest) if is_long and is_plain else None


@register_rule("cat.default", "concat.default", "concatenate.default", "prims::cat")
def cat(call: OpCall) -> Rule:
    """Rule `a1,a1->a1` of `cat` along dim 1; an empty operand may have one dim alone.

    The rule is `a1,ab->ac` if the second operand is much longer, `c` being `b` and elements before.
    """
    result = call.result
    dim = wrap_dim(call.get("dim"), result.ndim)
    dim_maps = [range(meta.ndim) if meta.ndim == result.ndim else [dim] for meta in call.operands]
    rule, long = join_rule(call, dim_maps, dim), _long_operand(call, dim)
    if long is None:
        return rule
    names = factor_names(result.ndim + 1)
    lengths = [meta.shape[dim] for meta in call.operands]
    piece = Slice(names[-1], names[dim], -sum(lengths[:long]), sum(lengths[long:]))
    operands = tuple(
        (*x[:dim], (piece.of,), *x[dim + 1 :]) if i == long else x
        for i, x in enumerate(rule.operands)
    )
    result_dims = letter_dims(result.ndim)
    result_dims = (*result_dims[:dim], (piece.name,), *result_dims[dim + 1 :])
    local = _LocalExtension(dim, long)
    return replace(rule, operands=operands, results=(result_dims,), local=local, slices=(piece,))


@register_rule("stack", "_stack")
def stack(call: OpCall) -> Rule:
    """Rule `ac,ac->a1c` of `stack`: all dims but the new one may be sharded."""
    result = call.result
    dim = wrap_dim(call.get("dim"), result.ndim)
    dim_maps = [[i for i in range(result.ndim) if i != dim]] * len(call.operands)
    return join_rule(call, dim_maps, dim)


def _hstack(ndim: int) -> tuple[DimMap, int]:
    return range(ndim), 0 if ndim <= 1 else 1


def _vstack(ndim: int) -> tuple[DimMap, int]:
    return ([1] if ndim == 1 else range(ndim)), 0


def _dstack(ndim: int) -> tuple[DimMap, int]:
    return ([1] if ndim == 1 else range(ndim)), 2


def _column_stack(ndim: int) -> tuple[DimMap, int]:
    return range(ndim), 1


_STACKS = {
    "hstack": _hstack, "vstack": _vstack, "row_stack": _vstack, "dstack": _dstack,
    "column_stack": _column_stack,
}  # fmt: skip


@register_rule(*_STACKS)
def stack_rule(call: OpCall) -> Rule:
    """Rule of `hstack` and the like, which add dims to tensors of few dims."""
    dim_map_of = _STACKS[base_name(call.op)]
    maps = [dim_map_of(meta.ndim) for meta in call.operands]
    return join_rule(call, [meta for meta, _ in maps], maps[0][1])


@register_rule("pad_sequence")
def pad_sequence(call: OpCall) -> Rule:
    """Rule of `pad_sequence`: the dims after the length may be sharded."""
    result = call.result
    dims = letter_dims(result.ndim - 2)
    modes = all_modes(*range(len(call.operands)))
    if call.get("padding_value"):
        modes = tuple(mode for mode in modes if mode.kind not in ("sum", "product"))
    return Rule((((), *dims),) * len(call.operands), (((), (), *dims),), modes=modes)


@register_rule("block_diag", "_chunk_cat", "flatten_dense_tensors")
def block_diag(call: OpCall) -> Rule:
    """Rule of operations that place tensors beside and below each other: all unsharded."""
    operands = tuple(((),) * meta.ndim for meta in call.operands)
    results = tuple(((),) * meta.ndim for meta in call.results if meta is not None)
    return Rule(operands, results, modes=all_modes(*range(len(operands))))


@register_rule("cartesian_prod")
def cartesian_prod(call: OpCall) -> Rule:
    """Rule of `cartesian_prod`: rows are a product of all operands, the first one major."""
    names = factor_names(len(call.operands))
    operands: tuple[Dims, ...] = tuple(((name,),) for name in names)
    rows: Dims = (names, ()) if len(names) > 1 else (names,)
    return Rule(operands, (rows,), modes=all_modes(*range(len(names))))


@register_rule("combinations")
def combinations(call: OpCall) -> Rule:
    """Rule of `combinations`: unsharded."""
    return Rule(((("a",),),), (((), ()),), unsharded=frozenset("a"), modes=all_modes(0))


# -- several results, each of one operand -------------------------------------------------


def _each_alone(count: int) -> tuple[Mode, ...]:
    """Return modes of operands that make one result each: all together, or one alone."""
    single = () if count == 1 else tuple(
        Mode((i,), kind, tuple(kind if j == i else None for j in range(count)))
        for i in range(count) for kind in REDUCTIONS
    )  # fmt: skip
    return all_modes(*range(count), results=count) + single


@register_rule("meshgrid")
def meshgrid(call: OpCall) -> Rule:
    """Rule `a,b->ab,ab` of `meshgrid`; indexing "xy" swaps the first two dims."""
    count = len(call.operands)
    factors = letter_dims(count)
    result_dims = factors
    if call.has("indexing") and call.get("indexing") == "xy" and count > 1:
        result_dims = (factors[1], factors[0], *factors[2:])
    operands = tuple(factors[i : i + 1] * meta.ndim for i, meta in enumerate(call.operands))
    result_dims = tuple(dim if any(dim in meta for meta in operands) else () for dim in result_dims)
    return Rule(operands, (result_dims,) * count, modes=_each_alone(count))


def _local_broadcast(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> list[Any]:
    """Expand each tensor to its local result shape."""
    return [x.expand(ctx.shape(i)) for i, x in enumerate(args[0])]


@register_rule("broadcast_tensors")
def broadcast_tensors(call: OpCall) -> Rule:
    """Rule of `broadcast_tensors`: an operand has the dims along which it is not repeated."""
    result = call.result
    dims = letter_dims(result.ndim)
    operands = tuple(align_factors(meta.shape, result.shape, dims) for meta in call.operands)
    count = len(operands)
    return Rule(operands, (dims,) * count, modes=_each_alone(count), local=_local_broadcast)
