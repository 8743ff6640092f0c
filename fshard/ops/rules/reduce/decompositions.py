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
from fshard.ops.rules.reduce.reductions import named
from fshard.ops.strategy.local_call import RankContext

__all__ = ["kept", "log_sum_exp", "positions", "root", "vector_norm", "wide"]

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


def _positions_here(op: Any, args: Sequence[Any], kwargs: Any, here: RankContext) -> Tensor:
    x, dim = args
    return _places(x, dim, here.offset(0, dim))


@register_rule(torch.ops.fshard.positions.default, family="reductions")
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
        here = torch.ops.fshard.positions(x.detach(), dims[0]) == place
        best = torch.where(here, x, 0).sum(dims, True)
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


@register_decomposition(*named("var"))
def _var(x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
         correction: float | None = None) -> Tensor:  # fmt: skip
    return _moments(x, dim, unbiased, keepdim, correction)[0]


@register_decomposition(*named("std"))
def _std(x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
         correction: float | None = None) -> Tensor:  # fmt: skip
    return root(_moments(x, dim, unbiased, keepdim, correction)[0])


@register_decomposition(*named("var_mean"))
def _var_mean(x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
              correction: float | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _moments(x, dim, unbiased, keepdim, correction)


@register_decomposition(*named("std_mean"))
def _std_mean(x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
              correction: float | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    variance, mean = _moments(x, dim, unbiased, keepdim, correction)
    return root(variance), mean


# -- norms ---------------------------------------------------------------------------------


def vector_norm(
    x: Tensor, order: float = 2.0, dim: Dims = None, keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """A norm of vectors, as `torch.linalg.vector_norm`."""
    given = x if dtype is None else x.to(dtype)
    dims, size = dims_in(x, dim), wide(given.abs())
    made = given.abs().dtype
    if order in (math.inf, -math.inf):
        return _extreme(size, dims, keepdim, order > 0).to(made)
    if order == 0:
        return (size != 0).to(made).sum(dims, keepdim)
    if order == 1:
        return size.sum(dims, keepdim).to(made)
    if order == 2:
        return root((size * size).sum(dims, keepdim)).to(made)
    safe = torch.where(size == 0, 1, size).pow(order)
    powers = torch.where(size == 0, 0.0 if order > 0 else math.inf, safe)
    return root(powers.sum(dims, keepdim), order).to(made)


@register_decomposition("linalg_vector_norm")
def _vector_norm(x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *,  # noqa: A002
                 dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    return vector_norm(x, float(ord), dim, keepdim, dtype)


@register_decomposition(*named("norm", "native_norm"))
def _norm(x: Tensor, p: float | None = 2, dim: Dims = None, keepdim: bool = False,
          dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    return vector_norm(x, 2.0 if p is None else float(p), dim, keepdim, dtype)


@register_decomposition(*named("frobenius_norm"))
def _frobenius_norm(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return vector_norm(x, 2.0, dim, keepdim)


@register_decomposition(*named("linalg_matrix_norm"))
def _matrix_norm(x: Tensor, ord: float | str = "fro", dim: Sequence[int] = (-2, -1),  # noqa: A002
                 keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    rows, columns = dims = dims_in(x, dim)
    if ord == "fro":
        return vector_norm(x, 2.0, dims, keepdim, dtype)
    given = x if dtype is None else x.to(dtype)
    if ord == "nuc" or abs(float(ord)) == 2:
        values: Tensor = torch.linalg.svdvals(given.movedim(dims, (-2, -1)))
        made = values.sum(-1) if ord == "nuc" or not values.shape[-1] else (
            values.amax(-1) if float(ord) > 0 else values.amin(-1))  # fmt: skip
        for at in sorted(dims) if keepdim else ():
            made = made.unsqueeze(at)
        return made
    summed, chosen = (rows, columns) if abs(float(ord)) == 1 else (columns, rows)
    sums = given.abs().sum([summed], True)
    if not x.shape[chosen]:
        return sums.sum(dims, keepdim)
    return kept(_extreme(sums, [chosen], True, float(ord) > 0), dims, keepdim)


@register_decomposition(*named("linalg_norm"))
def _linalg_norm(x: Tensor, ord: float | str | None = None, dim: Dims = None,  # noqa: A002
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


# -- softmaxes -----------------------------------------------------------------------------


def _shifted(x: Tensor, dims: list[int]) -> Tensor:
    """Without the maximum, which exponentials are taken of."""
    return x - torch.amax(x.detach(), dims, True) if x.numel() else x


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


@register_decomposition("softmax.int", "special_softmax")
def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    given = x if dtype is None else x.to(dtype)
    powers = _shifted(wide(given), dims_in(x, dim)).exp()
    return (powers / powers.sum(dims_in(x, dim), True)).to(given.dtype)


@register_decomposition("log_softmax.int", "special_log_softmax")
def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    given = x if dtype is None else x.to(dtype)
    shifted = _shifted(wide(given), dims_in(x, dim))
    return (shifted - shifted.exp().sum(dims_in(x, dim), True).log()).to(given.dtype)


@register_decomposition("_softmax")
def _softmax_kernel(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _softmax(x, dim, torch.float32 if half_to_float else None)


@register_decomposition("_log_softmax")
def _log_softmax_kernel(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _log_softmax(x, dim, torch.float32 if half_to_float else None)


@register_decomposition("_safe_softmax")
def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    given, dims = x if dtype is None else x.to(dtype), dims_in(x, dim)
    numbers = wide(given)
    most = torch.amax(numbers.detach(), dims, True)
    powers = (numbers - torch.where(most == -math.inf, 0, most)).exp()
    sums = powers.sum(dims, True)
    return (powers / torch.where(sums == 0, 1, sums)).to(given.dtype)


@register_decomposition("_softmax_backward_data")
def _softmax_backward(grad: Tensor, made: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    given = wide(grad) * wide(made)
    return (given - wide(made) * given.sum(dims_in(grad, dim), True)).to(input_dtype)


@register_decomposition("_log_softmax_backward_data")
def _log_softmax_backward(grad: Tensor, made: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    sums = wide(grad).sum(dims_in(grad, dim), True)
    return (wide(grad) - wide(made).exp() * sums).to(input_dtype)
