"""Rules of operations that treat every element alone: all of PyTorch's, by their tag.

Dims that broadcast have no factor on the smaller operand. What passes unreduced operands is listed:
linear functions pass sums and averages, affine ones averages, monotone ones maxima and minima.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from fshard.ops.build import aligned, dims_of, is_inexact, kinds, linear
from fshard.ops.call import Call, Meta
from fshard.ops.registry import register_rule
from fshard.ops.rule import Dims, Mode, Rule

__all__ = ["pointwise"]

EQUAL = {kind: kind for kind in ("sum", "avg", "max", "min", "product")}
RISING = {"max": "max", "min": "min"}
FALLING = {"max": "min", "min": "max"}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LINEAR = _words("""
    _conj conj conj_physical _neg_view deg2rad imag neg negative positive rad2deg real
    resolve_conj resolve_neg view_as_real view_as_complex
""")
"""Linear in the one tensor that they have."""
SAME = _words("alias alias_copy clone contiguous detach detach_copy lift_fresh lift_fresh_copy")
RISES = _words("""
    arcsinh arctan asinh atan cbrt ceil celu elu erf exp exp2 expit expm1 floor hardsigmoid
    hardtanh heaviside leaky_relu log_sigmoid logsigmoid nan_to_num relu relu6 round selu sgn
    sigmoid sign sinh softplus special_expit special_expm1 special_exp2 special_erf special_ndtr
    tanh threshold trunc fix sqrt log log2 log10 log1p
""") - _words("nan_to_num threshold leaky_relu elu celu heaviside sgn")
"""Never smaller for a larger operand, as PyTorch rounds them too."""
FALLS = _words("neg negative bitwise_not logical_not")


def pointwise(call: Call) -> Rule:
    """One factor for every dim of the result, on all operands that do not broadcast there."""
    results = tuple(_result_dims(each) for each in call.results)
    widest = max((each for each in call.results if each is not None), key=lambda m: m.ndim)
    factors = dims_of(widest.ndim)
    operands = tuple(aligned(each.shape, widest.shape, factors) for each in call.operands)
    return Rule(operands, results, modes=_modes(call))


def _result_dims(meta: Meta | None) -> Dims | None:
    return None if meta is None else dims_of(meta.ndim)


def _modes(call: Call) -> tuple[Mode, ...]:
    name = call.op._schema.name.partition("::")[2].rstrip("_")
    results, n = len(call.results), len(call.operands)
    inexact = is_inexact(call.results[0])
    if name in SAME:
        return kinds(0, dict(EQUAL), results)
    if name in LINEAR:
        return linear(0, results=results) + (kinds(0, FALLING) if name in FALLS else ())
    if name in RISES:
        return kinds(0, RISING)
    if name in FALLS:
        return kinds(0, FALLING)
    if name in ("add", "sub", "subtract", "rsub"):
        return _added(call, name, n)
    if name in ("mul", "multiply") and inexact:
        return linear(*range(n), results=results)
    if name in ("div", "divide", "true_divide") and inexact and _plain_division(call):
        return linear(0) if isinstance(call.args[0], Meta) else ()
    if name in ("maximum", "minimum", "fmax", "fmin", "max", "min") and n == 2:
        kind = "max" if "max" in name else "min"
        return kinds(0, {kind: kind}) + kinds(1, {kind: kind}) + (Mode((0, 1), kind, (kind,)),)
    if name in ("where",) and n == 3:
        return tuple(Mode((1, 2), kind, (kind,)) for kind in EQUAL)
    if name in ("_to_copy", "to", "type_as"):
        return _cast(call)
    return ()


def _added(call: Call, name: str, n: int) -> tuple[Mode, ...]:
    """Sums are linear in both operands together; a constant shifts averages and extremes."""
    if not is_inexact(call.results[0]):
        return linear((0, 1)) if n == 2 else ()
    both = linear((0, 1)) if n == 2 else ()
    return both + tuple(m for at in range(n) for m in linear(at, affine=True))


def _plain_division(call: Call) -> bool:
    return not call.has("rounding_mode") or call.get("rounding_mode") is None


def _cast(call: Call) -> tuple[Mode, ...]:
    """Casts to inexact numbers of at least the same range are linear up to rounding."""
    source, made = call.operands[0], call.results[0]
    if made is None or not (is_inexact(source) and is_inexact(made)):
        return ()
    return linear(0) if source.dtype.is_complex == made.dtype.is_complex else ()


def _tagged() -> Sequence[Any]:
    """Every overload of aten and prims that PyTorch calls pointwise, and computes something new."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if space not in ("aten", "prims") or base.startswith("_foreach"):
            continue
        packet = getattr(getattr(torch.ops, space), base, None)
        op = getattr(packet, overload or "default", None)
        if isinstance(op, OpOverload) and torch.Tag.pointwise in op.tags:
            found.append(op)
    return found


register_rule(*_tagged(), family="pointwise")(pointwise)
for _name in (*SAME, "_to_copy", "to", "type_as", "where", "real", "imag"):
    _packet = getattr(torch.ops.aten, _name, None)
    if isinstance(_packet, OpOverloadPacket):
        register_rule(_packet, family="pointwise")(pointwise)
