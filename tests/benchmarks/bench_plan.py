"""Planning times, side by side with DTensor's two planners in the same process.

`python -m tests.benchmarks.bench_plan` prints the median microseconds of one plan, over pairs
of layouts that both can express (DTensor's default shard order, no reduced axes), and as
ratios to DTensor's greedy planner; then of all layouts that fshard has. Cold means that no
cache of plans is asked; planners and specs exist already, and the fastest of three runs counts.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute as dtensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from fshard.mesh import Mesh
from fshard.plan.redistribute import _plan, redistribute
from fshard.program.topology import Topology
from fshard.spec import Spec
from tests.helpers import all_specs, sample_pairs

SEED, PAIRS, REPEATS = 0, 150, 3
WORLD = 2**20
Pair = tuple[Spec, Spec]


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh and a shape."""

    name: str
    mesh: Mesh
    shape: tuple[int, ...]


CASES = (
    Case("2 axes x 2 dims, 2x2", Mesh(a=2, b=2), (4096, 4096)),
    Case("2 axes x 2 dims, 4x8", Mesh(a=4, b=8), (4096, 4096)),
    Case("2 axes x 2 dims, 1024x1024", Mesh(a=1024, b=1024), (2**20, 2**20)),
    Case("3 axes x 3 dims, 2x2x2", Mesh(a=2, b=2, c=2), (512, 512, 512)),
)


def main() -> None:
    """Measure every case and print one table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Nothing is sent: a DeviceMesh only wants to know its world.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    table = Table(title="median time of one plan, µs (and over DTensor's greedy planner)")
    for name in ("case", "pairs", "fshard", "DTensor greedy", "DTensor by cost", "fshard, p99"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for case in CASES:
        table.add_row(case.name, *measure(case))
    for case in CASES[::3]:
        table.add_row(f"{case.name}, all layouts", *measure_alone(case))
    table.add_row(*measure_cached(CASES[0]))
    Console(width=110).print(table)
    dist.destroy_process_group()


def measure(case: Case) -> list[str]:
    """The cells of one case: cold plans, every cache of plans left out."""
    mesh = device_mesh(case.mesh)
    pairs = [(pair, both) for pair in sample(case) if (both := as_dtensor(pair, mesh))]
    ours = [best(lambda p=pair: cold(*p)) for pair, _ in pairs]
    greedy = [best(lambda b=both: dtensor._gen_transform_infos_non_cached(*b, False))
              for _, both in pairs]  # fmt: skip
    cost = [best(lambda b=both: dtensor._gen_transform_infos_non_cached(*b, True))
            for _, both in pairs]  # fmt: skip
    base = statistics.median(greedy)
    return [str(len(pairs)), cell(ours, base), cell(greedy, base), cell(cost, base),
            f"{quantile(ours, 0.99) * 1e6:,.0f}"]  # fmt: skip


def measure_alone(case: Case) -> list[str]:
    """The cells of every state and every order of axes, which DTensor does not have."""
    pairs = sample_pairs(all_specs(case.mesh, case.shape, dtype=torch.float32), PAIRS, SEED)
    times = [best(lambda p=pair: cold(*p)) for pair in pairs]
    middle = f"{statistics.median(times) * 1e6:,.1f}"
    return [str(len(pairs)), middle, "-", "-", f"{quantile(times, 0.99) * 1e6:,.0f}"]


def measure_cached(case: Case) -> list[str]:
    """The cells of a plan that is asked for again."""
    pair, both = next(
        (pair, both)
        for pair in sample(case)
        if pair[0] != pair[1] and (both := as_dtensor(pair, device_mesh(case.mesh)))
    )
    ours = [many(lambda: redistribute(*pair))]
    greedy = [many(lambda: dtensor._gen_transform_infos(*both, False))]
    base = statistics.median(greedy)
    return ["cached plan", "1", cell(ours, base), cell(greedy, base), "-", "-"]


def sample(case: Case) -> list[Pair]:
    """Pairs of layouts that DTensor's default shard order can express."""
    specs = [
        spec
        for spec in all_specs(case.mesh, case.shape, ("invariant", "unreduced"),
                              dtype=torch.float32)
        if all(list(axes) == sorted(axes) for axes in spec.partition.dims)
    ]  # fmt: skip
    pairs = list(itertools.product(specs, specs))
    return random.Random(SEED).sample(pairs, min(PAIRS, len(pairs)))


def device_mesh(mesh: Mesh) -> DeviceMesh:
    ranks = torch.arange(mesh.size).reshape(mesh.sizes)
    return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.axes, _init_backend=False)


def as_dtensor(pair: Pair, mesh: DeviceMesh) -> tuple[DTensorSpec, DTensorSpec] | None:
    """The pair as DTensor's specs, or None where its planners refuse it."""
    shape = torch.Size(pair[0].shape)
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), torch.float32)
    src, dst = (DTensorSpec(mesh, spec.placements, tensor_meta=meta) for spec in pair)
    try:
        for by_cost in (False, True):
            dtensor._gen_transform_infos_non_cached(src, dst, by_cost)
    except (RuntimeError, NotImplementedError, AssertionError, ValueError):
        return None
    return src, dst


def cold(src: Spec, dst: Spec) -> object:
    return _plan.__wrapped__(src, dst, Topology.node(), None, (), None, None)


def best(plan: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        plan()
        times.append(time.perf_counter() - start)
    return min(times)


def many(plan: Callable[[], object], count: int = 20_000) -> float:
    """Seconds of one of very many runs."""
    plan()
    start = time.perf_counter()
    for _ in range(count):
        plan()
    return (time.perf_counter() - start) / count


def quantile(times: Sequence[float], at: float) -> float:
    return sorted(times)[round(at * (len(times) - 1))]


def cell(times: Sequence[float], base: float) -> str:
    """Median microseconds and its ratio to `base`."""
    middle = statistics.median(times)
    return f"{middle * 1e6:,.1f} ({middle / base:.2g}x)"


if __name__ == "__main__":
    main()
