"""What passes unreduced operands of operations on single elements, by the operation's name.

Linear functions pass sums and averages, affine ones averages, rising ones maxima and minima,
falling ones exchange them. What is listed holds for every candidate, minus infinity and NaN too: a
logarithm is no rising function of a maximum of numbers below zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fshard.ops.core.builders import (
    all_modes,
    is_inexact,
    kind_modes,
    linear_modes,
    unread_modes,
)
from fshard.ops.core.call import Meta, OpCall, base_name
from fshard.ops.core.rule import Mode

__all__ = ["CASTS", "SAME", "_extreme", "modes_of"]

RISING = {"max": "max", "min": "min"}
FALLING = {"max": "min", "min": "max"}
Modes = tuple[Mode, ...]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SAME = _words("""
    _conj _conj_copy _conj_physical _lazy_clone alias alias_copy clone conj
    conj_physical contiguous detach detach_copy lift lift_fresh lift_fresh_copy pin_memory positive
    resolve_conj resolve_neg view_of
""")
"""Elements as they are; conjugates of complex ones, of which no maximum is taken."""
LINEAR = _words("""
    _masked_scale _neg_view _neg_view_copy deg2rad imag ldexp neg negative polar rad2deg real
""")
"""Linear in their first tensor."""
RISES = _words("""
    arcsinh arctan asinh atan cbrt ceil celu deg2rad erf exp exp2 expit expm1
    fix floor hardsigmoid hardtanh log_ndtr log_sigmoid logaddexp logaddexp2 logsigmoid ndtr rad2deg
    relu relu6 round selu sigmoid sinh tanh trunc clamp clip maximum minimum
""")
"""Never smaller for a larger operand, as PyTorch rounds them too, in each of their tensors.

A softplus falls at a low threshold.
"""
FALLS = _words("neg negative bitwise_not logical_not erfc erfcx _neg_view _neg_view_copy")
CASTS = _words("""
    _autocast_to_full_precision _autocast_to_reduced_precision _cast_Byte _cast_Char _cast_Double
    _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _to_copy _to_cpu chalf
    convert_element_type device_put to type_as
""")


def modes_of(call: OpCall) -> Modes:
    """The unreduced operands that a call on single elements passes."""
    name = base_name(call.op).rstrip("_").removeprefix("special_")
    n, results = len(call.operands), len(call.results)
    if name in SAME or (name == "real" and not call.operands[0].dtype.is_complex):
        return all_modes(0, results=results)
    if name in CASTS:
        return _cast(call.operands[0], call.results[0], 0)
    if name.endswith("_backward"):
        # Gradients are linear in the gradient that they are of, which comes first.
        return linear_modes(0, results=results)
    if name in _BY_NAME:
        return _BY_NAME[name](call)
    found: Modes = ()
    if name in LINEAR:
        found += linear_modes(0, results=results)
    if name in RISES and results == 1:
        found += tuple(mode for at in range(n) for mode in kind_modes(at, RISING))
    if name in FALLS and _falls(name, call.operands[0].dtype):
        found += kind_modes(0, FALLING)
    return found


def _falls(name: str, dtype: torch.dtype) -> bool:
    """Whether order is turned around: not by the least integer, nor by numbers as booleans."""
    if name == "logical_not":
        return dtype == torch.bool
    return name == "bitwise_not" or dtype.is_floating_point


# -- arithmetic ----------------------------------------------------------------------------


def _alike(call: OpCall, *places: int) -> bool:
    """Whether sums of these operands are sums of the result: integers wrap in their own size."""
    result = call.result
    return is_inexact(result) or all(call.operands[at].dtype == result.dtype for at in places)


def _added(call: OpCall) -> Modes:
    """Sums are linear in both operands together; a constant shifts averages and extremes."""
    n = len(call.operands)
    both = linear_modes((0, 1)) if n == 2 and _alike(call, 0, 1) else ()
    if not is_inexact(call.results[0]):
        return both
    alone = tuple(mode for at in range(n) for mode in linear_modes(at, affine=True))
    return both + alone + (_shifted(call) if n == 1 else ())


def _shifted(call: OpCall) -> Modes:
    """A tensor and a number: of numbers subtracted from one the larger is the smaller."""
    name = base_name(call.op)
    number, tensor = _scalar(call), call.operands[0]
    times = call.get("alpha") if call.has("alpha") else 1
    if not _is_finite(number) or tensor.dtype.is_complex or not is_inexact(tensor):
        return ()
    falls = name == "rsub" or (name in ("sub", "subtract") and not isinstance(call.args[0], Meta))
    if not _is_finite(times) or (falls and name == "rsub" and times <= 0):
        return ()
    return kind_modes(0, FALLING if falls else RISING)


def _scalar(call: OpCall) -> Any:
    """The number among the first two arguments; None where there is none."""
    given = (*call.args, *call.kwargs.values())
    return next((each for each in given[:2] if not isinstance(each, Meta)), None)


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float) and math.isfinite(number)


def _multiplied(call: OpCall) -> Modes:
    """Linear in each operand; a number keeps or turns around the order."""
    places = [at for at in range(len(call.operands)) if _alike(call, at)]
    return linear_modes(*places) + _scaled(call)


def _scaled(call: OpCall) -> Modes:
    number, tensor = _scalar(call), call.operands[0]
    if len(call.operands) > 1 or not is_inexact(tensor) or tensor.dtype.is_complex:
        return ()
    if not _is_finite(number) or number == 0:
        return ()
    return kind_modes(0, RISING if number > 0 else FALLING)


def _divided(call: OpCall) -> Modes:
    """Linear in what is divided."""
    whole = call.has("rounding_mode") and call.get("rounding_mode") is not None
    if whole or not is_inexact(call.results[0]) or not isinstance(call.args[0], Meta):
        return ()
    return linear_modes(0) + _scaled(call)


def _product_added(call: OpCall) -> Modes:
    """`self + t1 * t2`: linear in the first together with one of the factors."""
    exact = not is_inexact(call.results[0])
    both = linear_modes((0, 1), (0, 2)) if _alike(call, 0, 1, 2) else ()
    return (
        both if exact else both + tuple(m for at in range(3) for m in linear_modes(at, affine=True))
    )


def _quotient_added(call: OpCall) -> Modes:
    return linear_modes((0, 1)) + linear_modes(0, affine=True) + linear_modes(1, affine=True)


def _interpolated(call: OpCall) -> Modes:
    """Linear in both ends together, affine in each, and in weights."""
    places = range(len(call.operands))
    return linear_modes((0, 1)) + tuple(m for at in places for m in linear_modes(at, affine=True))


def _paired(call: OpCall) -> Modes:
    """Real and imaginary parts: linear in both together, affine in each."""
    return linear_modes((0, 1)) + linear_modes(0, affine=True) + linear_modes(1, affine=True)


# -- choices -------------------------------------------------------------------------------


def _beside(place: int, constant: Any) -> Modes:
    """Elements of an operand beside a constant: what the reduction leaves of the constant is it."""
    passing = ["avg", "max", "min"]
    if isinstance(constant, int | float):
        passing += ["sum"] * (constant == 0) + ["product"] * (constant in (0, 1))
    return kind_modes(place, {kind: kind for kind in passing})


def _where(call: OpCall) -> Modes:
    if len(call.operands) == 3:
        return all_modes(1, 2) + _beside(1, None) + _beside(2, None)
    if len(call.operands) == 2:
        return _beside(1, next(each for each in call.args[1:] if not isinstance(each, Meta)))
    return ()


def _masked(call: OpCall) -> Modes:
    if len(call.operands) == 2:
        return _beside(0, call.get("value"))
    return all_modes(0, 2) + _beside(0, None) + _beside(2, None)


def _extreme(kind: str) -> Callable[[OpCall], Modes]:
    def both(call: OpCall) -> Modes:
        alone = tuple(mode for at in range(len(call.operands)) for mode in kind_modes(at, RISING))
        return alone + ((Mode((0, 1), kind, (kind,)),) if len(call.operands) == 2 else ())

    return both


def _logical(kind: str) -> Callable[[OpCall], Modes]:
    """Of booleans `or` is a maximum and `and` a minimum."""

    def both(call: OpCall) -> Modes:
        if any(each.dtype != torch.bool for each in call.operands):
            return ()
        return _extreme(kind)(call)

    return both


# -- copies --------------------------------------------------------------------------------


def _cast(source: Meta, made: Meta | None, place: int) -> Modes:
    """Casts to inexact numbers of no much smaller range are linear up to rounding, and rising."""
    if made is None or source.dtype == made.dtype:
        return all_modes(place)
    real = not (source.dtype.is_complex or made.dtype.is_complex)
    rises = kind_modes(place, RISING) if real and is_inexact(made) else ()
    if not (is_inexact(source) and is_inexact(made)):
        return rises
    if source.dtype.is_complex and not made.dtype.is_complex:
        return linear_modes(place)
    wide = torch.finfo(made.dtype).max
    return rises + (
        linear_modes(place) if wide > 1e38 or wide >= torch.finfo(source.dtype).max else ()
    )


def _overwritten(call: OpCall) -> Modes:
    """What is written over does not matter; what is written is moved, and cast."""
    written = _cast(call.operands[1], call.results[0], 1) if len(call.operands) > 1 else ()
    return unread_modes(0) + written


def _absolute(call: OpCall) -> Modes:
    return kind_modes(0, {"product": "product"})


def _leaky(call: OpCall) -> Modes:
    return kind_modes(0, RISING) if call.get("negative_slope") > 0 else ()


def _elu(call: OpCall) -> Modes:
    rises = all(call.get(name) > 0 for name in ("alpha", "scale", "input_scale"))
    return kind_modes(0, RISING) if rises else ()


def _shrunk(call: OpCall) -> Modes:
    return kind_modes(0, RISING) if call.get("lambd") >= 0 else ()


def _threshold(call: OpCall) -> Modes:
    return kind_modes(0, RISING) if call.get("value") <= call.get("threshold") else ()


def _compared(first: str, second: str) -> Callable[[OpCall], Modes]:
    """Comparisons that are true where they are of all candidates, and false of what is no number.

    Of the least of all, or of the greatest; true where any candidate's is, they are not of NaN.
    """

    def both(call: OpCall) -> Modes:
        sides = zip((first, second), range(len(call.operands)), strict=False)
        return tuple(mode for kind, at in sides for mode in kind_modes(at, {kind: "min"}))

    return both


def _names(
    words: str, modes: Callable[[OpCall], Modes]
) -> Iterable[tuple[str, Callable[[OpCall], Modes]]]:
    return ((word, modes) for word in words.split())


_BY_NAME = dict((
    *_names("add sub subtract rsub", _added),
    *_names("mul multiply", _multiplied),
    *_names("div divide true_divide", _divided),
    *_names("addcmul", _product_added),
    *_names("addcdiv", _quotient_added),
    *_names("lerp", _interpolated),
    *_names("complex", _paired),
    *_names("where", _where),
    *_names("masked_fill", _masked),
    *_names("maximum max clamp_min", _extreme("max")),
    *_names("minimum min clamp_max", _extreme("min")),
    *_names("ge gt greater greater_equal", _compared("min", "max")),
    *_names("le lt less less_equal", _compared("max", "min")),
    *_names("elu", _elu),
    *_names("hardshrink softshrink", _shrunk),
    *_names("threshold", _threshold),
    *_names("logical_or bitwise_or __or", _logical("max")),
    *_names("logical_and bitwise_and __and", _logical("min")),
    *_names("copy fill copy_to", _overwritten),
    *_names("abs absolute", _absolute),
    *_names("leaky_relu", _leaky),
))  # fmt: skip
