"""Graphs that `make_fx` records of simulated mapped functions, pairs and partitioned functions."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P
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


def test_graphs_within_simulated_ranks_are_refused() -> None:
    body = lambda x: torch.func.linearize(lambda x: fs.psum(x.sin(), "x"), x)[1](x)  # noqa: E731
    with pytest.raises(fs.ShardingError, match=r"torch.func.jvp\(f, \(x,\), \(t,\)\) in the body"):
        fs.shard_map(body, mesh=fs.Mesh(x=2), in_specs=P("x"), out_specs=P())(torch.ones(2))


def test_linearized_functions_have_derivatives() -> None:
    assert [text for name, case in CASES.items() for text in derivative_problems(name, case)] == []
