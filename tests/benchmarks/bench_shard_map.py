"""Time of collectives and mapped functions beside the bare operations of PyTorch.

`python -m tests.benchmarks.bench_shard_map` prints medians of one run. On the `fake` process
group nothing is sent, so that the cost of the call remains. On two gloo ranks the other side is
the functional collective written by hand, result in the right layout. On simulated ranks it is
PyTorch's `LocalTensorMode`. Collective matmul on two and four gloo ranks stands beside a gather or
scatter with one product, and beside a ring by hand; the last column is what `partition` chooses on
the topology that `fs.calibrate` measures there. The contenders take turns, so that a busy machine
slows all of them.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import fshard as fs
from fshard import Mesh, P, Sharded, Spec
from fshard.run.transports.base import set_world
from tests.benchmarks.bench_transport import Run, medians
from tests.helpers.gloo.harness import close_all, run_ranks

FAKE, GLOO, SIMULATED, STEPS = 8, 2, 8, (20, 120)
PRODUCTS = (256, 512), (1024, 1024), (4096, 1024)
SIZES = {"8 KiB": 2048, "256 KiB": 65536, "4 MiB": 1048576}
OPS: Any = torch.ops._c10d_functional
Op = Callable[[torch.Tensor], torch.Tensor]


def collectives(mesh: Mesh) -> dict[str, tuple[Op, Op]]:
    """Return hand-written and fshard's collectives of a tensor whose dim 0 the ranks divide."""
    n, rank = mesh.size, dist.get_rank()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    ring = [(index, (index + 1) % n) for index in range(n)]
    wait = OPS.wait_tensor

    def mean(x: torch.Tensor) -> torch.Tensor:
        if dist.get_backend() == "gloo":  # which has no average
            return wait(OPS.all_reduce(x, "sum", name)) / n  # type: ignore[no-any-return]
        return wait(OPS.all_reduce(x, "avg", name))  # type: ignore[no-any-return]

    def swap(x: torch.Tensor) -> torch.Tensor:
        sizes = [x.shape[0] // n] * n
        return wait(OPS.all_to_all_single(x, sizes, sizes, name))  # type: ignore[no-any-return]

    def turn(x: torch.Tensor) -> torch.Tensor:
        send, receive = [0] * n, [0] * n
        send[(rank + 1) % n] = receive[(rank - 1) % n] = x.shape[0]
        return wait(OPS.all_to_all_single(x, receive, send, name))  # type: ignore[no-any-return]

    return {
        "psum": (
            lambda x: wait(OPS.all_reduce(x, "sum", name)), lambda x: fs.psum(x, "x", mesh=mesh)
        ),
        "pmean": (mean, lambda x: fs.pmean(x, "x", mesh=mesh)),
        "all_gather": (
            lambda x: wait(OPS.all_gather_into_tensor(x, n, name)),
            lambda x: fs.all_gather(x, "x", mesh=mesh, tiled=True),
        ),
        "psum_scatter": (
            lambda x: wait(OPS.reduce_scatter_tensor(x, "sum", n, name)),
            lambda x: fs.psum_scatter(x, "x", mesh=mesh, tiled=True),
        ),
        "all_to_all": (swap, lambda x: fs.all_to_all(x, "x", 0, 0, mesh=mesh, tiled=True)),
        "ppermute": (turn, lambda x: fs.ppermute(x, "x", ring, mesh=mesh)),
    }  # fmt: skip


# -- the cost of calls -------------------------------------------------------------------


def on_fake_ranks() -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Return microseconds of collectives and of mapped calls where nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FAKE)
    mesh = Mesh(x=FAKE)
    fs.init(mesh)
    try:
        x = torch.zeros(64, 8)
        leaf = x.clone().requires_grad_()
        results = {}
        for name, (bare, op) in collectives(mesh).items():
            ct = torch.zeros_like(op(x))
            runs: dict[str, Run] = {
                "bare": lambda bare=bare: bare(x),  # type: ignore[misc]
                "plain": lambda op=op: op(x),  # type: ignore[misc]
                "grad": lambda op=op: op(leaf),  # type: ignore[misc]
                "backward": lambda op=op, ct=ct: torch.autograd.grad(op(leaf), leaf, ct),  # type: ignore[misc]
            }
            results[name] = medians(runs, rounds=20, repeats=100)
        return results, mapped_calls(mesh)
    finally:
        set_world(None)
        dist.destroy_process_group()


def mapped_calls(mesh: Mesh) -> dict[str, dict[str, float]]:
    """Return functions of locals, bare and mapped over pairs without a check."""
    x = torch.zeros(8, 8)
    pair = Sharded(x, Spec(mesh, P("x"), shape=(8 * mesh.size, 8)))
    functions: dict[str, tuple[Callable[..., Any], int]] = {
        "x + 1": (lambda a: a + 1, 1),
        "a + b": (lambda a, b: a + b, 2),
        "psum": (lambda a: a + fs.psum(a, "x", mesh=mesh), 1),
    }
    results = {}
    for name, (fn, count) in functions.items():
        call = fs.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check=False)
        runs: dict[str, Run] = {
            "bare": lambda fn=fn, count=count: fn(*[x] * count),  # type: ignore[misc]
            "mapped": lambda call=call, count=count: call(*[pair] * count),  # type: ignore[misc]
        }
        results[name] = medians(runs, rounds=20, repeats=100)
    return results


# -- real ranks --------------------------------------------------------------------------


def on_gloo_ranks(numel: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return microseconds of collectives on this rank of two."""
    warnings.simplefilter("ignore")
    mesh = Mesh(x=GLOO)
    fs.init(mesh)
    x = torch.randn(numel // 64, 64)
    results = {}
    for name, (bare, op) in collectives(mesh).items():
        torch.testing.assert_close(bare(x), op(x))
        runs: dict[str, Run] = {
            "bare": lambda bare=bare: bare(x),  # type: ignore[misc]
            "fshard": lambda op=op: op(x),  # type: ignore[misc]
        }
        results[name] = medians(runs, repeats=repeats)
    return results


# -- collective matmul -------------------------------------------------------------------


def gathered_ring(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply the gathered rows of `x` by `w`, a block at a time while the next one arrives."""
    n, rank, rows = dist.get_world_size(), dist.get_rank(), x.shape[0]
    result = x.new_empty(n * rows, w.shape[1])
    for step in range(n):
        index, following = (rank - step) % n, torch.empty_like(x)
        waits = turned(x, following) if step < n - 1 else []
        torch.mm(x, w, out=result[index * rows : (index + 1) * rows])
        for wait in waits:
            wait.wait()
        x = following
    return result


def scattered_ring(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Add up the products of all ranks, and keep this rank's rows; sums move around the ring."""
    n, rank = dist.get_world_size(), dist.get_rank()
    rows = x.chunk(n)
    total = rows[(rank - 1) % n] @ w
    for step in range(2, n + 1):
        arriving = torch.empty_like(total)
        waits = turned(total, arriving)
        own = rows[(rank - step) % n] @ w
        for wait in waits:
            wait.wait()
        total = own.add_(arriving)
    return total


def turned(x: torch.Tensor, arriving: torch.Tensor) -> list[dist.Work]:
    """Send a tensor to the next rank, and receive another one from the previous rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, (rank + 1) % n),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % n),
        ]
    )


def collective_matmuls(rows: int, width: int) -> tuple[dict[str, dict[str, float]], float, str]:
    """Return microseconds of products, the measured overlap, and the choice of `partition`."""
    n = dist.get_world_size()
    mesh, name = Mesh(x=n), dist.group.WORLD.group_name  # type: ignore[union-attr]
    fs.init(mesh)
    topology = fs.calibrate(mesh, seconds=2)
    wait = OPS.wait_tensor
    x, w = torch.randn(rows // n, width), torch.randn(width, width // n)
    y, v = torch.randn(rows, width // n), torch.randn(width // n, width)
    products: dict[str, dict[str, Run]] = {
        "all_gather_matmul": {
            "at once": lambda: wait(OPS.all_gather_into_tensor(x, n, name)) @ w,
            "by hand": lambda: gathered_ring(x, w),
            "fshard": lambda: fs.all_gather_matmul(x, w, "x", mesh=mesh),
        },
        "matmul_reduce_scatter": {
            "at once": lambda: wait(OPS.reduce_scatter_tensor(y @ v, "sum", n, name)),
            "by hand": lambda: scattered_ring(y, v),
            "fshard": lambda: fs.matmul_reduce_scatter(y, v, "x", mesh=mesh),
        },
    }
    for runs in products.values():
        expected, *others = (run() for run in runs.values())
        for other in others:
            torch.testing.assert_close(other, expected, rtol=1e-3, atol=1e-3)
    part = fs.partition(torch.matmul, mesh=mesh, in_specs=(P("x"), P(None, "x")),
                        out_specs=P(None, "x"), topology=topology)  # fmt: skip
    call = part.trace(torch.empty(rows, width), torch.empty(width, width))
    choice = "ring" if "all_gather_matmul" in str(call.explain()) else "at once"
    times = {op: medians(runs, rounds=7, repeats=2) for op, runs in products.items()}
    return times, topology.overlap, choice


# -- simulated ranks ---------------------------------------------------------------------


def on_simulated_ranks() -> dict[str, dict[str, float]]:
    """Return microseconds of one operation of all ranks, without the start of a simulation.

    `LocalTensorMode` is measured with parts created outside of it, which is faster. `bare`
    is the operation on plain tensors in a loop, a lower bound of the time.
    """
    from torch.distributed import _local_tensor as local_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIMULATED)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    mesh = Mesh(x=SIMULATED)
    operations: dict[str, tuple[Op, Op]] = {
        "x + 1": (lambda v: v + 1, lambda v: v + 1),
        "all-reduce": (
            lambda v: OPS.wait_tensor(OPS.all_reduce(v, "sum", name)), lambda v: fs.psum(v, "x")
        ),
    }  # fmt: skip
    results = {}
    for what, (theirs, ours) in operations.items():
        for size in (16, 65536):
            x = torch.zeros(SIMULATED, size)
            parts = {rank: torch.zeros(1, size) for rank in range(SIMULATED)}
            held: Any = local_tensor.LocalTensor(parts)
            runs: dict[str, Run] = {}
            for steps in STEPS:
                mapped = fs.shard_map(
                    lambda v, op=ours, steps=steps: repeated(op, v, steps),
                    mesh=mesh, in_specs=P("x"), out_specs=P("x"), check=False,
                )  # fmt: skip

                def by_mode(op: Op = theirs, held: Any = held, steps: int = steps) -> None:
                    with local_tensor.LocalTensorMode(SIMULATED):
                        repeated(op, held, steps)

                runs[f"fshard {steps}"] = lambda m=mapped, x=x: m(x)  # type: ignore[misc]
                runs[f"theirs {steps}"] = by_mode
                if what == "x + 1":
                    runs[f"bare {steps}"] = lambda op=theirs, parts=parts, steps=steps: [  # type: ignore[misc]
                        repeated(op, part, steps) for part in parts.values()
                    ]
            times = medians(runs, rounds=8, repeats=3)
            few, many = STEPS
            results[f"{what}, {4 * size:,} B"] = {
                who: (times[f"{who} {many}"] - times[f"{who} {few}"]) / (many - few)
                for who in ("fshard", "theirs", "bare")
                if f"{who} {few}" in times
            }
    dist.destroy_process_group()
    return results


def repeated(op: Op, x: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        x = op(x)
    return x


# -- the tables --------------------------------------------------------------------------


def table(title: str, *heads: str) -> Table:
    output = Table(title=title)
    for index, head in enumerate(heads):
        output.add_column(head, justify="right" if index else "left")
    return output


def main() -> None:
    """Measure and print all tables."""
    # By its importable name, which other processes can import.
    from tests.benchmarks.bench_shard_map import collective_matmuls, on_gloo_ranks

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console = Console(width=110)
    costs, mapped = on_fake_ranks()
    shown = table(
        f"Collectives on {FAKE} fake ranks, µs (goals: +3 without grad, +15 with)",
        "", "raw op and wait", "fshard", "adds", "requires grad", "adds", "and backward",
    )  # fmt: skip
    for name, results in costs.items():
        bare, plain, grad, back = results.values()
        numbers = (bare, plain, plain - bare, grad, grad - bare, back)
        shown.add_row(name, *(f"{number:.1f}" for number in numbers))
    console.print(shown)

    shown = table(
        "Mapped calls, pairs in and out, check=False, µs (goal: +15)", "", "bare", "mapped", "adds"
    )
    for name, results in mapped.items():
        bare, call = results.values()
        shown.add_row(name, f"{bare:.1f}", f"{call:.1f}", f"{call - bare:.1f}")
    console.print(shown)

    shown = table(
        f"Collectives on {GLOO} gloo ranks, µs (goal: 1.1 of hand-written)",
        "", "", "hand-written", "fshard", "ratio",
    )  # fmt: skip
    for size, numel in SIZES.items():
        repeats = 10 if numel > 500_000 else 30
        for name, results in run_ranks(GLOO, on_gloo_ranks, numel, repeats, timeout=600)[0].items():
            bare, ours = results.values()
            shown.add_row(size, name, f"{bare:,.0f}", f"{ours:,.0f}", f"{ours / bare:.2f}")
    console.print(shown)

    shown = table(
        "Collective matmul on gloo ranks, µs (goal: 1.1 of the ring by hand)",
        "", "ranks", "shape", "at once", "ring by hand", "fshard", "ratio", "overlap", "partition",
    )  # fmt: skip
    for ranks, (rows, width) in itertools.product((2, 4), PRODUCTS):
        times, share, choice = run_ranks(ranks, collective_matmuls, rows, width, timeout=600)[0]
        for name, results in times.items():
            _, hand, ours = results.values()
            shown.add_row(name, f"{ranks}", f"{rows} x {width} x {width}",
                          *(f"{number:,.0f}" for number in results.values()),
                          f"{ours / hand:.2f}", f"{share:.0%}", choice)  # fmt: skip
    close_all()
    console.print(shown)

    shown = table(
        f"{SIMULATED} simulated ranks, µs per operation of all (goals: 0.20, collectives 0.33)",
        "", "bare", "fshard", "LocalTensorMode", "ratio",
    )  # fmt: skip
    for label, results in on_simulated_ranks().items():
        ours, theirs = results["fshard"], results["theirs"]
        bare = f"{results['bare']:,.1f}" if "bare" in results else ""
        shown.add_row(label, bare, f"{ours:,.1f}", f"{theirs:,.1f}", f"{ours / theirs:.2f}")
    console.print(shown)


if __name__ == "__main__":
    main()
