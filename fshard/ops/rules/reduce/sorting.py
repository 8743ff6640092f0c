"""Rules of operations that order, search and count: sort, topk, searchsorted, isin, histc, one_hot.

What is ordered is needed whole, other dims pass. A search among cut boundaries counts those that
are below, part by part: an unreduced sum, since a part of what is sorted is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.ops.core.builders import MAX_BLOCKS, dim_factors, wrap_dim
from fshard.ops.core.call import Meta, OpCall, argument
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.index.gather import whole
from fshard.ops.rules.index.local_indices import as_first, factored
from fshard.ops.strategy.local_call import RankContext, with_argument

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


register_rule("sort", "argsort", "msort", family="sorting")(_sorted)
register_rule("topk", family="sorting")(_topk)


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


def _counts(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext) -> Any:
    """A search among the boundaries that a rank has; none are below where it has none."""
    name = "boundaries" if op._schema.name == "aten::bucketize" else "sorted_sequence"
    bounds = argument(op, args, kwargs, name)
    if bounds.shape[-1]:
        return op(*args, **kwargs)
    dtype = torch.int32 if argument(op, args, kwargs, "out_int32") else torch.int64
    return bounds.new_zeros(here.shape(), dtype=dtype)


def _searched(call: OpCall) -> Rule:
    """Values pass, and so do rows of boundaries; boundaries are counted."""
    bucket = call.op._schema.name == "aten::bucketize"
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


register_rule("searchsorted", "bucketize", family="sorting")(_searched)


def _isin(call: OpCall) -> Rule:
    """Elements pass; what they are looked for in is cut where any (or all) of the parts say it."""
    made = call.results[0]
    assert made is not None
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


register_rule("isin", family="sorting")(_isin)


# -- counts -----------------------------------------------------------------------------------


def _histc(call: OpCall) -> Rule:
    """Elements are counted, where the range does not depend on them."""
    x = call.operands[0]
    if call.get("min") == call.get("max"):
        return whole(call)
    dims = dim_factors(x.ndim)
    return Rule((dims,), (((),),), tuple((f, "sum") for (f,) in dims))


def _edges_once(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext) -> Any:
    """Counts of a rank's elements, with the edges of the bins on the first rank alone."""
    counts, edges = op(*args, **kwargs)
    return counts, as_first(edges, here, 0, range(len(here.operands[0].shape)))


def _histogram(call: OpCall) -> Rule:
    """Elements are counted, where neither the range nor a density depends on all of them."""
    x = call.operands[0]
    if call.get("density") or (call.has("range") and call.get("range") is None):
        return whole(call)
    dims = dim_factors(x.ndim)
    bins = call.operand_index("bins")
    operands = tuple(((),) if at == bins else dims for at in range(len(call.operands)))
    return Rule(operands, (((),), ((),)), tuple((f, "sum") for (f,) in dims), local=_edges_once)


register_rule("histc", family="sorting")(_histc)
register_rule("histogram", family="sorting")(_histogram)
register_rule("histogramdd", family="sorting")(whole)


# -- one_hot ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A rank's classes of a one-hot code, and one more, first, for those of other ranks."""

    classes: int

    def __call__(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> Any:
        last = len(here.shape()) - 1
        count, begin = here.shape()[last], here.result_offset(last)
        if count == self.classes:
            return op(*args, **kwargs)
        x = argument(op, args, kwargs, "self")
        there = x >= begin
        if begin + count < self.classes:
            there = there & (x < begin + count)
        moved = torch.where(there, x - (begin - 1), x.clamp(max=0))
        _, args, kwargs = with_argument(op, args, kwargs, "self", moved)
        _, args, kwargs = with_argument(op, args, kwargs, "num_classes", count + 1)
        return op(*args, **kwargs).narrow(-1, 1, count)


def _one_hot(call: OpCall) -> Rule:
    """All dims pass, and the classes of the code may be cut."""
    x = call.operands[0]
    dims = dim_factors(x.ndim)
    return Rule((dims,), ((*dims, ("c",)),), local=_Encoded(call.get("num_classes")))


register_rule("one_hot", family="sorting")(_one_hot)
