"""Graphs that `make_fx` records of simulated mapped functions, pairs and partitioned functions."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fshard as fs
from fshard import P
from tests.helpers.spmd.derivatives.functorch_idioms import differing_linearizations
from tests.helpers.spmd.derivatives.recorded_cases import (
    CASES,
    derivative_problems,
    linear_problems,
    problems,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of linearize


@pytest.mark.parametrize("name", CASES)
def test_graphs_are_the_functions_of_all_ranks(name: str) -> None:
    assert problems(name, CASES[name], on_rank=False) == []


def test_linearized_functions_are_derivatives() -> None:
    assert [text for name, case in CASES.items() for text in linear_problems(name, case)] == []


@pytest.mark.parametrize("check", [True, False])
def test_bodies_linearize_functions_with_collectives(check: bool) -> None:
    assert differing_linearizations(check) == []


def test_linearizations_of_written_arguments_are_refused() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        _, derivative = torch.func.linearize(torch.sin, y)
        y += 1
        return derivative(x)

    mapped = fs.shard_map(body, mesh=fs.Mesh(x=2), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(fs.ShardingError, match=r"linearize\(f, x.clone\(\)\)"):
        mapped(torch.ones(2))


def test_graphs_within_simulated_ranks_are_refused() -> None:
    body = lambda x: make_fx(lambda x: fs.psum(x.sin(), "x"))(x)(x)  # noqa: E731
    with pytest.raises(fs.ShardingError, match="make_fx around the call"):
        fs.shard_map(body, mesh=fs.Mesh(x=2), in_specs=P("x"), out_specs=P())(torch.ones(2))


def test_linearized_functions_have_derivatives() -> None:
    assert [text for name, case in CASES.items() for text in derivative_problems(name, case)] == []
