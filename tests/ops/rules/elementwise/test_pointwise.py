"""Rules of pointwise operations: broadcast dims, modes of unreduced operands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fshard.ops.core.registry import row_of
from tests.helpers.ops.op_checks import call_with, check_call

A = torch.ops.aten


def tensor(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


X, Y, ROW = tensor(4, 6), tensor(4, 6).flip(0), tensor(6)
WHOLE, MASK = torch.arange(24).reshape(4, 6) - 12, X > 0
NUMBER = torch.tensor(3.0, dtype=torch.float64)
CASES: dict[str, tuple[Any, ...]] = {
    "add": (A.add.Tensor, X, ROW),
    "add integers": (A.add.Tensor, WHOLE, WHOLE),
    "add integers of two sizes": (A.add.Tensor, WHOLE, WHOLE.int()),
    "add a number": (A.add.Scalar, X, 2.0),
    "add infinity": (A.add.Scalar, X, float("inf")),
    "subtract from a number": (A.rsub.Scalar, X, 2.0),
    "broadcast both": (A.sub.Tensor, tensor(1, 6), tensor(4, 1)),
    "broadcast no elements": (A.add.Tensor, tensor(0, 6), ROW),
    "no dims": (A.add.Tensor, tensor(), X),
    "mul": (A.mul.Tensor, X, ROW),
    "mul integers": (A.mul.Tensor, WHOLE, WHOLE),
    "mul by less than zero": (A.mul.Scalar, X, -2.0),
    "mul by zero": (A.mul.Scalar, X, 0.0),
    "mul booleans and integers": (A.mul.Tensor, MASK, WHOLE),
    "div": (A.div.Tensor, X, ROW),
    "div_": (A.div_.Scalar, X, -2.0),
    "div rounded": (A.div.Tensor_mode, X, ROW),
    "addcmul": (A.addcmul.default, X, Y, ROW),
    "addcmul of integers": (A.addcmul.default, WHOLE, WHOLE, WHOLE),
    "addcdiv": (A.addcdiv.default, X, Y, ROW),
    "lerp": (A.lerp.Tensor, X, Y, ROW),
    "lerp by a number": (A.lerp.Scalar, X, Y, 0.3),
    "complex": (A.complex.default, X, Y),
    "where": (A.where.self, MASK, X, Y),
    "where beside zero": (A.where.ScalarOther, MASK, X, 0.0),
    "where beside a number": (A.where.ScalarSelf, MASK, 7.0, X),
    "masked_fill": (A.masked_fill.Scalar, X, MASK, 5.0),
    "masked_fill by zero": (A.masked_fill_.Scalar, X, MASK, 0.0),
    "masked_fill of integers by one": (A.masked_fill.Scalar, WHOLE, MASK, 1),
    "masked_fill by a tensor": (A.masked_fill.Tensor, X, MASK, NUMBER),
    "maximum": (A.maximum.default, X, Y),
    "minimum of integers": (A.minimum.default, WHOLE, -WHOLE),
    "clamp": (A.clamp.default, X, -0.5, 0.5),
    "clamp between tensors": (A.clamp.Tensor, X, Y - 0.5, ROW + 0.5),
    "or": (A.logical_or.default, MASK, Y > 0),
    "and": (A.bitwise_and.Tensor, MASK, Y > 0),
    "or of integers": (A.logical_or.default, WHOLE, WHOLE),
    "not": (A.logical_not.default, MASK),
    "neg": (A.neg.default, X),
    "abs": (A.abs.default, X),
    "relu_": (A.relu_.default, X),
    "sqrt": (A.sqrt.default, X),
    "exp": (A.exp.default, X),
    "sign": (A.sign.default, X),
    "leaky_relu": (A.leaky_relu.default, X),
    "gelu": (A.gelu.default, X),
    "gelu_backward": (A.gelu_backward.default, Y, X),
    "prelu": (A.prelu.default, X, tensor(6)),
    "prelu of one": (A.prelu.default, X, tensor(1)),
    "clone": (A.clone.default, X),
    "conj": (A.conj_physical.default, torch.complex(X, Y)),
    "real": (A.real.default, torch.complex(X, Y)),
    "fill by a tensor": (A.fill_.Tensor, X, NUMBER),
    "to the same dtype": (A.to.dtype, WHOLE, torch.int64),
    "frexp": (A.frexp.Tensor, X),
    "isclose": (A.isclose.default, X, Y),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_are_right(name: str) -> None:
    op, *args = CASES[name]
    kwargs = {"rounding_mode": "floor"} if name == "div rounded" else {}
    assert check_call(op, *args, **kwargs) == []


@pytest.mark.parametrize("into", [X, WHOLE])
def test_copies_into_another_tensor(into: torch.Tensor) -> None:
    assert check_call(A.copy_.default, into, X.round(), grad=False) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.complex128])
def test_casts_equal_one_device(dtype: torch.dtype) -> None:
    assert check_call(A._to_copy.default, X.round(), dtype=dtype, grad=False) == []


def test_casts_to_the_dtype_of_another_tensor() -> None:
    inputs = (X.round().float(), tensor(3))
    assert check_call(A.type_as.default, *inputs, grad=False) == []
    assert str(call_with(A.type_as.default, inputs, {})[1]) == (
        "d0 d1,1->d0 d1  {unreduced 0 max; unreduced 0 min; unreduced 0 sum; unreduced 0 avg}"
    )


SUMS = "unreduced 0 sum; unreduced 0 avg"
TEXTS = {
    "add": "d0 d1,d1->d0 d1  {unreduced 0+1 sum; unreduced 0+1 avg; unreduced 0 avg; "
           "unreduced 1 avg}",
    "add integers": "d0 d1,d0 d1->d0 d1  {unreduced 0+1 sum; unreduced 0+1 avg}",
    "add integers of two sizes": "d0 d1,d0 d1->d0 d1",
    "add a number": "d0 d1->d0 d1  {unreduced 0 avg; unreduced 0 max; unreduced 0 min}",
    "add infinity": "d0 d1->d0 d1  {unreduced 0 avg}",
    "subtract from a number":
        "d0 d1->d0 d1  {unreduced 0 avg; unreduced 0 max -> min; unreduced 0 min -> max}",
    "mul by zero": f"d0 d1->d0 d1  {{{SUMS}}}",
    "mul by less than zero":
        f"d0 d1->d0 d1  {{{SUMS}; unreduced 0 max -> min; unreduced 0 min -> max}}",
    "div rounded": "d0 d1,d1->d0 d1",
    "masked_fill":
        "d0 d1,d0 d1->d0 d1  {unreduced 0 avg; unreduced 0 max; unreduced 0 min}",
    "masked_fill by zero":
        "d0 d1,d0 d1->d0 d1  {unreduced 0 avg; unreduced 0 max; unreduced 0 min; "
        "unreduced 0 sum; unreduced 0 product}",
    "sqrt": "d0 d1->d0 d1",
    "exp": "d0 d1->d0 d1  {unreduced 0 max; unreduced 0 min}",
    "sign": "d0 d1->d0 d1",
    "gelu_backward": f"d0 d1,d0 d1->d0 d1  {{{SUMS}}}",
    "prelu": "d0 d1,d1->d0 d1",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_rule_texts(name: str) -> None:
    op, *args = CASES[name]
    kwargs = {"rounding_mode": "floor"} if name == "div rounded" else {}
    assert str(call_with(op, args, kwargs)[1]) == TEXTS[name]


ENDS = torch.tensor(
    [math.nan, -math.inf, -1e30, -1.5, -0.0, 0.0, 0.5, 1e30, math.inf], dtype=torch.float64
)
RISING = [
    "asinh", "atan", "ceil", "celu", "erf", "exp", "exp2", "expm1", "floor", "hardsigmoid",
    "hardtanh", "log_sigmoid", "relu", "relu6", "round", "selu", "sigmoid", "sinh",
    "special_log_ndtr", "special_ndtr", "tanh", "trunc",
]  # fmt: skip


@pytest.mark.parametrize("name", RISING)
def test_maxima_pass_with_nan_candidates(name: str) -> None:
    """The maximum of the results is the result of the maximum for every pair of candidates."""
    actual, expected = torch.meshgrid(ENDS, ENDS, indexing="ij")
    op = getattr(A, name).default
    assert [m.kind for m in call_with(op, (actual,), {})[1].modes] == ["max", "min"]
    full = op(torch.maximum(actual, expected))
    assert torch.allclose(torch.maximum(op(actual), op(expected)), full, equal_nan=True)


JOINS = {"max": torch.maximum, "min": torch.minimum}
ORDERED: dict[str, tuple[Any, int, tuple[Any, ...], int]] = {
    "elu": (A.elu.default, 1, (), 2),
    "elu that falls": (A.elu.default, 1, (-1.0,), 0),
    "hardshrink": (A.hardshrink.default, 1, (), 2),
    "softshrink": (A.softshrink.default, 1, (), 2),
    "threshold": (A.threshold.default, 1, (0.5, 0.25), 2),
    "threshold that falls": (A.threshold.default, 1, (0.5, 0.75), 0),
    "erfc": (A.erfc.default, 1, (), 2),
    "erfcx": (A.special_erfcx.default, 1, (), 2),
    "logaddexp": (A.logaddexp.default, 2, (), 4),
    "logaddexp2": (A.logaddexp2.default, 2, (), 4),
    **{f"{name} of two": (getattr(A, name).Tensor, 2, (), 2) for name in ("ge", "gt", "le", "lt")},
    **{f"{name} a number": (getattr(A, name).Scalar, 1, (0.5,), 1)
       for name in ("ge", "gt", "le", "lt")},
    **{f"{name} of two": (getattr(A, name).Tensor, 2, (), 5 if "clamp" in name else 0)
       for name in ("clamp_min", "clamp_max", "eq")},
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERED)
def test_modes_commute_with_the_operation(name: str) -> None:
    """The same for every pair of candidates with every constant, infinities and NaN included."""
    op, operands, extra, count = ORDERED[name]
    actual, expected, constant = torch.meshgrid(ENDS, ENDS, ENDS, indexing="ij")
    modes = call_with(op, (actual,) * operands + extra, {})[1].modes
    assert len(modes) == count
    for mode in modes:

        def run(candidate: torch.Tensor, places: tuple[int, ...] = mode.operands) -> torch.Tensor:
            inputs = [candidate if i in places else constant for i in range(operands)]
            result: torch.Tensor = op(*inputs, *extra)
            return result

        (kind,) = mode.results
        assert kind is not None
        full = run(JOINS[mode.kind](actual, expected)).double()
        parts = JOINS[kind](run(actual).double(), run(expected).double())
        assert torch.allclose(parts, full, equal_nan=True), mode


@pytest.mark.parametrize("name", ["add_", "__and__", "absolute", "special_expit", "multiply"])
def test_composites_and_in_place_variants_have_rules(name: str) -> None:
    packet = getattr(A, name)
    matches = [row_of(getattr(packet, x)) for x in packet.overloads()]
    assert any(row is not None and row.module.endswith("pointwise") for row in matches)


@pytest.mark.parametrize("name", ["add", "neg", "where", "maximum", "convert_element_type", "fill"])
def test_pointwise_prims_equal_one_device(name: str) -> None:
    args = {
        "add": (X, Y), "neg": (X,), "where": (MASK, X, Y), "maximum": (X, Y),
        "convert_element_type": (X.round(), torch.float32), "fill": (X, 2.0),
    }[name]  # fmt: skip
    assert check_call(getattr(torch.ops.prims, name).default, *args, grad=False) == []
