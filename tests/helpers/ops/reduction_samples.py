"""Sample calls of reductions and norms."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.helpers.ops.samples import Sample, aten_op, integers, normal

__all__ = ["NORMS", "REDUCTIONS"]

aten = torch.ops.aten


def small_integers(*shape: int) -> torch.Tensor:
    """Return integers from -3 to 3."""
    return integers(-3, 4, *shape)


def ties(*shape: int) -> torch.Tensor:
    """Return floats from -1 to 1, most of them several times."""
    return small_integers(*shape).clamp(-1, 1).double()


def with_nan(*shape: int) -> torch.Tensor:
    """Return floats with NaN as the second."""
    x = normal(*shape)
    x.view(-1)[1] = math.nan
    return x


DATA: dict[str, Callable[..., torch.Tensor]] = {
    "floats": normal, "integers": small_integers, "ties": ties, "nan": with_nan,
}  # fmt: skip

REDUCTIONS: dict[str, Sample] = {
    **{f"{name} {kind}": lambda name=name, make=make: (aten_op(name), make(4, 3))
       for name in ("sum", "prod", "max", "min", "any", "all", "nansum", "count_nonzero", "amax",
                    "amin", "argmax", "argmin", "aminmax", "median", "nanmedian", "trace")
       for kind, make in DATA.items()},
    **{f"{name} of no dims": lambda name=name: (aten_op(name), normal())
       for name in ("sum", "mean", "amax", "any", "argmax", "median", "std", "linalg_vector_norm")},
    **{f"{name} {dims} {keep}": lambda name=name, dims=dims, keep=keep: (
        aten_op(name), normal(4, 3, 2), dims, keep)
       for name in ("sum.dim_IntList", "mean.dim", "amax", "any.dims", "all.dims")
       for dims in ([1], [-1, 0], []) for keep in (True, False)},
    **{f"{name} {dim}": lambda name=name, dim=dim: (aten_op(name), normal(4, 3), dim)
       for name in ("prod.dim_int", "any.dim", "all.dim", "max.dim", "min.dim", "argmax.default",
                    "median.dim", "nanmedian.dim", "mode.default", "count_nonzero.default")
       for dim in (0, -1)},
    **{f"{name} dims": lambda name=name: (aten_op(name), normal(4, 3, 2), [0, 2])
       for name in ("nansum.default", "logsumexp.default", "special_logsumexp.default",
                    "count_nonzero.dim_IntList", "nanmean.default", "var.dim", "std.dim",
                    "var_mean.dim", "std_mean.dim", "var.correction", "std_mean.correction")},
    "amax of one": lambda: (aten.amax.default, normal(1, 1), [], True),
    "mean": lambda: (aten.mean.default, normal(5, 3)),
    "mean of nan": lambda: (aten.mean.dim, with_nan(5, 3), [0]),
    "mean of nothing": lambda: (aten.mean.dim, normal(0, 3), [0]),
    "sum of nothing": lambda: (aten.sum.dim_IntList, normal(3, 0), [1]),
    "var": lambda: (aten.var.default, normal(5, 3), False),
    "kthvalue": lambda: (aten.kthvalue.default, normal(5, 3), 2, 0),
    "quantile": lambda: (aten.quantile.scalar, normal(4, 3), 0.3, 1),
    "quantiles": lambda: (aten.quantile.default, normal(4, 3), normal(2).sigmoid(), 0, True),
    "quantile of all": lambda: (aten.quantile.default, normal(4, 3), torch.tensor(0.5).double()),
    "cov": lambda: (aten.cov.default, normal(3, 4)),
    "corrcoef": lambda: (aten.corrcoef.default, normal(3, 4)),
    "powsum": lambda: (aten.linalg__powsum.default, normal(4, 3), 3, [0]),
    "all are true": lambda: (aten._is_all_true.default, small_integers(4, 3) > -3),
    "any is true": lambda: (aten._is_any_true.default, small_integers(4, 3) > 2),
    "trace of rows": lambda: (aten.trace.default, normal(5, 2)),
    "sum_to_size": lambda: (aten.sum_to_size.default, normal(4, 3, 2), [3, 1]),
    "any of bools": lambda: (aten.any.default, small_integers(4, 3) > 2),
    "all of bools": lambda: (aten.all.dim, small_integers(4, 3) > -3, 1),
    "any of bytes": lambda: (aten.any.default, small_integers(4, 3).abs().to(torch.uint8)),
    "amax of bools": lambda: (aten.amax.default, small_integers(4, 3) > 2, [0]),
    "amin of bytes": lambda: (aten.amin.default, small_integers(4, 3).abs().to(torch.uint8), [0]),
    "sum of bools": lambda: (aten.sum.default, small_integers(4, 3) > 0),
    "sum of int32": lambda: (aten.sum.default, small_integers(4, 3).int()),
    "selecting": lambda: (aten.value_selecting_reduction_backward.default, normal(4, 2), 1,
                          small_integers(4, 2).abs().clamp(max=2), [4, 3, 2], False),
}  # fmt: skip

NORMS: dict[str, Sample] = {
    **{f"vector_norm {p} {keep} {data}": lambda p=p, keep=keep, data=data: (
        aten.linalg_vector_norm.default, DATA[data](4, 3), p, [0], keep)
       for p in (0, 1, 2, 3, 0.5, math.inf, -math.inf) for keep in (True, False)
       for data in ("ties", "nan")},
    **{f"linalg_norm {p}": lambda p=p: (aten.linalg_norm.default, normal(4, 3), p)
       for p in (None, 1, -1, 2, math.inf, -math.inf)},
    **{f"matrix_norm {p}": lambda p=p: (aten.linalg_matrix_norm.default, ties(2, 4, 3), p, [2, 1])
       for p in (1, -1, -2, math.inf, -math.inf)},
    "matrix_norm fro": lambda: (aten.linalg_matrix_norm.str_ord, normal(2, 4, 3)),
    "matrix_norm nuc": lambda: (aten.linalg_matrix_norm.str_ord, normal(2, 4, 3), "nuc"),
    "matrix_norm of none": lambda: (aten.linalg_norm.default, normal(0, 3), math.inf),
    "linalg_norm nuc": lambda: (aten.linalg_norm.ord_str, normal(4, 3), "nuc"),
    "linalg_norm dims": lambda: (aten.linalg_norm.default, normal(2, 4, 3), 1, [0, 2]),
    "norm": lambda: (aten.norm.Scalar, normal(4, 3)),
    "norm 1": lambda: (aten.norm.ScalarOpt_dim, normal(4, 3), 1, [1]),
    "norm inf": lambda: (aten.norm.ScalarOpt_dim, normal(4, 3), math.inf, [1], True),
    "nuclear_norm": lambda: (aten.nuclear_norm.default, normal(4, 3)),
    "complex": lambda: (aten.linalg_vector_norm.default, torch.complex(normal(4), normal(4)), 1),
    **{f"dist {p}": lambda p=p: (aten.dist.default, normal(4, 3), normal(3), p)
       for p in (1, 2, math.inf)},
    **{f"pairwise_distance {p}":
       lambda p=p: (aten.pairwise_distance.default, normal(4, 3), normal(3), p)
       for p in (1, 2, math.inf)},
}  # fmt: skip
