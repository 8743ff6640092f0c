"""`fs.testing.assert_communicates` and `assert_local`: counts, bytes, both passes, failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs

MESH = fs.Mesh(dp=2, tp=2)


def operands() -> tuple[fs.Sharded, fs.Sharded]:
    x = fs.shard(torch.ones(4, 8), MESH, fs.P("dp", "tp"))
    w = fs.shard(torch.ones(8, 4), MESH, fs.P("tp"))
    return x, w


def layer(x: fs.Sharded, w: fs.Sharded) -> Any:
    return fs.reshard(fs.apply(torch.matmul, x, w), fs.P("dp"))


BACKWARD = {("all_reduce", "dp"): 1}
"""The weight's gradient is the sum over the batch."""


@pytest.mark.parametrize("counts", [{"all_reduce": 1}, {("all_reduce", "tp"): 1}])
def test_counts_and_bytes_of_both_passes(counts: Any) -> None:
    result = fs.testing.assert_communicates(
        layer, operands(), counts, bytes=32, backward=BACKWARD, backward_bytes=64
    )
    fs.testing.assert_layout(result, fs.P("dp"))


@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ({}, {}),
        ({"all_reduce": 2}, {}),
        ({("all_reduce", "dp"): 1}, {}),
        ({"all_reduce": 1, "all_gather": 1}, {}),
        ({"all_reduce": 1}, {"bytes": 33}),
        ({"all_reduce": 1}, {"backward": {}}),
        ({"all_reduce": 1}, {"backward": BACKWARD, "backward_bytes": 1}),
    ],
)
def test_differences_fail(counts: Any, options: Any) -> None:
    with pytest.raises(AssertionError, match="differs"):
        fs.testing.assert_communicates(layer, operands(), counts, **options)


def test_failure_is_a_table_of_expected_and_counted_launches() -> None:
    with pytest.raises(AssertionError) as caught:
        fs.testing.assert_communicates(
            layer, operands(), {"all_gather": 1, "all_reduce": 1}, backward=BACKWARD
        )
    lines = [line.split() for line in str(caught.value).splitlines()]
    assert ["forward", "all_gather", "1", "0", "-", "differs"] in lines
    assert ["forward", "all_reduce", "1", "1", "32", "B"] in lines
    assert ["backward", "all_reduce", "dp", "1", "1", "64", "B"] in lines


def test_boundary_traffic_of_a_map_counts() -> None:
    mapped = fs.shard_map(
        lambda x: fs.psum(x, "dp"), mesh=MESH, in_specs=fs.P("dp", "tp"), out_specs=fs.P(None, "tp")
    )
    x = torch.ones(4, 8)
    pair = fs.shard(x, MESH, fs.P("dp", "tp"))
    fs.testing.assert_communicates(mapped, (pair,), {"all_reduce": 1})
    fs.testing.assert_communicates(mapped, (x,), {"all_reduce": 1, "all_gather": 1})


def test_local_calls() -> None:
    x, w = operands()
    fs.testing.assert_local(lambda x: fs.apply(torch.relu, x), (x,), backward=True)
    fs.testing.assert_local(lambda x, w: fs.apply(torch.matmul, x, w), (x, w))
    with pytest.raises(AssertionError, match=r"(?s)assert_local.*backward\s+all_reduce\s+dp"):
        fs.testing.assert_local(lambda x, w: fs.apply(torch.matmul, x, w), (x, w), backward=True)


def test_arguments_keep_their_gradients_to_themselves() -> None:
    x, w = operands()
    fs.testing.assert_communicates(layer, (x, w), {"all_reduce": 1}, backward=BACKWARD)
    assert not any(local.requires_grad for pair in (x, w) for local in pair.local)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (torch.ones(2), {}, "args is a Tensor"),
        ((), {"backward_bytes": 3}, "backward_bytes=3 without backward="),
    ],
)
def test_malformed_calls_are_refused(args: Any, options: Any, message: str) -> None:
    with pytest.raises(fs.ShardingError, match=message):
        fs.testing.assert_communicates(layer, args, {}, **options)


@pytest.mark.parametrize("counts", [
    [("all_reduce", 1)], {"all_reduce": "1"}, None, {("all_reduce", "tp", "dp"): 1}, {3: 1},
])  # fmt: skip
def test_counts_are_numbers_of_launches(counts: Any) -> None:
    with fs.comm_log() as log:
        pass
    with pytest.raises(fs.ShardingError, match="to numbers of launches"):
        log.assert_only(counts)


def test_one_axis_may_be_a_tuple() -> None:
    fs.testing.assert_communicates(layer, operands(), {("all_reduce", ("tp",)): 1})
