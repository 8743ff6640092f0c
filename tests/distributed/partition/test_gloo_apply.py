"""`fs.apply` on processes: the values and gradients of a simulation."""

from __future__ import annotations

from functools import partial
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
from tests.helpers.spec_grid import message


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


def errors_of_wrong_locals(on_processes: bool) -> list[str]:
    """Return the errors of pairs whose locals on the last rank are not of their spec."""
    mesh, right = Mesh(x=2), torch.ones(4)
    spec = Spec(mesh, P("x"), shape=(8,))
    if on_processes:
        fs.init(mesh)
    is_last = on_processes and torch.distributed.get_rank() == 1
    part = fs.partition(torch.neg, mesh=mesh, in_specs=P("x"))
    texts = []
    for wrong in (torch.ones(8), torch.ones(4, dtype=torch.float64)):
        local: Any = (right, wrong)
        if on_processes:
            local = wrong if is_last else right
        for call in (part, partial(apply, torch.neg)):
            call((right if on_processes else (right, right), spec))  # also known calls are checked
            try:
                call((local, spec))
            except ShardingError as error:
                texts.append(str(error))
    return texts


def test_locals_that_are_not_of_their_spec_are_refused() -> None:
    texts = errors_of_wrong_locals(False)
    assert [text.partition("\n")[0] for text in texts] == 2 * [
        "fs.partition(neg)", "fs.apply(neg)"
    ]  # fmt: skip
    assert texts[1] == message(
        "fs.apply(neg)",
        "on rank 1 (x=1) a local of shape (8,) and torch.float32",
        "with f32[8@x] on Mesh(x=2) it must have shape (4,) and torch.float32",
        "fs.from_local makes a spec from locals, fs.reshard changes one",
    )
    assert run_ranks(2, errors_of_wrong_locals, True) == [[], texts]
