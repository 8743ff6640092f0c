"""`ragged_all_to_all`: JAX's values, gradients by the reverse exchange, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spmd.collective_cases import this_rank
from tests.helpers.spmd.ragged_cases import (
    MESH,
    REFUSED,
    X,
    by_hand,
    exchange_in_reverse,
    leaves,
    ragged_by_hand,
    ragged_on_rank,
    refusals,
    text,
)


def test_example_of_jax() -> None:
    """Run the example in the documentation of `jax.lax.ragged_all_to_all`."""
    mesh = Mesh(i=2)
    value = [
        ([1, 2, 2], [0, 1], [1, 2], [0, 0], [1, 1]),
        ([3, 4, 0], [0, 1], [1, 1], [1, 2], [2, 1]),
    ]

    def body() -> Any:
        operand, *numbers = value[this_rank(mesh)]
        output = torch.zeros(4, dtype=torch.int64)
        tensors = [torch.tensor(item) for item in numbers]
        return fs.ragged_all_to_all(
            torch.tensor(operand), output, *tensors, axis_name="i", mesh=mesh
        ).tolist()

    with fs.comm_log() as log:
        assert fs.simulate(mesh, body) == [[1, 3, 0, 0], [2, 2, 4, 0]]
    assert dict(log.counts) == {("all_gather", "i"): 1, ("ragged_all_to_all", "i"): 1}
    assert log.bytes["ragged_all_to_all", "i"] == 2 * 8


def test_gradients_to_second_order() -> None:
    results = fs.simulate(MESH, ragged_on_rank, MESH)
    for actual, expected in zip(results, ragged_by_hand(MESH), strict=True):
        torch.testing.assert_close(actual, [t.detach() for t in expected])


def test_in_shard_map_and_in_groups() -> None:
    mesh = Mesh(y=3)
    x, out = (t[:3, 0].flatten(0, 1) for t in leaves())
    f = fs.shard_map(exchange_in_reverse, mesh=mesh, in_specs=P("y"), out_specs=P("y"))
    y = f(x, out)
    torch.testing.assert_close(y, torch.cat(by_hand(list(x.chunk(3)), list(out.chunk(3)))))

    def alone() -> Any:
        v = torch.arange(3.0)
        return fs.ragged_all_to_all(
            v, 0 * v, [1], [2], [0], [2], axis_name="y", axis_index_groups=[[0], [2], [1]],
            mesh=mesh,
        ).tolist()  # fmt: skip

    assert fs.simulate(mesh, alone) == [[1, 2, 0]] * 3


def test_meta_tensors() -> None:
    x, out = torch.empty(3, 2, device="meta"), torch.empty(7, 2, device="meta")
    numbers = ([0, 1], [1, 2], [0, 0], [4, 1])
    y = fs.ragged_all_to_all(x, out, *numbers, axis_name="i", mesh=Mesh(i=2))
    assert (tuple(y.shape), y.device.type) == ((7, 2), "meta")
    lost = torch.empty(2, device="meta", dtype=torch.int64)
    with pytest.raises(ShardingError, match="send_sizes without values"):
        fs.ragged_all_to_all(x, out, [0, 1], lost, *numbers[2:], axis_name="i", mesh=Mesh(i=2))


def test_all_ranks_raise_the_same_errors() -> None:
    mesh = Mesh(i=2)
    for results in fs.simulate(mesh, refusals, mesh):
        for item, actual in zip(REFUSED, results, strict=True):
            assert actual == text(item.lines), item.name


def test_errors_name_no_rank_of_the_simulation() -> None:
    mesh = Mesh(i=2)

    def body(x: torch.Tensor) -> torch.Tensor:
        i = int(fs.axis_index("i"))
        return fs.ragged_all_to_all(x, x, [0, 1], [1, 1 + i], [i, i], [1, 1], axis_name="i")

    f = fs.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(ShardingError) as caught:
        f(torch.zeros(4))
    line = "on rank 1 along the axes 2 rows from row 1 on, for rank 1 along the axes"
    rows = (line, "the operand has 2 rows", "check input_offsets and send_sizes")
    assert str(caught.value) == text([rows])
    assert not getattr(caught.value, "__notes__", [])


def test_error_in_one_group_leaves_others_running() -> None:
    """The ranks of the other group get their result."""
    mesh = Mesh(j=2, i=2)

    def body() -> str:
        i, j = int(fs.axis_index("i", mesh=mesh)), int(fs.axis_index("j", mesh=mesh))
        numbers = [0, 1 + i * j], [1, 1], [i, i], [1, 1]
        try:
            return str(fs.ragged_all_to_all(X[:2], X, *numbers, axis_name="i", mesh=mesh).tolist())
        except ShardingError as error:
            return str(error)

    line = "on rank 1 along the axes 1 rows from row 2 on, for rank 1 along the axes"
    rows = text([(line, "the operand has 2 rows", "check input_offsets and send_sizes")])
    assert fs.simulate(mesh, body) == ["[0.0, 0.0, 0.0]"] * 2 + [rows] * 2
