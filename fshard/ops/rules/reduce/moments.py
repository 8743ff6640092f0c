"""Mean and variance over sharded dims with one reduction over ranks.

Each rank computes the mean and variance of its shard by PyTorch's kernel, which is stable, and from
them the sums of values and of squares, which are reduced in one launch and combined by the pairwise
update of Chan, Golub and LeVeque ("Algorithms for computing the sample variance", 1983). The sums
are in double precision, so the variance has a relative error of about 1e-16 times the square of the
ratio of mean and deviation: below that of the values themselves, unless they are in double
precision. `var` and `std` of those take two reductions, the second one of deviations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.ops.core.builders import dim_factors
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext


@torch.library.custom_op("fshard::moment_sums", mutates_args=())
def moment_sums(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the sums of values and of squares over `dims`, which keep size 1, stacked, in float64.

    The gradient of `x` is `g[0] + 2 * x * g[1]` for a cotangent `g`.
    """
    return _stable_sums(x, dims)


@moment_sums.register_fake
def _(x: Tensor, dims: Sequence[int]) -> Tensor:
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    return x.new_empty((2, *shape), dtype=torch.float64)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    of_values, of_squares = grad.unbind()
    return (of_values + 2 * x * of_squares).to(x.dtype), None


moment_sums.register_autograd(_backward, setup_context=_save)


def _stable_sums(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return what `moment_sums` does, from the mean and variance.

    Its gradient is computed from deviations, without a tensor of `x`'s size in double precision.
    """
    if not x.numel():  # the kernel warns
        nothing = x.sum(list(dims), True, dtype=torch.float64)
        return torch.stack([nothing, nothing])
    variance, mean = torch.var_mean(x, list(dims), correction=0, keepdim=True)
    first, count = mean.double(), math.prod(x.shape[dim] for dim in dims)
    return torch.stack([first, variance.double() + first * first]) * count


def _local_sums(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Tensor:
    """Return the sums of one rank's shard."""
    return _stable_sums(args[0], args[1])


@register_rule(torch.ops.fshard.moment_sums.default)
def _moment_sums_rule(call: OpCall) -> Rule:
    factors, dims = dim_factors(call.operands[0].ndim), call.get("dims")
    result = (() if dim in dims else factor for dim, factor in enumerate(factors))
    sums = tuple((factors[dim][0], "sum") for dim in dims)
    return Rule((factors,), (((), *result),), sums, local=_local_sums)


def reduced_together(sums: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of a stack of sums, which ranks reduce in one launch.

    The bound changes no value. The rule of clamp has no unreduced operand, so the stack is reduced
    before it.
    """
    return sums.clamp_min(-math.inf).unbind()


def mean_and_variance(
    x: Tensor, dims: list[int], *, in_two_passes: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of floating values over dims that keep size 1."""
    count = math.prod(x.shape[dim] for dim in dims)
    if in_two_passes or not count:
        mean = x.mean(dims, True)
        return mean, (x - mean).square().mean(dims, True)
    first, second = reduced_together(torch.ops.fshard.moment_sums(x, dims) / count)
    return first.to(x.dtype), (second - first * first).clamp_min(0).to(x.dtype)
