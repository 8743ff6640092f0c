"""Running times on two real gloo ranks, beside PyTorch's own.

`python -m tests.benchmarks.bench_transport` prints medians of one run: an fshard program
called with and without gradients, DTensor's `redistribute`, and the bare functional
collective with its wait (no copy into the right layout, no check, no gradient). All
contenders run in each round, so that a busy machine slows all of them.

A second table is of `fs.comm_log`: the CPU time of the first rank's thread in one collective, with
no log and within one, on gloo ranks, on a rank of PyTorch's fake backend (which sends nothing) and
on simulated ranks, whose threads share one core: if the system moves them, the caches of its cores
take as long as a collective. Rounds alternate; the figures are of their fastest tenth.
`forward, backward` is a collective and its transpose.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.gloo.harness import close_all, run_ranks

RANKS, ROUNDS, REPEATS = 2, 20, 20
SIZES = {"8 KiB": (64, 32), "4 MiB": (1024, 1024)}
LAYOUTS: dict[str, tuple[fs.PartitionSpec, Any]] = {
    "S(0)": (P("x"), Shard(0)),
    "S(1)": (P(None, "x"), Shard(1)),
    "R": (P(), Replicate()),
    "P": (P(unreduced={"x"}), Partial()),
}
TRANSITIONS = [("S(0)", "R"), ("R", "S(0)"), ("S(0)", "S(1)"), ("P", "R")]
Run = Callable[[], object]
OPS: Any = torch.ops._c10d_functional


def medians(runs: dict[str, Run], rounds: int = ROUNDS, repeats: int = REPEATS) -> dict[str, float]:
    """Return median microseconds of one call; all contenders run in every round."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            for _ in range(repeats):
                start = time.perf_counter()
                run()
                results[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in results.items()}


# -- real ranks ------------------------------------------------------------------------


def bare(a: str, b: str, x: torch.Tensor) -> Run:
    """Return the functional collective alone."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    match a, b:
        case "S(0)", "R":
            return lambda: OPS.wait_tensor(OPS.all_gather_into_tensor(x, RANKS, name))
        case "S(0)", "S(1)":
            flat, sizes = x.reshape(-1), [x.numel() // RANKS] * RANKS
            return lambda: OPS.wait_tensor(OPS.all_to_all_single(flat, sizes, sizes, name))
        case "P", "R":
            return lambda: OPS.wait_tensor(OPS.all_reduce(x, "sum", name))
        case _:
            rows = x.shape[0] // RANKS
            return lambda: x.narrow(0, rows * dist.get_rank(), rows).clone()


def real(shape: tuple[int, int], repeats: int) -> dict[tuple[str, str], dict[str, float]]:
    """Return the medians of every transition on this rank."""
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    mesh = Mesh(x=RANKS)
    fs.init(mesh)
    other_value = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("x",))
    results = {}
    for a, b in TRANSITIONS:
        src, dst = (Spec(mesh, LAYOUTS[item][0], shape=shape) for item in (a, b))
        x = torch.randn(src.local_shape(dist.get_rank()))
        leaf = x.clone().requires_grad_()
        prog = fs.redistribute(src, dst)
        value = DTensor.from_local(x, other_value, (LAYOUTS[a][1],))
        tracked = DTensor.from_local(leaf, other_value, (LAYOUTS[a][1],))
        to = (LAYOUTS[b][1],)
        runs: dict[str, Run] = {
            "bare": bare(a, b, x),
            "fshard": lambda p=prog, x=x: p(x),  # type: ignore[misc]
            "DTensor": lambda d=value, to=to: _waited(d.redistribute(placements=to)),  # type: ignore[misc]
            "fshard, grad": lambda p=prog, x=leaf: p(x),  # type: ignore[misc]
            "DTensor, grad": lambda d=tracked, to=to: _waited(d.redistribute(placements=to)),  # type: ignore[misc]
        }
        results[a, b] = medians(runs, repeats=repeats)
    return results


def _waited(x: DTensor) -> torch.Tensor:
    """Wait for DTensor's result, as reading it would."""
    local = x.to_local()
    return local.wait() if hasattr(local, "wait") else local


# -- observed collectives ----------------------------------------------------------------

CALLS, LOG_ROUNDS = 20, 150
COLLECTIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "psum": lambda x: fs.psum(x, "x"),
    "all_gather": lambda x: fs.all_gather(x, "x"),
    "psum_scatter": lambda x: fs.psum_scatter(x, "x"),
}


def logged(transport: str) -> dict[tuple[str, str], list[float]]:
    """Return the CPU microseconds of a rank's collective, without a log and within one."""
    if transport == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh, results = Mesh(x=RANKS), dict[tuple[str, str], list[float]]()
    if transport == "simulated":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    else:
        fs.init(mesh)

    def body(x: torch.Tensor) -> torch.Tensor:
        for name, collective in COLLECTIVES.items():
            forward, both = partial(collective, x), partial(both_passes, collective, x)
            for kind, run in {"forward": forward, "forward, backward": both}.items():
                times = alternated(run)
                if fs.axis_index("x") == 0:
                    results[name, kind] = times
        return x

    fs.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check=False)(torch.ones(RANKS, 8))
    return results


def both_passes(collective: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Run a collective and its transpose."""
    leaf = x.detach().requires_grad_()
    y = collective(leaf)
    torch.autograd.grad(y, leaf, torch.ones_like(y))


def alternated(run: Run) -> list[float]:
    """Return the CPU microseconds of this rank's thread in a call, without a log and within one."""
    times: list[list[float]] = [[], []]
    is_first = fs.axis_index("x") == 0  # a log of each simulated rank would count all of them
    for i in [0, 1] * LOG_ROUNDS:
        with fs.comm_log() if i and is_first else nullcontext():
            run()
            start = time.thread_time()
            for _ in range(CALLS):
                run()
            times[i].append(1e6 * (time.thread_time() - start) / CALLS)
    return [statistics.quantiles(each, n=10)[0] for each in times]


def print_logged(console: Console) -> None:
    """Measure and print the table of observed collectives."""
    # By its importable name: other processes do not know this module as __main__.
    from tests.benchmarks.bench_transport import logged

    table = Table(title="CPU µs of a rank's thread in one collective")
    for head in ("ranks", "", "", "no log", "fs.comm_log", "ratio", "difference"):
        table.add_column(head, justify="right" if head not in ("ranks", "") else "left")
    rows = {"gloo": run_ranks(RANKS, logged, "gloo", timeout=600)[0]}
    for transport in ("fake", "simulated"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            rows[transport] = process.submit(logged, transport).result()
    for ranks, results in rows.items():
        for (name, kind), (off, on) in results.items():
            cells = f"{off:.1f}", f"{on:.1f}", f"{on / off:.2f}", f"{on - off:.1f}"
            table.add_row(ranks, name, kind, *cells)
    console.print(table)


# -- the tables ------------------------------------------------------------------------


def ratio(part: float, unsharded: float) -> str:
    return f"{part:,.0f} ({part / unsharded:.2f})"


def main() -> None:
    """Measure and print the table."""
    # By its importable name: other processes do not know this module as __main__.
    from tests.benchmarks.bench_transport import real

    table = Table(title=f"{RANKS} gloo ranks, µs per call (and over the bare collective)")
    for head in ("f32", "", "bare", "fshard", "DTensor", "fshard, grad", "DTensor, grad"):
        table.add_column(head, justify="right" if head else "left")
    for size, shape in SIZES.items():
        rows = run_ranks(RANKS, real, shape, REPEATS if shape[0] < 512 else 5, timeout=600)[0]
        for (a, b), times in rows.items():
            first, *rest = times.values()
            table.add_row(size, f"{a} -> {b}", f"{first:,.0f}", *(ratio(t, first) for t in rest))
    console = Console(width=110)
    console.print(table)
    print_logged(console)
    close_all()


if __name__ == "__main__":
    main()
