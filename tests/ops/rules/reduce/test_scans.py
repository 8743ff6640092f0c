"""Rules and decompositions of scans: correctness for every role, texts, messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.partition.ir import Redistribution
from fshard.program.cost.links import Link
from fshard.program.cost.topology import Topology
from tests.helpers.ops.op_checks import call_with, check_call
from tests.helpers.ops.samples import integers, positive
from tests.helpers.ops.scan_samples import SCANS

aten = torch.ops.aten


@pytest.mark.parametrize("name", SCANS)
def test_rules_are_right(name: str) -> None:
    op, *args = SCANS[name]()
    # PyTorch has no gradients of these operations.
    without = ("_logcumsumexp", "_masked_softmax square", "_masked_softmax keys")
    assert check_call(op, *args, grad=not name.startswith(without)) == []


def test_gradients_along_listed_dims_are_right() -> None:
    x = positive(2, 3, 4)
    assert check_call(aten.gradient.scalarint, x, dim=1) == []
    assert check_call(aten.gradient.array, x, dim=[1, 2]) == []
    assert check_call(aten.gradient.tensorarray, x, spacing=[positive(3)], dim=[1]) == []


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "prod"])
def test_segmented_dims_stay_unsharded(reduce: str) -> None:
    lengths = torch.tensor([[1, 3], [2, 2], [4, 0]])
    x = positive(3, 4, 2)
    assert check_call(aten.segment_reduce.default, x, reduce, lengths=lengths, axis=1) == []
    assert check_call(aten.segment_reduce.default, x[0], reduce, lengths=lengths[0]) == []


def test_rules_on_two_axes() -> None:
    assert check_call(aten.softmax.int, positive(4, 3, 5), 1, two_axes=True) == []
    assert check_call(aten.cummax.default, positive(4, 3, 5), 1, two_axes=True) == []


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
def test_rule_texts(name: str) -> None:
    op, *args = SCANS[name]()
    assert str(call_with(op, args, {})[1]) == TEXTS[name]


# -- over a sharded dim --------------------------------------------------------------------

# Slow links and cheap launches, so that small tensors suffice to make decompositions pay off.
SLOW = Topology(inner=Link(latency=1e-7, bandwidth=1e8), launch=1e-7)
N, FOUR = 256, fs.Mesh(x=4)


def _numbers() -> torch.Tensor:
    return torch.randn(3, N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _odd() -> torch.Tensor:
    """Return values with ties, infinities and NaN in several shards."""
    x = _numbers().round()
    x[0, 90, 0] = x[1, 3, 1] = x[1, 200, 1] = math.nan
    x[2, 80:96] = math.inf
    x[2, :75, 1] = -math.inf
    return x


SCANNED: dict[str, tuple[Callable[..., Any], Callable[[], torch.Tensor], int]] = {
    "cumsum": (lambda x: x.cumsum(1), _numbers, 1),
    "cumsum from the end": (lambda x: x.mT.cumsum(-1), _numbers, 1),
    "cumsum of integers": (lambda x: x.cumsum(1), lambda: integers(1, 4, 3, N, 2).int(), 1),
    "cumsum of booleans": (lambda x: x.cumsum(1), lambda: integers(1, 4, 3, N, 2) > 2, 1),
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
    "cummax of integers": (lambda x: x.cummax(1), lambda: integers(1, 4, 3, N, 2), 2),
    "cummin of bytes": (lambda x: x.cummin(1), lambda: integers(1, 4, 3, N, 2).byte(), 2),
    "diff": (lambda x: x.diff(dim=1), _numbers, 1),
    "diff twice": (lambda x: x.diff(2, 1), _numbers, 2),
    "diff of booleans": (lambda x: x.diff(dim=1), lambda: integers(1, 4, 3, N, 2) > 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SCANNED)
def test_scans_of_sharded_dims_send_block_ends_only(name: str) -> None:
    """Values and gradients equal one device's; a sixteenth of the elements is sent."""
    fn, make, moves = SCANNED[name]
    x = make()
    x.requires_grad_(x.is_floating_point())
    spec = fs.Spec(FOUR, fs.P(None, "x"), shape=x.shape, dtype=x.dtype)
    part = fs.partition(fn, mesh=FOUR, in_specs=(spec,), topology=SLOW)
    programs = [line.program for line in part.trace(x).lines if isinstance(line, Redistribution)]
    sent = [prog.cost(SLOW).bytes_received for prog in programs]
    assert sum(map(bool, sent)) <= moves
    # Indices have eight bytes for every dtype; an all-reduce sends twice what an all-gather does.
    assert sum(sent) <= 2 * 8 * x.numel() // 16 * moves
    result, right = (item if isinstance(item, tuple) else (item,) for item in (part(x), fn(x)))
    for actual, expected in zip(result, right, strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)
    if x.requires_grad:
        weights = torch.rand(right[0].shape, generator=torch.Generator().manual_seed(1))
        matches, whole_ = ((item[0] * weights).sum() for item in (result, right))
        (actual,), (expected,) = (torch.autograd.grad(item, x) for item in (matches, whole_))
        # PyTorch's gradient is NaN if the scan begins with the logarithm of zero.
        single = {"rtol": 1e-4, "atol": 1e-4} if "single" in name else {}
        torch.testing.assert_close(
            actual.where(~expected.isnan(), 0), expected.nan_to_num(), **single
        )


def test_differences_of_order_zero_leave_out_what_is_put_before_and_after() -> None:
    x, before, after = positive(4, 3), positive(1, 3), positive(2, 3)
    assert check_call(aten.diff.default, x, 0, 0, before, after) == []
    pairs = [fs.shard(y, Mesh(x=3), P("x")) for y in (x, before, after)]
    result = fs.apply(torch.diff, pairs[0], 0, 0, *pairs[1:], mode="auto")  # decomposed
    assert torch.equal(fs.unshard(result), x)


@pytest.mark.parametrize("name", [name for name in SCANNED if "diff" not in name])
@pytest.mark.parametrize("sizes", [(100, 0, 151, 5), (0, 255, 1, 0)])
def test_scans_of_uneven_shards_gather_their_ends(name: str, sizes: tuple[int, ...]) -> None:
    """A rank sends an end of its shard, once for each result, and nothing else; so backward."""
    fn, make, results = SCANNED[name]
    x = make()
    x.requires_grad_(x.is_floating_point())
    spec = fs.Spec(FOUR, fs.P(None, "x"), shape=x.shape, dtype=x.dtype, sizes={1: sizes})
    pair = fs.shard(x, spec)
    with fs.comm_log() as log:
        y = fs.partition(fn, mesh=FOUR)(pair)
    pairs, right = y if results == 2 else (y,), fn(x)
    right = right if results == 2 else (right,)
    ends = math.prod(x.shape) // N * sum(z.element_size() for z in right)
    assert {op for op, _ in log.counts} == {"all_gather"}
    assert log.total_bytes == 3 * ends  # to each of three others; the log has those of one rank
    for actual, expected in zip(pairs, right, strict=True):
        torch.testing.assert_close(fs.unshard(actual), expected, equal_nan=True)
        assert sizes in actual.spec.sizes
    if x.requires_grad:
        weights = torch.rand(right[0].shape, generator=torch.Generator().manual_seed(1))
        values = fs.unshard(pairs[0]), right[0]
        grads = [torch.autograd.grad((z * weights).sum(), x)[0] for z in values]
        single = {"rtol": 1e-4, "atol": 1e-4} if "single" in name else {}
        nan = grads[1].isnan()
        torch.testing.assert_close(grads[0].where(~nan, 0), grads[1].nan_to_num(), **single)


@pytest.mark.parametrize("scan", [torch.cummin, torch.cummax])
@pytest.mark.parametrize("sizes", [(16, 16), (5, 0, 11)])
def test_extremes_of_long_integers(scan: Any, sizes: tuple[int, ...]) -> None:
    """The largest int64, of which no value is less, is not a double."""
    x = torch.arange(sum(sizes)).sub(7).mul(-(2**50)).remainder(1 << 60)
    spec = Spec(Mesh(x=len(sizes)), P("x"), shape=x.shape, dtype=x.dtype, sizes={0: sizes})
    part = fs.partition(lambda x: scan(x, 0), mesh=spec.mesh, in_specs=spec)
    results = map(fs.unshard, part(fs.shard(x, spec)))
    for y, expected in zip(results, scan(x, 0), strict=True):
        assert torch.equal(y, expected)
