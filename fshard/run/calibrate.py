"""Measurement of a topology: `fs.calibrate` times messages, bytes, launches and copies."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Mesh, as_mesh
from fshard.program.cost.links import Link, slowest
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import Traffic, all_gather_traffic, all_to_all_traffic
from fshard.run.transports.base import (
    Group,
    is_simulated,
    label_of,
    labelled,
    own_transport,
    stacked,
)
from fshard.run.transports.torch_distributed import ProcessWorld

SIZES = tuple(2**power for power in range(10, 27, 2))
"""Bytes of the tensors that are gathered and exchanged, from 1 KiB to 64 MiB."""

REPEATS = 7
CALLS = {"cpu": 1, "cuda": 8}
"""Calls that are timed together, by device: on a GPU launches overlap, as in programs."""

COPIED = {"cpu": 2**26, "cuda": 2**29}
"""Bytes of the local copy, by device: more than fit into caches."""


class Sample(NamedTuple):
    """Traffic of a collective and its measured time."""

    traffic: Traffic
    seconds: float


def calibrate(
    mesh: Mesh, /, *, seconds: float = 10.0, save: str | os.PathLike[str] | None = None
) -> Topology:
    """Measure latency and bandwidth along each mesh axis, the time of a launch, and local copies.

    Every process must call it, also one outside of the mesh. All groups of an axis gather and
    exchange tensors of growing sizes at the same time, as in programs; latency and bandwidth are
    the least squares of the cost model over the medians of the slowest rank (after Hockney 1994,
    and LogGP of Alexandrov et al. 1995). The time of a message apart from its round needs a mesh of
    at least 3 ranks. On GPUs NCCL is measured, with some 1.5 GiB of memory on each. Nothing else
    must run on the devices or links.

    Args:
        mesh: the mesh whose axes are measured; other axes get the slowest of its links.
        seconds: approximate duration.
        save: file for `Topology.load`, written by the first rank of the mesh; None writes none.

    Returns:
        A `Topology` with one link per axis, the same on every process.

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
    results = torch.zeros(4 + 2 * len(axes), dtype=torch.float64, device=world.device)
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
    launch, memory, message, *rest = measured
    links = {axis: Link(*rest[2 * i : 2 * i + 2]) for i, axis in enumerate(axes)}
    if not links:
        return Topology("calibrated", launch=launch, memory=memory, message=message)
    link = slowest(links.values())
    return Topology(
        "calibrated",
        inner=link,
        outer=link,
        links=tuple(sorted(links.items())),
        launch=launch,
        memory=memory,
        message=message,
    )


def _written(topology: Topology, save: str | os.PathLike[str] | None) -> bool:
    if save is None:
        return True
    try:
        topology.save(save)
    except (OSError, ValueError):  # a null character in a path raises ValueError
        return False
    return True


# -- measuring -----------------------------------------------------------------------------


def _measure(world: ProcessWorld, mesh: Mesh, axes: Sequence[str], seconds: float) -> list[float]:
    """Return launch, memory, message, and latency and bandwidth per axis; equal on all ranks."""
    ranks = tuple(mesh.ranks)
    nbytes = COPIED[world.device.type]
    one = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
    other = torch.zeros_like(one)
    copied = _timed(world, ranks, lambda: other.copy_(one))
    launch = _launch_seconds(world, ranks)
    message = _message(*_shift_and_swap(world, ranks))
    numbers = [launch, 2 * nbytes / copied, message]
    for axis in axes:
        group = mesh.group(world.rank, axis)
        link = _fit(_samples(world, ranks, group, seconds / len(axes)), launch, message)
        numbers += [link.latency, link.bandwidth]
    return [float(f"{number:.4g}") for number in numbers]


def _samples(world: ProcessWorld, ranks: Group, group: Group, seconds: float) -> list[Sample]:
    """Time gathers and exchanges of growing sizes in all groups at once, for some seconds."""
    n, remaining = len(group), seconds
    samples: list[Sample] = []
    for size in SIZES:
        shard = -(-size // n)
        x = torch.zeros(n * shard, dtype=torch.uint8, device=world.device)
        own, pieces = x[:shard], [shard] * n
        spent = 0.0
        for traffic, run in (
            (all_gather_traffic(n, shard), lambda own=own: world.all_gather(own, group)()),
            (
                all_to_all_traffic(n, n * shard),
                lambda x=x, pieces=pieces: world.all_to_all(x, pieces, pieces, group)(),
            ),
        ):
            duration = _timed(world, ranks, run)
            samples.append(Sample(traffic, duration))
            spent += (REPEATS + 1) * CALLS[world.device.type] * duration
        remaining -= spent
        # Durations are equal on all ranks, so that all end with the same size.
        if remaining < spent * SIZES[1] / SIZES[0]:
            break
    return samples


def _shift_and_swap(world: ProcessWorld, ranks: Group) -> tuple[Sample, Sample]:
    """Time one message per rank, to the next one, and one to every other rank."""
    n, index = len(ranks), ranks.index(world.rank)
    x = torch.zeros(n, dtype=torch.uint8, device=world.device)
    send = [int(i == (index + 1) % n) for i in range(n)]
    receive = [int(i == (index - 1) % n) for i in range(n)]

    def shift() -> torch.Tensor:
        return world.all_to_all(x[:1], send, receive, ranks)()

    def swap() -> torch.Tensor:
        return world.all_to_all(x, [1] * n, [1] * n, ranks)()

    one, many = Traffic(1, 1, 1, 1), all_to_all_traffic(n, n)
    return Sample(one, _timed(world, ranks, shift)), Sample(many, _timed(world, ranks, swap))


def _message(one: Sample, many: Sample) -> float:
    """Return the seconds of a message beside its round, from two exchanges of few bytes."""
    more = many.traffic.messages - one.traffic.messages
    return max(0.0, (many.seconds - one.seconds) / more) if more > 0 else 0.0


def _fit(samples: Sequence[Sample], launch: float, message: float) -> Link:
    """Fit latency and bandwidth, both positive, by least squares of relative errors."""
    mm = mb = bb = mt = bt = 0.0
    for traffic, seconds in samples:
        m, b = traffic.rounds / seconds, traffic.received / seconds
        t = 1 - (launch + traffic.messages * message) / seconds
        mm, mb, bb, mt, bt = mm + m * m, mb + m * b, bb + b * b, mt + m * t, bt + b * t
    scale = mm * bb - mb * mb
    latency = (mt * bb - bt * mb) / scale if scale > 0 else 0.0
    pace = (bt - latency * mb) / bb
    if latency < 0:
        latency, pace = 0.0, bt / bb
    if pace <= 0:
        # Latency dominated all samples: only a lower bound of the bandwidth is known.
        largest = max(samples, key=lambda sample: sample.traffic.received)
        pace, latency = largest.seconds / largest.traffic.received, max(0.0, mt / mm)
    return Link(latency, 1 / pace)


def _launch_seconds(world: ProcessWorld, ranks: Group) -> float:
    """Return the seconds that launching a collective takes, without the wait for it."""
    x = torch.zeros(1, device=world.device)
    times = []
    for _ in range(4 * REPEATS):
        start = time.perf_counter()
        finish = world.all_gather(x, ranks)
        times.append(time.perf_counter() - start)
        finish()
    return _slowest(world, ranks, statistics.median(times))


def _timed(world: ProcessWorld, ranks: Group, run: Callable[[], object]) -> float:
    """Return the median seconds of a call on the slowest of `ranks`."""
    times = []
    calls = CALLS[world.device.type]
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append((time.perf_counter() - start) / calls)
    return _slowest(world, ranks, statistics.median(times[1:]))


def _slowest(world: ProcessWorld, ranks: Group, seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=world.device)
    return float(world.all_reduce(value, "max", ranks)().item())
