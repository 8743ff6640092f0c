"""Rules of reductions, against the whole on every role; their texts; what is cut with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fshard.ops.strategy.axis_roles import roles_of
from tests.helpers.ops.op_checks import call_with, check_call

aten, prims = torch.ops.aten, torch.ops.prims
Samples = dict[str, Callable[[], tuple[Any, ...]]]


def named(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def whole(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-3, 4, shape, generator=generator)


def ties(*shape: int) -> torch.Tensor:
    return whole(*shape).clamp(-1, 1).double()


def with_nan(*shape: int) -> torch.Tensor:
    x = rand(*shape)
    x.view(-1)[1] = math.nan
    return x


DATA: dict[str, Callable[..., torch.Tensor]] = {
    "floats": rand, "integers": whole, "ties": ties, "nan": with_nan,
}  # fmt: skip

OF_ONE: Samples = {
    **{f"{name} {kind}": lambda name=name, make=make: (named(name), make(4, 3))
       for name in ("sum", "prod", "max", "min", "any", "all", "nansum", "count_nonzero", "amax",
                    "amin", "argmax", "argmin", "aminmax", "median", "nanmedian", "trace")
       for kind, make in DATA.items()},
    **{f"{name} of no dims": lambda name=name: (named(name), rand())
       for name in ("sum", "mean", "amax", "any", "argmax", "median", "std", "linalg_vector_norm")},
    **{f"{name} {dims} {keep}": lambda name=name, dims=dims, keep=keep: (
        named(name), rand(4, 3, 2), dims, keep)
       for name in ("sum.dim_IntList", "mean.dim", "amax", "any.dims", "all.dims")
       for dims in ([1], [-1, 0], []) for keep in (True, False)},
    **{f"{name} {dim}": lambda name=name, dim=dim: (named(name), rand(4, 3), dim)
       for name in ("prod.dim_int", "any.dim", "all.dim", "max.dim", "min.dim", "argmax.default",
                    "median.dim", "nanmedian.dim", "mode.default", "count_nonzero.default")
       for dim in (0, -1)},
    **{f"{name} dims": lambda name=name: (named(name), rand(4, 3, 2), [0, 2])
       for name in ("nansum.default", "logsumexp.default", "special_logsumexp.default",
                    "count_nonzero.dim_IntList", "nanmean.default", "var.dim", "std.dim",
                    "var_mean.dim", "std_mean.dim", "var.correction", "std_mean.correction")},
    "amax of one": lambda: (aten.amax.default, rand(1, 1), [], True),
    "mean": lambda: (aten.mean.default, rand(5, 3)),
    "mean of nan": lambda: (aten.mean.dim, with_nan(5, 3), [0]),
    "mean of nothing": lambda: (aten.mean.dim, rand(0, 3), [0]),
    "sum of nothing": lambda: (aten.sum.dim_IntList, rand(3, 0), [1]),
    "var": lambda: (aten.var.default, rand(5, 3), False),
    "kthvalue": lambda: (aten.kthvalue.default, rand(5, 3), 2, 0),
    "quantile": lambda: (aten.quantile.scalar, rand(4, 3), 0.3, 1),
    "quantiles": lambda: (aten.quantile.default, rand(4, 3), rand(2).sigmoid(), 0, True),
    "quantile of all": lambda: (aten.quantile.default, rand(4, 3), torch.tensor(0.5).double()),
    "cov": lambda: (aten.cov.default, rand(3, 4)),
    "corrcoef": lambda: (aten.corrcoef.default, rand(3, 4)),
    "powsum": lambda: (aten.linalg__powsum.default, rand(4, 3), 3, [0]),
    "all are true": lambda: (aten._is_all_true.default, whole(4, 3) > -3),
    "any is true": lambda: (aten._is_any_true.default, whole(4, 3) > 2),
    "trace of rows": lambda: (aten.trace.default, rand(5, 2)),
    "sum_to_size": lambda: (aten.sum_to_size.default, rand(4, 3, 2), [3, 1]),
    "any of bools": lambda: (aten.any.default, whole(4, 3) > 2),
    "all of bools": lambda: (aten.all.dim, whole(4, 3) > -3, 1),
    "any of bytes": lambda: (aten.any.default, whole(4, 3).abs().to(torch.uint8)),
    "amax of bools": lambda: (aten.amax.default, whole(4, 3) > 2, [0]),
    "amin of bytes": lambda: (aten.amin.default, whole(4, 3).abs().to(torch.uint8), [0]),
    "sum of bools": lambda: (aten.sum.default, whole(4, 3) > 0),
    "sum of int32": lambda: (aten.sum.default, whole(4, 3).int()),
    "selecting": lambda: (aten.value_selecting_reduction_backward.default, rand(4, 2), 1,
                          whole(4, 2).abs().clamp(max=2), [4, 3, 2], False),
}  # fmt: skip

NORMS: Samples = {
    **{f"vector_norm {p} {keep} {data}": lambda p=p, keep=keep, data=data: (
        aten.linalg_vector_norm.default, DATA[data](4, 3), p, [0], keep)
       for p in (0, 1, 2, 3, 0.5, math.inf, -math.inf) for keep in (True, False)
       for data in ("ties", "nan")},
    **{f"linalg_norm {p}": lambda p=p: (aten.linalg_norm.default, rand(4, 3), p)
       for p in (None, 1, -1, 2, math.inf, -math.inf)},
    **{f"matrix_norm {p}": lambda p=p: (aten.linalg_matrix_norm.default, ties(2, 4, 3), p, [2, 1])
       for p in (1, -1, -2, math.inf, -math.inf)},
    "matrix_norm fro": lambda: (aten.linalg_matrix_norm.str_ord, rand(2, 4, 3)),
    "matrix_norm nuc": lambda: (aten.linalg_matrix_norm.str_ord, rand(2, 4, 3), "nuc"),
    "matrix_norm of none": lambda: (aten.linalg_norm.default, rand(0, 3), math.inf),
    "linalg_norm nuc": lambda: (aten.linalg_norm.ord_str, rand(4, 3), "nuc"),
    "linalg_norm dims": lambda: (aten.linalg_norm.default, rand(2, 4, 3), 1, [0, 2]),
    "norm": lambda: (aten.norm.Scalar, rand(4, 3)),
    "norm 1": lambda: (aten.norm.ScalarOpt_dim, rand(4, 3), 1, [1]),
    "norm inf": lambda: (aten.norm.ScalarOpt_dim, rand(4, 3), math.inf, [1], True),
    "nuclear_norm": lambda: (aten.nuclear_norm.default, rand(4, 3)),
    "complex": lambda: (aten.linalg_vector_norm.default, torch.complex(rand(4), rand(4)), 1),
    **{f"dist {p}": lambda p=p: (aten.dist.default, rand(4, 3), rand(3), p)
       for p in (1, 2, math.inf)},
    **{f"pairwise_distance {p}":
       lambda p=p: (aten.pairwise_distance.default, rand(4, 3), rand(3), p)
       for p in (1, 2, math.inf)},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:at..frobenius_norm")
@pytest.mark.parametrize("name", [*OF_ONE, *NORMS])
def test_rules_are_right(name: str) -> None:
    op, *args = {**OF_ONE, **NORMS}[name]()
    # PyTorch has no gradient of this.
    assert check_call(op, *args, grad=name != "powsum") == []


@pytest.mark.parametrize("name", ["mean", "amax", "sum.dim_IntList", "any.dim"])
def test_rules_on_two_axes(name: str) -> None:
    args: list[Any] = {"dim_IntList": [[1]], "dim": [1]}.get(name.partition(".")[2], [])
    assert check_call(named(name), rand(5, 4), *args, two_axes=True) == []


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
def test_rules_read(name: str) -> None:
    op, *args = {**OF_ONE, **NORMS}[name]()
    assert str(call_with(op, args, {})[1]) == TEXTS[name]


@pytest.mark.parametrize(
    ("name", "cut"), [("sum floats", 2), ("amax [1] False", 2), ("prod floats", 0), ("norm inf", 1)]
)
def test_with_gradients_what_depends_on_other_parts_is_whole(name: str, cut: int) -> None:
    op, *args = {**OF_ONE, **NORMS}[name]()
    call, rule, *_ = call_with(op, args, {})
    roles = roles_of(rule, call, grad=True)
    assert sum(role.factor is not None for role in roles) == cut
    assert not any("max" in role.name or "product" in role.name for role in roles)


@pytest.mark.parametrize("name", ["amax", "amin", "sum", "prod"])
def test_rules_of_primitives_are_right(name: str) -> None:
    # They have no gradients of their own.
    assert check_call(getattr(prims, name).default, rand(4, 3), [1], grad=False) == []
