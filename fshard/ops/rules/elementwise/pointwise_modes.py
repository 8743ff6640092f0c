"""Modes of pointwise operations: the unreduced operands that they accept, by operation name.

Linear functions accept sums and averages, affine ones averages; increasing functions accept
maxima and minima, decreasing ones exchange them. A listed mode must hold for every candidate
value, minus infinity and NaN included: the logarithm is not increasing below zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import all_modes, kind_modes, linear_modes, unread_modes
from fshard.ops.core.call import Meta, OpCall, base_name
from fshard.ops.core.rule import Mode

INCREASING = {"max": "max", "min": "min"}
DECREASING = {"max": "min", "min": "max"}
Modes = tuple[Mode, ...]


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


SAME = _word_set("""
    _conj _conj_copy _conj_physical _lazy_clone alias alias_copy clone conj
    conj_physical contiguous detach detach_copy lift lift_fresh lift_fresh_copy pin_memory positive
    resolve_conj resolve_neg view_of
""")
"""Copies of elements; conjugates of complex values, which have no maximum."""
LINEAR = _word_set("""
    _masked_scale _neg_view _neg_view_copy deg2rad imag ldexp neg negative polar rad2deg real
""")
"""Operations linear in their first tensor."""
NON_DECREASING = _word_set("""
    arcsinh arctan asinh atan cbrt ceil celu deg2rad erf exp exp2 expit expm1
    fix floor hardsigmoid hardtanh log_ndtr log_sigmoid logaddexp logaddexp2 logsigmoid ndtr rad2deg
    relu relu6 round selu sigmoid sinh tanh trunc clamp clip maximum minimum
""")
"""Operations that are non-decreasing in each tensor, also as PyTorch rounds them.

Softplus is missing: it decreases at a low threshold.
"""
NON_INCREASING = _word_set(
    "neg negative bitwise_not logical_not erfc erfcx _neg_view _neg_view_copy"
)
CASTS = _word_set("""
    _autocast_to_full_precision _autocast_to_reduced_precision _cast_Byte _cast_Char _cast_Double
    _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _to_copy _to_cpu chalf
    convert_element_type device_put to type_as
""")


def modes_of(call: OpCall) -> Modes:
    """Return the modes of a pointwise call; one of numbers alone has none."""
    if not call.operands:
        return ()
    name = base_name(call.op).rstrip("_").removeprefix("special_")
    count, results = len(call.operands), len(call.results)
    if name in SAME or (name == "real" and not call.operands[0].dtype.is_complex):
        return all_modes(0, results=results)
    if name in CASTS:
        return _cast(call.operands[0], call.results[0], 0)
    if name.endswith("_backward"):
        # Gradients are linear in the incoming gradient, the first operand.
        return linear_modes(0, results=results)
    if name in _BY_NAME:
        return _BY_NAME[name](call)
    modes: Modes = ()
    if name in LINEAR:
        modes += linear_modes(0, results=results)
    if name in NON_DECREASING and results == 1:
        modes += tuple(mode for i in range(count) for mode in kind_modes(i, INCREASING))
    if name in NON_INCREASING and _is_decreasing(name, call.operands[0].dtype):
        modes += kind_modes(0, DECREASING)
    return modes


def _is_decreasing(name: str, dtype: torch.dtype) -> bool:
    """Return True if the operation is decreasing for the dtype, without integer overflow."""
    if name == "logical_not":
        return dtype == torch.bool
    return name == "bitwise_not" or dtype.is_floating_point


# -- arithmetic ----------------------------------------------------------------------------


def _same_dtype(call: OpCall, *operands: int) -> bool:
    """Return True if the operands have the result's dtype, so that integers wrap the same way."""
    result = call.result
    return is_inexact(result) or all(call.operands[i].dtype == result.dtype for i in operands)


def _added(call: OpCall) -> Modes:
    """Return the modes of a sum: linear in both operands, affine in each."""
    count = len(call.operands)
    together = linear_modes((0, 1)) if count == 2 and _same_dtype(call, 0, 1) else ()
    if not is_inexact(call.results[0]):
        return together
    alone = tuple(mode for i in range(count) for mode in linear_modes(i, affine=True))
    return together + alone + (_shifted(call) if count == 1 else ())


def _shifted(call: OpCall) -> Modes:
    """Return the modes of a tensor plus or minus a number; `1 - x` is decreasing."""
    name = base_name(call.op)
    number, tensor = _scalar(call), call.operands[0]
    alpha = call.get("alpha") if call.has("alpha") else 1
    if not _is_finite(number) or tensor.dtype.is_complex or not is_inexact(tensor):
        return ()
    is_decreasing = name == "rsub" or (
        name in ("sub", "subtract") and not isinstance(call.args[0], Meta)
    )
    if not _is_finite(alpha) or (is_decreasing and name == "rsub" and alpha <= 0):
        return ()
    return kind_modes(0, DECREASING if is_decreasing else INCREASING)


def _scalar(call: OpCall) -> Any:
    """Return the number among the first two arguments, None without one."""
    values = (*call.args, *call.kwargs.values())
    return next((value for value in values[:2] if not isinstance(value, Meta)), None)


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float) and math.isfinite(number)


def _multiplied(call: OpCall) -> Modes:
    """Return the modes of a product: linear in each operand; a number may reverse the order."""
    operands = [i for i in range(len(call.operands)) if _same_dtype(call, i)]
    return linear_modes(*operands) + _scaled(call)


def _scaled(call: OpCall) -> Modes:
    number, tensor = _scalar(call), call.operands[0]
    if len(call.operands) > 1 or not is_inexact(tensor) or tensor.dtype.is_complex:
        return ()
    if not _is_finite(number) or number == 0:
        return ()
    return kind_modes(0, INCREASING if number > 0 else DECREASING)


def _divided(call: OpCall) -> Modes:
    """Return the modes of a quotient: linear in the dividend."""
    rounds = call.has("rounding_mode") and call.get("rounding_mode") is not None
    if rounds or not is_inexact(call.results[0]) or not isinstance(call.args[0], Meta):
        return ()
    return linear_modes(0) + _scaled(call)


def _product_added(call: OpCall) -> Modes:
    """Return the modes of `self + t1 * t2`: linear in `self` together with one factor."""
    exact = not is_inexact(call.results[0])
    together = linear_modes((0, 1), (0, 2)) if _same_dtype(call, 0, 1, 2) else ()
    return (
        together
        if exact
        else together + tuple(m for i in range(3) for m in linear_modes(i, affine=True))
    )


def _interpolated(call: OpCall) -> Modes:
    """Return the modes of `lerp`: linear in both ends together, affine in each and in weights."""
    operands = range(len(call.operands))
    return linear_modes((0, 1)) + tuple(m for i in operands for m in linear_modes(i, affine=True))


def _paired(call: OpCall) -> Modes:
    """Return the modes of `complex` and `addcdiv`: linear in two operands, affine in each."""
    return linear_modes((0, 1)) + linear_modes(0, affine=True) + linear_modes(1, affine=True)


# -- choices -------------------------------------------------------------------------------


def _beside(operand: int, constant: Any) -> Modes:
    """Return the modes of an operand mixed with a constant that the reduction leaves as it is."""
    reductions = ["avg", "max", "min"]
    if isinstance(constant, int | float):
        reductions += ["sum"] * (constant == 0) + ["product"] * (constant in (0, 1))
    return kind_modes(operand, {kind: kind for kind in reductions})


def _where(call: OpCall) -> Modes:
    if len(call.operands) == 3:
        return all_modes(1, 2) + _beside(1, None) + _beside(2, None)
    if len(call.operands) == 2:
        return _beside(1, next(value for value in call.args[1:] if not isinstance(value, Meta)))
    return ()


def _masked(call: OpCall) -> Modes:
    if len(call.operands) == 2:
        return _beside(0, call.get("value"))
    return all_modes(0, 2) + _beside(0, None) + _beside(2, None)


def _extreme(kind: str) -> Callable[[OpCall], Modes]:
    def modes(call: OpCall) -> Modes:
        alone = tuple(mode for i in range(len(call.operands)) for mode in kind_modes(i, INCREASING))
        return alone + ((Mode((0, 1), kind, (kind,)),) if len(call.operands) == 2 else ())

    return modes


def _logical(kind: str) -> Callable[[OpCall], Modes]:
    """Return the modes of booleans: `or` is a maximum, `and` a minimum."""

    def modes(call: OpCall) -> Modes:
        if any(meta.dtype != torch.bool for meta in call.operands):
            return ()
        return _extreme(kind)(call)

    return modes


# -- copies --------------------------------------------------------------------------------


def _cast(source: Meta, result: Meta | None, operand: int) -> Modes:
    """Return the modes of a cast: increasing, and linear unless the range shrinks."""
    if result is None or source.dtype == result.dtype:
        return all_modes(operand)
    real = not (source.dtype.is_complex or result.dtype.is_complex)
    increasing = kind_modes(operand, INCREASING) if real and is_inexact(result) else ()
    if not (is_inexact(source) and is_inexact(result)):
        return increasing
    if source.dtype.is_complex and not result.dtype.is_complex:
        return linear_modes(operand)
    max_value = torch.finfo(result.dtype).max
    return increasing + (
        linear_modes(operand)
        if max_value > 1e38 or max_value >= torch.finfo(source.dtype).max
        else ()
    )


def _overwritten(call: OpCall) -> Modes:
    """Return the modes of `copy` and `fill`: the overwritten values are not read."""
    written = _cast(call.operands[1], call.results[0], 1) if len(call.operands) > 1 else ()
    return unread_modes(0) + written


def _absolute(call: OpCall) -> Modes:
    return kind_modes(0, {"product": "product"})


def _leaky(call: OpCall) -> Modes:
    return kind_modes(0, INCREASING) if call.get("negative_slope") > 0 else ()


def _elu(call: OpCall) -> Modes:
    is_increasing = all(call.get(name) > 0 for name in ("alpha", "scale", "input_scale"))
    return kind_modes(0, INCREASING) if is_increasing else ()


def _shrunk(call: OpCall) -> Modes:
    return kind_modes(0, INCREASING) if call.get("lambd") >= 0 else ()


def _threshold(call: OpCall) -> Modes:
    return kind_modes(0, INCREASING) if call.get("value") <= call.get("threshold") else ()


def _compared(first: str, second: str) -> Callable[[OpCall], Modes]:
    """Return the modes of a comparison that is true if it is true of every candidate.

    `first` and `second` are the reductions of the two sides under which that holds; a comparison
    with NaN is false.
    """

    def modes(call: OpCall) -> Modes:
        sides = zip((first, second), range(len(call.operands)), strict=False)
        return tuple(mode for kind, i in sides for mode in kind_modes(i, {kind: "min"}))

    return modes


def _entries(
    words: str, modes: Callable[[OpCall], Modes]
) -> Iterable[tuple[str, Callable[[OpCall], Modes]]]:
    return ((word, modes) for word in words.split())


_BY_NAME = dict((
    *_entries("add sub subtract rsub", _added),
    *_entries("mul multiply", _multiplied),
    *_entries("div divide true_divide", _divided),
    *_entries("addcmul", _product_added),
    *_entries("addcdiv", _paired),
    *_entries("lerp", _interpolated),
    *_entries("complex", _paired),
    *_entries("where", _where),
    *_entries("masked_fill", _masked),
    *_entries("maximum max clamp_min", _extreme("max")),
    *_entries("minimum min clamp_max", _extreme("min")),
    *_entries("ge gt greater greater_equal", _compared("min", "max")),
    *_entries("le lt less less_equal", _compared("max", "min")),
    *_entries("elu", _elu),
    *_entries("hardshrink softshrink", _shrunk),
    *_entries("threshold", _threshold),
    *_entries("logical_or bitwise_or __or", _logical("max")),
    *_entries("logical_and bitwise_and __and", _logical("min")),
    *_entries("copy fill copy_to", _overwritten),
    *_entries("abs absolute", _absolute),
    *_entries("leaky_relu", _leaky),
))  # fmt: skip
