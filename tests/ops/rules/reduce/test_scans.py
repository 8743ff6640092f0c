"""Rules of operations along a dim, against the whole on every role; their texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.partition.ir import Redistribution
from fshard.program.cost.topology import Link, Topology
from tests.helpers.ops.op_checks import call_with, check_call

aten = torch.ops.aten
Samples = dict[str, Callable[[], tuple[Any, ...]]]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.25


def whole(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(1, 4, shape, generator=generator)


def op_of(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


SCANS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "_logcumsumexp")
SOFTMAXES = ("softmax.int", "log_softmax.int", "special_softmax", "special_log_softmax",
             "_safe_softmax")  # fmt: skip

SAMPLES: Samples = {
    **{f"{name} {dim}": lambda name=name, dim=dim: (op_of(name), rand(3, 4), dim)
       for name in (*SCANS, *SOFTMAXES) for dim in (0, -1)},
    **{f"{name} of integers": lambda name=name: (op_of(name), whole(3, 4), 1)
       for name in ("cumsum", "cumprod", "cummax", "cummin")},
    **{f"{name} of no dims": lambda name=name: (op_of(name), rand(), 0)
       for name in ("cumsum", "cummax", "softmax.int")},
    "cumsum of int32": lambda: (aten.cumsum.default, whole(3, 4).int(), 1),
    "softmax of half": lambda: (aten.softmax.int, rand(3, 4).bfloat16(), 1, torch.float32),
    "_safe_softmax of nothing": lambda: (
        aten._safe_softmax.default, torch.full((2, 3), -math.inf, dtype=torch.float64), 1),
    **{f"{name} kernel": lambda name=name: (op_of(name), rand(3, 4), 1, False)
       for name in ("_softmax", "_log_softmax")},
    **{name: lambda name=name: (op_of(name), rand(3, 4), rand(3, 4, seed=1), 1, torch.float64)
       for name in ("_softmax_backward_data", "_log_softmax_backward_data")},
    "glu": lambda: (aten.glu.default, rand(3, 4), 1),
    "glu of rows": lambda: (aten.glu.default, rand(4, 3, 2), 0),
    "glu_backward": lambda: (aten.glu_backward.default, rand(3, 2), rand(3, 4), 1),
    "diff": lambda: (aten.diff.default, rand(4, 3)),
    "diff twice": lambda: (aten.diff.default, rand(5, 3), 2, 0),
    "diff with ends": lambda: (aten.diff.default, rand(4, 3), 1, 0, rand(1, 3), rand(2, 3)),
    "diff of bools": lambda: (aten.diff.default, whole(4, 3) > 2),
    "trapezoid": lambda: (aten.trapezoid.dx, rand(4, 3)),
    "trapezoid at": lambda: (aten.trapezoid.x, rand(4, 3), rand(3)),
    "trapezoid at all": lambda: (aten.trapezoid.x, rand(4, 3), rand(4, 3, seed=1)),
    "trapz": lambda: (aten.trapz.x, rand(4, 3), rand(4, 3, seed=1)),
    "cumulative_trapezoid": lambda: (aten.cumulative_trapezoid.dx, rand(4, 3)),
    "cumulative_trapezoid at": lambda: (aten.cumulative_trapezoid.x, rand(4, 3), rand(3)),
    "trapezoid spread": lambda: (aten.trapezoid.x, rand(4, 1, 3), rand(2, 3)),
    "_masked_softmax": lambda: (aten._masked_softmax.default, rand(3, 4), whole(3, 4) > 2, 1, 2),
    "_masked_softmax square": lambda: (
        aten._masked_softmax.default, rand(2, 3, 4, 4).float(), whole(4, 4) > 2, 3, 0),
    "_masked_softmax keys": lambda: (
        aten._masked_softmax.default, rand(2, 3, 4, 4).float(), whole(2, 4) > 2, 3, 1),
    "cumprod_backward": lambda: (
        aten.cumprod_backward.default, rand(3, 4), rand(3, 4, seed=1), 1,
        rand(3, 4, seed=1).cumprod(1)),
    "cummaxmin_backward": lambda: (
        aten.cummaxmin_backward.default, rand(3, 4), rand(3, 4, seed=1),
        rand(3, 4, seed=1).cummax(1)[1], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_rules_are_right(name: str) -> None:
    op, *args = SAMPLES[name]()
    # PyTorch has no gradients of these.
    without = ("_logcumsumexp", "_masked_softmax square", "_masked_softmax keys")
    assert check_call(op, *args, grad=not name.startswith(without)) == []


def test_gradients_along_listed_dims_are_right() -> None:
    x = rand(2, 3, 4)
    assert check_call(aten.gradient.scalarint, x, dim=1) == []
    assert check_call(aten.gradient.array, x, dim=[1, 2]) == []
    assert check_call(aten.gradient.tensorarray, x, spacing=[rand(3)], dim=[1]) == []


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "prod"])
def test_segments_are_whole(reduce: str) -> None:
    lengths = torch.tensor([[1, 3], [2, 2], [4, 0]])
    x = rand(3, 4, 2)
    assert check_call(aten.segment_reduce.default, x, reduce, lengths=lengths, axis=1) == []
    assert check_call(aten.segment_reduce.default, x[0], reduce, lengths=lengths[0]) == []


def test_rules_on_two_axes() -> None:
    assert check_call(aten.softmax.int, rand(4, 3, 5), 1, two_axes=True) == []
    assert check_call(aten.cummax.default, rand(4, 3, 5), 1, two_axes=True) == []


TEXTS = {
    "cumsum 0": "d0 d1->d0 d1  {d0 unsharded; unreduced 0 sum; unreduced 0 avg}",
    "cumsum of int32": "d0 d1->d0 d1  {d1 unsharded}",
    "cumprod -1": "d0 d1->d0 d1  {d1 unsharded; unreduced 0 product}",
    "cummax 0": "d0 d1->d0 d1,d0 d1  {d0 unsharded}",
    "softmax.int -1": "d0 d1->d0 d1  {d1 unsharded}",
    "_softmax_backward_data":
        "d0 d1,d0 d1->d0 d1  {d1 unsharded; unreduced 0 sum; unreduced 0 avg}",
    "glu": "d0 d1->d0 ()  {d1 unsharded}",
    "diff with ends":
        "d0 d1,() d1,() d1->() d1  {d0 unsharded; unreduced 0+1+2 sum; unreduced 0+1+2 avg}",
    "diff of bools": "d0 d1->d0 ()  {d1 unsharded; unreduced 0 sum; unreduced 0 avg}",
    "trapezoid at": "d0 d1,d1->d0"
        "  {d1 unsharded; unreduced 0 sum; unreduced 0 avg; unreduced 1 sum; unreduced 1 avg}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_rules_read(name: str) -> None:
    op, *args = SAMPLES[name]()
    assert str(call_with(op, args, {})[1]) == TEXTS[name]


# -- over a dim that stays cut ------------------------------------------------------------

# Numbers are slow to move and messages cheap, so that what is small need not be large here.
SLOW = Topology(inner=Link(latency=1e-7, bandwidth=1e8), launch=1e-7)
N, FOUR = 256, fs.Mesh(x=4)


def _numbers() -> torch.Tensor:
    return torch.randn(3, N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _odd() -> torch.Tensor:
    """Ties, infinities, and numbers that are none, in several parts."""
    x = _numbers().round()
    x[0, 90, 0] = x[1, 3, 1] = x[1, 200, 1] = math.nan
    x[2, 80:96] = math.inf
    x[2, :75, 1] = -math.inf
    return x


SCANNED: dict[str, tuple[Callable[..., Any], Callable[[], torch.Tensor], int]] = {
    "cumsum": (lambda x: x.cumsum(1), _numbers, 1),
    "cumsum from the end": (lambda x: x.mT.cumsum(-1), _numbers, 1),
    "cumsum of integers": (lambda x: x.cumsum(1), lambda: whole(3, N, 2).int(), 1),
    "cumsum of booleans": (lambda x: x.cumsum(1), lambda: whole(3, N, 2) > 2, 1),
    "cumsum of single numbers": (lambda x: x.cumsum(1, dtype=torch.float32), _numbers, 1),
    "cumprod": (lambda x: x.cumprod(1), lambda: _numbers().round(), 1),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), _numbers, 1),
    "logcumsumexp of nothing": (
        lambda x: x.logcumsumexp(1), lambda: _numbers().where(_numbers() > 1, -math.inf), 1),
    "cummax": (lambda x: x.cummax(1), _numbers, 2),
    "cummax of ties": (lambda x: x.cummax(1), lambda: _numbers().round(), 2),
    "cummin of ties": (lambda x: x.cummin(1), lambda: _numbers().round(), 2),
    "cummax of what is odd": (lambda x: x.cummax(1), _odd, 2),
    "cummin of what is odd": (lambda x: x.cummin(1), _odd, 2),
    "cummax of integers": (lambda x: x.cummax(1), lambda: whole(3, N, 2), 2),
    "cummin of bytes": (lambda x: x.cummin(1), lambda: whole(3, N, 2).byte(), 2),
    "diff": (lambda x: x.diff(dim=1), _numbers, 1),
    "diff twice": (lambda x: x.diff(2, 1), _numbers, 2),
    "diff of booleans": (lambda x: x.diff(dim=1), lambda: whole(3, N, 2) > 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SCANNED)
def test_only_what_is_at_the_ends_of_parts_is_sent(name: str) -> None:
    """Values and gradients are one device's; a sixteenth of all is gathered, or summed."""
    fn, make, moves = SCANNED[name]
    x = make()
    x.requires_grad_(x.is_floating_point())
    spec = fs.Spec(FOUR, fs.P(None, "x"), shape=x.shape, dtype=x.dtype)
    part = fs.partition(fn, mesh=FOUR, in_specs=(spec,), topology=SLOW)
    programs = [line.program for line in part.trace(x).lines if isinstance(line, Redistribution)]
    sent = [prog.cost(SLOW).bytes_received for prog in programs]
    assert sum(map(bool, sent)) <= moves
    # Places are of eight bytes whatever they are of; a sum takes twice what a gather does.
    assert sum(sent) <= 2 * 8 * x.numel() // 16 * moves
    made, right = (each if isinstance(each, tuple) else (each,) for each in (part(x), fn(x)))
    for one, other in zip(made, right, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    if x.requires_grad:
        weights = torch.rand(right[0].shape, generator=torch.Generator().manual_seed(1))
        found, whole_ = ((each[0] * weights).sum() for each in (made, right))
        (one,), (other,) = (torch.autograd.grad(each, x) for each in (found, whole_))
        # Of what begins with the logarithm of nothing PyTorch's gradient is no number.
        single = {"rtol": 1e-4, "atol": 1e-4} if "single" in name else {}
        torch.testing.assert_close(one.where(~other.isnan(), 0), other.nan_to_num(), **single)


def test_what_has_no_blocks_is_brought_together() -> None:
    x = rand(3, 7)
    spec = fs.Spec(FOUR, fs.P(None, "x"), shape=x.shape, dtype=x.dtype, uneven="chunk")
    part = fs.partition(lambda x: x.cumsum(1), mesh=FOUR, in_specs=(spec,), topology=SLOW)
    torch.testing.assert_close(part(x), x.cumsum(1))
    assert len(part.trace(x).programs) == 1
