"""Rules of operations that sort, search and count.

sort, argsort, msort, topk, searchsorted, bucketize, isin, histc, histogram. A sorted dim stays
unsharded. A search among sharded boundaries counts those below in each shard, an unreduced sum,
since a shard of a sorted tensor is sorted.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import MAX_BLOCKS, dim_factors, wrap_dim
from fshard.ops.core.call import Meta, OpCall, argument
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.index.gather import unsharded_rule
from fshard.ops.rules.index.local_indices import factors_with, zeros_after_first
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

# -- sorts ------------------------------------------------------------------------------------


def _sort(call: OpCall) -> Rule:
    """Rule `as->as,as` of sorts: the sorted dim `s` stays unsharded."""
    x = call.operands[0]
    dim = wrap_dim(call.get("dim"), x.ndim) if call.has("dim") else 0
    dims = tuple(factors_with(x.ndim, dim, "s"))
    return Rule((dims,), (dims,) * len(call.results), unsharded=frozenset({"s"} if x.ndim else ()))


def _topk(call: OpCall) -> Rule:
    """Rule `as->a1,a1` of `topk`: the searched dim `s` stays unsharded."""
    x = call.operands[0]
    dim = wrap_dim(call.get("dim"), x.ndim)
    dims = tuple(factors_with(x.ndim, dim, "s"))
    result = tuple(() if i == dim else f for i, f in enumerate(dims))
    return Rule((dims,), (result, result), unsharded=frozenset({"s"} if x.ndim else ()))


register_rule("sort", "argsort", "msort")(_sort)
register_rule("topk")(_topk)


@register_decomposition("topk")
def _topk_of_blocks(
    x: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002
) -> tuple[Tensor, Tensor]:
    """Return the largest among the largest of each block; blocks may be on different ranks."""
    block_dim = wrap_dim(dim, x.ndim)
    size = x.shape[block_dim] if x.ndim else 1
    blocks = math.gcd(size, MAX_BLOCKS)
    if not x.ndim or blocks < 2 or 2 * blocks * k > size:
        values, indices = torch.topk(x, k, dim, largest, sorted)
        return values, indices
    blocks_of_x = x.unflatten(block_dim, (blocks, size // blocks))
    values, indices = torch.topk(blocks_of_x, k, block_dim + 1, largest, False)
    starts = torch.arange(0, size, size // blocks, device=x.device)
    indices = indices + starts.reshape(
        [blocks if dim == block_dim else 1 for dim in range(blocks_of_x.ndim)]
    )
    values, chosen = torch.topk(values.flatten(block_dim, block_dim + 1), k, block_dim, largest,
                                sorted)  # fmt: skip
    return values, indices.flatten(block_dim, block_dim + 1).gather(block_dim, chosen)


# -- searches ---------------------------------------------------------------------------------


def _count_below(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Count the rank's boundaries below each value; zero for an empty shard."""
    name = "boundaries" if schema_of(op).name == "aten::bucketize" else "sorted_sequence"
    bounds = argument(op, args, kwargs, name)
    if bounds.shape[-1]:
        return op(*args, **kwargs)
    dtype = torch.int32 if argument(op, args, kwargs, "out_int32") else torch.int64
    return bounds.new_zeros(ctx.shape(), dtype=dtype)


def _search(call: OpCall) -> Rule:
    """Rule `m,ab->ab` of searches: counts of the boundaries `m` are summed."""
    bucket = schema_of(call.op).name == "aten::bucketize"
    bounds = call.operand_index("boundaries" if bucket else "sorted_sequence")
    values = call.operand_index("self")
    assert bounds is not None
    boundaries = call.operands[bounds]
    query = call.operands[values] if values is not None else Meta((), boundaries.dtype)
    query_dims = dim_factors(query.ndim)
    rows: Dims = () if boundaries.ndim == 1 else query_dims[:-1]
    dims: list[Dims] = [(*rows, ("m",)) for _ in call.operands]
    if values is not None:
        dims[values] = query_dims
    # With a sorter, a shard of the boundaries is not sorted.
    has_order = not bucket and call.operand_index("sorter") is not None
    return Rule(tuple(dims), (query_dims,), (("m", "sum"),), frozenset({"m"} if has_order else ()),
                local=_count_below)  # fmt: skip


register_rule("searchsorted", "bucketize")(_search)


def _isin(call: OpCall) -> Rule:
    """Rule `ab,t->ab` of `isin`: `t` is reduced by `max`, or inverted by `min`."""
    result = call.result
    dims = dim_factors(result.ndim, "e")
    operands: list[Dims] = []
    for name in ("elements", "test_elements"):
        place = call.operand_index(name) if call.has(name) else None
        if place is not None:
            operands.append(
                dims if name == "elements" else dim_factors(call.operands[place].ndim, "t")
            )
    test_factors = [f for operand in operands for (f,) in operand if f.startswith("t")]
    kind = "min" if call.get("invert") else "max"
    return Rule(tuple(operands), (dims,), tuple((f, kind) for f in test_factors))


register_rule("isin")(_isin)


# -- counts -----------------------------------------------------------------------------------


def _histc(call: OpCall) -> Rule:
    """Rule `a->1` of `histc`: elements are counted, if the range does not depend on them."""
    x = call.operands[0]
    if call.get("min") == call.get("max"):
        return unsharded_rule(call)
    dims = dim_factors(x.ndim)
    return Rule((dims,), (((),),), tuple((f, "sum") for (f,) in dims))


def _edges_once(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Count a rank's elements, with the edges of the bins on the first rank only."""
    counts, edges = op(*args, **kwargs)
    return counts, zeros_after_first(edges, ctx, 0, range(len(ctx.operands[0].shape)))


def _histogram(call: OpCall) -> Rule:
    """Rule of `histogram`: elements are counted, if range and density do not depend on them."""
    x = call.operands[0]
    if call.get("density") or (call.has("range") and call.get("range") is None):
        return unsharded_rule(call)
    dims = dim_factors(x.ndim)
    bins = call.operand_index("bins")
    operands = tuple(((),) if i == bins else dims for i in range(len(call.operands)))
    return Rule(operands, (((),), ((),)), tuple((f, "sum") for (f,) in dims), local=_edges_once)


register_rule("histc")(_histc)
register_rule("histogram")(_histogram)
register_rule("histogramdd")(unsharded_rule)


# -- one_hot ----------------------------------------------------------------------------------
