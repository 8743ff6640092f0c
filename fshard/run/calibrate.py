"""Measurement of a topology: `fs.calibrate` times messages, bytes, launches, copies and overlap."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Mesh, as_mesh
from fshard.program.cost.links import JOIN, Link, slowest
from fshard.program.cost.machines import NVLINK
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import (
    Traffic,
    all_gather_traffic,
    all_reduce_traffic,
    all_to_all_traffic,
)
from fshard.run.transports.base import (
    Group,
    is_simulated,
    label_of,
    labelled,
    own_transport,
    stacked,
)
from fshard.run.transports.torch_distributed import ProcessWorld

SIZES = tuple(2**power for power in range(10, 26, 3))
"""Bytes of the tensors that are gathered and exchanged, from 1 KiB to 32 MiB."""

FLOAT = torch.float32
"""Dtype of reductions, products and small operations, whichever is the default."""

REPEATS = 7
BATCH, MAX_CALLS = 1e-2, 16
"""Seconds of the collectives that are timed together, and how many they are at most."""
LOCAL_SHARE, MAX_LOCAL = 1e-2, 4096
"""Calls of each rank alone that are timed together: their share of the duration, and their number.

Ranks that share a core have it for some milliseconds at a time. In less than several turns of all
of them the slowest rank would seem slower than all are on average.
"""

COPIED = {"cpu": 2**26, "cuda": 2**29}
"""Bytes of the local copy, by device: more than fit into caches."""
PRODUCT = {"cpu": 512, "cuda": 4096}
"""Rows of the matrices that are multiplied, by device."""
OVERLAPPED = {"cpu": 2**22, "cuda": 2**26}
"""Bytes of the reduction that runs beside products, by device."""


class Sample(NamedTuple):
    """Traffic of a collective in a group, named by its axis, and its measured time."""

    group: str
    exchange: bool
    traffic: Traffic
    seconds: float


def calibrate(
    mesh: Mesh, /, *, seconds: float = 10.0, save: str | os.PathLike[str] | None = None
) -> Topology:
    """Measure links along each mesh axis, launches, copies, products, small operations, overlap.

    Every process must call it, also one outside of the mesh. All groups of an axis gather, reduce
    and exchange tensors of growing sizes at the same time, as in programs; latency and bandwidths
    are the least squares of the cost model over the times of the slowest rank, medians of several
    rounds (after Hockney 1994, and LogGP of Alexandrov et al. 1995). The time of a message
    apart from its round needs a mesh of at least 3 ranks. The overlap is the time that a reduction
    over all ranks and products hide of each other when they run together, as a share of the shorter
    one: little where ranks share cores. On GPUs NCCL is measured, with some 1.5
    GiB of memory on each. Nothing else must run on the devices or links. Bind processes that share
    CPU cores to them, as `mpirun --bind-to core` does: times change by half where they wander.

    Args:
        mesh: the mesh whose axes are measured; other axes get the slowest of its links.
        seconds: approximate duration.
        save: file for `Topology.load`, written by the first rank of the mesh; None writes none.

    Returns:
        A `Topology` with a link for each axis and one for all together, equal on every process.

    Raises:
        ShardingError: ranks are missing (no `torchrun`, or no `fs.init`), the mesh has ranks that
            do not exist, or the file cannot be written.

    >>> import fshard as fs
    >>> def main():  # torchrun --nproc-per-node 8 calibrate.py
    ...     mesh = fs.Mesh(dp=2, tp=4)
    ...     fs.init(mesh)
    ...     topology = fs.calibrate(mesh, save="links.json")
    ...     print(fs.redistribute(src, dst, topology=topology))
    """
    mesh = as_mesh(mesh, "fs.calibrate")
    world = _world(mesh, seconds, save)
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    results = torch.zeros(7 + 3 * len(_names(axes)), dtype=torch.float64, device=world.device)
    first = mesh.ranks[0]
    with labelled(label_of("calibrate", mesh)):
        if world.rank in mesh:
            measured = _measure(world, mesh, axes, seconds)
            written = world.rank != first or _written(_topology(axes, measured), save)
            results = results.new_tensor([float(written), *measured])
        everyone = tuple(range(dist.get_world_size()))
        gathered = stacked(world.all_gather(results, everyone)(), results.shape)
        written, *measured = gathered[first].tolist()
    if not written:
        fail(
            "fs.calibrate",
            f"save={os.fspath(save or '')!r}",
            f"rank {first}, the first of the mesh, must be able to write the file",
            "a path in a directory that exists; or leave it out, and topology.save(path) later",
        )
    return _topology(axes, measured)


def _world(mesh: Mesh, seconds: float, save: object) -> ProcessWorld:
    """Return this process's transport; raise `ShardingError` for wrong arguments."""
    world = own_transport()
    if is_simulated() or not isinstance(world, ProcessWorld):
        _no_ranks(mesh)
    problems = []
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        problems.append(Problem(f"seconds={seconds!r}", "seconds must be positive", "seconds=10.0"))
    if save is not None and not isinstance(save, str | os.PathLike):
        problems.append(
            Problem(f"save={save!r}", "a path must be a str or a Path", "save='topology.json'")
        )
    size = dist.get_world_size()
    if max(mesh.ranks) >= size:
        rule = f"ranks must be among the {size} processes of the world, 0..{size - 1}"
        problems.append(Problem(f"{mesh} with ranks up to {max(mesh.ranks)}", rule,
                                f"a mesh of at most {size}, or more processes"))  # fmt: skip
    raise_if("fs.calibrate", problems)
    return world


def _no_ranks(mesh: Mesh) -> NoReturn:
    fail("fs.calibrate", f"{mesh}, in a process that is not a rank of torchrun",
         "links must be those between processes, which a simulation does not have",
         f"torchrun --nproc-per-node {max(mesh.ranks) + 1} script.py, and fs.init(mesh) in it; "
         "fs.Topology.dgx_h100() and others need no processes")  # fmt: skip


def _topology(axes: Sequence[str], measured: Sequence[float]) -> Topology:
    """Return the topology of the values that `_measure` returns."""
    launch, memory, message, kernel, flops, overlap, *rest = measured
    links = {name: Link(*rest[3 * i : 3 * i + 3]) for i, name in enumerate(_names(axes))}
    link = slowest(links.values()) if links else NVLINK
    return Topology(
        "calibrated", inner=link, outer=link, links=tuple(sorted(links.items())), launch=launch,
        memory=memory, message=message, kernel=kernel, flops=(("float32", flops),),
        overlap=overlap,
    )  # fmt: skip


def _names(axes: Sequence[str]) -> list[str]:
    """Return the names of the links that are measured: of each axis, and of all together."""
    return [*axes, *([JOIN.join(axes)] if len(axes) > 1 else [])]


def _written(topology: Topology, save: str | os.PathLike[str] | None) -> bool:
    if save is None:
        return True
    try:
        topology.save(save)
    except (OSError, ValueError):  # a null character in a path raises ValueError
        return False
    return True


# -- measuring -----------------------------------------------------------------------------


class _Run(NamedTuple):
    """Collective that is measured: its group, its traffic and a function that launches it."""

    group: str
    exchange: bool
    traffic: Traffic
    start: Callable[[], Callable[[], object]]

    def call(self) -> object:
        """Launch the collective and wait for it."""
        return self.start()()


def _measure(world: ProcessWorld, mesh: Mesh, axes: Sequence[str], seconds: float) -> list[float]:
    """Return the figures of `_topology`, equal on all ranks."""
    ranks = tuple(mesh.ranks)
    nbytes = COPIED[world.device.type]
    one = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
    other, small = torch.zeros_like(one), torch.zeros(8, dtype=FLOAT, device=world.device)
    side = PRODUCT[world.device.type]
    matrix = torch.zeros(side, side, dtype=FLOAT, device=world.device)
    locally = (lambda: other.copy_(one), lambda: small.add_(1.0), lambda: matrix @ matrix)
    copied, kernel, product = _typical(world, ranks, locally, LOCAL_SHARE * seconds, MAX_LOCAL)
    launch = _launch_seconds(world, ranks)
    samples = _samples(world, mesh, axes, seconds)
    message, links = _fit(samples, launch)
    overlap = _overlap(world, ranks, lambda: matrix @ matrix, product)
    rate = 2 * side**3 / max(product, 1e-9)
    numbers = [launch, 2 * nbytes / copied, message, kernel, rate, overlap]
    for name in _names(axes):
        link = links[name]
        numbers += [link.latency, link.bandwidth, link.of_exchanges().bandwidth]
    return [float(f"{number:.4g}") for number in numbers]


def _overlap(
    world: ProcessWorld, ranks: Group, multiply: Callable[[], object], seconds: float
) -> float:
    """Return the share of the time of a reduction that products of `seconds` hide, or it of them.

    The products take about as long as the reduction.
    """
    if len(ranks) == 1:
        return 1.0
    x = torch.zeros(OVERLAPPED[world.device.type] // 4, dtype=FLOAT, device=world.device)
    start = partial(world.all_reduce, x, "sum", ranks)
    count = 1

    def reduce() -> None:
        start()()

    def compute() -> None:
        for _ in range(count):
            multiply()

    def both() -> None:
        finish = start()
        compute()
        finish()

    (alone,) = _typical(world, ranks, [reduce])
    count = max(1, round(alone / max(seconds, 1e-9)))
    reduced, computed, together = _typical(world, ranks, (reduce, compute, both))
    return min(1.0, max(0.0, (reduced + computed - together) / min(reduced, computed)))


def _samples(world: ProcessWorld, mesh: Mesh, axes: Sequence[str], seconds: float) -> list[Sample]:
    """Time collectives of growing sizes in all groups at once, for some seconds.

    All sizes take turns in each round, so that a machine that is slower for a while slows all.
    """
    ranks, remaining = tuple(mesh.ranks), seconds
    groups = {name: mesh.group(world.rank, name.split(JOIN)) for name in _names(axes)}
    if not groups:
        return []
    chosen, first = list[_Run](), list[float]()
    for size in SIZES:
        runs = [run for name, group in groups.items() for run in _runs(world, group, name, size)]
        # Durations are equal on all ranks, so that all end with the same size.
        durations = _slowest(world, ranks, [_seconds(world, run.call, 2) for run in runs])
        remaining -= _spent(durations)
        if chosen and remaining < 0:
            break
        chosen += runs
        first += durations
    times = _medians(world, ranks, [run.call for run in chosen], first)
    return [
        Sample(run.group, run.exchange, run.traffic, duration)
        for run, duration in zip(chosen, times, strict=True)
    ]


def _runs(world: ProcessWorld, group: Group, name: str, size: int) -> list[_Run]:
    """Return a gather, two reductions and two exchanges of `size` bytes in a group."""
    n, index = len(group), group.index(world.rank)
    shard = -(-size // (4 * n))
    x = torch.zeros(n * shard, dtype=FLOAT, device=world.device)
    own, rows, pieces = x[:shard], x.view(n, shard), [shard] * n
    to, source = ([shard * (i == (index + step) % n) for i in range(n)] for step in (1, -1))
    gathered, swapped = all_gather_traffic(n, 4 * shard), all_to_all_traffic(n, 4 * n * shard)
    reduced, shifted = all_reduce_traffic(n, 4 * n * shard, 4), Traffic(4 * shard, 4 * shard, 1, 1)
    return [
        _Run(name, False, gathered, partial(world.all_gather, own, group)),
        _Run(name, False, gathered, partial(world.reduce_scatter, rows, "sum", group)),
        _Run(name, False, reduced, partial(world.all_reduce, x, "sum", group)),
        _Run(name, True, swapped, partial(world.all_to_all, x, pieces, pieces, group)),
        _Run(name, True, shifted, partial(world.all_to_all, own, to, source, group)),
    ]


def _fit(samples: Sequence[Sample], launch: float) -> tuple[float, dict[str, Link]]:
    """Fit the seconds of a message, and the link of each group, to measured times.

    They are the least squares of relative errors among figures of at least 0.
    """
    names = list(dict.fromkeys(sample.group for sample in samples))
    if not names:
        return 0.0, {}
    table = torch.zeros(len(samples), 1 + 3 * len(names), dtype=torch.float64)
    for i, (name, exchange, traffic, seconds) in enumerate(samples):
        first = 1 + 3 * names.index(name)
        table[i, 0], table[i, first] = traffic.messages / seconds, traffic.rounds / seconds
        table[i, first + 1 + exchange] = max(traffic.sent, traffic.received) / seconds
    shares = [max(0.0, 1 - launch / sample.seconds) for sample in samples]
    goal = torch.tensor(shares, dtype=torch.float64)
    figures = _least_squares(table, goal)
    links = {}
    for i, name in enumerate(names):
        latency, *paces = figures[1 + 3 * i : 4 + 3 * i]
        own = [sample for sample in samples if sample.group == name]
        rates = [1 / pace if pace > 0 else _largest_rate(own) for pace in paces]
        links[name] = Link(latency, rates[0], None if rates[0] == rates[1] else rates[1])
    return figures[0], links


def _largest_rate(samples: Sequence[Sample]) -> float:
    """Return the bytes per second of the largest sample: a lower bound of the bandwidth.

    Use it where latency dominates all samples, so that the fit has no bandwidth.
    """
    largest = max(samples, key=lambda sample: sample.traffic.received)
    return largest.traffic.received / largest.seconds


def _least_squares(table: torch.Tensor, goal: torch.Tensor) -> list[float]:
    """Return the least-squares solution of figures of at least 0: negative ones become 0."""
    scale = table.norm(dim=0).clamp_min(1e-300)
    columns = [i for i in range(table.shape[1]) if table[:, i].any()]
    while columns:
        chosen = (table / scale)[:, columns]
        # The fit of least norm shares time among columns that are alike, such as the messages and
        # the rounds of groups of two.
        solution = torch.linalg.pinv(chosen, rtol=1e-9) @ goal
        least = int(solution.argmin())
        if solution[least] >= 0:
            result = torch.zeros(table.shape[1], dtype=torch.float64)
            result[columns] = solution
            return [float(x) for x in (result / scale).unbind()]
        del columns[least]
    return [0.0] * table.shape[1]


def _launch_seconds(world: ProcessWorld, ranks: Group) -> float:
    """Return the seconds that launching a collective takes, without the wait for it."""
    x = torch.zeros(1, device=world.device)
    times = []
    for _ in range(4 * REPEATS):
        start = time.perf_counter()
        finish = world.all_gather(x, ranks)
        times.append(time.perf_counter() - start)
        finish()
    return _slowest(world, ranks, [statistics.median(times)])[0]


def _typical(
    world: ProcessWorld, ranks: Group, runs: Sequence[Callable[[], object]],
    batch: float = BATCH, most: int = MAX_CALLS,
) -> list[float]:  # fmt: skip
    """Return each call's seconds on the slowest of `ranks`: the median of several rounds.

    Calls of `batch` seconds, `most` of them at most, are timed together.
    """
    first = _slowest(world, ranks, [_seconds(world, run, 2) for run in runs])
    return _medians(world, ranks, runs, first, batch, most)


def _medians(
    world: ProcessWorld, ranks: Group, runs: Sequence[Callable[[], object]], first: Sequence[float],
    batch: float = BATCH, most: int = MAX_CALLS,
) -> list[float]:  # fmt: skip
    """Return `_typical`'s seconds of calls that took about the seconds of `first`."""
    calls = [max(1, min(most, int(batch / max(seconds, 1e-9)))) for seconds in first]
    times = [
        _seconds(world, run, n) for _ in range(REPEATS) for run, n in zip(runs, calls, strict=True)
    ]
    slowest_of = _slowest(world, ranks, times)
    return [statistics.median(slowest_of[i :: len(runs)]) for i in range(len(runs))]


def _spent(times: Sequence[float]) -> float:
    """Return the estimated seconds of `_typical` for calls of these durations."""
    return sum(2 * seconds + REPEATS * max(seconds, min(BATCH, MAX_CALLS * seconds))
               for seconds in times)  # fmt: skip


def _seconds(world: ProcessWorld, run: Callable[[], object], count: int) -> float:
    """Return the mean seconds of `count` calls in sequence; on a GPU their launches overlap."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return (time.perf_counter() - start) / count


def _slowest(world: ProcessWorld, ranks: Group, seconds: Sequence[float]) -> list[float]:
    """Return the elementwise maximum of the seconds of `ranks`."""
    value = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    largest: list[float] = world.all_reduce(value, "max", ranks)().tolist()
    return largest
