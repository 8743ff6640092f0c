"""Plans of windows: laws, text, refusals, and the peer's known failures."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from fshard.ops.core.windows import Window
from tests.helpers.strategies import shard_sizes

F64 = torch.float64


@given(st.data())
def test_laws(data: st.DataObject) -> None:
    """Parts are adjacent, windows minimal, and operations on them give the result's shards."""
    draw = data.draw
    kernel, stride, dilation = (draw(st.integers(1, high)) for high in (5, 4, 3))
    pads = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    extent = dilation * (kernel - 1)
    size = draw(st.integers(max(1, extent + 1 - sum(pads)), 14 + extent))
    sizes = draw(shard_sizes(size, draw(st.integers(1, 5))))
    length = (size + sum(pads) - extent - 1) // stride + 1
    sizes_out = draw(st.one_of(st.none(), shard_sizes(length, len(sizes))))
    plan = fs.domain.window_plan(
        size, kernel, stride, dilation, pads, sizes_in=sizes, sizes_out=sizes_out
    )
    assert sum(plan.sizes) == plan.length == length
    assert sizes_out is None or plan.sizes == tuple(sizes_out)
    for interval in ("own", "outputs"):
        pairs = [getattr(rank, interval) for rank in plan.ranks]
        assert [0, *(stop for _, stop in pairs)] == [*(start for start, _ in pairs), pairs[-1][1]]
    x = torch.arange(1.0, size + 1, dtype=F64)
    weight = torch.arange(1.0, kernel + 1, dtype=F64)
    expected = F.conv1d(F.pad(x, pads)[None, None], weight[None, None], None, stride, 0, dilation)
    for rank in plan.ranks:
        start, stop = rank.outputs
        if start == stop:
            assert rank.window[0] == rank.window[1]
            continue
        read = {
            i * stride + j * dilation - pads[0] for i in range(start, stop) for j in range(kernel)
        }
        inside = [position for position in sorted(read) if 0 <= position < size]
        if inside:
            assert rank.window[0] <= inside[0]
            assert inside[-1] < rank.window[1]
        window = F.pad(x[slice(*rank.window)], rank.padding)
        assert len(window) == (stop - start - 1) * stride + extent + 1
        part = F.conv1d(window[None, None], weight[None, None], None, stride, 0, dilation)
        torch.testing.assert_close(part, expected[..., start:stop])
        own = set(range(*rank.own))
        lacked = set(itertools.chain(*(range(*interval) for interval in rank.lacks)))
        assert lacked == set(range(*rank.window)) - own
        assert rank.lacking == len(lacked)
    assert str(plan).splitlines()[0].startswith(f"{size} -> {length} elements on ")
    assert len(plan.draw().splitlines()) == len(sizes)


@settings(max_examples=25)
@given(st.data())
def test_read_sizes_are_those_that_windows_shards_came_from(data: st.DataObject) -> None:
    """Sizes of the dim that is read follow from those of the windows, up to equivalent ones."""
    draw = data.draw
    size, step, per = draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    low = draw(st.integers(-3, 0))
    length = max(1, size * per // step)
    window = Window("o", "h", length, size, step, low, low + draw(st.integers(0, 4)), per=per)
    sizes = draw(shard_sizes(size, draw(st.integers(1, 4))))
    found = window.read_sizes(window.sizes(sizes))
    assert sum(found) == size
    assert min(found) >= 0
    if min(sizes):
        assert window.sizes(found) == window.sizes(sizes)


@given(st.data())
def test_traffic_is_window_minus_own(data: st.DataObject) -> None:
    """The program of a convolution on one sharded dim receives what the plan lacks."""
    draw = data.draw
    kernel, stride, padding = (draw(st.integers(*ends)) for ends in ((1, 5), (1, 3), (0, 2)))
    size = draw(st.integers(max(1, kernel - 2 * padding), 16))
    sizes = draw(shard_sizes(size, draw(st.integers(2, 4))))
    mesh = Mesh(h=len(sizes))
    spec = Spec(mesh, P(None, None, "h"), shape=(1, 2, size, 3), dtype=F64, sizes={2: sizes})
    plan = fs.domain.window_plan(size, kernel, stride, padding=padding, sizes_in=sizes)
    with fs.comm_log() as log:
        pair = fs.shard(torch.ones(spec.shape, dtype=F64), spec)
        y = fs.domain.conv2d(pair, torch.ones(1, 2, kernel, 1, dtype=F64), None, (stride, 1),
                             (padding, 0))  # fmt: skip
    assert y.spec.shard_sizes(2) == plan.sizes
    sent = [0] * len(sizes)
    owners = [rank for rank, part in enumerate(plan.ranks) for _ in range(*part.own)]
    for rank, part in enumerate(plan.ranks):
        for position in range(*part.window):
            sent[owners[position]] += owners[position] != rank
    assert log.total_bytes == max(sent) * 2 * 3 * 8


# -- failures of ShardTensor (PhysicsNeMo), which must not be ours --------------------------------


def conv_rows(sizes: tuple[int, ...], kernel: int, stride: int, padding: int) -> fs.Sharded:
    """Convolve rows of these shards, and check the values; return the pair."""
    size = sum(sizes)
    x = torch.arange(float(size), dtype=F64).view(1, 1, size)
    weight = torch.arange(1.0, kernel + 1, dtype=F64).view(1, 1, kernel)
    spec = Spec(Mesh(h=len(sizes)), P(None, None, "h"), shape=x.shape, dtype=F64,
                sizes={2: sizes})  # fmt: skip
    y: fs.Sharded = fs.domain.conv1d(fs.shard(x, spec), weight, None, stride, padding)
    torch.testing.assert_close(fs.unshard(y), F.conv1d(x, weight, None, stride, padding))
    return y


def test_strided_convolution_of_9_and_7_rows_has_8_outputs() -> None:
    y = conv_rows((9, 7), kernel=3, stride=2, padding=1)
    assert y.spec.shape[2] == 8
    assert y.spec.shard_sizes(2) == (5, 3)


def test_5_rows_over_4_ranks() -> None:
    assert conv_rows((2, 2, 1, 0), 3, 1, 1).spec.shard_sizes(2) == (2, 2, 1, 0)


def test_result_smaller_than_the_mesh() -> None:
    assert conv_rows((2, 2, 2, 2), 8, 8, 0).spec.shard_sizes(2) == (0, 1, 0, 0)


def test_halo_wider_than_the_senders_shard() -> None:
    plan = fs.domain.window_plan(8, 7, padding=3, sizes_in=(4, 1, 1, 2))
    assert plan.ranks[0].lacks == ((4, 7),)
    conv_rows((4, 1, 1, 2), 7, 1, 3)


def test_pooling_with_a_stride_that_is_not_the_kernel() -> None:
    x = torch.randn(1, 2, 9, 7, dtype=F64)
    spec = Spec(Mesh(h=2, w=2), P(None, None, "h", "w"), shape=x.shape, dtype=F64,
                sizes={2: (2, 7), 3: (5, 2)})  # fmt: skip
    for stride in (1, 2, 4):
        for name in ("avg_pool2d", "max_pool2d"):
            y = getattr(fs.domain, name)(fs.shard(x, spec), 3, stride, 1)
            expected = getattr(F, name)(x, 3, stride, 1)
            torch.testing.assert_close(fs.unshard(y), expected)


def test_convolution_with_both_dims_sharded_unevenly() -> None:
    x, w = torch.randn(1, 2, 9, 7, dtype=F64), torch.randn(3, 2, 3, 4, dtype=F64)
    spec = Spec(Mesh(h=2, w=3), P(None, None, "h", "w"), shape=x.shape, dtype=F64,
                sizes={2: (2, 7), 3: (5, 0, 2)})  # fmt: skip
    y = fs.domain.conv2d(fs.shard(x, spec), w, None, 1, (1, 2))
    torch.testing.assert_close(fs.unshard(y), F.conv2d(x, w, None, 1, (1, 2)))


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 16, "kernel": 0, "sizes_in": (8, 8)}, "kernel must be an int of at least 1"),
        ({"size": 16, "kernel": 3, "sizes_in": (9, 8)}, "sizes of at least 0 that add up to 16"),
        ({"size": 4, "kernel": 7, "sizes_in": (2, 2)}, "not be longer than the padded dim of 4"),
        ({"size": 4, "kernel": 3, "padding": -1, "sizes_in": (2, 2)}, "padding must be an int of"),
        (
            {"size": 16, "kernel": 3, "sizes_in": (8, 8), "sizes_out": (8, 8)},
            "2 sizes of at least 0 that add up to 14",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        fs.domain.window_plan(**options)


def test_kernel_larger_than_the_padded_input_is_refused() -> None:
    x = fs.shard(torch.ones(1, 1, 4), Mesh(h=2), P(None, None, "h"))
    with pytest.raises(ShardingError, match="must not be longer than the padded dim of 4"):
        fs.domain.conv1d(x, torch.ones(1, 1, 7))
