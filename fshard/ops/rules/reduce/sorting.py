"""Rules of operations that order, search and count: sort, topk, searchsorted, isin, histc, one_hot.

What is ordered is needed whole, other dims pass. A search among cut boundaries counts those that
are below, part by part: an unreduced sum, since a part of what is sorted is sorted.
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
from fshard.ops.rules.index.gather import whole
from fshard.ops.rules.index.local_indices import as_first, factored
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

__all__: list[str] = []


# -- in order ---------------------------------------------------------------------------------


def _sorted(call: OpCall) -> Rule:
    """Dims beside the one that is put in order pass."""
    x = call.operands[0]
    dim = wrap_dim(call.get("dim"), x.ndim) if call.has("dim") else 0
    dims = tuple(factored(x.ndim, dim, "s"))
    return Rule((dims,), (dims,) * len(call.results), unsharded=frozenset({"s"} if x.ndim else ()))


def _topk(call: OpCall) -> Rule:
    """Dims beside the one whose largest are taken pass."""
    x = call.operands[0]
    dim = wrap_dim(call.get("dim"), x.ndim)
    dims = tuple(factored(x.ndim, dim, "s"))
    made = tuple(() if at == dim else f for at, f in enumerate(dims))
    return Rule((dims,), (made, made), unsharded=frozenset({"s"} if x.ndim else ()))


register_rule("sort", "argsort", "msort")(_sorted)
register_rule("topk")(_topk)


@register_decomposition("topk")
def _topk_of_blocks(
    x: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002
) -> tuple[Tensor, Tensor]:
    """The largest of every block, and the largest of those: blocks may be on different ranks."""
    at = wrap_dim(dim, x.ndim)
    size = x.shape[at] if x.ndim else 1
    blocks = math.gcd(size, MAX_BLOCKS)
    if not x.ndim or 2 * blocks * k > size:
        values, indices = torch.topk(x, k, dim, largest, sorted)
        return values, indices
    apart = x.unflatten(at, (blocks, size // blocks))
    values, places = torch.topk(apart, k, at + 1, largest, False)
    begin = torch.arange(0, size, size // blocks, device=x.device)
    places = places + begin.reshape([blocks if dim == at else 1 for dim in range(apart.ndim)])
    values, found = torch.topk(values.flatten(at, at + 1), k, at, largest, sorted)
    return values, places.flatten(at, at + 1).gather(at, found)


# -- searches ---------------------------------------------------------------------------------


def _counts(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """A search among the boundaries that a rank has; none are below where it has none."""
    name = "boundaries" if schema_of(op).name == "aten::bucketize" else "sorted_sequence"
    bounds = argument(op, args, kwargs, name)
    if bounds.shape[-1]:
        return op(*args, **kwargs)
    dtype = torch.int32 if argument(op, args, kwargs, "out_int32") else torch.int64
    return bounds.new_zeros(ctx.shape(), dtype=dtype)


def _searched(call: OpCall) -> Rule:
    """Values pass, and so do rows of boundaries; boundaries are counted."""
    bucket = schema_of(call.op).name == "aten::bucketize"
    bounds = call.operand_index("boundaries" if bucket else "sorted_sequence")
    values = call.operand_index("self")
    assert bounds is not None
    edges = call.operands[bounds]
    asked = call.operands[values] if values is not None else Meta((), edges.dtype)
    read = dim_factors(asked.ndim)
    rows: Dims = () if edges.ndim == 1 else read[:-1]
    given: list[Dims] = [(*rows, ("m",)) for _ in call.operands]
    if values is not None:
        given[values] = read
    # Where boundaries are in the order of a sorter, no part of them is sorted.
    has_order = not bucket and call.operand_index("sorter") is not None
    return Rule(tuple(given), (read,), (("m", "sum"),), frozenset({"m"} if has_order else ()),
                local=_counts)  # fmt: skip


register_rule("searchsorted", "bucketize")(_searched)


def _isin(call: OpCall) -> Rule:
    """Elements pass; what they are looked for in is cut where any (or all) of the parts say it."""
    made = call.result
    read = dim_factors(made.ndim, "e")
    operands: list[Dims] = []
    for name in ("elements", "test_elements"):
        place = call.operand_index(name) if call.has(name) else None
        if place is not None:
            operands.append(
                read if name == "elements" else dim_factors(call.operands[place].ndim, "t")
            )
    looked = [f for dims in operands for (f,) in dims if f.startswith("t")]
    kind = "min" if call.get("invert") else "max"
    return Rule(tuple(operands), (read,), tuple((f, kind) for f in looked))


register_rule("isin")(_isin)


# -- counts -----------------------------------------------------------------------------------


def _histc(call: OpCall) -> Rule:
    """Elements are counted, where the range does not depend on them."""
    x = call.operands[0]
    if call.get("min") == call.get("max"):
        return whole(call)
    dims = dim_factors(x.ndim)
    return Rule((dims,), (((),),), tuple((f, "sum") for (f,) in dims))


def _edges_once(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Counts of a rank's elements, with the edges of the bins on the first rank alone."""
    counts, edges = op(*args, **kwargs)
    return counts, as_first(edges, ctx, 0, range(len(ctx.operands[0].shape)))


def _histogram(call: OpCall) -> Rule:
    """Elements are counted, where neither the range nor a density depends on all of them."""
    x = call.operands[0]
    if call.get("density") or (call.has("range") and call.get("range") is None):
        return whole(call)
    dims = dim_factors(x.ndim)
    bins = call.operand_index("bins")
    operands = tuple(((),) if at == bins else dims for at in range(len(call.operands)))
    return Rule(operands, (((),), ((),)), tuple((f, "sum") for (f,) in dims), local=_edges_once)


register_rule("histc")(_histc)
register_rule("histogram")(_histogram)
register_rule("histogramdd")(whole)


# -- one_hot ----------------------------------------------------------------------------------
