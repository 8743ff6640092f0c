"""Rules of operations along a dim: cumulative ones, softmaxes, differences.

The dim they run along is whole and every other is cut freely. How a softmax is done over a dim that
stays cut, `decompositions` says. Cumulative ones are done so block by block, each going on where
the one before ends, so that only last elements are sent; differences are those of two slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.ops.core.builders import (
    MAX_BLOCKS,
    align_factors,
    all_modes,
    dim_factors,
    is_inexact,
    kind_modes,
    linear_modes,
    normalize_dims,
    wrap_dim,
)
from fshard.ops.core.call import Meta, OpCall, base_name
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.rules.reduce.reduction_decompositions import log_sum_exp
from fshard.ops.rules.reduce.reductions import ZerosIfEmpty, functional_overloads, same_numbers

__all__ = ["_whole"]

LINEAR = (
    "cumsum", "diff", "_softmax_backward_data", "_log_softmax_backward_data", "glu_backward",
)  # fmt: skip
"""Linear in their first operand; a difference in all of them together."""
OTHERS = (
    "cumprod", "cummax", "cummin", "logcumsumexp", "_logcumsumexp", "softmax", "log_softmax",
    "_softmax", "_log_softmax", "_safe_softmax", "special_softmax", "special_log_softmax", "glu",
)  # fmt: skip


def along(call: OpCall) -> Rule:
    """Every dim but one is cut as it is on all tensors."""
    x = call.operands[0]
    dim = wrap_dim(call.get("dim"), x.ndim)
    if base_name(call.op) == "diff" and call.get("n") == 0:
        own = dim_factors(x.ndim)
        return Rule((own,) * len(call.operands), (own,), modes=all_modes(0))
    return Rule(tuple(_dims(each, x, dim) for each in call.operands),
                tuple(each and _dims(each, x, dim) for each in call.results),
                unsharded=_whole(x.ndim, (dim,)), modes=_modes(call))  # fmt: skip


def _dims(meta: Meta, x: Meta, dim: int) -> Dims:
    """The factors of `x`, but for `dim` where it is of another size."""
    return tuple(
        () if at == dim and meta.shape[at] != x.shape[at] else each
        for at, each in enumerate(dim_factors(meta.ndim))
    )


def _whole(ndim: int, dims: tuple[int, ...]) -> frozenset[str]:
    return frozenset(f for at, each in enumerate(dim_factors(ndim)) for f in each if at in dims)


def _modes(call: OpCall) -> tuple[Mode, ...]:
    name, results = base_name(call.op), len(call.results)
    if not all(same_numbers(call, at) for at in range(len(call.operands))):
        return ()
    if name == "diff":
        return linear_modes(tuple(range(len(call.operands))))
    if name in LINEAR:
        return linear_modes(0, results=results)
    return kind_modes(0, {"product": "product"}) if name == "cumprod" else ()


def segment_reduce(call: OpCall) -> Rule:
    """The dim of the segments is whole; others are free, leading ones as the lengths have them."""
    x, axis = call.operands[0], wrap_dim(call.get("axis"), call.operands[0].ndim)
    factors = dim_factors(x.ndim)
    inner = (*factors[:axis], (), *factors[axis + 1 :])
    lengths = ((*factors[:axis], ()),) * (len(call.operands) - 1)
    reduce, modes = call.get("reduce"), tuple[Mode, ...]()
    if reduce in ("max", "min"):
        modes = kind_modes(0, {reduce: reduce})
    elif reduce in ("sum", "mean") and call.get("initial") is None:
        modes = linear_modes(0)
    return Rule((factors, *lengths), (inner,), unsharded=_whole(x.ndim, (axis,)), modes=modes,
                no_grad=frozenset(modes if reduce in ("max", "min") else ()),
                local=ZerosIfEmpty())  # fmt: skip


def trapezoid(call: OpCall) -> Rule:
    """The dim is whole; the places, where they are given, are of that dim alone or of all."""
    y, made = call.operands[0], call.result
    dim = wrap_dim(call.get("dim"), y.ndim)
    shape, places = y.shape, call.operands[1:]
    if places and places[0].ndim > 1:
        shape = torch.broadcast_shapes(shape, places[0].shape)
        dim += len(shape) - y.ndim
    factors = dim_factors(len(shape))
    at = tuple((factors[dim],) if x.ndim == 1 and x.shape[0] == shape[dim]
               else align_factors(x.shape, shape, factors) for x in places)  # fmt: skip
    middle = ((),) if made.ndim == len(shape) else ()
    inexact = all(map(is_inexact, (made, *call.operands)))
    return Rule((align_factors(y.shape, shape, factors), *at),
                ((*factors[:dim], *middle, *factors[dim + 1 :]),),
                unsharded=_whole(len(shape), (dim,)),
                modes=linear_modes(*range(len(call.operands))) if inexact else ())  # fmt: skip


def gradient(call: OpCall) -> Rule:
    """The dims that differences are taken along are whole, as are the places given for them."""
    x = call.operands[0]
    factors, dims = dim_factors(x.ndim), normalize_dims(call.get("dim"), x.ndim)
    places = tuple(((),) * each.ndim for each in call.operands[1:])
    count = len(call.results)
    return Rule((factors, *places), (factors,) * count, unsharded=_whole(x.ndim, dims),
                modes=linear_modes(0, results=count) if is_inexact(x) else ())  # fmt: skip


register_rule(*functional_overloads(*LINEAR, *OTHERS))(along)
register_rule(*functional_overloads("trapezoid", "trapz", "cumulative_trapezoid"))(trapezoid)
register_rule(*functional_overloads("segment_reduce"))(segment_reduce)
register_rule(*functional_overloads("gradient"))(gradient)


# -- block by block -------------------------------------------------------------------------


def _blocks(x: Tensor, dim: int) -> tuple[Tensor, int] | None:
    """A tensor whose `dim` is blocks, which may be on different ranks, and what is in each.

    None where that saves nothing.
    """
    at = wrap_dim(dim, x.ndim)
    blocks = math.gcd(x.shape[at], MAX_BLOCKS) if x.ndim else 1
    if blocks < 2 or x.shape[at] < 2 * blocks:
        return None
    return x.unflatten(at, (blocks, x.shape[at] // blocks)), at


def _before(last: Tensor, at: int, first: float | int | bool) -> Tensor:
    """Of every block what is before it, from what is at the blocks' ends; `first` before all."""
    ahead = last.narrow(at, 0, last.shape[at] - 1)
    rest = [0, 0] * (last.ndim - 1 - at)
    return pad(ahead, [*rest, 1, 0], value=first).unsqueeze(at + 1)


def _scanned(
    x: Tensor, dim: int, scan: Callable[[Tensor, int], Tensor], first: float,
    join: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """A cumulative operation: that of every block, joined to that of the blocks before it."""
    found = _blocks(x, dim)
    if found is None:
        return scan(x, dim)
    apart, at = found
    inner = scan(apart, at + 1)
    ends = scan(inner.select(at + 1, -1), at)
    return join(inner, _before(ends, at, first)).flatten(at, at + 1)


@register_decomposition("cumsum.default")
def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    scan = lambda t, at: torch.cumsum(t, at, dtype=dtype)  # noqa: E731
    return _scanned(x, dim, scan, 0, torch.add)


@register_decomposition("cumprod.default")
def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    scan = lambda t, at: torch.cumprod(t, at, dtype=dtype)  # noqa: E731
    return _scanned(x, dim, scan, 1, torch.mul)


@register_decomposition("logcumsumexp")
def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    found = None if x.is_complex() else _blocks(x, dim)
    if found is None:
        return torch.logcumsumexp(x, dim)
    apart, at = found
    ends = torch.logcumsumexp(log_sum_exp(apart, at + 1), at)
    before = _before(ends, at, -math.inf)
    # A block begins with what is before it: where it begins with logarithms of nothing, its own
    # gradient would be no number.
    some = before != -math.inf
    first = apart.narrow(at + 1, 0, 1)
    first = torch.where(some, torch.logaddexp(first, torch.where(some, before, 0)), first)
    rest = apart.narrow(at + 1, 1, apart.shape[at + 1] - 1)
    return torch.cat([first, rest], at + 1).logcumsumexp(at + 1).flatten(at, at + 1)


def _extreme_so_far(x: Tensor, dim: int, highest: bool) -> tuple[Tensor, Tensor]:
    """The extreme up to every element, and the last place of it; that of NaN where there is one."""
    scan = torch.cummax if highest else torch.cummin
    found = _blocks(x, dim)
    if found is None:
        values, places = scan(x, dim)
        return values, places
    apart, at = found
    inner, places = scan(apart, at + 1)
    length = apart.shape[at + 1]
    begin = torch.arange(0, x.shape[at], length, device=x.device)
    places = places + begin.reshape([-1 if d == at else 1 for d in range(apart.ndim)])
    ends, which = scan(inner.select(at + 1, -1), at)
    where = places.select(at + 1, -1).gather(at, which)
    least = _least(x.dtype, highest)
    before, there = _before(ends, at, least), _before(where, at, 0)
    mine = inner >= before if highest else inner <= before
    if x.is_floating_point():
        mine = inner.isnan() | (mine & ~before.isnan())
    made = torch.where(mine, inner, before), torch.where(mine, places, there)
    return made[0].flatten(at, at + 1), made[1].flatten(at, at + 1)


def _least(dtype: torch.dtype, highest: bool) -> float | int | bool:
    """What every number is at least, or with `highest` false at most."""
    if dtype == torch.bool:
        return not highest
    if dtype.is_floating_point:
        return -math.inf if highest else math.inf
    return torch.iinfo(dtype).min if highest else torch.iinfo(dtype).max


@register_decomposition("cummax.default")
def _cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _extreme_so_far(x, dim, True)


@register_decomposition("cummin.default")
def _cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _extreme_so_far(x, dim, False)


@register_decomposition("diff")
def _diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None,
          append: Tensor | None = None) -> Tensor:  # fmt: skip
    given = [each for each in (prepend, x, append) if each is not None]
    made = torch.cat(given, dim) if len(given) > 1 else x
    for _ in range(min(n, made.shape[dim])):
        size = made.shape[dim] - 1
        after, before = made.narrow(dim, 1, size), made.narrow(dim, 0, size)
        made = after ^ before if x.dtype == torch.bool else after - before
    return made
