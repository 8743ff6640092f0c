"""Times of a step's record on a machine: two clocks, one of the device and one of its links.

The device runs operations in order. A collective starts when it is launched and those before it
have ended; it runs beside the computation, but for the share of its time in which the device is
busy with it (`Topology.overlap`). The device waits for it where its result is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import fail
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten
from fshard.partition.step_cost.memory_timeline import (
    CATEGORIES,
    HeldValue,
    MemoryPoint,
    StepMemory,
)
from fshard.partition.step_cost.roofline import COMMUNICATION, COMPUTE, Roofline, StepEvent
from fshard.partition.step_cost.step_record import (
    AllocatedBlock,
    AwaitedCollective,
    Block,
    Entry,
    LaunchedCollective,
    RanOperation,
    StepRecord,
)
from fshard.program.cost.links import is_number
from fshard.program.cost.topology import Topology
from fshard.run.transports.shape_only import RecordedCollective


def roofline_of(record: StepRecord, topology: Topology) -> Roofline:
    """Return the times of a record on a machine."""
    events: list[StepEvent] = []
    launched: dict[int, int] = {}
    now = link = 0.0
    flops: Counter[torch.dtype] = Counter()
    for entry in record.entries:
        match entry:
            case RanOperation():
                events.append(operation_event(entry, topology, now))
                now = events[-1].end
                flops[entry.dtype] += entry.flops
            case LaunchedCollective():
                launched[entry.index] = len(events)
                event = _collective_event(entry, topology, max(now, link))
                events.append(replace(event, waited=(1 - topology.overlap) * event.time))
                link, now = event.end, now + events[-1].waited
            case AwaitedCollective():
                index = launched[entry.index]
                waited = max(0.0, events[index].end - now)
                events[index] = replace(events[index], waited=events[index].waited + waited)
                now += waited
    dtype = flops.most_common(1)[0][0] if flops else torch.float32
    return Roofline(_title(record), topology, tuple(events), dtype)


def operation_event(ran: RanOperation, topology: Topology, start: float) -> StepEvent:
    """Return an operation that starts at a moment, by the roofline model."""
    computing = ran.flops / topology.flops_per_second(ran.dtype)
    moving = ran.nbytes / topology.memory
    limit = COMPUTE if computing > moving else "memory"
    longer = max(computing, moving)
    end = start + longer + topology.kernel
    return StepEvent(
        ran.line.name, COMPUTE, ran.phase, ran.line.value, start, end, ran.flops, ran.nbytes,
        "start" if topology.kernel > longer else limit, topology.kernel, 0.0, ran.line.spec,
        ran.line.place, ran.is_product, ran.line.module,
    )  # fmt: skip


def _collective_event(entry: LaunchedCollective, topology: Topology, start: float) -> StepEvent:
    collective, line = entry.collective, entry.line
    time, startup = _collective_times(collective, topology)
    name = f"{collective.op}({', '.join(collective.axes)})"
    bound = "start" if 2 * startup > time else "link"
    return StepEvent(name, COMMUNICATION, entry.phase, line.value, start, start + time, 0,
                     collective.traffic.sent, bound, startup, 0.0, line.spec,
                     line.place, module=line.module)  # fmt: skip


@lru_cache(maxsize=CACHE_SIZE)
def _collective_times(collective: RecordedCollective, topology: Topology) -> tuple[float, float]:
    """Return the seconds of a collective, and the part that does not depend on its bytes."""
    empty = replace(collective, traffic=collective.traffic._replace(sent=0, received=0))
    return collective.cost(topology).time, empty.cost(topology).time


def memory_of(record: StepRecord, roofline: Roofline, optimizer: int = 0) -> StepMemory:
    """Return the memory of a record over the times of its roofline.

    Args:
        record: the record.
        roofline: its times.
        optimizer: bytes of the optimizer's state, which are held all the time.
    """
    category_bytes = dict.fromkeys(CATEGORIES, 0)
    category_bytes["optimizer"] = optimizer
    points: list[MemoryPoint] = []
    launched: dict[int, int] = {}
    index, now, peak, total, end = 0, 0.0, -1, optimizer, 0
    for number, entry in enumerate(record.entries):
        match entry:
            case RanOperation():
                now, index = roofline.events[index].end, index + 1
            case LaunchedCollective():
                launched[entry.index], index = index, index + 1
            case AwaitedCollective():
                now = max(now, roofline.events[launched[entry.index]].end)
            case AllocatedBlock(block, frees, phase):
                change = -block.nbytes if frees else block.nbytes
                category_bytes[block.category] += change
                total += change
                if number >= record.arguments - 1:
                    points.append(MemoryPoint(now, index, phase, tuple(category_bytes.values())))
                if total > peak:
                    peak, end = total, number + 1
    points = points or [MemoryPoint(0.0, 0, "forward", tuple(category_bytes.values()))]
    blocks = _held_blocks(record.entries[:end])
    values = [HeldValue(x.line.name, x.category, x.nbytes, x.phase, x.line.place)
              for x in sorted(blocks, key=lambda x: -x.nbytes)]  # fmt: skip
    name = blocks[-1].line.name if blocks else ""
    return StepMemory(_title(record), _merged(points), tuple(values), name)


def _held_blocks(entries: Sequence[Entry]) -> list[Block]:
    """Return the blocks that are held after some entries, in the order of allocation."""
    blocks: dict[int, Block] = {}
    for entry in entries:
        if isinstance(entry, AllocatedBlock):
            if entry.frees:
                blocks.pop(id(entry.block), None)
            else:
                blocks[id(entry.block)] = entry.block
    return [*blocks.values()]


def _merged(points: list[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """Return points without those that the next one replaces at once, but for local maxima."""
    kept = points[:1]  # of the arguments alone
    for before, point, after in zip(points, points[1:], [*points[2:], points[-1]], strict=False):
        is_peak = before.total <= point.total >= after.total
        is_last = point.time != after.time or point.phase != after.phase or point is points[-1]
        if is_peak or is_last:
            kept.append(point)
    return tuple(kept)


def _title(record: StepRecord) -> str:
    return f"rank {record.rank} of {record.mesh}"


def optimizer_bytes(optimizer: Any, params: Sequence[Spec], rank: int) -> int:
    """Return the bytes of an optimizer's state on a rank.

    Args:
        optimizer: a multiple of the parameters' bytes, a tree of specs or pairs, or an object with
            `slots`, a function of a parameter's spec to the specs of its state.
        params: the specs of the parameters.
        rank: the rank.

    Raises:
        ShardingError: for anything else.
    """
    if is_number(optimizer) and optimizer >= 0:
        return round(float(optimizer) * sum(spec.local_nbytes(rank) for spec in params))
    slots = getattr(optimizer, "slots", None)
    tree = optimizer if slots is None else [slots(spec) for spec in params]
    specs = [x.spec if isinstance(x, Sharded) else x for x in flatten(tree)[0]]
    tensors = [spec for spec in specs if isinstance(spec, Spec)]
    if not tensors and specs and slots is None:
        value = optimizer if isinstance(optimizer, int | float) else type(optimizer).__name__
        fail("memory", f"optimizer {value}", "optimizer must be a multiple of at least 0 of "
             "the parameters' bytes, a tree of specs or pairs, or an optimizer of fs.state",
             "optimizer=2 for Adam's two moments")  # fmt: skip
    return sum(spec.local_nbytes(rank) for spec in tensors)
