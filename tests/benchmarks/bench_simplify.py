"""Distance of simplified programs to plans: composed programs, simplified, beside plans.

`python -m tests.benchmarks.bench_simplify` composes planned programs through random layouts and
prints the modelled time of the composition and of its `simplify`, as multiples of the plan
between the same ends (geometric mean and worst), how many reach the plan, and the median
milliseconds of one `simplify` with empty caches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import operator
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from fshard.layout.mesh import Mesh
from fshard.plan.redistribute import redistribute
from fshard.program.cost.topology import Topology
from fshard.program.program import Program
from fshard.program.steps import Exchange
from tests.benchmarks.bench_plan import clear_caches
from tests.helpers.spec_grid import STATES, all_specs

SEED = 0
TOLERANCE = 1e-9
"""Relative difference of times, sums of floats, that count as equal."""


@dataclass(frozen=True, slots=True)
class Case:
    """Layouts to compose, the number of programs, and excluded steps."""

    mesh: Mesh
    shape: tuple[int, ...]
    states: tuple[str, ...]
    length: int
    exclude: tuple[type, ...] = ()

    def __str__(self) -> str:
        grid = "x".join(map(str, self.mesh.sizes))
        less = ", collectives only" if self.exclude else ""
        return f"{grid}, {'all states' if self.states == STATES else 'sharded'}{less}"


CASES = tuple(
    Case(mesh, shape, states, length, exclude)
    for mesh, shape in ((Mesh(x=2, y=4), (1024, 1024)), (Mesh(x=2, y=2, z=4), (1024, 1024)))
    for states in (("invariant",), STATES)
    for length in (2, 3)
    for exclude in ((), (Exchange,))
)


@dataclass(frozen=True, slots=True)
class Row:
    """Times of one composition and of its simplification, and the seconds that this took.

    Times are relative to that of the plan from the first layout to the last.
    """

    composed: float
    simple: float
    seconds: float


def measure(case: Case, count: int, topology: Topology) -> list[Row]:
    """Return the rows of random compositions that are not empty."""
    layouts = all_specs(case.mesh, case.shape, case.states)
    chooser = random.Random(SEED)
    rows: list[Row] = []
    plan = functools.partial(redistribute, topology=topology, exclude=case.exclude)
    while len(rows) < count:
        chain = [chooser.choice(layouts) for _ in range(case.length + 1)]
        parts = [plan(*pair) for pair in itertools.pairwise(chain)]
        prog: Program = functools.reduce(operator.rshift, parts)
        best = plan(chain[0], chain[-1]).cost().time
        if best == 0:
            continue
        clear_caches()
        start = time.thread_time()
        simple = prog.simplify(exclude=case.exclude)
        seconds = time.thread_time() - start
        times = (prog.cost().time, simple.cost().time)
        rows.append(Row(*(t / best for t in times), seconds))
    return rows


def ratios(numbers: Sequence[float]) -> str:
    """Return the geometric mean and the worst."""
    mean = math.exp(statistics.fmean(map(math.log, numbers)))
    return f"{mean:.3f} / {max(numbers):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="compositions of each kind")
    parser.add_argument("--topology", choices=["node", "cluster"], default="node")
    options = parser.parse_args()
    topology = Topology.node() if options.topology == "node" else Topology.cluster(4)
    table = Table(title=f"modelled time over that of a plan (mean / worst), {topology.name}")
    for name in ("layouts", "plans", "composed", "simple", "as planned", "below", "ms"):
        table.add_column(name, justify="left" if name == "layouts" else "right")
    for case in CASES:
        rows = measure(case, options.count, topology)
        simple = [row.simple for row in rows]
        table.add_row(
            str(case),
            str(case.length),
            ratios([row.composed for row in rows]),
            ratios(simple),
            f"{sum(ratio <= 1 + TOLERANCE for ratio in simple) / len(simple):.1%}",
            f"{sum(ratio < 1 - TOLERANCE for ratio in simple) / len(simple):.1%}",
            f"{1e3 * statistics.median(row.seconds for row in rows):.2f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
