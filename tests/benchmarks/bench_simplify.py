"""How near rewrites come to a plan: composed programs, simplified, beside one planned anew.

`python -m tests.benchmarks.bench_simplify` composes planned programs through random layouts and
prints the modelled time of the composition and of what `simplify` makes of it, as multiples of
the plan between the same ends (geometric mean and worst), how many reach the plan, and the
median milliseconds of one `simplify` that remembers nothing.
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
from tests.benchmarks.bench_plan import forget
from tests.helpers.spec_grid import STATES, all_specs

SEED = 0
SAME = 1e-9
"""Two times that differ by less are equal: sums of floats."""


@dataclass(frozen=True, slots=True)
class Case:
    """Which layouts, through how many others, and what is not used."""

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
    """Of one composition: its time and the simple one's over the plan's, and the seconds."""

    composed: float
    simple: float
    seconds: float


def measure(case: Case, count: int, topology: Topology) -> list[Row]:
    """The rows of random compositions that have something to do."""
    layouts = all_specs(case.mesh, case.shape, case.states)
    chooser = random.Random(SEED)
    rows: list[Row] = []
    plan = functools.partial(redistribute, topology=topology, exclude=case.exclude)
    while len(rows) < count:
        chain = [chooser.choice(layouts) for _ in range(case.length + 1)]
        parts = [plan(*pair) for pair in itertools.pairwise(chain)]
        prog: Program = functools.reduce(operator.rshift, parts)
        best = plan(chain[0], chain[-1]).cost(topology).time
        if best == 0:
            continue
        forget()
        start = time.thread_time()
        simple = prog.simplify(topology, exclude=case.exclude)
        seconds = time.thread_time() - start
        times = (prog.cost(topology).time, simple.cost(topology).time)
        rows.append(Row(*(each / best for each in times), seconds))
    return rows


def ratios(numbers: Sequence[float]) -> str:
    """Geometric mean and worst."""
    mean = math.exp(statistics.fmean(map(math.log, numbers)))
    return f"{mean:.3f} / {max(numbers):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="compositions of each kind")
    parser.add_argument("--topology", choices=["node", "cluster"], default="node")
    given = parser.parse_args()
    topology = Topology.node() if given.topology == "node" else Topology.cluster(4)
    table = Table(title=f"modelled time over that of a plan (mean / worst), {topology.name}")
    for name in ("layouts", "plans", "composed", "simple", "as planned", "below", "ms"):
        table.add_column(name, justify="left" if name == "layouts" else "right")
    for case in CASES:
        rows = measure(case, given.count, topology)
        simple = [row.simple for row in rows]
        table.add_row(
            str(case),
            str(case.length),
            ratios([row.composed for row in rows]),
            ratios(simple),
            f"{sum(each <= 1 + SAME for each in simple) / len(simple):.1%}",
            f"{sum(each < 1 - SAME for each in simple) / len(simple):.1%}",
            f"{1e3 * statistics.median(row.seconds for row in rows):.2f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
