"""Planning times, side by side with DTensor's two planners in the same process.

`python -m tests.benchmarks.bench_plan` prints the median milliseconds of one plan in some
minutes, `--seconds 3` in fewer, over layouts that both can express (DTensor's default
shard order, no reduced axes), and as ratios to DTensor's greedy planner; then of all layouts that
fshard has. Cold means that nothing is remembered of any plan, cost or bound: what fshard keeps is
dropped before each run, and DTensor's plans are asked for past its cache. Specs exist already,
and the fastest of three runs counts. Who takes long gets as many of the pairs as fit in a time.
Times are the processor's: a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import _redistribute as dtensor

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.plan.redistribute import redistribute
from tests.helpers.dtensor_plans import PLANNERS, as_dtensor, device_mesh

SEED, PAIRS, REPEATS = 0, 150, 3
SEARCHED = 5
"""The most axes that DTensor's search is given: on 6 one plan takes most of a minute."""

Pair = tuple[Spec, Spec]
Both = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh and a shape; the goal in milliseconds."""

    name: str
    mesh: Mesh
    shape: tuple[int, ...]
    goal: float


CASES = (
    Case("2 axes, 2 dims, 2x2", Mesh(a=2, b=2), (4096, 4096), 1),
    Case("2 axes, 2 dims, 4x8", Mesh(a=4, b=8), (4096, 4096), 1),
    Case("2 axes, 2 dims, 2**20 ranks", Mesh(a=1024, b=1024), (2**20, 2**20), 1),
    Case("3 axes, 3 dims, 2x2x2", Mesh(a=2, b=2, c=2), (512, 512, 512), 5),
    Case("3 axes, 3 dims, 4x2x4", Mesh(a=4, b=2, c=4), (512, 512, 512), 5),
    Case("5 axes, 3 dims, 2x2x2x2x2", Mesh(a=2, b=2, c=2, d=2, e=2), (512,) * 3, 50),
    Case("6 axes, 3 dims, 65,536 ranks", Mesh(a=8, b=8, c=8, d=8, e=4, f=4), (2**16,) * 3, 200),
)


def main() -> None:
    """Measure every case and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12, help="for each planner of a case")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger(dtensor.__name__).setLevel(logging.ERROR)
    table = Table(title="median time of one cold plan, ms (and over DTensor's greedy planner)")
    for head in ("case", "goal", "fshard", "p99", "fshard by bytes",
                 "DTensor greedy", "DTensor Dijkstra"):  # fmt: skip
        table.add_column(head, justify="left" if head == "case" else "right")
    for case in CASES:
        table.add_row(case.name, *measure(case, seconds))
    table.add_section()
    for case in CASES:
        table.add_row(f"{case.name}, any layout", *measure_alone(case, seconds))
    table.add_section()
    table.add_row("cached plan", *measure_cached(CASES[0]))
    Console(width=140).print(table)


# -- one case --------------------------------------------------------------------------


def measure(case: Case, seconds: float) -> list[str]:
    """The cells of layouts that DTensor's default shard order can express."""
    pairs = sample(case, PAIRS, everything=False)
    mesh = device_mesh(case.mesh)
    both = [(as_dtensor(src, mesh), as_dtensor(dst, mesh)) for src, dst in pairs]
    ours = timed([cold(pair) for pair in pairs], seconds, forget)
    by_bytes = timed([cold(pair, objective="bytes") for pair in pairs], seconds, forget)
    greedy = timed([theirs(each, "greedy") for each in both], seconds)
    few = both if len(case.mesh.axes) <= SEARCHED else []
    searched = timed([theirs(each, "Dijkstra") for each in few], seconds)
    base = statistics.median(greedy)
    return [
        f"{case.goal:g}",
        cell(ours, base),
        f"{1e3 * quantile(ours, 0.99):,.2f}",
        *(cell(each, base) if each else "-" for each in (by_bytes, greedy, searched)),
    ]


def measure_alone(case: Case, seconds: float) -> list[str]:
    """The cells of every state and every order of axes, which DTensor does not have."""
    pairs = sample(case, PAIRS, everything=True)
    ours = timed([cold(pair) for pair in pairs], seconds, forget)
    by_bytes = timed([cold(pair, objective="bytes") for pair in pairs], seconds, forget)
    last = f"{1e3 * quantile(ours, 0.99):,.2f}"
    return [f"{case.goal:g}", cell(ours), last, cell(by_bytes), "-", "-"]


def measure_cached(case: Case) -> list[str]:
    """The cells of a plan that is asked for again."""
    pair = next(each for each in sample(case, 10, everything=False) if each[0] != each[1])
    mesh = device_mesh(case.mesh)
    both = as_dtensor(pair[0], mesh), as_dtensor(pair[1], mesh)
    ours, greedy = many(lambda: redistribute(*pair)), many(lambda: remembered(*both))
    ratio = f"{1e3 * ours:.5f} ({as_ratio(ours / greedy)})"
    return ["-", ratio, "-", "-", f"{1e3 * greedy:.5f} (1x)", "-"]


def sample(case: Case, count: int, *, everything: bool) -> list[Pair]:
    """Pairs of layouts: every axis on a dim or in a state, each as likely as any other."""
    random_ = random.Random(SEED)
    states = ["invariant", "unreduced"] + ["reduced"] * everything
    choices = [*range(len(case.shape)), *states]

    def layout() -> Spec:
        axes = list(case.mesh.axes)
        if everything:
            random_.shuffle(axes)
        found: dict[object, list[str]] = {choice: [] for choice in choices}
        for axis in axes:
            found[random_.choice(choices)].append(axis)
        partition = PartitionSpec(
            *(tuple(found[dim]) for dim in range(len(case.shape))),
            unreduced=set(found["unreduced"]),
            reduced=set(found.get("reduced", ())),
        )
        return Spec(case.mesh, partition, shape=case.shape)

    return [(layout(), layout()) for _ in range(count)]


# -- one plan --------------------------------------------------------------------------


def cold(pair: Pair, objective: str = "time") -> Callable[[], object]:
    return lambda: redistribute(*pair, objective=objective)


def theirs(both: Both, planner: str) -> Callable[[], object]:
    return lambda: dtensor._gen_transform_infos_non_cached(*both, PLANNERS[planner])


def remembered(src: Any, dst: Any) -> object:
    return dtensor._gen_transform_infos(src, dst, False)


def forget() -> None:
    """Drop what planning, programs and costs remember."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fshard.plan", "fshard.program", "fshard.layout.refinement")):
            for value in list(vars(module).values()):
                if callable(drop := getattr(value, "cache_clear", None)):
                    drop()


def timed(
    plans: Sequence[Callable[[], object]],
    seconds: float,
    before: Callable[[], object] = lambda: None,
) -> list[float]:
    """Seconds of the fastest of a few runs of each, or of the first ones that fit."""
    found = []
    end = time.perf_counter() + seconds
    gc.disable()
    for plan in plans:
        times = []
        for _ in range(REPEATS):
            before()
            start = time.thread_time()
            plan()
            times.append(time.thread_time() - start)
            if time.perf_counter() > end:
                break
        found.append(min(times))
        if time.perf_counter() > end:
            break
    gc.enable()
    return found


def many(plan: Callable[[], object], count: int = 20_000) -> float:
    """Seconds of one of very many runs."""
    plan()
    start = time.thread_time()
    for _ in range(count):
        plan()
    return (time.thread_time() - start) / count


def quantile(times: Sequence[float], at: float) -> float:
    return sorted(times)[round(at * (len(times) - 1))]


def cell(times: Sequence[float], base: float | None = None) -> str:
    """Median milliseconds and its ratio to `base`, and of how many pairs where not of all."""
    middle = statistics.median(times)
    ratio = f" ({as_ratio(middle / base)})" if base else ""
    few = f" of {len(times)}" if len(times) < PAIRS else ""
    return f"{1e3 * middle:,.3f}{ratio}{few}"


def as_ratio(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


if __name__ == "__main__":
    main()
