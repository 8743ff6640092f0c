"""Planning times, side by side with DTensor's two planners in the same process.

`python -m tests.benchmarks.bench_plan` prints the median milliseconds of one plan in some
minutes, `--seconds 3` in fewer, over layouts that both can express (DTensor's default
shard order, no reduced axes), and as ratios to DTensor's greedy planner; then for all layouts of
fshard. Cold plans start with empty caches: fshard's are cleared before each run, DTensor's plans
bypass its cache. Specs exist already, and the fastest of three runs counts. A slow planner gets as
many of the pairs as fit into its time. Times are processor times, independent of other load.
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
MAX_SEARCHED_AXES = 5
"""Most axes for DTensor's search: on 6 one plan takes most of a minute."""

Pair = tuple[Spec, Spec]
Both = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh, a shape, and the goal in milliseconds."""

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
    """Return the cells of layouts that DTensor's default shard order can express."""
    pairs = sample(case, PAIRS, all_states=False)
    mesh = device_mesh(case.mesh)
    dtensor_pairs = [(as_dtensor(src, mesh), as_dtensor(dst, mesh)) for src, dst in pairs]
    ours = timed([cold(pair) for pair in pairs], seconds, clear_caches)
    by_bytes = timed([cold(pair, objective="bytes") for pair in pairs], seconds, clear_caches)
    greedy = timed([dtensor_plan(pair, "greedy") for pair in dtensor_pairs], seconds)
    few = dtensor_pairs if len(case.mesh.axes) <= MAX_SEARCHED_AXES else []
    searched = timed([dtensor_plan(pair, "Dijkstra") for pair in few], seconds)
    base = statistics.median(greedy)
    return [
        f"{case.goal:g}",
        cell(ours, base),
        f"{1e3 * quantile(ours, 0.99):,.2f}",
        *(cell(times, base) if times else "-" for times in (by_bytes, greedy, searched)),
    ]


def measure_alone(case: Case, seconds: float) -> list[str]:
    """Return the cells of every state and every order of axes, which DTensor does not have."""
    pairs = sample(case, PAIRS, all_states=True)
    ours = timed([cold(pair) for pair in pairs], seconds, clear_caches)
    by_bytes = timed([cold(pair, objective="bytes") for pair in pairs], seconds, clear_caches)
    last = f"{1e3 * quantile(ours, 0.99):,.2f}"
    return [f"{case.goal:g}", cell(ours), last, cell(by_bytes), "-", "-"]


def measure_cached(case: Case) -> list[str]:
    """Return the cells of a plan that is in the cache."""
    pair = next((a, b) for a, b in sample(case, 10, all_states=False) if a != b)
    mesh = device_mesh(case.mesh)
    both = as_dtensor(pair[0], mesh), as_dtensor(pair[1], mesh)
    ours, greedy = (
        mean_time(lambda: redistribute(*pair)),
        mean_time(lambda: cached_dtensor_plan(*both)),
    )
    ratio = f"{1e3 * ours:.5f} ({as_ratio(ours / greedy)})"
    return ["-", ratio, "-", "-", f"{1e3 * greedy:.5f} (1x)", "-"]


def sample(case: Case, count: int, *, all_states: bool) -> list[Pair]:
    """Return pairs of layouts: every axis on a dim or in a state, each equally likely."""
    random_ = random.Random(SEED)
    states = ["invariant", "unreduced"] + ["reduced"] * all_states
    choices = [*range(len(case.shape)), *states]

    def layout() -> Spec:
        axes = list(case.mesh.axes)
        if all_states:
            random_.shuffle(axes)
        axes_of: dict[object, list[str]] = {choice: [] for choice in choices}
        for axis in axes:
            axes_of[random_.choice(choices)].append(axis)
        partition = PartitionSpec(
            *(tuple(axes_of[dim]) for dim in range(len(case.shape))),
            unreduced=set(axes_of["unreduced"]),
            reduced=set(axes_of.get("reduced", ())),
        )
        return Spec(case.mesh, partition, shape=case.shape)

    return [(layout(), layout()) for _ in range(count)]


# -- one plan --------------------------------------------------------------------------


def cold(pair: Pair, objective: str = "time") -> Callable[[], object]:
    return lambda: redistribute(*pair, objective=objective)


def dtensor_plan(pair: Both, planner: str) -> Callable[[], object]:
    return lambda: dtensor._gen_transform_infos_non_cached(*pair, PLANNERS[planner])


def cached_dtensor_plan(src: Any, dst: Any) -> object:
    return dtensor._gen_transform_infos(src, dst, False)


def clear_caches() -> None:
    """Clear the caches of planning, programs and costs."""
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
    """Return the seconds of the fastest of a few runs of each plan, of as many as fit."""
    fastest = []
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
        fastest.append(min(times))
        if time.perf_counter() > end:
            break
    gc.enable()
    return fastest


def mean_time(plan: Callable[[], object], count: int = 20_000) -> float:
    """Return the mean seconds of very many runs."""
    plan()
    start = time.thread_time()
    for _ in range(count):
        plan()
    return (time.thread_time() - start) / count


def quantile(times: Sequence[float], q: float) -> float:
    return sorted(times)[round(q * (len(times) - 1))]


def cell(times: Sequence[float], base: float | None = None) -> str:
    """Return median milliseconds, the ratio to `base`, and the number of pairs if not all."""
    middle = statistics.median(times)
    ratio = f" ({as_ratio(middle / base)})" if base else ""
    few = f" of {len(times)}" if len(times) < PAIRS else ""
    return f"{1e3 * middle:,.3f}{ratio}{few}"


def as_ratio(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


if __name__ == "__main__":
    main()
