"""Rules and decompositions of softmax, log_softmax, _safe_softmax, _masked_softmax and gradients.

The softmax dim stays unsharded in the rules; over a sharded dim a softmax is decomposed into a
maximum, a sum and a division. The backward pass keeps the result alone, and takes one sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fshard.ops.core.builders import dim_factors, wrap_dim
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.reduce.moments import wide
from fshard.ops.rules.reduce.reduction_decompositions import dims_in
from fshard.ops.rules.reduce.reductions import ZerosIfEmpty, functional_overloads
from fshard.ops.rules.reduce.scans import _unsharded


def masked_softmax(call: OpCall) -> Rule:
    """Rule of `_masked_softmax`.

    The mask covers the last two dims (type 0), the first and the last dim (type 1), or all dims.
    """
    x, mask = call.operands
    dim, kind = call.get("dim"), call.get("mask_type")
    factors = masked = dim_factors(x.ndim)
    dims: tuple[int, ...] = (wrap_dim(-1 if dim is None else dim, x.ndim),)
    if kind in (0, 1) and mask.ndim < x.ndim:
        # The kernel requires as many rows as columns.
        dims = (x.ndim - 2, x.ndim - 1)
        masked = factors[-2:] if kind == 0 else (factors[0], factors[-1])
    return Rule((factors, masked), (factors,), unsharded=_unsharded(x.ndim, dims),
                local=ZerosIfEmpty())  # fmt: skip


register_rule(*functional_overloads("_masked_softmax"))(masked_softmax)


# -- decompositions --------------------------------------------------------------------------


def _shifted(x: Tensor, dims: list[int]) -> Tensor:
    """Return `x` minus its maximum, so that exponentials do not overflow."""
    return x - torch.amax(x, dims, True) if x.numel() else x


class _SavedResult(torch.autograd.Function):
    """Function that saves its result alone, as PyTorch's."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dims = inputs[1]
        ctx.save_for_backward(output)


class _Softmax(_SavedResult):
    """Softmax; `safe` returns zeros for no terms."""

    @staticmethod
    def forward(x: Tensor, dims: list[int], safe: bool) -> Tensor:
        values = wide(x)
        if not safe:
            powers = _shifted(values, dims).exp()
            return (powers / powers.sum(dims, True)).to(x.dtype)
        maximum = torch.amax(values, dims, True)
        powers = (values - torch.where(maximum == -math.inf, 0, maximum)).exp()
        sums = powers.sum(dims, True)
        return (powers / torch.where(sums == 0, 1, sums)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        return _softmax_gradient(grad, result, ctx.dims).to(result.dtype), None, None


class _LogSoftmax(_SavedResult):
    """Logarithm of softmax."""

    @staticmethod
    def forward(x: Tensor, dims: list[int]) -> Tensor:
        shifted = _shifted(wide(x), dims)
        return (shifted - shifted.exp().sum(dims, True).log()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return _log_softmax_gradient(grad, result, ctx.dims).to(result.dtype), None


def _softmax_gradient(grad: Tensor, result: Tensor, dims: list[int]) -> Tensor:
    product = wide(grad) * wide(result)
    return product - wide(result) * product.sum(dims, True)


def _log_softmax_gradient(grad: Tensor, result: Tensor, dims: list[int]) -> Tensor:
    sums = wide(grad).sum(dims, True)
    return wide(grad) - wide(result).exp() * sums


@register_decomposition("softmax.int", "special_softmax")
def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    source = x if dtype is None else x.to(dtype)
    return _Softmax.apply(source, dims_in(x, dim), False)  # type: ignore[no-untyped-call, no-any-return]


@register_decomposition("log_softmax.int", "special_log_softmax")
def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    source = x if dtype is None else x.to(dtype)
    return _LogSoftmax.apply(source, dims_in(x, dim))  # type: ignore[no-untyped-call, no-any-return]


@register_decomposition("_softmax")
def _softmax_kernel(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _softmax(x, dim, torch.float32 if half_to_float else None)


@register_decomposition("_log_softmax")
def _log_softmax_kernel(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _log_softmax(x, dim, torch.float32 if half_to_float else None)


@register_decomposition("_safe_softmax")
def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    source = x if dtype is None else x.to(dtype)
    return _Softmax.apply(source, dims_in(x, dim), True)  # type: ignore[no-untyped-call, no-any-return]


@register_decomposition("_softmax_backward_data")
def _softmax_backward(grad: Tensor, result: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return _softmax_gradient(grad, result, dims_in(grad, dim)).to(input_dtype)


@register_decomposition("_log_softmax_backward_data")
def _log_softmax_backward(
    grad: Tensor, result: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    return _log_softmax_gradient(grad, result, dims_in(grad, dim)).to(input_dtype)
