"""Rules and decompositions of vector norms, matrix norms and distances of two tensors.

norm, linalg.norm, linalg.vector_norm, linalg.matrix_norm, frobenius_norm, nuclear_norm, dist,
pairwise_distance. Partial norms of order 0 and 1 add up, and of infinite order are extremes;
over sharded dims other orders are decomposed into sums of powers and a root.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.ops.core.builders import align_factors, dim_factors, normalize_dims
from fshard.ops.core.call import OpCall, base_name
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.reduce.moments import wide
from fshard.ops.rules.reduce.reduction_decompositions import (
    ReducedDims,
    dims_in,
    drop_dims,
    extreme,
    root,
)
from fshard.ops.rules.reduce.reductions import NeutralIfEmpty, functional_overloads, reduction_rule


@dataclass(frozen=True, slots=True)
class NormKind:
    """Kind of a norm: its order, its dims, and whether it is a matrix norm."""

    order: float | str
    dims: tuple[int, ...]
    matrix: bool = field(default=False)

    @property
    def reductions(self) -> dict[int, str | None]:
        """Map each dim to the reduction of partial results, None if there is none."""
        if not self.matrix:
            kind = {math.inf: "max", -math.inf: "min", 0.0: "sum", 1.0: "sum"}
            return dict.fromkeys(self.dims, kind.get(self.order))  # type: ignore[arg-type]
        if self.order in ("fro", "nuc") or abs(float(self.order)) == 2:
            return dict.fromkeys(self.dims, None)
        rows, columns = self.dims
        summed, chosen = (rows, columns) if abs(float(self.order)) == 1 else (columns, rows)
        return {summed: None, chosen: "max" if float(self.order) > 0 else "min"}


def norm_of(call: OpCall) -> NormKind:
    """Return the kind of norm that a call computes."""
    name, ndim = base_name(call.op), call.operands[0].ndim
    order = next((call.get(key) for key in ("ord", "p") if call.has(key)), None)
    dims = call.get("dim") if call.has("dim") else None
    dims = normalize_dims(dims, ndim) if ndim else ()
    if name == "linalg_matrix_norm":
        return NormKind(_order(order), dims, matrix=True)
    if name == "nuclear_norm":
        return NormKind("nuc", dims[-2:], matrix=True)
    if name == "linalg_norm" and order is not None and len(dims) == 2:
        return NormKind(_order(order), dims, matrix=True)
    return NormKind(2.0 if order is None else _order(order), dims)


def _order(order: Any) -> float | str:
    return order if isinstance(order, str) else float(order)


def norm(call: OpCall) -> Rule:
    """Rule `ab->a` of norms: `b` may be sharded for orders 0, 1 and infinity."""
    kind = norm_of(call)
    shares = kind.order not in (0.0, 1.0) or kind.matrix
    return reduction_rule(call, kind.reductions, shares=shares, non_negative=True)


def dist(call: OpCall) -> Rule:
    """Rule `ab,ab->` of a norm of a difference over all dims; the operands may broadcast."""
    return _norm_of_difference(call, max(meta.ndim for meta in call.operands), keepdim=False)


def pairwise_distance(call: OpCall) -> Rule:
    """Rule `ab,ab->a` of a norm of a difference over the last dim; operands may broadcast."""
    return _norm_of_difference(call, 1, keepdim=call.get("keepdim"))


def _norm_of_difference(call: OpCall, count: int, *, keepdim: bool) -> Rule:
    """Return the rule of a norm over the last `count` dims of a difference."""
    kind = NormKind(float(call.get("p")), (0,)).reductions[0]
    shape = torch.broadcast_shapes(*(meta.shape for meta in call.operands))
    factors, kept = dim_factors(len(shape)), len(shape) - count
    operands = tuple(align_factors(meta.shape, shape, factors) for meta in call.operands)
    result = (*factors[:kept], *[()] * (count if keepdim else 0))
    names = frozenset(f for dim in factors[kept:] for f in dim)
    if kind is None:
        return Rule(operands, (result,), unsharded=names)
    is_extreme = kind in ("max", "min")
    dims = tuple(tuple(range(m.ndim))[-count:] for m in call.operands)
    return Rule(
        operands,
        (result,),
        tuple((f, kind) for dim in factors[kept:] for f in dim),
        no_grad=names if is_extreme else frozenset(),
        local=NeutralIfEmpty(kind, dims, non_negative=True) if is_extreme else None,
    )


NORMS = ("norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "native_norm",
         "frobenius_norm", "nuclear_norm")  # fmt: skip

register_rule(*functional_overloads(*NORMS))(norm)
register_rule("dist.default")(dist)
register_rule("pairwise_distance.default")(pairwise_distance)


# -- decompositions --------------------------------------------------------------------------


def vector_norm(
    x: Tensor, order: float = 2.0, dim: ReducedDims = None, keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return a norm of vectors, as `torch.linalg.vector_norm`."""
    source = x if dtype is None else x.to(dtype)
    dims, size = dims_in(x, dim), wide(source.abs())
    norm_dtype = source.abs().dtype
    if order in (math.inf, -math.inf):
        return extreme(size, dims, keepdim, order > 0).to(norm_dtype)
    if order == 0:
        return (size != 0).to(norm_dtype).sum(dims, keepdim)
    if order == 1:
        return size.sum(dims, keepdim).to(norm_dtype)
    if order == 2:
        return root((size * size).sum(dims, keepdim)).to(norm_dtype)
    safe = torch.where(size == 0, 1, size).pow(order)
    powers = torch.where(size == 0, 0.0 if order > 0 else math.inf, safe)
    return root(powers.sum(dims, keepdim), order).to(norm_dtype)


@register_decomposition("linalg_vector_norm")
def _vector_norm(x: Tensor, ord: float = 2, dim: ReducedDims = None, keepdim: bool = False, *,  # noqa: A002
                 dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    return vector_norm(x, float(ord), dim, keepdim, dtype)


@register_decomposition(*functional_overloads("norm", "native_norm"))
def _norm(x: Tensor, p: float | None = 2, dim: ReducedDims = None, keepdim: bool = False,
          dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    return vector_norm(x, 2.0 if p is None else float(p), dim, keepdim, dtype)


@register_decomposition(*functional_overloads("frobenius_norm"))
def _frobenius_norm(x: Tensor, dim: ReducedDims = None, keepdim: bool = False) -> Tensor:
    return vector_norm(x, 2.0, dim, keepdim)


@register_decomposition(*functional_overloads("linalg_matrix_norm"))
def _matrix_norm(x: Tensor, ord: float | str = "fro", dim: Sequence[int] = (-2, -1),  # noqa: A002
                 keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    rows, columns = dims = dims_in(x, dim)
    if ord == "fro":
        return vector_norm(x, 2.0, dims, keepdim, dtype)
    source = x if dtype is None else x.to(dtype)
    if ord == "nuc" or abs(float(ord)) == 2:
        values: Tensor = torch.linalg.svdvals(source.movedim(dims, (-2, -1)))
        result = values.sum(-1) if ord == "nuc" or not values.shape[-1] else (
            values.amax(-1) if float(ord) > 0 else values.amin(-1))  # fmt: skip
        for d in sorted(dims) if keepdim else ():
            result = result.unsqueeze(d)
        return result
    summed, chosen = (rows, columns) if abs(float(ord)) == 1 else (columns, rows)
    sums = source.abs().sum([summed], True)
    if not x.shape[chosen]:
        return sums.sum(dims, keepdim)
    return drop_dims(extreme(sums, [chosen], True, float(ord) > 0), dims, keepdim)


@register_decomposition(*functional_overloads("linalg_norm"))
def _linalg_norm(x: Tensor, ord: float | str | None = None, dim: ReducedDims = None,  # noqa: A002
                 keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    dims = dims_in(x, dim)
    if ord is None or isinstance(dim, int) or len(dims) != 2:
        assert not isinstance(ord, str)
        return vector_norm(x, 2.0 if ord is None else float(ord), dims, keepdim, dtype)
    return _matrix_norm(x, ord, dims, keepdim, dtype=dtype)


@register_decomposition("dist")
def _dist(x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    return vector_norm(x - y, float(p))


@register_decomposition("pairwise_distance")
def _pairwise_distance(
    x: Tensor, y: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return vector_norm(x - y + eps, float(p), -1, keepdim)
