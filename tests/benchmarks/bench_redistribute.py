"""Real times and memory of layout changes on gloo ranks, beside DTensor's.

`python -m tests.benchmarks.bench_redistribute` prints medians of one run of some minutes;
`--ranks 4 --sizes 4KiB,1MiB --seconds 0.3` makes a short one. Of each transition and size
fshard's program, DTensor's `redistribute`, and the same with DTensor's searched plans take turns,
so that a busy machine slows all of them; a round's time is that of its slowest rank. Forward only.
fshard plans for what `fs.calibrate` measures first; with `--default` for what it takes by default.

Memory is what the resident set of the busiest rank grows by while one call runs, its result
included: the kernel's own high-water mark (`VmHWM`), set back before the call. Each phase begins
after free memory went back to the system, and large blocks get pages of their own, so that no
call profits from what an earlier one left. Buffers of gloo count, those of the kernel do not.
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
"""Of a square float32 tensor: its side."""

MEMORY = "16 MiB", 2048
"""What memory is measured with: next to it an allocator's own noise is small."""

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
    a, b = ([WORDS[each] for each in end.split()] for end in (src, dst))
    return Spec.from_placements(mesh, a, shape), Spec.from_placements(mesh, b, shape)


def contenders(
    src: Spec, dst: Spec, topology: Topology | None, meshes: Sequence[DeviceMesh]
) -> list[Run]:
    """One call of each, which waits for its result.

    The two of DTensor have a mesh each: what a mesh was planned for is remembered, whether it
    was searched for or not.
    """
    x, to = local_of(src, dist.get_rank()), dst.placements
    plain, planned = (DTensor.from_local(x, mesh, src.placements) for mesh in meshes)

    def searched() -> torch.Tensor:
        with dtensor.use_min_cost_redistribution_plan():
            return waited(planned.redistribute(placements=to))

    return [
        lambda: fs.redistribute(src, dst, topology=topology)(x),
        lambda: waited(plain.redistribute(placements=to)),
        searched,
    ]


def local_of(spec: Spec, rank: int) -> torch.Tensor:
    """Random numbers: replicas equal, addends each their own."""
    torch.manual_seed(spec.mesh.index(rank, tuple(spec.partition.unreduced)))
    return torch.randn(spec.shape)[spec.index(rank)].clone()


def waited(x: DTensor) -> torch.Tensor:
    """Wait for DTensor's result, as reading it would."""
    local = x.to_local()
    return local.wait() if hasattr(local, "wait") else local


def agree(runs: Sequence[Run]) -> None:
    """All give the same numbers."""
    ours, *theirs = (run() for run in runs)
    for other in theirs:
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


# -- times -----------------------------------------------------------------------------


def timed(runs: Sequence[Run], seconds: float) -> list[list[float]]:
    """Of each run the microseconds of a call in every round; every rank does as many."""
    first = [elapsed(run, 1) for run in runs]
    slowest = torch.tensor([sum(first)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    calls = max(1, min(10, int(seconds / ROUNDS / slowest.item())))
    rounds = max(FEWEST, min(ROUNDS, int(seconds / calls / slowest.item())))
    found: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds):
        # Nobody always comes after the same one.
        for place in range(len(runs)):
            at = (turn + place) % len(runs)
            found[at].append(elapsed(runs[at], calls))
    return found


def elapsed(run: Run, calls: int) -> float:
    """Seconds of one call, ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


# -- memory ----------------------------------------------------------------------------

M_MMAP_THRESHOLD = -3


def status(name: str) -> int:
    """A line of this process's status in bytes."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    assert found is not None
    return int(found.group(1)) * 1024


def grown(run: Run) -> float:
    """Bytes by which the resident set grows while `run` runs."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    kept = run()
    peak = status("VmHWM")
    dist.barrier()
    del kept
    return float(max(0, peak - before))


# -- real ranks ------------------------------------------------------------------------


def on_ranks(
    axes: dict[str, int],
    transitions: Sequence[str],
    sizes: Sequence[str],
    seconds: float,
    calibrated: bool,
) -> tuple[dict[Cell, Found], dict[Cell, Found], dict[Cell, str]]:
    """Seconds of this rank, bytes that it grew by, and fshard's programs."""
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
        agree(runs)
        found = timed(runs, seconds)
        times[size, transition] = dict(zip(CONTENDERS, found, strict=True))
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 2**16)
    for transition in transitions:
        runs = runs_of(MEMORY[1], transition)
        gc.collect()
        found = [[grown(run) for _ in range(3)][1:] for run in runs]
        memory[MEMORY[0], transition] = dict(zip(CONTENDERS, found, strict=True))
    return times, memory, programs


def slowest(ranks: Sequence[dict[Cell, Found]]) -> dict[Cell, dict[str, float]]:
    """Of each round the largest number of any rank, of the rounds the median."""
    return {
        cell: {
            who: statistics.median(map(max, zip(*(rank[cell][who] for rank in ranks), strict=True)))
            for who in CONTENDERS
        }
        for cell in ranks[0]
    }


# -- the tables ------------------------------------------------------------------------


def shown(title: str, cells: dict[Cell, dict[str, float]], unit: float) -> Table:
    """A row per transition and size: numbers, and DTensor's over fshard's."""
    made = Table(title=title)
    for head in ("x y", "global size", *CONTENDERS, "DTensor / fshard", "searched / fshard"):
        made.add_column(head, justify="left" if head in ("x y", "global size") else "right")
    last = ""
    for (size, transition), found in sorted(cells.items(), key=by_transition):
        if last not in ("", transition):
            made.add_section()
        last = transition
        ours, *theirs = (found[who] for who in CONTENDERS)
        made.add_row(
            transition,
            size,
            *(f"{number / unit:,.2f}" for number in (ours, *theirs)),
            *(f"{other / ours:.2f}" if ours else "-" for other in theirs),
        )
    return made


def by_transition(each: tuple[Cell, object]) -> tuple[int, int]:
    (size, transition), _ = each
    return (NAMED + SINGLE).index(transition), [*SIZES, MEMORY[0]].index(size)


def summary(name: str, cells: dict[Cell, dict[str, float]]) -> str:
    """How much faster, and where not."""
    lines = []
    for who in CONTENDERS[1:]:
        ratios = {cell: found["fshard"] / found[who] for cell, found in cells.items()}
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
    # By its importable name: other processes do not know this module as __main__.
    from tests.benchmarks.bench_redistribute import on_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="4,8", help="4, 8 or both")
    parser.add_argument("--sizes", default=",".join(SIZES), help="4KiB,1MiB, say")
    parser.add_argument("--seconds", type=float, default=1.2, help="for each cell")
    parser.add_argument("--default", action="store_true", help="plan as for no known hardware")
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
        times, memory = (slowest([each[at] for each in results]) for at in range(2))
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
