"""Transforms of `torch.func` around pairs, programs, `apply` and partitioned functions."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P
from tests.helpers.spmd.transform_cases import CALLS, MESH, TRANSFORMS, close, dense_call

pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr"
)  # torch.func.linearize


def by_redistribution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Redistribute an unreduced product; its shards are tensors of each rank."""
    columns, rows = fs.shard(x, MESH, P(None, "x")), fs.shard(w, MESH, P("x"))
    parts = tuple(a @ b for a, b in zip(columns.local, rows.local, strict=True))
    spec = fs.Spec(MESH, P(unreduced={"x"}), shape=parts[0].shape, dtype=x.dtype, uneven="chunk")
    total = fs.unshard(fs.reshard(fs.Sharded(parts, spec), P("x")))
    return torch.tanh(total).cumsum(0)


ALL_CALLS = {**CALLS, "programs": by_redistribution}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", ALL_CALLS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transformed_calls_equal_the_dense_ones(transform: str, call: str) -> None:
    run = TRANSFORMS[transform]
    close(run(ALL_CALLS[call]), run(dense_call))
