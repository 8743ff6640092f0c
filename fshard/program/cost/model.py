"""Cost model: seconds of a step on a topology, and the `Cost` of a program.

`step_time` is the one measure of time, for programs, planning and layout decisions alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fshard._util.notebook_view import NotebookView
from fshard._util.text import bytes_text, plural, time_text
from fshard.layout.spec import Spec
from fshard.program.cost.links import Link
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import Dims, Traffic, max_local_nbytes, step_axes, traffic
from fshard.program.exchange_boxes import reduction_axes
from fshard.program.halo_boxes import halo_partners
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Cast,
    Exchange,
    HaloExchange,
    HaloReduce,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    Remesh,
    Step,
)


@dataclass(frozen=True, slots=True)
class Cost(NotebookView):
    """Estimated cost of one run of a program, or of several in turn.

    Attributes:
        time: Seconds.
        bytes_sent: Bytes that the busiest rank sends.
        bytes_received: Bytes that the busiest rank receives.
        peak_memory: Bytes of the largest local on the way, the measure of Rink et al. (arXiv
            2112.01075). A step holds its input and its output at once, so that a run needs up to
            twice as much.
        launches: Collectives that are launched.
        messages: Messages that the busiest rank sends.

    >>> import fshard as fs
    >>> print(fs.Cost(8.4e-6, 196608, 196608, 262144, launches=1, messages=3))
    8.40 µs, 196,608 B sent, 196,608 B received, 262,144 B peak, 1 launch, 3 messages
    """

    time: float
    bytes_sent: int
    bytes_received: int
    peak_memory: int
    launches: int
    messages: int

    @staticmethod
    def in_turn(costs: Iterable[Cost]) -> Cost:
        """Return the cost of programs that run one after the other.

        Args:
            costs: The cost of each program.

        Returns:
            The sums, and the largest `peak_memory`. No rank sends or receives as many bytes if
            programs have different busiest ranks.

        >>> import fshard as fs
        >>> fs.Cost.in_turn([fs.Cost(1.0, 2, 3, 4, 5, 6)] * 2)
        Cost(time=2.0, bytes_sent=4, bytes_received=6, peak_memory=4, launches=10, messages=12)
        """
        costs = tuple(costs)
        return Cost(
            time=sum(cost.time for cost in costs),
            bytes_sent=sum(cost.bytes_sent for cost in costs),
            bytes_received=sum(cost.bytes_received for cost in costs),
            peak_memory=max((cost.peak_memory for cost in costs), default=0),
            launches=sum(cost.launches for cost in costs),
            messages=sum(cost.messages for cost in costs),
        )

    def __str__(self) -> str:
        sent, received, peak = map(
            bytes_text, (self.bytes_sent, self.bytes_received, self.peak_memory)
        )
        counts = f"{plural(self.launches, 'launch')}, {plural(self.messages, 'message')}"
        return f"{time_text(self.time)}, {sent} sent, {received} received, {peak} peak, {counts}"


GATHERS = (AllGather, AllReduce, ReduceScatter)
"""Steps whose values all ranks of a group need or add up; others are exchanges for a `link`."""


class TimeParts(NamedTuple):
    """Seconds of a step by what they are spent on.

    Attributes:
        startup: Launch, rounds and messages, which do not depend on the size of the tensor.
        wire: Bytes of the busiest rank on its link.
        copies: Operations that read and write its own memory, each with its start.
    """

    startup: float
    wire: float
    copies: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.startup + self.wire + self.copies


def copy_time(topology: Topology, *copies: int) -> float:
    """Return the seconds of operations that each read and write some bytes, none if that is 0."""
    return sum(topology.kernel + nbytes / topology.memory for nbytes in copies if nbytes)


def collective_parts(topology: Topology, link: Link, moved: Traffic, *copies: int) -> TimeParts:
    """Return the seconds of a collective: launch, rounds, messages, bytes on the link, copies.

    The model is LogGP (Alexandrov et al. 1995); an alpha-beta model has rounds and bytes alone.
    """
    startup = topology.launch + moved.rounds * link.latency + moved.messages * topology.message
    wire = max(moved.sent, moved.received) / link.bandwidth
    return TimeParts(startup, wire, copy_time(topology, *copies))


def collective_time(topology: Topology, link: Link, moved: Traffic, *copies: int) -> float:
    """Return the seconds of a collective, the sum of its `collective_parts`."""
    return collective_parts(topology, link, moved, *copies).total


def step_parts(topology: Topology, step: Step, src: Spec, dst: Spec) -> TimeParts:
    """Return the seconds of one step: its collective with the copies around it, or local copies."""
    moved = traffic(step, src, dst)
    copies = copied_bytes(step, src, dst)
    if not moved.launches:
        return TimeParts(0.0, 0.0, copy_time(topology, *copies))
    return collective_parts(topology, step_link(topology, step, src, dst), moved, *copies)


def step_time(topology: Topology, step: Step, src: Spec, dst: Spec) -> float:
    """Return the seconds of one step, the sum of its `step_parts`."""
    return step_parts(topology, step, src, dst).total


def step_link(topology: Topology, step: Step, src: Spec, dst: Spec) -> Link:
    """Return the effective link of a collective step."""
    if src.mesh == dst.mesh:
        gathers, axes = isinstance(step, GATHERS), step_axes(step, src, dst)
        partners = None
        if isinstance(step, HaloExchange | HaloReduce) and axes:
            partners = halo_partners(step, src, dst, axes)
        return topology.link(src.mesh, axes, exchange=not gathers, partners=partners)
    return topology.between(src.mesh, dst.mesh)


def copied_bytes(step: Step, src: Spec, dst: Spec) -> tuple[int, ...]:
    """Return the bytes that the busiest rank reads and writes in each operation around a step.

    They are one before a collective and one after it; an exchange may need only one of them.
    """
    launches = traffic(step, src, dst).launches
    packed, unpacked = copy_passes(step, src, dst, launches)
    before, after = packed * max_local_nbytes(src), unpacked * max_local_nbytes(dst)
    apart = launches > 0
    if launches and isinstance(step, Exchange):
        dims = src.partition.dims, dst.partition.dims
        apart = exchange_copies_twice(*dims, adds=bool(reduction_axes(src, dst)))
    return (before, after) if apart else (before + after,)


def exchange_copies_twice(have: Dims, need: Dims, *, adds: bool) -> bool:
    """Return True if an exchange copies before and after it: along dim 0 pieces are contiguous.

    Args:
        have: the axes of each dim of the source.
        need: the axes of each dim of the target.
        adds: True if it adds up partial sums, after it.
    """
    rows = [*zip(have, need, strict=True)][1:]
    packs = any(axes != before[: len(axes)] for before, axes in rows)
    return packs and (adds or any(axes != after[: len(axes)] for axes, after in rows))


def copy_passes(step: Step, src: Spec, dst: Spec, launches: int) -> tuple[int, int]:
    """Return how often a rank reads or writes its local of `src` around a step, and of `dst`.

    Pieces along dim 0 need no packing: they are contiguous. An exchange reads the values that it
    reduces once more. A collective without `launches` (of one rank, or with nothing lacking) copies
    its result.
    """
    match step:
        case Remesh():
            return 0, 0
        case InvariantToReduced() | ReducedToInvariant():
            return 0, 0 if _keeps_values(step, src) else 2
        case Cast():
            return (0, 0) if step.dtype == src.dtype else (1, 1)
        case _ if not launches:
            return 0, 2
        case AllGather():
            return 0, 2 if step.dim else 0
        case ReduceScatter():
            return 2 if step.dim else 0, 0
        case AllToAll():
            packs, unpacks = bool(step.also or step.dst_dim), bool(step.also or step.src_dim)
            return 2 * packs, 2 * unpacks
        case HaloExchange():
            return 0, 2
        case HaloReduce():
            return 1, 1
        case Exchange():
            return 2, 1 + src.mesh.axis_size(reduction_axes(src, dst))
        case _:
            return 0, 0


def _keeps_values(step: InvariantToReduced | ReducedToInvariant, src: Spec) -> bool:
    """Return True if the step multiplies nothing: shares of an average are other values."""
    if isinstance(step, InvariantToReduced):
        return step.kind == "sum"
    return all(kind == "sum" for axis, kind in src.partition.reduced_kinds if axis in step.axes)
