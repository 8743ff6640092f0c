"""Real times and memory of redistributions on gloo ranks, beside DTensor's.

`python -m tests.benchmarks.bench_redistribute` prints medians of one run of some minutes;
`--ranks 4 --sizes 4KiB,1MiB --seconds 0.3` makes a short one. For each transition and size
fshard's program, DTensor's `redistribute`, and the same with DTensor's searched plans alternate,
so that other load slows all of them alike; a round's time is the slowest rank's. Forward only.
fshard plans for the topology that `fs.calibrate` measures first; with `--default` for one node.

Memory is the growth of the busiest rank's resident set while one call runs, its result included:
the kernel's own high-water mark (`VmHWM`), reset before the call. Each phase begins after free
memory went back to the system, and large blocks get pages of their own, so that no call profits
from memory of an earlier one. Buffers of gloo count, those of the kernel do not.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import re
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import _redistribute as dtensor

import fshard as fs
from fshard import Mesh, P, Spec, Topology
from tests.helpers.gloo.harness import close_all, run_ranks

MESHES = {4: {"x": 2, "y": 2}, 8: {"x": 2, "y": 4}}
SIZES = {"4 KiB": 32, "64 KiB": 128, "1 MiB": 512, "8 MiB": 1448, "64 MiB": 4096}
"""Side of a square float32 tensor, by its size."""

MEMORY = "16 MiB", 2048
"""Size for memory: an allocator's own noise is small beside it."""

NAMED = (
    "S0 S0 -> R S0", "S0 S1 -> S1 S0", "S0 R -> R S0", "P P -> R R", "P S0 -> S0 S1",
    "S0 S0 -> S1 S1", "yx -> xy", "P S0 -> S0 S0", "P S0 -> S0 R", "S0 S1 -> S1 S1",
    "P R -> R S0", "P P -> R S0",
)  # fmt: skip
SINGLE = ("R S0 -> R R", "R S1 -> R R", "R S0 -> R S1", "R P -> R R", "R P -> R S0", "R P -> R S1")
CONTENDERS = ("fshard", "DTensor", "DTensor, searched")
ROUNDS, FEWEST = 15, 3
Run = Callable[[], torch.Tensor]
Cell = tuple[str, str]
Found = dict[str, list[float]]


# -- one transition --------------------------------------------------------------------

WORDS: dict[str, Placement] = {
    "P": Partial(), "R": Replicate(), "S0": Shard(0), "S1": Shard(1)
}  # fmt: skip


def ends(transition: str, mesh: Mesh, side: int) -> tuple[Spec, Spec]:
    src, dst = transition.split(" -> ")
    shape = (side, side)
    if src == "yx":
        return Spec(mesh, P(("y", "x")), shape=shape), Spec(mesh, P(("x", "y")), shape=shape)
    a, b = ([WORDS[word] for word in end.split()] for end in (src, dst))
    return Spec.from_placements(mesh, a, shape), Spec.from_placements(mesh, b, shape)


def contenders(
    src: Spec, dst: Spec, topology: Topology | None, meshes: Sequence[DeviceMesh]
) -> list[Run]:
    """Return one function per name in `CONTENDERS`: fshard, and DTensor without and with a search.

    Each redistributes this rank's local and waits for the result. DTensor caches plans by mesh,
    whether they were searched or not, so its two runs use the two `meshes`.
    """
    x, to = local_of(src, dist.get_rank()), dst.placements
    plain, planned = (DTensor.from_local(x, mesh, src.placements) for mesh in meshes)

    def searched() -> torch.Tensor:
        with dtensor.use_min_cost_redistribution_plan():
            return wait_for(planned.redistribute(placements=to))

    return [
        lambda: fs.redistribute(src, dst, topology=topology)(x),
        lambda: wait_for(plain.redistribute(placements=to)),
        searched,
    ]


def local_of(spec: Spec, rank: int) -> torch.Tensor:
    """Return random values: replicas equal, unreduced values different."""
    torch.manual_seed(spec.mesh.index(rank, tuple(spec.partition.unreduced)))
    return torch.randn(spec.shape)[spec.index(rank)].clone()


def wait_for(x: DTensor) -> torch.Tensor:
    """Wait for DTensor's result, as reading it would."""
    local = x.to_local()
    return local.wait() if hasattr(local, "wait") else local


def check_equal(runs: Sequence[Run]) -> None:
    """Check that all contenders give the same values."""
    ours, *rest = (run() for run in runs)
    for other in rest:
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


# -- times -----------------------------------------------------------------------------


def round_times(runs: Sequence[Run], seconds: float) -> list[list[float]]:
    """Return the seconds of a call of each run in every round; every rank runs as many."""
    first = [elapsed(run, 1) for run in runs]
    slowest = torch.tensor([sum(first)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    calls = max(1, min(10, int(seconds / ROUNDS / slowest.item())))
    rounds = max(FEWEST, min(ROUNDS, int(seconds / calls / slowest.item())))
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds):
        # The order rotates, so that no run always follows the same one.
        for i in range(len(runs)):
            index = (turn + i) % len(runs)
            times[index].append(elapsed(runs[index], calls))
    return times


def elapsed(run: Run, calls: int) -> float:
    """Return the seconds of one call, with ranks that start together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


# -- memory ----------------------------------------------------------------------------

M_MMAP_THRESHOLD = -3


def status(name: str) -> int:
    """Return a line of this process's status in bytes."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{name}:\s+(\d+) kB", text)
    assert match is not None
    return int(match.group(1)) * 1024


def memory_growth(run: Run) -> float:
    """Return the bytes by which the resident set grows in one run."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = run()
    peak = status("VmHWM")
    dist.barrier()
    del result
    return float(max(0, peak - before))


# -- real ranks ------------------------------------------------------------------------


def on_ranks(
    axes: dict[str, int],
    transitions: Sequence[str],
    sizes: Sequence[str],
    seconds: float,
    calibrated: bool,
) -> tuple[dict[Cell, Found], dict[Cell, Found], dict[Cell, str]]:
    """Return seconds and memory growth of this rank, and fshard's programs."""
    warnings.simplefilter("ignore")
    mesh = Mesh(axes)
    fs.init(mesh)
    topology = fs.calibrate(mesh, seconds=5) if calibrated else None
    grid = tuple(axes.values())
    meshes = [
        init_device_mesh("cpu", grid, mesh_dim_names=names) for names in (("a", "b"), ("c", "d"))
    ]
    times: dict[Cell, Found] = {}
    memory: dict[Cell, Found] = {}
    programs: dict[Cell, str] = {}

    def runs_of(side: int, transition: str) -> list[Run]:
        src, dst = ends(transition, mesh, side)
        return contenders(src, dst, topology, meshes)

    for size, transition in itertools.product(sizes, transitions):
        runs = runs_of(SIZES[size], transition)
        src, dst = ends(transition, mesh, SIZES[size])
        programs[size, transition] = str(fs.redistribute(src, dst, topology=topology))
        check_equal(runs)
        result = round_times(runs, seconds)
        times[size, transition] = dict(zip(CONTENDERS, result, strict=True))
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 2**16)
    for transition in transitions:
        runs = runs_of(MEMORY[1], transition)
        gc.collect()
        result = [[memory_growth(run) for _ in range(3)][1:] for run in runs]
        memory[MEMORY[0], transition] = dict(zip(CONTENDERS, result, strict=True))
    return times, memory, programs


def slowest(ranks: Sequence[dict[Cell, Found]]) -> dict[Cell, dict[str, float]]:
    """Return the median over rounds of the largest figure of any rank."""
    return {
        cell: {
            who: statistics.median(map(max, zip(*(rank[cell][who] for rank in ranks), strict=True)))
            for who in CONTENDERS
        }
        for cell in ranks[0]
    }


# -- the tables ------------------------------------------------------------------------


def shown(title: str, cells: dict[Cell, dict[str, float]], unit: float) -> Table:
    """Return a table with a row per transition and size: figures, and DTensor's over fshard's."""
    table = Table(title=title)
    for head in ("x y", "global size", *CONTENDERS, "DTensor / fshard", "searched / fshard"):
        table.add_column(head, justify="left" if head in ("x y", "global size") else "right")
    last = ""
    for (size, transition), seconds in sorted(cells.items(), key=by_transition):
        if last not in ("", transition):
            table.add_section()
        last = transition
        ours, *rest = (seconds[who] for who in CONTENDERS)
        table.add_row(
            transition,
            size,
            *(f"{number / unit:,.2f}" for number in (ours, *rest)),
            *(f"{other / ours:.2f}" if ours else "-" for other in rest),
        )
    return table


def by_transition(item: tuple[Cell, object]) -> tuple[int, int]:
    (size, transition), _ = item
    return (NAMED + SINGLE).index(transition), [*SIZES, MEMORY[0]].index(size)


def summary(name: str, cells: dict[Cell, dict[str, float]]) -> str:
    """Return sentences about how much faster fshard is, and where it is slower."""
    lines = []
    for who in CONTENDERS[1:]:
        ratios = {cell: seconds["fshard"] / seconds[who] for cell, seconds in cells.items()}
        worst = max(ratios, key=lambda cell: ratios[cell])
        slower = sum(ratio > 1.1 for ratio in ratios.values())
        mean = 1 / statistics.geometric_mean(ratios.values())
        lines.append(
            f"{name} over {who}: {mean:.2f}x faster (geometric mean, goal 1.5), at worst"
            f" {ratios[worst]:.2f}x its time (goal 1.1; {' '.join(worst)}),"
            f" above 1.1 in {slower} of {len(ratios)} cells"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print the tables."""
    # Imported by name, because other processes cannot import __main__.
    from tests.benchmarks.bench_redistribute import on_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="4,8", help="4, 8 or both")
    parser.add_argument("--sizes", default=",".join(SIZES), help="4KiB,1MiB, say")
    parser.add_argument("--seconds", type=float, default=1.2, help="for each cell")
    parser.add_argument("--default", action="store_true", help="plan for a single node")
    parser.add_argument("--only", help="transitions, 'P P -> R R;S0 R -> R S0', say")
    options = parser.parse_args()
    sizes = tuple(size for size in SIZES if size.replace(" ", "") in options.sizes.replace(" ", ""))
    transitions = tuple(options.only.split(";")) if options.only else NAMED + SINGLE
    console = Console(width=120)
    start = time.perf_counter()
    for ranks in map(int, options.ranks.split(",")):
        axes = MESHES[ranks]
        results = run_ranks(
            ranks,
            on_ranks,
            axes,
            transitions,
            sizes,
            options.seconds,
            not options.default,
            timeout=900,
        )
        close_all()
        times, memory = (slowest([result[i] for result in results]) for i in range(2))
        grid = "x".join(map(str, axes.values()))
        console.print(shown(f"{ranks} gloo ranks, {grid}, ms of one call", times, 1e-3))
        console.print(shown(f"{ranks} gloo ranks, {grid}, MiB grown by", memory, 2**20))
        for name, members in (("12 transitions", NAMED), ("single collectives", SINGLE)):
            if cells := {cell: found for cell, found in times.items() if cell[1] in members}:
                console.print(summary(name, cells), highlight=False)
        for cell, found in times.items():
            if found["fshard"] > 1.1 * found["DTensor"]:
                print(f"slower at {' '.join(cell)}: {results[0][2][cell]}")
        console.print(f"{time.perf_counter() - start:.0f} s", highlight=False)


if __name__ == "__main__":
    main()
