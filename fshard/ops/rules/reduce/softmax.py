"""TODO."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fshard.ops.core.builders import dim_factors, wrap_dim
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.reduce.reduction_decompositions import dims_in, wide
from fshard.ops.rules.reduce.reductions import ZerosIfEmpty, functional_overloads
from fshard.ops.rules.reduce.scans import _whole

__all__: list[str] = []


def masked_softmax(call: OpCall) -> Rule:
    """A mask is for a square of the last dims (type 0), for batch and last dim (1), or for all."""
    x, mask = call.operands
    given, kind = call.get("dim"), call.get("mask_type")
    factors = masked = dim_factors(x.ndim)
    dims: tuple[int, ...] = (wrap_dim(-1 if given is None else given, x.ndim),)
    if kind in (0, 1) and mask.ndim < x.ndim:
        # The kernel asks for as many rows as columns.
        dims = (x.ndim - 2, x.ndim - 1)
        masked = factors[-2:] if kind == 0 else (factors[0], factors[-1])
    return Rule((factors, masked), (factors,), unsharded=_whole(x.ndim, dims), local=ZerosIfEmpty())


register_rule(*functional_overloads("_masked_softmax"))(masked_softmax)


# -- decompositions --------------------------------------------------------------------------


def _shifted(x: Tensor, dims: list[int]) -> Tensor:
    """Without the maximum, which exponentials are taken of."""
    return x - torch.amax(x.detach(), dims, True) if x.numel() else x


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
