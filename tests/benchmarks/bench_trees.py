"""Real times of trees on gloo ranks: leaves one by one, all started ahead, and as one batch.

`python -m tests.benchmarks.bench_trees` prints medians of one run of about two minutes;
`--rounds 3` makes a short one. The variants alternate, so that other load slows all of them
alike, and a round's time is the slowest rank's. Forward only; all variants give equal values.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import fshard as fs
from fshard import Mesh, P, Program, Spec
from tests.helpers.gloo.harness import close_all, run_ranks

MESH = Mesh(x=4)
BUCKETS = {"1 MiB": 2**20, "8 MiB": 2**23, "32 MiB": 2**25, "no bound": None}
Ends = tuple[list[Spec], list[Spec]]


def gathered(count: int, rows: int, cols: int) -> Ends:
    """Return specs of FSDP's parameters: rows over the ranks, then replicated."""
    src = [Spec(MESH, P("x"), shape=(rows, cols))] * count
    return src, [spec.replace(partition=P(reduced={"x"})) for spec in src]


def owned(count: int, rows: int, cols: int) -> Ends:
    """Return specs of Muon's matrices: each on one rank in turn, then on every rank."""
    src = [
        Spec(MESH, P("x"), shape=(rows, cols), sizes={0: [rows * (i % 4 == r) for r in range(4)]})
        for i in range(count)
    ]
    return src, [spec.replace(partition=P()) for spec in src]


def to_owners(count: int, rows: int, cols: int) -> Ends:
    """Return specs of Muon's gradients: rows on all ranks, then each matrix on one rank in turn."""
    owner_specs, replicated = owned(count, rows, cols)
    return [spec.replace(partition=P("x")) for spec in replicated], owner_specs


def transposed(count: int, rows: int, cols: int) -> Ends:
    """Return specs of a checkpoint's tensors, from rows to columns."""
    src = [Spec(MESH, P("x"), shape=(rows, cols))] * count
    return src, [spec.replace(partition=P(None, "x")) for spec in src]


CASES: dict[str, Ends] = {
    "200 x 4 KiB, gathered": gathered(200, 32, 32),
    "200 x 4 KiB, owned": owned(200, 32, 32),
    "200 x 4 KiB, transposed": transposed(200, 32, 32),
    "48 x 256 KiB, gathered": gathered(48, 256, 256),
    "24 x 1 MiB, gathered": gathered(24, 512, 512),
    "12 x 8 MiB, gathered": gathered(12, 2048, 1024),
    "48 x 1 MiB, to owners": to_owners(48, 512, 512),
}


def variants(src: list[Spec], dst: list[Spec]) -> dict[str, tuple[int, Callable[[], list[Any]]]]:
    """Return the launches of each variant, and a function of one run."""
    progs: list[Program] = [fs.redistribute(a, b) for a, b in zip(src, dst, strict=True)]
    torch.manual_seed(0)
    xs = [torch.randn(spec.local_shape(dist.get_rank())) for spec in src]
    launches = sum(prog.cost().launches for prog in progs)

    def one_by_one() -> list[Any]:
        return [prog(x) for prog, x in zip(progs, xs, strict=True)]

    def ahead() -> list[Any]:
        pendings = [prog(x, async_op=True) for prog, x in zip(progs, xs, strict=True)]
        return [pending.wait() for pending in pendings]

    variants = {"one by one": (launches, one_by_one), "started ahead": (launches, ahead)}
    for name, size in BUCKETS.items():
        batch = fs.redistribute(src, dst, bucket_bytes=size)
        variants[name] = len(batch.launches), lambda batch=batch: batch(xs)  # type: ignore[misc]
    return variants


def on_rank(rounds: int) -> dict[str, dict[str, tuple[int, list[float]]]]:
    """Return launches, and the seconds of every round on this rank, by case and variant."""
    fs.init(MESH)
    results = {}
    for case, ends in CASES.items():
        runs = variants(*ends)
        expected, *rest = (run() for _, run in runs.values())
        for ys in rest:
            assert all(map(torch.equal, ys, expected)), case
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(rounds):
            names = list(runs)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                start = time.perf_counter()
                runs[name][1]()
                seconds[name].append(time.perf_counter() - start)
        results[case] = {name: (launches, seconds[name]) for name, (launches, _) in runs.items()}
    return results


def table(by_rank: Sequence[dict[str, dict[str, tuple[int, list[float]]]]]) -> Table:
    """Return the table of milliseconds of the slowest rank, and launches."""
    names = ["one by one", "started ahead", *BUCKETS]
    shown = Table("4 gloo ranks", *names, title="trees: ms (launches); batches by bucket_bytes")
    for case in CASES:
        cells = []
        for name in names:
            rounds = zip(*(rank[case][name][1] for rank in by_rank), strict=True)
            median = statistics.median(map(max, rounds))
            cells.append(f"{median * 1e3:.1f} ({by_rank[0][case][name][0]})")
        shown.add_row(case, *cells)
    return shown


def main() -> None:
    # Imported by name, because other processes cannot import __main__.
    from tests.benchmarks.bench_trees import on_rank

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    try:
        by_rank = run_ranks(4, on_rank, options.rounds, timeout=600)
    finally:
        close_all()
    Console(width=120).print(table(by_rank))


if __name__ == "__main__":
    main()
