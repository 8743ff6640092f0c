"""Predicted beside measured times on 4 gloo ranks: programs, and partitioned steps.

`python -m tests.benchmarks.bench_prediction` calibrates topologies on the processes, predicts every
program and every step with them, and then measures them. It prints a row for each, the median of
the relative errors, and how often the order of alternatives is predicted: programs between the same
layouts, and layouts of the same step, among pairs whose measured times differ by more than 20 %.
Times are medians over rounds of the slowest rank. Each rank is bound to a core, as by
`mpirun --bind-to core`: where they wander, the times of one program differ by half from run to run.
Nothing else must run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.show.table import Column, Table
from tests.helpers.gloo.harness import close_all, run_ranks
from tests.helpers.gloo.rounds import bind_to_core

RANKS, ROUNDS, SECONDS = 4, 15, 0.02
LINE, GRID = Mesh(x=4), Mesh(x=2, y=2)
SIDES = (64, 512, 1024, 2048)
EXCLUDED: Sequence[tuple[type[fs.Step], ...]] = (
    (),
    (fs.Exchange,),
    (fs.AllToAll, fs.Exchange),
    (fs.AllReduce, fs.Exchange),
)
TRANSITIONS: Sequence[tuple[Mesh, fs.PartitionSpec, fs.PartitionSpec]] = (
    (LINE, P("x"), P()),
    (LINE, P("x"), P(None, "x")),
    (LINE, P(unreduced={"x"}), P()),
    (LINE, P(unreduced={"x"}), P("x")),
    (LINE, P(None, "x"), P()),
    (GRID, P("x", "y"), P()),
    (GRID, P("x", "y"), P("y", "x")),
    (GRID, P("x"), P(None, "x")),
    (GRID, P(unreduced={"x", "y"}), P()),
    (GRID, P(unreduced={"x"}), P("x")),
    (GRID, P(unreduced={"y"}), P("x")),
)
WIDTHS = (256, 768)
LAYOUTS = {
    "data parallel": (P(), P(), P("x")),
    "FSDP": (P("x"), P("x"), P("x")),
    "tensor parallel": (P(None, "x"), P("x"), P()),
    "weights gathered": (P(None, "x"), P("x"), P("x")),
    "replicated": (P(), P(), P()),
}
"""Partitions of the two weights and the batch of a step."""
Case = tuple[str, str, float]
"""The question, the answer to it, and its predicted seconds."""


def programs(topology: fs.Topology, mesh: Mesh) -> list[fs.Program]:
    """Return distinct programs between layouts: under exclusions, and through replicas."""
    found: dict[fs.Program, None] = {}
    for (of, before, after), side in itertools.product(TRANSITIONS, SIDES):
        if of != mesh:
            continue
        src, dst = (Spec(mesh, p, shape=(side, side)) for p in (before, after))
        for exclude in EXCLUDED:
            with contextlib.suppress(fs.ShardingError):
                found[fs.redistribute(src, dst, topology=topology, exclude=exclude)] = None
        middle = src.replace(partition=P())
        found[fs.redistribute(src, middle, topology=topology)
              >> fs.redistribute(middle, dst, topology=topology)] = None  # fmt: skip
    return list({(prog.src, prog.dst, prog.steps): prog for prog in found}.values())


def train(p: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a block of two products."""
    y = x + torch.relu(x @ p["up"]) @ p["down"]
    return torch.autograd.grad(y.square().mean(), list(p.values()))


def step(layout: str, width: int) -> tuple[fs.Partition, dict[str, fs.Sharded], fs.Sharded]:
    """Return a partitioned step and its arguments on this rank."""
    up, down, batch = LAYOUTS[layout]
    part = fs.partition(train, mesh=LINE, params={"up": up, "down": down}, in_specs=batch,
                        out_specs=(up, down))  # fmt: skip
    shapes = (up, (width, 4 * width)), (down, (4 * width, width))
    weights = [fs.ones(Spec(LINE, p, shape=shape)) for p, shape in shapes]
    for pair in weights:
        pair.local.requires_grad_()
    params = dict(zip(("up", "down"), weights, strict=True))
    return part, params, fs.ones(Spec(LINE, batch, shape=(512, width)))


def seconds(run: Callable[[], object], count: int) -> float:
    """Return the mean seconds of `count` calls in sequence."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def timed(runs: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Return the seconds of one call of each function, for each round."""
    repeats = []
    for run in runs:
        spent = torch.tensor(min(seconds(run, 1) for _ in range(5)))
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        repeats.append(max(1, min(64, int(SECONDS / float(spent)))))
    rounds: list[list[float]] = []
    order, shuffled = list(range(len(runs))), random.Random(0)
    for _ in range(ROUNDS):
        row = [0.0] * len(runs)
        # In one order, the calls after a large one would be slower in every round.
        shuffled.shuffle(order)
        for i in order:
            dist.barrier()
            runs[i]()  # after it, ranks are as far apart as between calls
            row[i] = seconds(runs[i], repeats[i])
        rounds.append(row)
    return rounds


def measured(kind: str) -> tuple[list[Case], list[list[float]], str]:
    """Return the cases with their predictions, and the times of each round on this rank."""
    mesh = GRID if kind == "programs on 2 x 2" else LINE
    if hasattr(os, "sched_setaffinity"):
        bind_to_core(dist.get_rank())
    fs.init(mesh)
    topology = fs.calibrate(mesh, seconds=8.0)
    cases: list[Case] = []
    runs: list[Callable[[], object]] = []
    if kind == "steps":
        for layout, width in itertools.product(LAYOUTS, WIDTHS):
            part, params, x = step(layout, width)
            time_of = part.trace(params, x).roofline(topology).time
            cases.append((f"width {width}", layout, time_of))
            runs.append(partial(part, params, x))
        return cases, timed(runs), str(topology)
    for prog in programs(topology, mesh):
        local = torch.zeros(prog.src.local_shape(dist.get_rank()))
        cases.append((f"{prog.src} -> {prog.dst}", "; ".join(map(str, prog.steps)),
                      prog.cost(topology).time))  # fmt: skip
        runs.append(partial(prog, local))
    return cases, timed(runs), str(topology)


def medians(results: Sequence[list[list[float]]]) -> list[float]:
    """Return the median over the rounds of the slowest rank's times."""
    rounds = zip(*results, strict=True)
    rows = [[max(times) for times in zip(*ranks, strict=True)] for ranks in rounds]
    return [statistics.median(times) for times in zip(*rows, strict=True)]


def report(kind: str) -> tuple[list[float], int, int]:
    """Print the cases of a kind; return their errors, and the pairs in the predicted order."""
    outcomes = run_ranks(RANKS, measured, kind, timeout=300)
    cases, _, topology = outcomes[0]
    seconds = medians([times for _, times, _ in outcomes])
    rows, errors, pairs = [], [], list[bool]()
    groups: dict[str, list[tuple[float, float]]] = {}
    for (question, answer, predicted), actual in zip(cases, seconds, strict=True):
        errors.append(abs(predicted / actual - 1))
        groups.setdefault(question, []).append((predicted, actual))
        rows.append((question, answer, f"{predicted * 1e6:,.0f}", f"{actual * 1e6:,.0f}",
                     f"{predicted / actual - 1:+.0%}"))  # fmt: skip
    for group in groups.values():
        for (guess, actual), (other_guess, other) in itertools.combinations(group, 2):
            if max(actual, other) > 1.2 * min(actual, other):
                pairs.append((guess < other_guess) == (actual < other))
    columns = (Column(kind, wrap=True), Column("", wrap=True), Column("predicted µs", right=True),
               Column("measured µs", right=True), Column("error", right=True))  # fmt: skip
    print(topology, Table("", columns, tuple(rows)).text(150), sep="\n")
    summary(kind, errors, sum(pairs), len(pairs))
    return errors, sum(pairs), len(pairs)


def summary(kind: str, errors: Sequence[float], right: int, count: int) -> None:
    """Print the median error and the share of pairs in the predicted order."""
    print(f"{len(errors)} {kind}: median error {statistics.median(errors):.0%}, "
          f"order right in {right} of {count} pairs\n")  # fmt: skip


def main() -> None:
    """Print the tables of all kinds."""
    results = [report(kind) for kind in ("programs on 4", "programs on 2 x 2", "steps")]
    for title, kinds in (("programs", results[:2]), ("programs and steps", results)):
        errors, right, counts = zip(*kinds, strict=True)
        summary(title, [*itertools.chain(*errors)], sum(right), sum(counts))


if __name__ == "__main__":
    try:
        main()
    finally:
        close_all()
        sys.stdout.flush()
