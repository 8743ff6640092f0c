"""Weighted mean and variance over sharded dims with one reduction over ranks, precise as Chan's.

Each rank has the sum of weights, the weighted mean and the weighted sum of squared deviations of
its shard. An all-reduce can add up only moments about one origin, `sum(w)`, `sum(w * x)` and
`sum(w * x**2)`, which cancel where means are much larger than deviations. So the moments of each
rank are pairs of doubles, of 106 bits, and they are added up exactly: a pair is divided into words,
multiples of a power of 2**40 below the next one, and words of one power add up without rounding for
up to 8,192 ranks. Word k has the powers that are k modulo 4. Where ranks differ by more than 2**120
the smaller value is lost, which rounding would lose anyway.

Pairs of doubles: Dekker ("A floating-point technique for extending the available precision", 1971).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.ops.core.builders import dim_factors
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Rule

BITS, WORDS, MOMENTS = 40, 4, 3
"""Bits of a word, words of a moment, and moments: of the powers 0, 1 and 2 of the values."""

Pair = tuple[Tensor, Tensor]
"""Sum of two doubles, of which the second is at most the rounding error of the first."""


@torch.library.custom_op("fshard::weighted_moment_sums", mutates_args=())
def weighted_moment_sums(x: Tensor, weights: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the words of the moments over `dims`, which keep size 1, in float64.

    Args:
        x: values.
        weights: weights, of the shape of the values.
        dims: the dims to reduce.
    """
    x, weights, over = x.double(), weights.double(), list(dims)
    if not all(x.shape[dim] for dim in over):
        return x.new_zeros(_shape(x, dims))
    total = weights.sum(over, True)
    mean = (weights * x).sum(over, True) / total
    mean = torch.where(mean.isfinite(), mean, x.mean(over, True))
    weighted = weights * (x - mean)
    first, second = weighted.sum(over, True), (weighted * (x - mean)).sum(over, True)
    zero, square = torch.zeros_like(total), _product(mean, mean)
    moments = (
        (total, zero),
        _added(_product(total, mean), (first, zero)),
        _added(_times(square, total), _added(_product(2 * mean, first), (second, zero))),
    )
    return torch.stack([word for moment in moments for word in _words(moment)])


@weighted_moment_sums.register_fake
def _(x: Tensor, weights: Tensor, dims: Sequence[int]) -> Tensor:
    return x.new_empty(_shape(x, dims), dtype=torch.float64)


def _shape(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [MOMENTS * WORDS, *(1 if dim in dims else size for dim, size in enumerate(x.shape))]


@torch.library.custom_op("fshard::merged_weighted_moments", mutates_args=())
def merged_weighted_moments(sums: Tensor) -> Tensor:
    """Return the sum of weights, the mean and the biased variance, stacked, of words of all ranks.

    Mean and variance are NaN if the weights are zeros.
    """
    total, first, second = (_pair(part) for part in sums.split(WORDS))
    mean = first[0] / total[0]
    rest = _added(first, _times(total, -mean))
    # With the rounded mean m the sum of w * (x - m)**2 is second - m * (2 * first - m * total).
    squares = _added(_added(second, _times(first, -mean)), _times(rest, -mean))
    shift = rest[0] / total[0]
    variance = (squares[0] / total[0] - shift * shift).clamp_min(0)
    return torch.stack([total[0], mean + shift, variance])


@merged_weighted_moments.register_fake
def _(sums: Tensor) -> Tensor:
    return sums.new_empty((3, *sums.shape[1:]))


# -- pairs of doubles ------------------------------------------------------------------------


def _sum(a: Tensor, b: Tensor) -> Pair:
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _product(a: Tensor, b: Tensor) -> Pair:
    (high, low), (upper, lower), product = _halves(a), _halves(b), a * b
    return product, ((high * upper - product) + high * lower + low * upper) + low * lower


def _halves(a: Tensor) -> Pair:
    """Return a double as the sum of two of 26 bits."""
    shifted = a * (2.0**27 + 1)
    high = shifted - (shifted - a)
    return high, a - high


def _added(a: Pair, b: Pair) -> Pair:
    total, error = _sum(a[0], b[0])
    return _sum(total, error + (a[1] + b[1]))


def _times(a: Pair, b: Tensor) -> Pair:
    product, error = _product(a[0], b)
    return _sum(product, error + a[1] * b)


def _words(pair: Pair) -> list[Tensor]:
    """Return the words of a pair, of which each adds up exactly with those of other pairs."""
    high, low = pair
    _, exponent = torch.frexp(high)
    power = torch.div(exponent, BITS, rounding_mode="floor").clamp(-1000 // BITS, 1000 // BITS)
    words = [torch.zeros_like(high) for _ in range(WORDS)]
    for _ in range(WORDS):
        unit = torch.exp2((power * BITS).to(high.dtype))
        part = torch.trunc(high / unit) * unit
        high, low = _sum(high - part, low)
        words = [torch.where(power % WORDS == i, part, word) for i, word in enumerate(words)]
        power = power - 1
    return words


def _pair(words: Tensor) -> Pair:
    """Return the sum of words as a pair."""
    order = words.abs().argsort(0, descending=True)
    ordered = words.gather(0, order).unbind()
    total: Pair = ordered[0], torch.zeros_like(ordered[0])
    for word in ordered[1:]:
        total = _added(total, (word, torch.zeros_like(word)))
    return total


# -- rules and gradient ----------------------------------------------------------------------


@register_rule(torch.ops.fshard.weighted_moment_sums.default)
def _sums_rule(call: OpCall) -> Rule:
    factors, dims = dim_factors(call.operands[0].ndim), call.get("dims")
    result = (() if dim in dims else factor for dim, factor in enumerate(factors))
    sums = tuple((factors[dim][0], "sum") for dim in dims)
    return Rule((factors, factors), (((), *result),), sums)


@register_rule(torch.ops.fshard.merged_weighted_moments.default)
def _merged_rule(call: OpCall) -> Rule:
    dims = ((), *dim_factors(call.operands[0].ndim - 1))
    return Rule((dims,), (dims,))


@weighted_moment_sums.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, weights: Tensor, dims: Sequence[int]) -> Any:
    x, weights = (
        y.expand(info.batch_size, *y.shape) if dim is None else y.movedim(dim, 0)
        for y, dim in zip((x, weights), in_dims, strict=False)
    )
    return weighted_moment_sums(x, weights, [dim + 1 for dim in dims]), 1


@merged_weighted_moments.register_vmap
def _(info: Any, in_dims: Any, sums: Tensor) -> Any:
    return merged_weighted_moments(sums.movedim(in_dims[0], 1)), 1


class _WeightedMoments(torch.autograd.Function):
    """Sum of weights, mean and biased variance, stacked; saves operands and results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weights: Tensor, dims: list[int]) -> Tensor:
        merged: Tensor = merged_weighted_moments(weighted_moment_sums(x, weights, dims))
        return merged

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weights, ctx.dims = inputs
        ctx.save_for_backward(x, weights, output)
        ctx.save_for_forward(x, weights, output)

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor | None, of_weights: Tensor | None, _: None) -> Tensor:
        x, weights, moments = ctx.saved_tensors
        total, mean, variance = moments.unbind()
        distance = x.double() - mean
        a, b = (torch.zeros_like(distance) if t is None else t.double() for t in (of_x, of_weights))
        moved = weights.double() * a
        terms = b, b * distance + moved, b * (distance * distance - variance) + 2 * moved * distance
        of_total, of_mean, of_variance = (term.sum(ctx.dims, True) for term in terms)
        return torch.stack([of_total, of_mean / total, of_variance / total])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights, moments = ctx.saved_tensors
        total, mean, variance = moments.unbind()
        of_total, of_mean, of_variance = grad.unbind()
        of_mean, of_variance = of_mean / total, of_variance / total
        distance, needs = x.double() - mean, ctx.needs_input_grad
        of_x = of_weights = None
        if needs[0]:
            of_x = (weights.double() * (of_mean + 2 * of_variance * distance)).to(x.dtype)
        if needs[1]:
            of_weights = of_total + of_mean * distance
            of_weights = of_weights + of_variance * (distance * distance - variance)
            of_weights = of_weights.to(weights.dtype)
        return of_x, of_weights, None


def weighted_moments(x: Tensor, weights: Tensor, dims: list[int]) -> Tensor:
    """Return the sum of weights, the mean and the biased variance, stacked; dims keep size 1.

    In a partitioned function it is one reduction.

    Args:
        x: values, of a real dtype.
        weights: weights, of the shape of the values.
        dims: the dims to reduce.
    """
    return _WeightedMoments.apply(x, weights, dims)  # type: ignore[no-untyped-call, no-any-return]
