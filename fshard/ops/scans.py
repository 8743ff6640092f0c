"""Rules of operations along a dim: cumulative ones, softmaxes, differences.

The dim they run along is whole and every other is cut freely. How a softmax is done over a dim that
stays cut, `decompositions` says.
"""

from __future__ import annotations

import torch

from fshard.ops.build import aligned, axes_of, dims_of, is_inexact, kinds, linear, wrap
from fshard.ops.call import Call, Meta, base_name
from fshard.ops.reductions import OfSome, named, same_numbers
from fshard.ops.registry import register_rule
from fshard.ops.rule import Dims, Mode, Rule

__all__ = ["along"]

LINEAR = (
    "cumsum", "diff", "_softmax_backward_data", "_log_softmax_backward_data", "glu_backward",
)  # fmt: skip
"""Linear in their first operand; a difference in all of them together."""
OTHERS = (
    "cumprod", "cummax", "cummin", "logcumsumexp", "_logcumsumexp", "softmax", "log_softmax",
    "_softmax", "_log_softmax", "_safe_softmax", "special_softmax", "special_log_softmax", "glu",
)  # fmt: skip


def along(call: Call) -> Rule:
    """Every dim but one is cut as it is on all tensors."""
    x = call.operands[0]
    dim = wrap(call.get("dim"), x.ndim)
    return Rule(tuple(_dims(each, x, dim) for each in call.operands),
                tuple(each and _dims(each, x, dim) for each in call.results),
                whole=_whole(x.ndim, (dim,)), modes=_modes(call))  # fmt: skip


def _dims(meta: Meta, x: Meta, dim: int) -> Dims:
    """The factors of `x`, but for `dim` where it is of another size."""
    return tuple(
        () if at == dim and meta.shape[at] != x.shape[at] else each
        for at, each in enumerate(dims_of(meta.ndim))
    )


def _whole(ndim: int, dims: tuple[int, ...]) -> frozenset[str]:
    return frozenset(f for at, each in enumerate(dims_of(ndim)) for f in each if at in dims)


def _modes(call: Call) -> tuple[Mode, ...]:
    name, results = base_name(call.op), len(call.results)
    if not all(same_numbers(call, at) for at in range(len(call.operands))):
        return ()
    if name == "diff":
        return linear(tuple(range(len(call.operands))))
    if name in LINEAR:
        return linear(0, results=results)
    return kinds(0, {"product": "product"}) if name == "cumprod" else ()


def masked_softmax(call: Call) -> Rule:
    """A mask is for a square of the last dims (type 0), for batch and last dim (1), or for all."""
    x, mask = call.operands
    given, kind = call.get("dim"), call.get("mask_type")
    factors = masked = dims_of(x.ndim)
    dims: tuple[int, ...] = (wrap(-1 if given is None else given, x.ndim),)
    if kind in (0, 1) and mask.ndim < x.ndim:
        # The kernel asks for as many rows as columns.
        dims = (x.ndim - 2, x.ndim - 1)
        masked = factors[-2:] if kind == 0 else (factors[0], factors[-1])
    return Rule((factors, masked), (factors,), whole=_whole(x.ndim, dims), local=OfSome())


def segment_reduce(call: Call) -> Rule:
    """The dim of the segments is whole; others are free, leading ones as the lengths have them."""
    x, axis = call.operands[0], wrap(call.get("axis"), call.operands[0].ndim)
    factors = dims_of(x.ndim)
    inner = (*factors[:axis], (), *factors[axis + 1 :])
    lengths = ((*factors[:axis], ()),) * (len(call.operands) - 1)
    linear_too = call.get("reduce") in ("sum", "mean") and call.get("initial") is None
    return Rule((factors, *lengths), (inner,), whole=_whole(x.ndim, (axis,)),
                modes=linear(0) if linear_too else (), local=OfSome())  # fmt: skip


def trapezoid(call: Call) -> Rule:
    """The dim is whole; the places, where they are given, are of that dim alone or of all."""
    y, made = call.operands[0], call.results[0]
    assert made is not None
    dim = wrap(call.get("dim"), y.ndim)
    shape, places = y.shape, call.operands[1:]
    if places and places[0].ndim > 1:
        shape = torch.broadcast_shapes(shape, places[0].shape)
        dim += len(shape) - y.ndim
    factors = dims_of(len(shape))
    at = tuple((factors[dim],) if x.ndim == 1 and x.shape[0] == shape[dim]
               else aligned(x.shape, shape, factors) for x in places)  # fmt: skip
    middle = ((),) if made.ndim == len(shape) else ()
    inexact = all(map(is_inexact, (made, *call.operands)))
    return Rule((aligned(y.shape, shape, factors), *at),
                ((*factors[:dim], *middle, *factors[dim + 1 :]),), whole=_whole(len(shape), (dim,)),
                modes=linear(*range(len(call.operands))) if inexact else ())  # fmt: skip


def gradient(call: Call) -> Rule:
    """The dims that differences are taken along are whole, as are the places given for them."""
    x = call.operands[0]
    factors, dims = dims_of(x.ndim), axes_of(call.get("dim"), x.ndim)
    places = tuple(((),) * each.ndim for each in call.operands[1:])
    count = len(call.results)
    return Rule((factors, *places), (factors,) * count, whole=_whole(x.ndim, dims),
                modes=linear(0, results=count) if is_inexact(x) else ())  # fmt: skip


register_rule(*named(*LINEAR, *OTHERS), family="scans")(along)
register_rule(*named("trapezoid", "trapz", "cumulative_trapezoid"), family="scans")(trapezoid)
register_rule(*named("_masked_softmax"), family="scans")(masked_softmax)
register_rule(*named("segment_reduce"), family="scans")(segment_reduce)
register_rule(*named("gradient"), family="scans")(gradient)
