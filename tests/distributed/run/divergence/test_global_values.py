"""Plain tensors whose values differ between processes, as models without a seed, are refused."""

from __future__ import annotations

import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(x=2)


def products(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).sum()


def first_line(function: fs.Partition, *args: torch.Tensor) -> str:
    """Return the error of a call, "" without one."""
    try:
        function(*args)
    except ShardingError as error:
        return str(error).replace("\n", " ")
    return ""


def errors_of_seeds() -> dict[str, str]:
    """Return the errors of calls with tensors that each rank draws by a seed of its own."""
    fs.init(MESH)
    torch.manual_seed(dist.get_rank())
    w, x = torch.randn(4, 3), torch.randn(8, 4)
    equal = torch.ones(4, 3), torch.ones(8, 4) * (1 + 1e-6 * dist.get_rank())
    in_specs = P(), P("x")
    mapped = fs.shard_map(
        lambda w, x: fs.psum(products(w, x), "x"), mesh=MESH, in_specs=in_specs, out_specs=P()
    )
    part = fs.partition(products, mesh=MESH, in_specs=in_specs)
    if dist.get_rank() == 0:
        fs.shard(torch.zeros(8, 4), MESH, P("x"))  # of one rank alone: another line
    return {
        "equal": first_line(part, *equal),
        "closed over": first_line(fs.partition(lambda x: products(w, x), mesh=MESH,
                                               in_specs=P("x")), equal[1]),
        "shard": first_line(lambda x: fs.shard(x, MESH, P(None, "x")), x.t()),
        "argument": first_line(part, w.double(), equal[1].double()),
        "equal ones in a body": first_line(mapped, *equal),
    }  # fmt: skip


def test_values_that_differ_are_refused_before_the_collective() -> None:
    errors = run_ranks(2, errors_of_seeds)
    for texts in errors:
        assert texts["equal"] == texts["equal ones in a body"] == ""
        assert (
            "fs.partition, closed over  given: a tensor of f32[4,3], whose" in texts["closed over"]
        )
        assert "fs.partition(products)" in texts["argument"]
        assert "fix:   torch.manual_seed(0) on every rank" in texts["argument"]
    # fs.shard has no communication: the rank that comes first goes on.
    assert sorted(bool(texts["shard"]) for texts in errors) == [False, True]
    assert any("test_global_values.py" in texts["shard"] for texts in errors)
