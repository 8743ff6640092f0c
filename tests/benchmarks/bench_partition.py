"""Time of a partitioned block relative to the same block written by hand for one rank.

`python -m tests.benchmarks.bench_partition` prints medians of one run, forward alone and with the
gradients of all parameters, on the `fake` process group, where nothing is sent and only
the work of one rank is left. The hand-written block is Megatron's: functions of PyTorch on local
shards, and two collectives of fshard. With DTensor, the single-device function runs on distributed
tensors. The contenders take turns.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fshard as fs
from fshard import Mesh, P
from tests.benchmarks.bench_transport import medians
from tests.helpers.ops.blocks import Params, rms

RANKS = 8
WIDTHS = (256, 1024)
BATCH, LENGTH, HEAD = 4, 128, 32
GOAL = 1.02
COLUMNS, ROWS = ("wq", "wk", "wv", "wg", "wu"), ("wo", "wd")
Run = Callable[[], Any]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention by operations: DTensor lacks a rule for the fused one on CPUs."""
    return torch.softmax(q @ k.transpose(-1, -2) / HEAD**0.5, -1) @ v


def block(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Run a decoder block with RMS norms and a SwiGLU, on one device."""
    batch, length, _ = x.shape
    h = rms(x, p["ln1"])
    q, k, v = (F.linear(h, p[w]).view(batch, length, -1, HEAD).transpose(1, 2) for w in COLUMNS[:3])
    a = attention(q, k, v)
    x = x + F.linear(a.transpose(1, 2).reshape(batch, length, -1), p["wo"])
    h = rms(x, p["ln2"])
    return x + F.linear(F.silu(F.linear(h, p["wg"])) * F.linear(h, p["wu"]), p["wd"])


def by_hand(mesh: Mesh) -> Callable[[Params, torch.Tensor], torch.Tensor]:
    """Return the block of one rank: inputs of sharded layers are reduced, outputs summed."""

    def run(p: Params, x: torch.Tensor) -> torch.Tensor:
        enter = lambda h: fs.pcast(h, "tp", src="invariant", to="reduced", mesh=mesh)  # noqa: E731
        batch, length, _ = x.shape
        h = enter(rms(x, p["ln1"]))
        q, k, v = (
            F.linear(h, p[w]).view(batch, length, -1, HEAD).transpose(1, 2) for w in COLUMNS[:3]
        )
        a = attention(q, k, v)
        o = F.linear(a.transpose(1, 2).reshape(batch, length, -1), p["wo"])
        x = x + fs.psum(o, "tp", mesh=mesh)
        h = enter(rms(x, p["ln2"]))
        y = F.linear(F.silu(F.linear(h, p["wg"])) * F.linear(h, p["wu"]), p["wd"])
        return x + fs.psum(y, "tp", mesh=mesh)

    return run


def parameters(width: int) -> Params:
    """Return global parameters."""
    draw = lambda *shape: torch.randn(shape) / shape[-1] ** 0.5  # noqa: E731
    params = {w: draw(width, width) for w in ("wq", "wk", "wv", "wo")}
    params |= {w: draw(4 * width, width) for w in ("wg", "wu")}
    return params | {
        "wd": draw(width, 4 * width),
        "ln1": torch.ones(width),
        "ln2": torch.ones(width),
    }


def stepping(run: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> Run:
    """Return a function that runs forward and computes all gradients."""
    return lambda: torch.autograd.grad(run().square().sum(), leaves)


def contenders(width: int) -> dict[str, tuple[Run, Run]]:
    """Return for each contender its forward pass, and the pass with gradients."""
    mesh, params = Mesh(tp=RANKS), parameters(width)
    specs = {k: P("tp") if k in COLUMNS else P(None, "tp") if k in ROWS else P() for k in params}
    x = torch.randn(BATCH, LENGTH, width)
    part = fs.partition(block, mesh=mesh, params=specs, in_specs=(P(),))
    pairs = {k: fs.shard(v, fs.Spec(mesh, specs[k], shape=v.shape)) for k, v in params.items()}
    local = {k: pair.local.requires_grad_() for k, pair in pairs.items()}
    args = {k: (local[k], pairs[k].spec) for k in local}
    spec = fs.Spec(mesh, P(), shape=x.shape)
    hand, leaves = by_hand(mesh), list(local.values())
    device_mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    placed = {
        k: distribute_tensor(v, device_mesh, [Shard(0) if k in COLUMNS else Shard(1) if k in ROWS
                                              else Replicate()]).requires_grad_()
        for k, v in params.items()
    }  # fmt: skip
    replicated = distribute_tensor(x, device_mesh, [Replicate()])
    graph = part.trace(args, (x, spec)).graph(0)
    listed = [local[k] for k in sorted(local)] + [x]
    runs: dict[str, tuple[Callable[[], torch.Tensor], list[torch.Tensor]]] = {
        "by hand": (lambda: hand(local, x), leaves),
        "partition, on pairs": (lambda: part(args, (x, spec)).local, leaves),
        "partition, its graph": (lambda: graph(*listed)[0], leaves),
        "DTensor": (lambda: block(placed, replicated).full_tensor(), list(placed.values())),
    }

    def without_grad(run: Run) -> Run:
        def forward() -> Any:
            with torch.no_grad():
                return run()

        return forward

    return {name: (without_grad(run), stepping(run, ls)) for name, (run, ls) in runs.items()}


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    fs.init(Mesh(tp=RANKS))
    title = f"A decoder block on one of {RANKS} ranks (goal {GOAL})"
    over = "over by hand"
    table = Table("width", "what", "forward, ms", over, "with gradients, ms", over, title=title)
    for width in WIDTHS:
        runs = contenders(width)
        forward = medians({name: run for name, (run, _) in runs.items()}, 5, 30)
        both = medians({name: run for name, (_, run) in runs.items()}, 5, 30)
        for name in runs:
            cells = [f"{times[name] / 1000:.2f}" for times in (forward, both)]
            more = [f"{times[name] / times['by hand']:.3f}" for times in (forward, both)]
            table.add_row(str(width), name, cells[0], more[0], cells[1], more[1])
        table.add_section()
    Console(width=110).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
