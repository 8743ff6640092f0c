"""Mean and variance over sharded dims with one reduction over ranks, as precise as on one device.

Each rank computes the mean and the sum of squared deviations of its shard. Ranks combine them by
the update of Chan, Golub and LeVeque ("Algorithms for computing the sample variance", 1983):
`sum(m2) + sum(n * (mean - total_mean)**2)`. An all-reduce adds up and has no total mean, so it adds
up the terms of that square, which cancel where means are much larger than deviations. Hence each
mean is divided into parts of few bits, whose products with each other and with counts are exact in
double precision. Then the relative error of the variance is a multiple of the ratio of mean and
deviation, as in kernels on one device, and not of its square.

The sums of a statistic have 40 bytes, of float64 56. The gradient reduces two values of each in
the dtype of the moments.
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

LEAST_BITS = 12
"""Bits of the first part of the total mean, at most those of any shard's."""


def wide(x: Tensor) -> Tensor:
    """Return `x` in the dtype of its sums: float32 for half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _part_count(dtype: torch.dtype) -> int:
    """Return the number of parts of a mean: two are precise to about 70 bits, three to 80."""
    return 3 if dtype == torch.float64 else 2


def _shape(x: Tensor, dims: Sequence[int]) -> list[int]:
    """Return the shape of the sums: a count, the parts of means, and as many of squares."""
    words = 1 + 2 * _part_count(x.dtype)
    return [words, *(1 if dim in dims else size for dim, size in enumerate(x.shape))]


@torch.library.custom_op("fshard::moment_sums", mutates_args=())
def moment_sums(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the sums over `dims`, which keep size 1, of which `merged_moments` makes moments.

    Returns:
        A stack in float64: sums of the count, of the parts of means, and of the squares of means by
        powers of the parts' precision, the last one with the squared deviations. All are divided by
        a common factor of the counts.
    """
    return _sums(x, dims, 1, 1)


@moment_sums.register_fake
def _(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.new_empty(_shape(x, dims), dtype=torch.float64)


@torch.library.custom_op("fshard::merged_moments", mutates_args=())
def merged_moments(sums: Tensor) -> Tensor:
    """Return the mean and the biased variance, stacked, of the sums over all ranks."""
    return _merged(sums)


@merged_moments.register_fake
def _(sums: Tensor) -> Tensor:
    return sums.new_empty((2, *sums.shape[1:]))


def _sums(x: Tensor, dims: Sequence[int], weight: int, total: int) -> Tensor:
    """Return the sums of a shard whose count is `weight` of a `total`."""
    mean, variance = _local_moments(x, list(dims))
    bits = max((51 - total.bit_length()) // 2, LEAST_BITS)
    first, *others = _parts(mean, bits, _part_count(x.dtype))
    rest = mean - first
    squares = [first * first, *(2 * first * part for part in others)]
    squares[-1].addcmul_(rest, rest).add_(variance)
    return torch.stack([torch.ones_like(mean), first, *others, *squares]).mul_(weight)


def _local_moments(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance in float64, of deviations from a first mean.

    The first mean is rounded to the dtype of the sums; deviations correct it.
    """
    values = wide(x)
    first = values.mean(dims, True)
    deviations = values - first
    correction = deviations.mean(dims, True).double()
    squares = deviations.square_().mean(dims, True).double()
    return first.double().add_(correction), squares.sub_(correction * correction).clamp_min_(0)


def _parts(x: Tensor, bits: int, count: int) -> list[Tensor]:
    """Divide doubles into a number of parts of `bits` bits each, the last one of the rest.

    After Dekker and Veltkamp ("A floating-point technique for extending the available precision",
    1971). Of values that are not finite all parts are NaN.
    """
    parts, before = [], torch.zeros_like(x)
    for index in range(1, count):
        shifted = x * (2.0 ** (53 - index * bits) + 1)
        leading = shifted - (shifted - x)
        parts.append(leading - before)
        before = leading
    return [*parts, x - before]


def _merged(sums: Tensor) -> Tensor:
    count, *words = sums.unbind()
    means, squares = words[: len(words) // 2], words[len(words) // 2 :]
    mean = torch.stack(means).sum(0) / count
    centre = _parts(mean, LEAST_BITS, 2)[0]
    # Sums of squared deviations from the centre; all but the last are exact.
    distance = means[0] - count * centre
    total = squares[0] - centre * (means[0] + distance)
    for part, square in zip(means[1:], squares[1:], strict=True):
        total, distance = total + (square - 2 * centre * part), distance + part
    shift = distance / count
    return torch.stack([centre + shift, (total - distance * shift).div_(count).clamp_min_(0)])


# -- rules ---------------------------------------------------------------------------------


def _local_sums(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Tensor:
    """Return the sums of one rank's shard, with counts as multiples of their common factor."""
    x: Tensor = args[0]
    dims: Sequence[int] = args[1]
    if not x.numel():
        return x.new_zeros(_shape(x, dims), dtype=torch.float64)
    weight = total = 1
    for dim in dims:
        sizes = ctx.operands[0].shard_sizes(dim)
        unit = math.gcd(*sizes)
        weight, total = weight * x.shape[dim] // unit, total * sum(sizes) // unit
    return _sums(x, dims, weight, total)


@register_rule(torch.ops.fshard.moment_sums.default)
def _moment_sums_rule(call: OpCall) -> Rule:
    factors, dims = dim_factors(call.operands[0].ndim), call.get("dims")
    result = (() if dim in dims else factor for dim, factor in enumerate(factors))
    sums = tuple((factors[dim][0], "sum") for dim in dims)
    return Rule((factors,), (((), *result),), sums, local=_local_sums)


@register_rule(torch.ops.fshard.merged_moments.default)
def _merged_moments_rule(call: OpCall) -> Rule:
    dims = ((), *dim_factors(call.operands[0].ndim - 1))
    return Rule((dims,), (dims,), local=_local_merge)


def _local_merge(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Tensor:
    return _merged(args[0])


# -- differentiable ------------------------------------------------------------------------


class _Moments(torch.autograd.Function):
    """Mean and biased variance, stacked; only the values are saved, and the result."""

    @staticmethod
    def forward(x: Tensor, dims: list[int]) -> Tensor:
        merged: Tensor = merged_moments(moment_sums(x, dims))
        return merged if x.dtype == torch.float64 else merged.float()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, dims = inputs
        ctx.save_for_backward(x, output)
        ctx.count = math.prod(x.shape[dim] for dim in dims)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, moments = ctx.saved_tensors
        of_mean, of_variance = (grad / ctx.count).unbind()
        return (of_mean + 2 * of_variance * (wide(x) - moments[0])).to(x.dtype), None


class _MeanSquare(torch.autograd.Function):
    """Mean of squares; only the values are saved."""

    @staticmethod
    def forward(x: Tensor, dims: list[int]) -> Tensor:
        return wide(x).square().mean(dims, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, dims = inputs
        ctx.save_for_backward(x)
        ctx.count = math.prod(x.shape[dim] for dim in dims)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (2 / ctx.count * grad * wide(x).conj()).to(x.dtype), None


def moments(x: Tensor, dims: list[int]) -> Tensor:
    """Return the mean and the biased variance of floating values, stacked; dims keep size 1.

    In a partitioned function it is one reduction, and one in the backward pass. Moments of
    half precision are in float32.
    """
    if not all(x.shape[dim] for dim in dims):
        nothing = wide(x).sum(dims, True)
        return torch.stack([nothing / 0, nothing / 0])
    return _Moments.apply(x, dims)  # type: ignore[no-untyped-call, no-any-return]


def mean_square(x: Tensor, dims: list[int]) -> Tensor:
    """Return the mean of squares of floating values over dims, which keep size 1."""
    if not all(x.shape[dim] for dim in dims):
        return wide(x).sum(dims, True) / 0
    return _MeanSquare.apply(x, dims)  # type: ignore[no-untyped-call, no-any-return]


def reduced_together(sums: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of a stack of sums, which ranks reduce in one launch.

    The bound changes no value. The rule of clamp has no unreduced operand, so the stack is reduced
    before it.
    """
    return sums.clamp_min(-math.inf).unbind()
