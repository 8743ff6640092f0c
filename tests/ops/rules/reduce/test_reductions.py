"""Rules of reductions: correctness for every role, texts, roles with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fshard.ops.strategy.axis_roles import roles_of
from tests.helpers.ops.op_checks import call_with, check_call
from tests.helpers.ops.reduction_samples import NORMS, REDUCTIONS
from tests.helpers.ops.samples import aten_op, normal

SAMPLES = {**REDUCTIONS, **NORMS}


@pytest.mark.filterwarnings("ignore:at..frobenius_norm")
@pytest.mark.parametrize("name", SAMPLES)
def test_rules_are_right(name: str) -> None:
    op, *args = SAMPLES[name]()
    # PyTorch has no gradient of `_powsum`.
    assert check_call(op, *args, grad=name != "powsum") == []


@pytest.mark.parametrize("name", ["mean", "amax", "sum.dim_IntList", "any.dim"])
def test_rules_on_two_axes(name: str) -> None:
    args: list[Any] = {"dim_IntList": [[1]], "dim": [1]}.get(name.partition(".")[2], [])
    assert check_call(aten_op(name), normal(5, 4), *args, two_axes=True) == []


TEXTS = {
    "sum floats": "d0 d1->  {d0 sum; d1 sum; unreduced 0 sum; unreduced 0 avg}",
    "sum of int32": "d0 d1->  {d0 sum; d1 sum}",
    "sum.dim_IntList [1] True":
        "d0 d1 d2->d0 () d2  {d1 sum; unreduced 0 sum; unreduced 0 avg}",
    "any.dims [] True": "d0 d1 d2->d0 d1 d2",
    "amax [1] False": "d0 d1 d2->d0 d2  {d1 max; unreduced 0 max}",
    "all of bools": "d0 d1->d0  {d1 min; unreduced 0 min}",
    "prod floats": "d0 d1->  {d0 product; d1 product; unreduced 0 product}",
    "var": "d0 d1->  {d0 unsharded; d1 unsharded}",
    "max.dim 0": "d0 d1->d1,d1  {d0 unsharded}",
    "quantiles": "d0 d1,q->q () d1  {d0 unsharded}",
    "trace floats": "d0 d1->  {d0 sum; d1 sum; unreduced 0 sum; unreduced 0 avg}",
    "vector_norm inf True ties": "d0 d1->() d1  {d0 max}",
    "vector_norm 1 False ties": "d0 d1->d1  {d0 sum}",
    "vector_norm 2 False ties": "d0 d1->d1  {d0 unsharded}",
    "matrix_norm 1": "d0 d1 d2->d0  {d1 max; d2 unsharded}",
    "dist 1": "d0 d1,d1->  {d0 sum; d1 sum}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_rule_texts(name: str) -> None:
    op, *args = SAMPLES[name]()
    assert str(call_with(op, args, {})[1]) == TEXTS[name]


@pytest.mark.parametrize(
    ("name", "count"),
    [("sum floats", 2), ("amax [1] False", 2), ("prod floats", 0), ("norm inf", 1)],
)
def test_roles_with_gradients_depend_on_one_shard(name: str, count: int) -> None:
    op, *args = SAMPLES[name]()
    call, rule, *_ = call_with(op, args, {})
    roles = roles_of(rule, call, grad=True)
    assert sum(role.factor is not None for role in roles) == count
    assert not any("max" in role.name or "product" in role.name for role in roles)


@pytest.mark.parametrize("name", ["amax", "amin", "sum", "prod"])
def test_rules_of_primitives_are_right(name: str) -> None:
    # Primitives have no gradients.
    assert check_call(getattr(torch.ops.prims, name).default, normal(4, 3), [1], grad=False) == []
