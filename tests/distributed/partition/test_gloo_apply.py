"""`fs.apply` on processes: the values and gradients of a simulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.partition.apply import apply
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.ops.apply_cases import rank_local_calls


def on_rank(size: int) -> list[Any]:
    fs.init(Mesh(x=size))
    return rank_local_calls(size)


def test_values_and_gradients() -> None:
    simulated = fs.simulate(Mesh(x=2), rank_local_calls, 2)
    for rank, results in enumerate(run_ranks(2, on_rank, 2)):
        torch.testing.assert_close(results, simulated[rank])


def explicit(size: int) -> str:
    mesh = Mesh(x=size)
    fs.init(mesh)
    x = torch.ones(4, 4)
    pairs = [fs.shard(x, Spec(mesh, p, shape=(4, 4))) for p in (P("x"), P(None, "x"))]
    with pytest.raises(ShardingError) as caught:
        apply(torch.add, *pairs)
    return str(caught.value)


def test_all_ranks_raise_the_same_error() -> None:
    texts = run_ranks(2, explicit, 2)
    assert texts[0] == texts[1]
    assert "all strategies need communication" in texts[0]
