"""Normalization by given moments as one operation, whose backward pass keeps only its operands.

Of a decomposed norm, autograd saves the values, their deviations and the normalized values; here
deviations are computed again. They are not a product and a sum, `x * scale + shift`, which loses
the digits in which the mean is larger than the deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._torch.functorch import apply_function, run_with_tangents
from fshard.ops.core.builders import align_factors, dim_factors
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.reduce.moments import wide
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

Maybe = Tensor | None


@torch.library.custom_op("fshard::normalize", mutates_args=())
def normalize(x: Tensor, moments: Tensor, weight: Maybe, bias: Maybe, eps: float) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias` in the dtype of `x`.

    Args:
        x: the values.
        moments: mean and variance, stacked, or the mean square alone; they broadcast to `x`.
        weight: a factor that broadcasts to `x`.
        bias: a term that broadcasts to `x`.
        eps: a number that is added to the variance.
    """
    return _normalized(x, moments, weight, bias, eps)


@normalize.register_fake
def _(x: Tensor, moments: Tensor, weight: Maybe, bias: Maybe, eps: float) -> Tensor:
    return torch.empty_like(x)


def _centered(x: Tensor, moments: Tensor) -> Tensor:
    return wide(x) - moments[0] if len(moments) > 1 else wide(x)


def _normalized(x: Tensor, moments: Tensor, weight: Maybe, bias: Maybe, eps: float) -> Tensor:
    scale = (moments[-1] + eps).rsqrt()
    factor, values = scale if weight is None else scale * weight, _centered(x, moments)
    if bias is None:
        return (values * factor).to(x.dtype)
    return torch.addcmul(bias.to(values.dtype), values, factor).to(x.dtype)


def _gradients(
    grad: Tensor, x: Tensor, moments: Tensor, weight: Maybe, bias: Maybe, eps: float
) -> tuple[Maybe, ...]:
    """Return the gradients of values, moments, weight and bias."""
    scale = (moments[-1] + eps).rsqrt()
    factor, grads = scale if weight is None else scale * weight, wide(grad)
    # Sums over the dims that neither moments nor the weight have are shared.
    products = (grads * _centered(x, moments)).sum_to_size(factor.shape)
    of_values = products if weight is None else products * weight
    of_moments = [(of_values * scale.pow(3)).sum_to_size(scale.shape) / -2]
    if len(moments) > 1:
        sums = grads.sum_to_size(factor.shape) * factor
        of_moments.insert(0, -sums.sum_to_size(scale.shape))
    return (
        (grads * factor).to(x.dtype),
        torch.stack(of_moments).to(moments.dtype),
        None if weight is None else (products * scale).sum_to_size(weight.shape).to(weight.dtype),
        None if bias is None else grads.sum_to_size(bias.shape).to(bias.dtype),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.eps = inputs[-1]
    ctx.save_for_backward(*inputs[:-1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Maybe, ...]:
    x, moments, weight, bias = ctx.saved_tensors
    weight = None if weight is None else weight.conj()  # values are complex in `rms_norm`
    return (*_gradients(grad, x.conj(), moments.conj(), weight, bias, ctx.eps), None)


normalize.register_autograd(_backward, setup_context=_save)


class _Normalize(torch.autograd.Function):
    """Normalization of one rank's shard."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, moments: Tensor, weight: Maybe, bias: Maybe, eps: float
    ) -> tuple[Tensor, ...]:
        return (_normalized(x, moments, weight, bias, eps),)

    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)

    @staticmethod
    def duals(level: int, args: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return run_with_tangents(lambda *xs: (_normalized(*xs),), args, tangents)


def _local_normalize(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Tensor:
    (result,) = apply_function(_Normalize, *args)
    return result  # type: ignore[no-any-return]


@register_rule(torch.ops.fshard.normalize.default)
def _normalize_rule(call: OpCall) -> Rule:
    """Rule of an elementwise function of values and of moments, which are stacked."""
    x, moments, *others = call.operands
    factors = dim_factors(x.ndim)
    stacked = ((), *align_factors(moments.shape[1:], x.shape, factors))
    aligned = (align_factors(other.shape, x.shape, factors) for other in others)
    return Rule((factors, stacked, *aligned), (factors,), local=_local_normalize)
