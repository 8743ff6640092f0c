"""Sample calls of scans, softmaxes and differences."""

from __future__ import annotations

import math

import torch

from tests.helpers.ops.samples import Sample, aten_op, integers
from tests.helpers.ops.samples import positive as rand

__all__ = ["SCANS"]

aten = torch.ops.aten

SCAN_NAMES = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "_logcumsumexp")
SOFTMAX_NAMES = ("softmax.int", "log_softmax.int", "special_softmax", "special_log_softmax",
             "_safe_softmax")  # fmt: skip

SCANS: dict[str, Sample] = {
    **{f"{name} {dim}": lambda name=name, dim=dim: (aten_op(name), rand(3, 4), dim)
       for name in (*SCAN_NAMES, *SOFTMAX_NAMES) for dim in (0, -1)},
    **{f"{name} of integers": lambda name=name: (aten_op(name), integers(1, 4, 3, 4), 1)
       for name in ("cumsum", "cumprod", "cummax", "cummin")},
    **{f"{name} of no dims": lambda name=name: (aten_op(name), rand(), 0)
       for name in ("cumsum", "cummax", "softmax.int")},
    "cumsum of int32": lambda: (aten.cumsum.default, integers(1, 4, 3, 4).int(), 1),
    "softmax of half": lambda: (aten.softmax.int, rand(3, 4).bfloat16(), 1, torch.float32),
    "_safe_softmax of nothing": lambda: (
        aten._safe_softmax.default, torch.full((2, 3), -math.inf, dtype=torch.float64), 1),
    **{f"{name} kernel": lambda name=name: (aten_op(name), rand(3, 4), 1, False)
       for name in ("_softmax", "_log_softmax")},
    **{name: lambda name=name: (aten_op(name), rand(3, 4), rand(3, 4, seed=1), 1, torch.float64)
       for name in ("_softmax_backward_data", "_log_softmax_backward_data")},
    "glu": lambda: (aten.glu.default, rand(3, 4), 1),
    "glu of rows": lambda: (aten.glu.default, rand(4, 3, 2), 0),
    "glu_backward": lambda: (aten.glu_backward.default, rand(3, 2), rand(3, 4), 1),
    "diff": lambda: (aten.diff.default, rand(4, 3)),
    "diff twice": lambda: (aten.diff.default, rand(5, 3), 2, 0),
    "diff with ends": lambda: (aten.diff.default, rand(4, 3), 1, 0, rand(1, 3), rand(2, 3)),
    "diff of bools": lambda: (aten.diff.default, integers(1, 4, 4, 3) > 2),
    "trapezoid": lambda: (aten.trapezoid.dx, rand(4, 3)),
    "trapezoid at": lambda: (aten.trapezoid.x, rand(4, 3), rand(3)),
    "trapezoid at all": lambda: (aten.trapezoid.x, rand(4, 3), rand(4, 3, seed=1)),
    "trapz": lambda: (aten.trapz.x, rand(4, 3), rand(4, 3, seed=1)),
    "cumulative_trapezoid": lambda: (aten.cumulative_trapezoid.dx, rand(4, 3)),
    "cumulative_trapezoid at": lambda: (aten.cumulative_trapezoid.x, rand(4, 3), rand(3)),
    "trapezoid spread": lambda: (aten.trapezoid.x, rand(4, 1, 3), rand(2, 3)),
    "_masked_softmax": lambda: (
        aten._masked_softmax.default, rand(3, 4), integers(1, 4, 3, 4) > 2, 1, 2),
    "_masked_softmax square": lambda: (
        aten._masked_softmax.default, rand(2, 3, 4, 4).float(), integers(1, 4, 4, 4) > 2, 3, 0),
    "_masked_softmax keys": lambda: (
        aten._masked_softmax.default, rand(2, 3, 4, 4).float(), integers(1, 4, 2, 4) > 2, 3, 1),
    "cumprod_backward": lambda: (
        aten.cumprod_backward.default, rand(3, 4), rand(3, 4, seed=1), 1,
        rand(3, 4, seed=1).cumprod(1)),
    "cummaxmin_backward": lambda: (
        aten.cummaxmin_backward.default, rand(3, 4), rand(3, 4, seed=1),
        rand(3, 4, seed=1).cummax(1)[1], 1),
}  # fmt: skip
