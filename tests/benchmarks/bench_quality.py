"""Quality of plans: bytes over the lower bound, memory, and modelled time beside DTensor's.

`python -m tests.benchmarks.bench_quality` prints the tables in ten minutes or so, with `--quick` of
a sample of the pairs in two. DTensor's two planners give their own plans, which
`helpers.dtensor_plans` reads as fshard programs: one model costs all of them. Received bytes are
the busiest rank's; ratios are geometric means and worst cases over all ordered pairs whose
lower bound is above 0.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import Partial, Replicate, Shard

import fshard as fs
from fshard import Mesh, P, Program, ShardingError, Spec, Topology
from fshard.program.cost.rank_overlap import local_bytes, overlap_bytes
from fshard.program.cost.traffic import max_local_nbytes
from fshard.program.exchange_boxes import converted_axes, reduction_axes
from tests.helpers.dtensor_plans import PLANNERS, plan
from tests.helpers.spec_grid import all_specs

SEED, QUICK, SAMPLE = 0, 200, 500
MESHES = (Mesh(x=2, y=4), Mesh(x=4, y=4), Mesh(x=8, y=8), Mesh(x=2, y=2, z=2), Mesh(x=4, y=2, z=4))
SHAPES = {2: (256, 256), 3: (64, 64, 64)}
TIMED_SHAPES = {2: ((64, 64), (1024, 1024), (16384, 16384)), 3: ((32, 32, 32), (512, 512, 512))}
T = TypeVar("T")
PRESETS = {"node": Topology.node(), "cluster": Topology.cluster()}
Pair = tuple[Spec, Spec]
Planner = Callable[[Spec, Spec], Program | None]


def by_bytes(src: Spec, dst: Spec) -> Program:
    return fs.redistribute(src, dst, objective="bytes")


def collectives_only(src: Spec, dst: Spec) -> Program:
    return fs.redistribute(src, dst, objective="bytes", exclude=(fs.Exchange,))


def capped(src: Spec, dst: Spec) -> Program | None:
    """Return the plan that never holds more than the larger end."""
    try:
        return fs.redistribute(src, dst, objective="bytes", max_memory=larger_end(src, dst))
    except ShardingError:
        return None


def dtensor_program(
    planner: str, src: Spec, dst: Spec, *, flattened: bool = False
) -> Program | None:
    return plan(src, dst, planner, flattened=flattened).program


OURS: dict[str, Planner] = {
    "fshard": by_bytes,
    "fshard, collectives": collectives_only,
    "fshard, max_memory": capped,
}
DTENSOR: dict[str, Planner] = {
    f"DTensor {name}": partial(dtensor_program, name) for name in PLANNERS
}


# -- bytes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """Received bytes of one plan over the bound, and its largest local over the larger end."""

    ratio: float
    peak: float


def larger_end(src: Spec, dst: Spec) -> int:
    return max(max_local_nbytes(src), max_local_nbytes(dst))


def score(prog: Program | None) -> Score | None:
    """Return the score; with a bound of 0 the ratio is `inf` if bytes move and `nan` if none do."""
    if prog is None:
        return None
    bound, moved = fs.lower_bound(prog.src, prog.dst).bytes_received, prog.cost().bytes_received
    ratio = moved / bound if bound else math.inf if moved else math.nan
    peak = max(map(max_local_nbytes, prog.specs)) / larger_end(prog.src, prog.dst)
    return Score(ratio, peak)


def scores(planners: dict[str, Planner], pair: Pair) -> dict[str, Score | None]:
    return {name: score(planner(*pair)) for name, planner in planners.items()}


def quality(run: Run, title: str, states: Sequence[str], every_order: bool) -> Table:
    """Return the table of all pairs, in mesh order of axes or in all orders."""
    planners = OURS if every_order else {**OURS, **DTENSOR}
    shown = table(
        title, "mesh", "planner", "pairs", "no plan", "mean", "worst",
        "bytes for nothing", "peak above both ends", "largest peak",
    )  # fmt: skip
    for mesh in MESHES:
        specs = layouts(mesh, SHAPES[len(mesh.axes)], states, every_order)
        pairs = run.pairs(specs, states)
        rows = run.map(partial(scores, planners), pairs)
        for name in planners:
            known = [s for row in rows if (s := row[name]) is not None]
            shown.add_row(shape_of(mesh), name, f"{len(pairs):,}", f"{len(pairs) - len(known):,}",
                          *summary(known))  # fmt: skip
        shown.add_section()
    return shown


def summary(known: Sequence[Score]) -> list[str]:
    if not known:
        return ["-"] * 5
    ratios = [s.ratio for s in known if math.isfinite(s.ratio)]
    above = sum(s.peak > 1 for s in known)
    return [
        f"{geometric(ratios):.3f}",
        f"{max(ratios):.2f}",
        f"{sum(math.isinf(s.ratio) for s in known):,}",
        f"{above / len(known):.1%}",
        f"{max(s.peak for s in known):.2f}",
    ]


# -- unreduced ends: why a plan receives more than the bound ----------------------------------


@dataclass(frozen=True, slots=True)
class Excess:
    """Factors of the ratio to the bound, of one plan with unreduced ends.

    `often` is what all ranks receive over the messages that the elements need, `uneven` what the
    busiest rank receives over the mean. `sends` is True if some rank has to send as much: the bound
    of the transposed program.
    """

    ratio: float
    often: float
    uneven: float
    sends: bool
    makes: tuple[str, ...]
    keeps: tuple[str, ...]
    reduces: tuple[str, ...]

    def kind(self) -> str:
        """Return the sentence of its class."""
        ends = {"makes": self.makes, "keeps": self.keeps, "reduces": self.reduces}
        words = " and ".join(word for word, axes in ends.items() if axes)
        if self.sends:
            return (
                f"{words} unreduced axes: a rank must send as much, for the transpose to receive it"
            )
        reasons = []
        if self.often > ROUNDING:
            reasons.append(
                "a sum is where its element was, and elements that could stay beside it move"
                if self.makes
                else "a step does one thing to all elements, also to those that could stay"
                if self.keeps
                else "sums are made in one layout and moved, also those with a partial sum in place"
            )
        if self.uneven > ROUNDING:
            reasons.append("ranks that hold some needed elements receive less than others")
        return f"{words} unreduced axes: {'; '.join(reasons)}"

    def numbers(self) -> str:
        """Return the axes, and the factor of each reason."""
        ends = {"makes": self.makes, "keeps": self.keeps, "reduces": self.reduces}
        words = ", ".join(f"{word} {'+'.join(axes)}" for word, axes in ends.items() if axes)
        return f"{words}; sent {self.often:.2f}x as often, busiest {self.uneven:.2f}x the mean"


ROUNDING = 1.001


def excess_of(pair: Pair) -> Excess | None:
    """Return the excess of a plan, or None if it is at the bound."""
    prog, least = by_bytes(*pair), fs.lower_bound(*pair).bytes_received
    ranks = pair[0].mesh.size
    steps = zip(prog.steps, prog.specs, prog.specs[1:], strict=False)
    by_rank = [sum(counts) for counts in zip(*itertools.starmap(received, steps), strict=True)]
    if not by_rank or max(by_rank) <= ROUNDING * least:
        return None
    before, after = ([*spec.partition.unreduced] for spec in pair)
    back = fs.lower_bound(pair[1].dual, pair[0].dual).bytes_received
    return Excess(
        max(by_rank) / least,
        sum(by_rank) / (least * ranks),
        max(by_rank) * ranks / sum(by_rank),
        max(by_rank) <= ROUNDING * back,
        tuple(axis for axis in after if axis not in before),
        tuple(axis for axis in after if axis in before),
        tuple(axis for axis in before if axis not in after),
    )


def received(step: object, src: Spec, dst: Spec) -> list[int]:
    """Return the bytes that each rank receives, for even shards."""
    ranks = src.mesh.ranks
    most = Program(src, (step,), dst).cost().bytes_received  # type: ignore[arg-type]
    if isinstance(step, fs.CollectivePermute):
        return [0 if held_value(src, rank) == held_value(dst, rank) else most for rank in ranks]
    if not isinstance(step, fs.Exchange):
        return [most for _ in ranks]
    partials = src.mesh.axis_size(reduction_axes(src, dst))
    summed = [axis for axis in converted_axes(src, dst) if axis in dst.partition.unreduced]
    members = src.mesh.axis_size(summed)
    both = zip(local_bytes(dst, ranks), overlap_bytes(src, dst, ranks), strict=True)
    return [partials * need // members - have for need, have in both]


def held_value(spec: Spec, rank: int) -> object:
    """Return the index of the shard and of the unreduced value that a rank holds."""
    coords = spec.mesh.coords(rank)
    count = 0
    for axis in spec.partition.unreduced:
        count = count * spec.mesh.shape[axis] + coords[axis]
    return spec.index(rank), count


def worst_pairs(run: Run, count: int = 10) -> tuple[Table, list[str]]:
    """Return a table of unreduced pairs above the bound by class, and texts of the worst."""
    excesses: list[tuple[Excess, Pair]] = []
    looked = 0
    for mesh in MESHES:
        pairs = run.pairs(layouts(mesh, SHAPES[len(mesh.axes)], BOTH, True), BOTH)
        looked += len(pairs)
        excesses += [
            (item, pair)
            for item, pair in zip(run.map(excess_of, pairs), pairs, strict=True)
            if item is not None
        ]
    excesses.sort(key=lambda item: -item[0].ratio)
    by_kind: dict[str, list[Excess]] = {}
    for item, _ in excesses:
        by_kind.setdefault(item.kind(), []).append(item)
    title = f"Why unreduced pairs receive more than the bound: {len(excesses):,} of {looked:,}"
    shown = table(title, "class", "pairs", "mean", "worst")
    for kind, some in by_kind.items():
        ratios = [item.ratio for item in some]
        shown.add_row(kind, f"{len(some):,}", f"{geometric(ratios):.3f}", f"{max(ratios):.2f}")
    return shown, [excess_text(*item) for item in excesses[:count]]


def excess_text(excess: Excess, pair: Pair) -> str:
    bound = fs.lower_bound(*pair).bytes_received
    return (
        f"{excess.ratio:.3f} of {bound:,} B received ({excess.numbers()}): {by_bytes(*pair)}\n"
        f"  {excess.kind()}"
    )


# -- modelled time ---------------------------------------------------------------------

TIMED: dict[str, Planner] = {
    **DTENSOR,
    **{f"{name}, flattened": partial(dtensor_program, name, flattened=True) for name in PLANNERS},
}


def times(pair: Pair) -> dict[tuple[str, str], float | None]:
    """Return the modelled time of fshard's plan over DTensor's, by preset and planner."""
    plans = {name: planner(*pair) for name, planner in TIMED.items()}
    ratios: dict[tuple[str, str], float | None] = {}
    for preset, topology in PRESETS.items():
        ours = fs.redistribute(*pair, topology=topology).cost().time
        for name, prog in plans.items():
            other = None if prog is None else prog.cost(topology).time
            ratios[preset, name] = None if other is None else time_ratio(ours, other)
    return ratios


def time_ratio(ours: float, other: float) -> float:
    return ours / other if other else math.inf if ours else 1.0


def modelled_times(run: Run, losses: list[str]) -> Table:
    """Return the table of modelled times; fshard's plans should nowhere be slower."""
    shown = table(
        "Modelled time of fshard's plans over DTensor's: geometric mean, worst (pairs slower)",
        "mesh, float32 shape", "preset", *TIMED,
    )  # fmt: skip
    for mesh in MESHES:
        for shape in TIMED_SHAPES[len(mesh.axes)]:
            every_order = len(mesh.axes) == 2
            pairs = run.pairs(layouts(mesh, shape, BOTH, every_order), BOTH + ONE)
            rows = run.map(times, pairs)
            for preset in PRESETS:
                cells = []
                for name in TIMED:
                    known = [
                        (ratio, pair)
                        for row, pair in zip(rows, pairs, strict=True)
                        if (ratio := row[preset, name]) is not None
                    ]
                    slower = sorted((item for item in known if item[0] > 1 + 1e-9), key=first)
                    losses += [loss_text(preset, name, *item) for item in slower[-1:]]
                    cells.append(compared([ratio for ratio, _ in known], len(slower)))
                shown.add_row(f"{shape_of(mesh)}, {shape_of(shape)}", preset, *cells)
            shown.add_section()
    return shown


def compared(ratios: Sequence[float], slower: int) -> str:
    mean = geometric([ratio for ratio in ratios if 0 < ratio < math.inf])
    return f"{mean:.2f}, {max(ratios):.3f} ({slower:,}/{len(ratios):,})"


def first(item: tuple[float, Pair]) -> float:
    return item[0]


def loss_text(preset: str, name: str, ratio: float, pair: Pair) -> str:
    topology = PRESETS[preset]
    ours, other = fs.redistribute(*pair, topology=topology), TIMED[name](*pair)
    return f"{ratio:.4f} of {name} on {preset}: {ours}\n  while DTensor's is\n{other}"


# -- named cases -----------------------------------------------------------------------

NAMED = {
    "S0 S0 -> R S0": 1024, "S0 S1 -> S1 S0": 256, "S0 R -> R S0": 1024, "P P -> R R": 7680,
    "P S0 -> S0 S1": 1024, "S0 S0 -> S1 S1": 240, "yx -> xy": 256, "P S0 -> S0 S0": 1024,
    "P S0 -> S0 R": 1792, "S0 S1 -> S1 S1": 448, "P R -> R S0": 1536, "P P -> R S0": 4608,
}  # fmt: skip
"""Most KiB to receive on (4, 4), by DTensor's placements on x and y."""


def named(name: str) -> Pair:
    mesh, shape = Mesh(x=4, y=4), (1024, 1024)
    src, dst = name.split(" -> ")
    if src == "yx":
        return tuple(Spec(mesh, P(tuple(axes)), shape=shape) for axes in (src, dst))  # type: ignore[return-value]
    words = {"P": Partial(), "R": Replicate(), "S0": Shard(0), "S1": Shard(1)}
    return tuple(  # type: ignore[return-value]
        Spec.from_placements(mesh, [words[word] for word in end.split()], shape)
        for end in (src, dst)
    )


def transitions() -> Table:
    """Return the table of KiB that the busiest rank receives in the named transitions."""
    shown = table(
        "KiB received per rank, 4x4, float32 1024x1024", "x y", "target", "lower bound",
        "fshard by bytes", "fshard, collectives", "fshard by time", *DTENSOR,
    )  # fmt: skip
    planners: list[Planner] = [by_bytes, collectives_only, fs.redistribute, *DTENSOR.values()]
    for name, target in NAMED.items():
        pair = named(name)
        bound = fs.lower_bound(*pair).bytes_received
        plans = [planner(*pair) for planner in planners]
        moved = [None if prog is None else prog.cost().bytes_received for prog in plans]
        shown.add_row(name, f"{target:,}", *map(kib, (bound, *moved)))
    return shown


def kib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1024:,.0f}"


def rematerialisations() -> list[str]:
    """Return texts about XLA's two known full rematerialisations."""
    grid = Mesh(x=4, y=2)
    src = Spec(grid, P("y", None, "x"), shape=(64, 64, 64))
    four = Mesh(x=2, y=2)
    tile = Spec(four, P(("x", "y")), shape=(64, 8, 8, 64))
    pairs = [
        (src, src.replace(partition=P(None, ("x", "y"), None))),
        (tile, tile.replace(partition=P("x", None, None, "y"))),
    ]
    texts = []
    for pair in pairs:
        for prog in (by_bytes(*pair), fs.redistribute(*pair)):
            bound = fs.lower_bound(*pair)
            peak = max(map(max_local_nbytes, prog.specs))
            texts.append(
                f"received {prog.cost().bytes_received:,} B of at least {bound.bytes_received:,} B,"
                f" largest local {peak:,} B of {prog.src.nbytes:,} B: {prog}"
            )
    return texts


# -- pairs and tables ------------------------------------------------------------------

ONE, BOTH = ("invariant",), ("invariant", "unreduced")


@dataclass(frozen=True, slots=True)
class Run:
    """Number of pairs to look at, and the executor."""

    executor: Executor
    quick: bool
    most: int

    def pairs(self, specs: Sequence[Spec], states: Sequence[str]) -> list[Pair]:
        """Return ordered pairs; with `states` of BOTH those with an unreduced end."""
        candidates: Iterable[Pair] = itertools.permutations(specs, 2)
        if tuple(states) == BOTH:
            candidates = (
                pair for pair in candidates if any(spec.partition.unreduced for spec in pair)
            )
        pairs = list(candidates)
        most = QUICK if self.quick else self.most if BOTH[1] in states else len(pairs)
        return random.Random(SEED).sample(pairs, most) if most < len(pairs) else pairs

    def map(self, function: Callable[[Pair], T], pairs: Sequence[Pair]) -> list[T]:
        return list(self.executor.map(function, pairs, chunksize=16))


def layouts(mesh: Mesh, shape: Sequence[int], states: Sequence[str], every: bool) -> list[Spec]:
    """Return the specs, only with axes in mesh order unless `every`."""
    return [
        spec
        for spec in all_specs(mesh, shape, states, dtype=torch.float32)
        if every or all(list(axes) == sorted(axes) for axes in spec.partition.dims)
    ]


def geometric(ratios: Sequence[float]) -> float:
    return statistics.geometric_mean(ratios) if ratios else math.nan


def shape_of(shape: Mesh | Sequence[int]) -> str:
    return "x".join(map(str, shape.sizes if isinstance(shape, Mesh) else shape))


def table(title: str, *heads: str) -> Table:
    result = Table(title=title)
    for head in heads:
        result.add_column(head, justify="left" if head in LEFT else "right")
    return result


LEFT = ("class", "mesh", "planner", "mesh, float32 shape", "preset", "x y")


def silence_dtensor() -> None:
    """Silence DTensor's warnings about flattened meshes that would help."""
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def main() -> None:
    """Measure and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} pairs of each mesh")
    parser.add_argument("--most", type=int, default=SAMPLE, help="most unreduced pairs, a mesh")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    silence_dtensor()
    console = Console(width=140)
    start = time.perf_counter()
    console.print(transitions())
    for text in rematerialisations():
        console.print(text, highlight=False, markup=False)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, initializer=silence_dtensor) as executor:
        run = Run(executor, options.quick, options.most)
        over_bound = "Received bytes over the bound"
        console.print(quality(run, f"{over_bound}, the mesh's order of axes", ONE, False))
        console.print(quality(run, f"{over_bound}, every order of axes", ONE, True))
        console.print(quality(run, f"{over_bound}, with unreduced ends", BOTH, False))
        reasons, texts = worst_pairs(run)
        console.print(reasons)
        for text in texts:
            console.print(text, highlight=False, markup=False)
        losses: list[str] = []
        console.print(modelled_times(run, losses))
        for text in losses[:10]:
            console.print(text, highlight=False, markup=False)
    console.print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
