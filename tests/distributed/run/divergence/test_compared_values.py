"""Plain tensors whose values differ between processes, as models without a seed, are refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import nan
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(x=2)


def scaled(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * w


def error_of(function: Callable[..., Any], *args: Any) -> str:
    """Return the error of a call, "" without one."""
    try:
        function(*args)
    except ShardingError as error:
        return str(error)
    return ""


def in_fake_mode(x: torch.Tensor) -> None:
    """Shard a tensor with values in a mode of tensors without."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fs.shard(x, MESH, P("x"))


def in_threads(tensors: list[torch.Tensor]) -> None:
    """Shard tensors in threads, as loaders do, which come in an order of their own."""
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda x: fs.shard(x, MESH, P("x")), tensors))


def errors_of_rank() -> dict[str, str]:
    """Return the errors of calls without communication, with plain tensors that ranks draw."""
    fs.init(MESH)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    w, equal = torch.randn(4), torch.ones(4) * (1 + 1e-6 * rank)
    x = fs.from_local(torch.ones(4, 4), MESH, P("x"))
    if rank == 0:
        fs.shard(torch.zeros(8, 4), MESH, P("x"))  # by one rank alone
    options: dict[str, Any] = {"mesh": MESH, "in_specs": (P(), P("x"))}
    part = fs.partition(scaled, **options)
    mapped = fs.shard_map(scaled, **options, out_specs=P("x"))
    return {
        "equal": error_of(part, equal, x) + error_of(mapped, equal, x),
        "closed over": error_of(fs.partition(lambda x: x * w, mesh=MESH), x),
        "argument": error_of(part, w.double(), x),
        "of a body": error_of(mapped, w.double(), x),
        "shard": error_of(lambda: fs.shard(w.expand(8, 4), MESH, P("x"))),
        "complex": error_of(lambda: fs.shard(torch.complex(w, w), MESH, P("x"))),
        "counts": error_of(lambda: fs.shard(torch.tensor([1000, 1001 + rank]), MESH, P("x"))),
        "seeds": error_of(lambda: fs.shard(torch.tensor([2**60 + rank, 0]), MESH, P("x"))),
        "nan": error_of(lambda: fs.shard(torch.tensor([1.0, nan if rank else 2.0]), MESH, P())),
        "no elements": error_of(lambda: fs.shard(w[:0], MESH, P("x"))),
        "bf16": error_of(lambda: fs.shard(torch.tensor([4 + rank / 32]).bfloat16(), MESH, P())),
        "bits": error_of(lambda: fs.shard(torch.ones(8).byte().view(torch.bits8), MESH, P())),
        "fake mode": error_of(in_fake_mode, torch.ones(2)),
        "threads": error_of(in_threads, [torch.full((6,), float(i ^ rank)) for i in range(2)]),
    }


def test_values_that_differ_between_processes_are_refused() -> None:
    """The process that comes first goes on: nothing waits for others where none communicates."""
    first, second = run_ranks(2, errors_of_rank)
    refused = {name for name in first if first[name]} | {name for name in second if second[name]}
    differing = {"closed over", "argument", "of a body", "shard", "complex", "counts"}
    differing |= {"seeds", "nan"}
    assert refused == differing
    errors = {name: first[name] or second[name] for name in first}
    assert not any(first[name] and second[name] for name in first)
    assert errors["argument"].startswith("fs.partition(scaled)\n  given: a tensor of f64[4], whose")
    assert "test_compared_values.py" in errors["shard"].partition("\n")[0]
    assert "nan on rank 1" in errors["nan"]
    assert "2 on rank 0" in errors["nan"]
    assert f"{2**60 + 1} on rank 1" in errors["seeds"]
    assert "fix:   torch.manual_seed(0) on every rank" in errors["closed over"]
