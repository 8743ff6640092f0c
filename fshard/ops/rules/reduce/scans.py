"""Rules of operations along a dim: scans and differences; the decomposition of differences.

cumsum, cumprod, cummax, cummin, logcumsumexp, diff, gradient, trapezoid, segment_reduce, glu.
The dim stays unsharded in the rules, every other may be sharded; softmaxes have the same rule.
Over a sharded dim differences are those of two slices; `block_scans` has the scans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import (
    align_factors,
    all_modes,
    dim_factors,
    kind_modes,
    linear_modes,
    normalize_dims,
    wrap_dim,
)
from fshard.ops.core.call import Meta, OpCall, base_name
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.rules.reduce.reductions import ZerosIfEmpty, functional_overloads, keeps_values

LINEAR = (
    "cumsum", "diff", "_softmax_backward_data", "_log_softmax_backward_data", "glu_backward",
)  # fmt: skip
"""Operations linear in their first operand; `diff` in all operands together."""
OTHERS = (
    "cumprod", "cummax", "cummin", "logcumsumexp", "_logcumsumexp", "softmax", "log_softmax",
    "_softmax", "_log_softmax", "_safe_softmax", "special_softmax", "special_log_softmax", "glu",
)  # fmt: skip


def along_dim(call: OpCall) -> Rule:
    """Rule `ab->ab` of an operation along `b`, which stays unsharded, on tensors of one shape."""
    x = call.operands[0]
    dim = wrap_dim(call.get("dim"), x.ndim)
    if base_name(call.op) == "diff" and call.get("n") == 0:
        return Rule(tuple(_dims(meta, x, dim) for meta in call.operands), (dim_factors(x.ndim),),
                    modes=all_modes(0))  # fmt: skip
    return Rule(tuple(_dims(meta, x, dim) for meta in call.operands),
                tuple(meta and _dims(meta, x, dim) for meta in call.results),
                unsharded=_unsharded(x.ndim, (dim,)), modes=_modes(call))  # fmt: skip


def _dims(meta: Meta, x: Meta, dim: int) -> Dims:
    """Return the factors of `x`, without that of `dim` if it has another size."""
    return tuple(
        () if i == dim and meta.shape[i] != x.shape[i] else factors
        for i, factors in enumerate(dim_factors(meta.ndim))
    )


def _unsharded(ndim: int, dims: tuple[int, ...]) -> frozenset[str]:
    return frozenset(f for i, factors in enumerate(dim_factors(ndim)) for f in factors if i in dims)


def _modes(call: OpCall) -> tuple[Mode, ...]:
    name, results = base_name(call.op), len(call.results)
    if not all(keeps_values(call, i) for i in range(len(call.operands))):
        return ()
    if name == "diff":
        return linear_modes(tuple(range(len(call.operands))))
    if name in LINEAR:
        return linear_modes(0, results=results)
    return kind_modes(0, {"product": "product"}) if name == "cumprod" else ()


def segment_reduce(call: OpCall) -> Rule:
    """Rule of `segment_reduce`: the segmented dim stays unsharded."""
    x, axis = call.operands[0], wrap_dim(call.get("axis"), call.operands[0].ndim)
    factors = dim_factors(x.ndim)
    result = (*factors[:axis], (), *factors[axis + 1 :])
    lengths = ((*factors[:axis], ()),) * (len(call.operands) - 1)
    reduce, modes = call.get("reduce"), tuple[Mode, ...]()
    if reduce in ("max", "min"):
        modes = kind_modes(0, {reduce: reduce})
    elif reduce in ("sum", "mean") and call.get("initial") is None:
        modes = linear_modes(0)
    return Rule((factors, *lengths), (result,), unsharded=_unsharded(x.ndim, (axis,)), modes=modes,
                no_grad=frozenset(modes if reduce in ("max", "min") else ()),
                local=ZerosIfEmpty())  # fmt: skip


def trapezoid(call: OpCall) -> Rule:
    """Rule `ab,b->a` of `trapezoid`: `b` stays unsharded; positions may also have all dims."""
    y, result = call.operands[0], call.result
    dim = wrap_dim(call.get("dim"), y.ndim)
    shape, positions = y.shape, call.operands[1:]
    if positions and positions[0].ndim > 1:
        shape = torch.broadcast_shapes(shape, positions[0].shape)
        dim += len(shape) - y.ndim
    factors = dim_factors(len(shape))
    position_dims = tuple(
        (factors[dim],)
        if x.ndim == 1 and x.shape[0] == shape[dim]
        else align_factors(x.shape, shape, factors)
        for x in positions
    )
    middle = ((),) if result.ndim == len(shape) else ()
    inexact = all(map(is_inexact, (result, *call.operands)))
    return Rule((align_factors(y.shape, shape, factors), *position_dims),
                ((*factors[:dim], *middle, *factors[dim + 1 :]),),
                unsharded=_unsharded(len(shape), (dim,)),
                modes=linear_modes(*range(len(call.operands))) if inexact else ())  # fmt: skip


def gradient(call: OpCall) -> Rule:
    """Rule of `gradient`: the differentiated dims and their positions stay unsharded."""
    x = call.operands[0]
    factors, dims = dim_factors(x.ndim), normalize_dims(call.get("dim"), x.ndim)
    positions = tuple(((),) * meta.ndim for meta in call.operands[1:])
    count = len(call.results)
    return Rule((factors, *positions), (factors,) * count, unsharded=_unsharded(x.ndim, dims),
                modes=linear_modes(0, results=count) if is_inexact(x) else ())  # fmt: skip


register_rule(*functional_overloads(*LINEAR, *OTHERS))(along_dim)
register_rule(*functional_overloads("trapezoid", "trapz", "cumulative_trapezoid"))(trapezoid)
register_rule(*functional_overloads("segment_reduce"))(segment_reduce)
register_rule(*functional_overloads("gradient"))(gradient)


# -- differences ----------------------------------------------------------------------------


@register_decomposition("diff")
def _diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None,
          append: Tensor | None = None) -> Tensor:  # fmt: skip
    pieces = [x for x in (prepend, x, append) if x is not None] if n else [x]
    result = torch.cat(pieces, dim) if len(pieces) > 1 else x
    for _ in range(min(n, result.shape[dim])):
        size = result.shape[dim] - 1
        after, before = result.narrow(dim, 1, size), result.narrow(dim, 0, size)
        result = after ^ before if x.dtype == torch.bool else after - before
    return result
