"""Decompositions of extremes, positions, means, variances and logsumexp over sharded dims.

amax, amin, max, min, argmax, argmin, aminmax, nanmean, var, std, var_mean, std_mean, logsumexp.
A variance is one reduction; a position is the least index of the maximum. Constants, such as the
maximum that a softmax subtracts, are detached before they are computed. Half precision is
summed in float32, as in PyTorch's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import dim_factors, normalize_dims
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.reduce.moments import moments, wide
from fshard.ops.rules.reduce.reductions import functional_overloads
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

ReducedDims = int | Sequence[int] | None


def drop_dims(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Remove reduced dims of size 1 unless `keepdim`."""
    return x if keepdim or not dims else x.squeeze(list(dims))


def dims_in(x: Tensor, dims: ReducedDims) -> list[int]:
    """Return non-negative dims; all for None or an empty list."""
    return list(normalize_dims(dims, x.ndim)) if x.ndim else []


def root(x: Tensor, order: float = 2.0) -> Tensor:
    """Return the root of a non-negative tensor, with gradient zero at zero as PyTorch's norms."""
    safe = torch.where(x == 0, 1, x)
    return torch.where(x == 0, 0, safe.sqrt() if order == 2 else safe.pow(1 / order))


# -- positions -----------------------------------------------------------------------------


@torch.library.custom_op("fshard::positions", mutates_args=())
def positions(x: Tensor, dim: int) -> Tensor:
    """Return each element's index along `dim`, in the shape of `x`."""
    return _indices_along(x, dim, 0)


@positions.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.int64)


def _indices_along(x: Tensor, dim: int, start: int) -> Tensor:
    shape = [-1 if i == dim else 1 for i in range(x.ndim)]
    line = torch.arange(start, start + x.shape[dim], device=x.device)
    return line.reshape(shape).expand(x.shape).clone()


def _local_positions(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Tensor:
    x, dim = args
    return _indices_along(x, dim, ctx.offset(0, dim))


@register_rule(torch.ops.fshard.positions.default)
def _positions_rule(call: OpCall) -> Rule:
    factors = dim_factors(call.operands[0].ndim)
    return Rule((factors,), (factors,), local=_local_positions)


# -- extremes ------------------------------------------------------------------------------


def _is_extreme(x: Tensor, best: Tensor) -> Tensor:
    """Return a mask of the elements that are the extreme; NaN is the extreme if there is one."""
    return (x == best) | x.isnan() if x.is_floating_point() else x == best


def extreme(x: Tensor, dims: list[int], keepdim: bool, highest: bool) -> Tensor:
    """Return a maximum or minimum whose gradient is shared evenly by ties."""
    values = x.detach()
    result = torch.amax(values, dims, True) if highest else torch.amin(values, dims, True)
    if not x.is_floating_point() or not dims:
        return drop_dims(result, dims, keepdim) if dims else x
    mask = _is_extreme(values, result)
    # A finite extreme plus shares of zero is exact and carries the gradient.
    difference = x - torch.where(result.isfinite(), result, 0)
    share = torch.where(mask, difference / mask.sum(dims, True), 0).sum(dims, True)
    return drop_dims(result + share, dims, keepdim)


def _extreme_index(x: Tensor, dim: int | None, keepdim: bool, highest: bool) -> Tensor:
    """Return the index of the first extreme, in the flattened tensor without a dim."""
    if not x.ndim:
        return torch.zeros_like(x, dtype=torch.int64)
    dims, values = dims_in(x, dim), x.detach()
    result = torch.amax(values, dims, True) if highest else torch.amin(values, dims, True)
    index = torch.ops.fshard.positions(values, dims[0])
    for d in dims[1:]:
        index = index * x.shape[d] + torch.ops.fshard.positions(values, d)
    size = math.prod(x.shape[d] for d in dims)
    return torch.where(_is_extreme(values, result), index, size).amin(dims, keepdim)


def _extreme_with_index(x: Tensor, dim: int, keepdim: bool, highest: bool) -> tuple[Tensor, Tensor]:
    """Return the extreme along a dim and its index; only that element gets the gradient."""
    index = _extreme_index(x, dim, True, highest)
    dims = dims_in(x, dim)
    if not dims:
        return x, index
    if x.is_floating_point():
        mask = torch.ops.fshard.positions(x.detach(), dims[0]) == index
        result = torch.where(mask, x, 0).sum(dims, True)
    else:
        result = torch.amax(x, dims, True) if highest else torch.amin(x, dims, True)
    return drop_dims(result, dims, keepdim), drop_dims(index, dims, keepdim)


@register_decomposition("amax")
def _amax(x: Tensor, dim: ReducedDims = (), keepdim: bool = False) -> Tensor:
    return extreme(x, dims_in(x, dim), keepdim, True)


@register_decomposition("amin")
def _amin(x: Tensor, dim: ReducedDims = (), keepdim: bool = False) -> Tensor:
    return extreme(x, dims_in(x, dim), keepdim, False)


@register_decomposition("max.default")
def _max(x: Tensor) -> Tensor:
    return extreme(x, dims_in(x, None), False, True)


@register_decomposition("min.default")
def _min(x: Tensor) -> Tensor:
    return extreme(x, dims_in(x, None), False, False)


@register_decomposition("max.dim")
def _max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extreme_with_index(x, dim, keepdim, True)


@register_decomposition("min.dim")
def _min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extreme_with_index(x, dim, keepdim, False)


@register_decomposition("argmax")
def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _extreme_index(x, dim, keepdim, True)


@register_decomposition("argmin")
def _argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _extreme_index(x, dim, keepdim, False)


@register_decomposition("aminmax")
def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = dims_in(x, dim)
    return extreme(x, dims, keepdim, False), extreme(x, dims, keepdim, True)


# -- means and variances -------------------------------------------------------------------


@register_decomposition("nanmean")
def _nanmean(
    x: Tensor, dim: ReducedDims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims, out_dtype = dims_in(x, dim), dtype or x.dtype
    values = wide(x.to(out_dtype))
    return (values.nansum(dims, keepdim) / (~x.isnan()).sum(dims, keepdim)).to(out_dtype)


def _moments(
    x: Tensor, dim: ReducedDims | bool, unbiased: bool, keepdim: bool, correction: float | None
) -> tuple[Tensor, Tensor]:
    """Return variance and mean; without `correction` it is 1 if unbiased, else 0."""
    if isinstance(dim, bool):
        return _moments(x, None, dim, keepdim, correction)
    dims = dims_in(x, dim)
    ddof = (1.0 if unbiased else 0.0) if correction is None else float(correction)
    count = math.prod(x.shape[d] for d in dims)
    if x.is_complex():
        parts = moments(torch.view_as_real(x), dims)
        mean, variance = torch.view_as_complex(parts[0]), parts[1].sum(-1)
    else:
        mean, variance = moments(x, dims).unbind()
    variance = variance * (count / (count - ddof) if count > ddof else math.inf)
    real = x.real.dtype if x.is_complex() else x.dtype
    return drop_dims(variance, dims, keepdim).to(real), drop_dims(mean, dims, keepdim).to(x.dtype)


@register_decomposition(*functional_overloads("var"))
def _var(x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
         correction: float | None = None) -> Tensor:  # fmt: skip
    return _moments(x, dim, unbiased, keepdim, correction)[0]


@register_decomposition(*functional_overloads("std"))
def _std(x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
         correction: float | None = None) -> Tensor:  # fmt: skip
    return root(_moments(x, dim, unbiased, keepdim, correction)[0])


@register_decomposition(*functional_overloads("var_mean"))
def _var_mean(x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
              correction: float | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _moments(x, dim, unbiased, keepdim, correction)


@register_decomposition(*functional_overloads("std_mean"))
def _std_mean(x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
              correction: float | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    variance, mean = _moments(x, dim, unbiased, keepdim, correction)
    return root(variance), mean


# -- norms ---------------------------------------------------------------------------------


# -- softmaxes -----------------------------------------------------------------------------


@register_decomposition("logsumexp", "special_logsumexp")
def log_sum_exp(x: Tensor, dim: ReducedDims, keepdim: bool = False) -> Tensor:
    """Return the log of the sum of exponentials; minus infinity with zero gradient for no terms."""
    source = x if is_inexact(x) else x.to(torch.get_default_dtype())
    dims, values = dims_in(x, dim), wide(source)
    constant = values.detach().real if x.is_complex() else values.detach()
    if not all(x.shape[d] for d in dims):
        return values.exp().sum(dims, keepdim).log().to(source.dtype)
    maximum = torch.amax(constant, dims, True)
    maximum = torch.where(maximum.isinf(), 0, maximum)
    sums = (values - maximum).exp().sum(dims, True)
    logs = torch.where(sums == 0, -math.inf, torch.where(sums == 0, 1, sums).log())
    return drop_dims(logs + maximum, dims, keepdim).to(source.dtype)
