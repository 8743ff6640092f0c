"""`fs.comm_log` on real processes counts collectives of PyTorch as CommDebugMode does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(x=2)


def raw_work(x: torch.Tensor) -> None:
    dist.all_reduce(x.clone())
    funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))
    dist.all_gather_single(x.new_empty(8), x)
    device_mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(x, device_mesh, [Shard(0)])
    (sharded @ sharded).full_tensor()
    sharded.redistribute(device_mesh, [Replicate()])


def fshard_work(x: torch.Tensor) -> None:
    pair = fs.shard(x, fs.Spec(MESH, P("x"), shape=(4,)))
    fs.reshard(pair, P())
    fs.unshard(pair)
    fs.psum((x, x), "x", mesh=MESH)
    fs.ppermute(x, "x", [(0, 1), (1, 0)], mesh=MESH)
    fs.scatter(x, pair.spec)
    fs.shard_map(lambda v: fs.psum(v, "x"), mesh=MESH, in_specs=P("x"), out_specs=P())(x)
    part = fs.partition(torch.dot, mesh=MESH, in_specs=(P("x"), P("x")))
    leaf = x.clone().requires_grad_()
    part(leaf, leaf).backward()


FIELDS = ("operation", "axes", "dtype", "call")


def logs() -> tuple[Any, ...]:
    fs.init(MESH)
    x = torch.arange(4.0)
    raw_work(x)  # process groups are created here
    with CommDebugMode() as mode, fs.comm_log() as silent:
        raw_work(x)
    with fs.comm_log(raw=True) as raw:
        raw_work(x)
    with fs.comm_log() as plain:
        fshard_work(x)
    with fs.comm_log(raw=True) as both:
        fshard_work(x)
    return (
        mode.get_total_counts(),
        silent.counts,
        *(log.to_dict(*FIELDS) for log in (raw, plain, both)),
    )


def without_bytes(log: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [*log["forward"], *log["backward"]]
    return [{k: v for k, v in row.items() if k != "bytes"} for row in rows]


def test_raw_collectives_are_counted_on_request() -> None:
    for total, silent, raw, plain, both in run_ranks(2, logs):
        assert not silent
        rows = without_bytes(raw)
        assert sum(row["count"] for row in rows) == total
        assert {"all_reduce", "all_gather"} <= {row["op"] for row in rows}
        assert {tuple(row["axes"]) for row in rows} == {("ranks 0, 1",)}
        # Collectives that fshard launches are not counted twice.
        assert without_bytes(plain) == without_bytes(both)
