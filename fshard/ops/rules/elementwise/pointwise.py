"""Rules of pointwise operations: all that PyTorch tags as such, and others listed by name.

add, mul, where, exp, relu, comparisons, casts, copy, masked_fill, prelu, type_as, ... Dims that
broadcast have no factor on the smaller operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fshard._torch.operators import OpOverload, OpOverloadPacket, all_op_names, schema_of
from fshard.ops.core.builders import align_factors, dim_factors
from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.elementwise.pointwise_modes import CASTS, SAME, modes_of
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext


def pointwise(call: OpCall) -> Rule:
    """Return the rule of an elementwise operation, `ab,b->ab` of a matrix and a vector.

    Each result dim has a factor, also in every operand that does not broadcast along it.
    """
    results = tuple(_result_dims(meta) for meta in call.results)
    widest = max((meta for meta in call.results if meta is not None), key=lambda m: m.ndim)
    factors = dim_factors(widest.ndim)
    operands = tuple(align_factors(meta.shape, widest.shape, factors) for meta in call.operands)
    return Rule(operands, results, modes=modes_of(call), local=_LOCAL.get(call.op))


def _copied(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """Return the copied values; `copy` itself has no gradient."""
    target, source = args[0], args[1]
    result: torch.Tensor = source.to(target.dtype).expand_as(target).clone()
    return result


_LOCAL = {torch.ops.aten.copy.default: _copied}


def _result_dims(meta: Meta | None) -> Dims | None:
    return None if meta is None else dim_factors(meta.ndim)


NOT_POINTWISE = ("equal", "rrelu")
"""Tagged operations that return a number or draw random values."""


def _tagged() -> Sequence[Any]:
    """Return the overloads of aten and prims that PyTorch tags as pointwise."""
    tagged_ops = []
    for name in all_op_names():
        space, _, op_name = name.partition("::")
        base, _, overload = op_name.partition(".")
        if space not in ("aten", "prims") or base.startswith("_foreach"):
            continue
        packet = getattr(getattr(torch.ops, space), base, None)
        op = getattr(packet, overload or "default", None)
        tagged = isinstance(op, OpOverload) and torch.Tag.pointwise in op.tags
        if tagged and base not in NOT_POINTWISE:
            tagged_ops.append(op)
    return tagged_ops


UNTAGGED = """
    __and__ __lshift__ __or__ __rshift__ __xor__ absolute arccos arccosh arcsin arcsinh arctan
    arctan2 arctanh complex copy.default divide elu_backward fill.Tensor fix floor_divide glu_jvp
    greater greater_equal hardshrink_backward hardsigmoid_backward hardswish hardswish_backward
    hardtanh_backward imag infinitely_differentiable_gelu_backward isclose isreal
    leaky_relu_backward less less_equal log_sigmoid masked_fill mish_backward multiply negative
    not_equal polar real rsub softplus_backward softshrink_backward special_digamma special_erf
    special_erfc special_erfinv special_exp2 special_expit special_expm1 special_gammainc
    special_gammaincc special_gammaln special_i0 special_log1p special_logit special_ndtr
    special_multigammaln special_polygamma special_psi special_round special_sinc special_xlogy
    subtract true_divide where _add_relu _masked_scale _neg_view _neg_view_copy _prelu_kernel
    _prelu_kernel_backward
"""
"""Pointwise operations without the tag: composites, and those with several results."""
PRIMS = """
    abs acos acosh add asin asinh atan atan2 atanh bessel_i0 bessel_i0e bessel_i1 bessel_i1e
    bessel_j0 bessel_j1 bitwise_and bitwise_not bitwise_or bitwise_xor cbrt ceil cos cosh digamma
    div eq erf erf_inv erfc erfcx exp exp2 expm1 fill floor fmax fmin fmod frexp gcd ge gt hypot
    igamma igammac isfinite le lgamma log log10 log1p log2 lt maximum minimum mul ndtri ne neg
    nextafter pow reciprocal remainder round rsqrt shift_left shift_right_arithmetic sign signbit
    sin sinh spherical_bessel_j0 sqrt sub tan tanh trunc zeta
"""


def _listed() -> list[Any]:
    """Return the overloads with tensor arguments of the operations listed by name."""
    listed_ops = [getattr(torch.ops.prims, name).default for name in PRIMS.split()]
    for name in dict.fromkeys((*UNTAGGED.split(), *sorted(SAME), *sorted(CASTS))):
        base, _, overload = name.partition(".")
        for space in (torch.ops.aten, torch.ops.prims):
            packet = getattr(space, base, None)
            if isinstance(packet, OpOverloadPacket):
                overloads_of_name = {
                    overload_name: getattr(packet, overload_name)
                    for overload_name in packet.overloads()
                }
                listed_ops += [
                    op for overload_name, op in overloads_of_name.items()
                    if overload in ("", overload_name) and _takes_tensors(op)
                ]  # fmt: skip
    return listed_ops


def _takes_tensors(op: Any) -> bool:
    return any("Tensor" in str(argument.type) for argument in schema_of(op).arguments)


register_rule(*_tagged(), *_listed())(pointwise)


@register_rule("to.other", "type_as")
def as_other(call: OpCall) -> Rule:
    """Rule of `to.other` and `type_as`: only the dtype of the second tensor is read."""
    dims = dim_factors(call.operands[0].ndim)
    other_dims = ((),) * call.operands[1].ndim
    return Rule((dims, other_dims), (dims,), modes=modes_of(call), unread=frozenset({1}))


@register_rule("prelu")
def prelu(call: OpCall) -> Rule:
    """Rule of `prelu`: one weight for all elements, or one per channel (dim 1)."""
    x, weight = call.operands
    dims = dim_factors(x.ndim)
    channel = dims[1:2] if x.ndim > 1 and weight.shape[-1:] == x.shape[1:2] else ((),)
    return Rule((dims, channel * weight.ndim), (dims,))
