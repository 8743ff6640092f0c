"""How reductions and softmaxes are done by others, over dims that stay cut.

A softmax is a maximum, a sum and a division; a variance two sums; a position the least place among
those of the maximum. What is held constant - the maximum that a softmax subtracts - is detached
before it is computed. Numbers of half precision are summed in single, as PyTorch's kernels do, and
roots of zero have gradient zero, as PyTorch's norms have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.ops.core.builders import dim_factors, normalize_dims
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.reduce.reductions import functional_overloads
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

__all__ = ["dims_in", "kept", "log_sum_exp", "root", "wide"]

Dims = int | Sequence[int] | None


def wide(x: Tensor) -> Tensor:
    """The numbers in which sums of `x` are taken."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def kept(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A tensor with dims of size 1, or without them."""
    return x if keepdim or not dims else x.squeeze(list(dims))


def dims_in(x: Tensor, dims: Dims) -> list[int]:
    """Dims from 0 on; all for None or none."""
    return list(normalize_dims(dims, x.ndim)) if x.ndim else []


def root(x: Tensor, order: float = 2.0) -> Tensor:
    """The root of what is not negative, with gradient zero at zero."""
    safe = torch.where(x == 0, 1, x)
    return torch.where(x == 0, 0, safe.sqrt() if order == 2 else safe.pow(1 / order))


# -- places --------------------------------------------------------------------------------


@torch.library.custom_op("fshard::positions", mutates_args=())
def positions(x: Tensor, dim: int) -> Tensor:
    """The place of every element along a dim, in the shape of `x`."""
    return _places(x, dim, 0)


@positions.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.int64)


def _places(x: Tensor, dim: int, begin: int) -> Tensor:
    shape = [-1 if at == dim else 1 for at in range(x.ndim)]
    line = torch.arange(begin, begin + x.shape[dim], device=x.device)
    return line.reshape(shape).expand(x.shape).clone()


def _positions_here(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Tensor:
    x, dim = args
    return _places(x, dim, ctx.offset(0, dim))


@register_rule(torch.ops.fshard.positions.default)
def _positions_rule(call: OpCall) -> Rule:
    factors = dim_factors(call.operands[0].ndim)
    return Rule((factors,), (factors,), local=_positions_here)


# -- extremes ------------------------------------------------------------------------------


def _chosen(x: Tensor, best: Tensor) -> Tensor:
    """Which elements are the extreme: NaN is the extreme of all where there is one."""
    return (x == best) | x.isnan() if x.is_floating_point() else x == best


def _extreme(x: Tensor, dims: list[int], keepdim: bool, highest: bool) -> Tensor:
    """A maximum or minimum whose gradient ties share evenly."""
    still = x.detach()
    best = torch.amax(still, dims, True) if highest else torch.amin(still, dims, True)
    if not x.is_floating_point() or not dims:
        return kept(best, dims, keepdim) if dims else x
    chosen = _chosen(still, best)
    # What is finite is the extreme and shares of zero: exact, and with a gradient.
    apart = x - torch.where(best.isfinite(), best, 0)
    share = torch.where(chosen, apart / chosen.sum(dims, True), 0).sum(dims, True)
    return kept(best + share, dims, keepdim)


def _place(x: Tensor, dim: int | None, keepdim: bool, highest: bool) -> Tensor:
    """Where the first of the extremes is, in the tensor in one line if there is no dim."""
    if not x.ndim:
        return torch.zeros_like(x, dtype=torch.int64)
    dims, still = dims_in(x, dim), x.detach()
    best = torch.amax(still, dims, True) if highest else torch.amin(still, dims, True)
    place = torch.ops.fshard.positions(still, dims[0])
    for at in dims[1:]:
        place = place * x.shape[at] + torch.ops.fshard.positions(still, at)
    size = math.prod(x.shape[at] for at in dims)
    return torch.where(_chosen(still, best), place, size).amin(dims, keepdim)


def _pick(x: Tensor, dim: int, keepdim: bool, highest: bool) -> tuple[Tensor, Tensor]:
    """The extreme along a dim and its place, where alone the gradient goes."""
    place = _place(x, dim, True, highest)
    dims = dims_in(x, dim)
    if not dims:
        return x, place
    if x.is_floating_point():
        chosen = torch.ops.fshard.positions(x.detach(), dims[0]) == place
        best = torch.where(chosen, x, 0).sum(dims, True)
    else:
        best = torch.amax(x, dims, True) if highest else torch.amin(x, dims, True)
    return kept(best, dims, keepdim), kept(place, dims, keepdim)


@register_decomposition("amax")
def _amax(x: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return _extreme(x, dims_in(x, dim), keepdim, True)


@register_decomposition("amin")
def _amin(x: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return _extreme(x, dims_in(x, dim), keepdim, False)


@register_decomposition("max.default")
def _max(x: Tensor) -> Tensor:
    return _extreme(x, dims_in(x, None), False, True)


@register_decomposition("min.default")
def _min(x: Tensor) -> Tensor:
    return _extreme(x, dims_in(x, None), False, False)


@register_decomposition("max.dim")
def _max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _pick(x, dim, keepdim, True)


@register_decomposition("min.dim")
def _min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _pick(x, dim, keepdim, False)


@register_decomposition("argmax")
def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _place(x, dim, keepdim, True)


@register_decomposition("argmin")
def _argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _place(x, dim, keepdim, False)


@register_decomposition("aminmax")
def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = dims_in(x, dim)
    return _extreme(x, dims, keepdim, False), _extreme(x, dims, keepdim, True)


# -- means and variances -------------------------------------------------------------------


@register_decomposition("nanmean")
def _nanmean(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims, made = dims_in(x, dim), dtype or x.dtype
    given = wide(x.to(made))
    return (given.nansum(dims, keepdim) / (~x.isnan()).sum(dims, keepdim)).to(made)


def _moments(
    x: Tensor, dim: Dims | bool, unbiased: bool, keepdim: bool, correction: float | None
) -> tuple[Tensor, Tensor]:
    """Variance and mean; a correction that is not given is that of what is unbiased."""
    if isinstance(dim, bool):
        return _moments(x, None, dim, keepdim, correction)
    dims, numbers = dims_in(x, dim), wide(x)
    less = (1.0 if unbiased else 0.0) if correction is None else float(correction)
    count = math.prod(x.shape[at] for at in dims)
    mean = numbers.mean(dims, True)
    apart = numbers - mean
    square = (apart * apart.conj()).real if x.is_complex() else apart * apart
    variance = square.sum(dims, True) * (1 / (count - less) if count > less else math.inf)
    real = x.real.dtype if x.is_complex() else x.dtype
    return kept(variance, dims, keepdim).to(real), kept(mean, dims, keepdim).to(x.dtype)


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
def log_sum_exp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """The logarithm of a sum of exponentials; minus infinity, of nothing, with gradient zero."""
    inexact = x.is_floating_point() or x.is_complex()
    given = x if inexact else x.to(torch.get_default_dtype())
    dims, numbers = dims_in(x, dim), wide(given)
    still = numbers.detach().real if x.is_complex() else numbers.detach()
    if not all(x.shape[at] for at in dims):
        return numbers.exp().sum(dims, keepdim).log().to(given.dtype)
    most = torch.amax(still, dims, True)
    most = torch.where(most.isinf(), 0, most)
    sums = (numbers - most).exp().sum(dims, True)
    logs = torch.where(sums == 0, -math.inf, torch.where(sums == 0, 1, sums).log())
    return kept(logs + most, dims, keepdim).to(given.dtype)
