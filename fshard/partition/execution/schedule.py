"""Order of execution of a plan's lines, with redistributions coalesced and launched ahead.

Redistributions that run the same collectives, forward and backward, share a launch. It waits for
the last of their sources and is waited for by the first of their uses; in the backward pass the
roles are exchanged. So gradients of parameters are reduced in buckets as by DDP (Li et al., arXiv
2006.15704), sharded parameters are gathered a bucket ahead of their use as by FSDP (Zhao et al.,
arXiv 2304.11277), and a result that is needed later is on its way meanwhile.

The last bucket of gradients and the first one of parameters overlap with no computation. They are
the parameters that are used first, and their bucket has half of the bytes of the others: with a
quarter the bucket before it would often be under way still. The same holds for gradients that the
function itself takes: it is their last bucket that has half. If S bytes are sent in k buckets, and
the startup of each (the host's and the machine's) takes as long as E bytes, this bucket and the
startups take the time of S / (2 k - 1) + k E bytes. The smallest k with 4 k^2 - 1 >= 2 S / E has
the minimum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fshard.partition.ir import (
    BeginCheckpoint,
    CheckpointedLines,
    ClosureTensor,
    EndCheckpoint,
    GradMode,
    LaunchBatch,
    Line,
    Operation,
    Pick,
    Redistribution,
    Ref,
    WaitBatch,
    Write,
    operands_of,
)
from fshard.plan.batch.batch import BUCKET_BYTES
from fshard.plan.batch.coalesce import LaunchKey, launch_keys
from fshard.program.cost.model import step_link
from fshard.program.cost.topology import Topology
from fshard.program.program import Program, wire_specs
from fshard.run.autograd.linear_function import ProgramGroup

LaunchKeys = tuple[LaunchKey, ...]
MAX_HOISTED = 8
"""Operations that run first, if a value without gradient that is sent depends on no others."""
FIRST, UNUSED = 0, -1
HOST_SECONDS = 3e-4
"""Python's time for one more launch and wait in the backward pass, measured on one CPU core.

It does not make buckets of gathered parameters larger, whose memory can be freed one by one.
"""

GRADIENT_BYTES = 25 * 2**20
"""Most bytes of gradients that are reduced together, as by DDP.

Gradients are freed once they are copied into a bucket. The C library gives more than that back to
the system when it is freed, and each step then maps the pages anew: a tenth of a step's time.
"""

MIN_GATHERS, MIN_GATHER_BYTES = 4, 2**21
"""Least number of launches in which parameters are gathered, of as many bytes each or more.

Until they are unpacked the parameters of a launch have their memory twice, as their gradients do.
"""


@dataclass(slots=True)
class LaunchBucket:
    """Redistributions that are launched together.

    Attributes:
        moves: the redistributions.
        sends: True if they communicate in the forward pass.
        ready: the index of the line before which all sources are there.
        use: the index of the line before which the first result is needed.
        nbytes: bytes of the locals, before or after.
    """

    sends: bool
    ready: int
    use: int
    nbytes: int = 0
    moves: list[Redistribution] = field(default_factory=list)

    def try_add(self, move: Redistribution, ready: int, use: int, full: float, limit: int) -> bool:
        """Add a redistribution and return True if it does not delay one of the others.

        A bucket of `full` bytes takes no more, and none gets more than `limit` bytes.
        """
        nbytes = _local_bytes(move.program)
        delays = max(ready, self.ready) > min(use, self.use)
        if self.moves and (delays or self.nbytes >= full or self.nbytes + nbytes > limit):
            return False
        self.moves.append(move)
        self.nbytes += nbytes
        self.ready, self.use = max(self.ready, ready), min(self.use, use)
        return True


def schedule(
    lines: Sequence[Line], inputs: Collection[int], outputs: Collection[int] = (),
    topology: Topology | None = None,
) -> list[Line]:  # fmt: skip
    """Return the lines of a plan in the order of execution.

    The lines of a checkpointed call become one line, and are scheduled among themselves.

    Args:
        lines: the lines.
        inputs: the value ids of the arguments.
        outputs: the value ids of the results.
        topology: the topology by which buckets of arguments are split, so that they overlap with
            the computation; None fills every bucket.
    """
    lines = _with_nested_calls(lines, outputs, topology)
    hoisted, others = _hoisted(lines, inputs)
    lines = _side_by_side([*hoisted, *others], inputs)
    buckets = _buckets(lines, inputs, topology)
    moved = {move.out for bucket in buckets for move in bucket.moves}
    count = 1 + max([*inputs, *(line.out for line in lines if hasattr(line, "out"))], default=0)
    before: list[list[LaunchBatch | WaitBatch | Pick]] = [[] for _ in range(len(lines) + 1)]
    turns: dict[int, int] = {}
    previous = FIRST
    for index, bucket in enumerate(sorted(buckets, key=lambda bucket: bucket.use)):
        launched, waited = count + 2 * index, count + 2 * index + 1
        start = bucket.ready
        if start == FIRST and bucket.sends:
            start, previous = previous, bucket.use
        elif start == FIRST:  # local: runs while values of the hoisted lines are sent
            start = len(hoisted)
        sources = tuple(move.source for move in bucket.moves)
        group = ProgramGroup(tuple(move.program for move in bucket.moves))
        turns[launched] = index if bucket.sends else index + len(buckets)
        grad, module = bucket.moves[0].grad, _common_path([move.module for move in bucket.moves])
        before[start].append(LaunchBatch(launched, sources, group, grad, module=module))
        before[bucket.use].append(WaitBatch(waited, Ref(launched)))
        before[bucket.use] += [
            Pick(move.out, Ref(waited), i) for i, move in enumerate(bucket.moves)
        ]
    result: list[Line] = []
    for line, earlier in zip((*lines, None), before, strict=True):
        earlier.sort(key=lambda move: turns.get(move.out, 2 * len(buckets)))
        result += earlier
        if line is not None and getattr(line, "out", None) not in moved:
            result.append(line)
    for index, (line, following) in enumerate(itertools.pairwise(result)):
        match line, following:
            case LaunchBatch(), WaitBatch() if following.source.value == line.out:
                result[index] = replace(line, waits=True)
    return result


def _common_path(modules: Sequence[str]) -> str:
    """Return the path of the innermost module that has all modules of these paths."""
    names = map(set, zip(*(path.split(".") for path in modules), strict=False))
    return ".".join(name for (name,) in itertools.takewhile(lambda x: len(x) == 1, names))


def _hoisted(
    lines: Sequence[Line], inputs: Collection[int]
) -> tuple[Sequence[Line], Sequence[Line]]:
    """Return short computations of values that are sent without gradient, and the other lines.

    The number of targets of a loss, say, depends on the targets alone: it is on its way while the
    model runs.
    """
    if any(isinstance(line, GradMode) for line in lines):
        return (), lines
    producers = {line.out: line for line in lines if isinstance(line, Operation | Pick)}
    first: dict[int, Line] = {}
    for line in lines:
        if not isinstance(line, Redistribution) or line.grad or not _keys(line.program):
            continue
        chain: dict[int, Line] = {}
        pending = [line.source.value]
        while pending and len(chain) <= MAX_HOISTED:
            value = pending.pop()
            if value in producers and value not in chain:
                chain[value] = producers[value]
                pending += operands_of(producers[value])
            elif value not in inputs and value not in producers:
                chain.clear()
                break
        if len(chain) <= MAX_HOISTED:
            first |= chain
    return (
        [line for line in lines if getattr(line, "out", None) in first],
        [line for line in lines if getattr(line, "out", None) not in first],
    )


def _side_by_side(lines: Sequence[Line], inputs: Collection[int]) -> list[Line]:
    """Return the lines with redistributions that do not depend on each other in a row.

    The redistributions of gradients that are taken in the function, or of norms of many tensors,
    are then one launch. The lines that depend on them come after, in their order; all others
    before, so that they run while values are sent. At most `BUCKET_BYTES` wait. Arguments are
    gathered where they are used.
    """
    result: list[Line] = []
    remaining = list(lines)
    if any(getattr(line, "grad", False) for line in lines if isinstance(line, Redistribution)):
        return remaining
    while remaining:
        moves: list[Line] = []
        waiting: list[Line] = []
        blocked: set[int] = set()
        nbytes = 0
        for index, line in enumerate(remaining):
            if not hasattr(line, "out"):  # a write, or a change of the grad mode
                waiting += remaining[index:] if moves else []
                if moves:
                    break
            elif not blocked.isdisjoint(operands_of(line)):
                waiting.append(line)
                blocked.add(line.out)
                continue
            elif isinstance(line, Redistribution) and _is_sent(line, inputs):
                nbytes += _local_bytes(line.program)
                if moves and nbytes > BUCKET_BYTES:
                    waiting += remaining[index:]
                    break
                moves.append(line)
                blocked.add(line.out)
                continue
            result.append(line)
        result += moves
        remaining = waiting
    return result


def _is_sent(move: Redistribution, inputs: Collection[int]) -> bool:
    """Return True for a redistribution of a computed value that communicates."""
    return move.source.value not in inputs and move.program.is_linear and bool(_keys(move.program))


def _buckets(
    lines: Sequence[Line], inputs: Collection[int], topology: Topology | None
) -> list[LaunchBucket]:
    """Return the buckets of all redistributions that can be launched before they are needed."""
    defined = dict.fromkeys(inputs, FIRST)
    first_use: dict[int, int] = {}
    for index, line in enumerate(lines):
        for operand in operands_of(line):
            first_use.setdefault(operand, index)
        if hasattr(line, "out") and not isinstance(line, Redistribution):
            defined[line.out] = index + 1
    end = next((i for i, line in enumerate(lines) if isinstance(line, Write)), len(lines))
    moves = [
        (defined[line.source.value], min(first_use.get(line.out, end), end), line)
        for line in lines[:end]
        if isinstance(line, Redistribution)
        and line.program.is_linear
        and line.source.value in defined
    ]
    by_key: dict[tuple[Any, ...], list[tuple[int, int, Redistribution]]] = {}
    for item in sorted(moves, key=lambda item: item[:2]):
        ready, _, move = item
        forward, backward = _keys(move.program), _keys(move.program.T) if move.grad else ()
        if forward or backward:
            key = bool(forward), move.grad, forward, backward, ready == FIRST
            by_key.setdefault(key, []).append(item)

    def waits(ready: int, use: int) -> bool:
        return all(isinstance(line, Redistribution | GradMode) for line in lines[ready:use])

    result: list[LaunchBucket] = []
    for (sends, grad, *_, is_first), members in by_key.items():
        computed = sends and not grad and not is_first  # as gradients that the function takes
        full, limit = math.inf, BUCKET_BYTES
        if computed or (is_first and not sends):
            limit = max(limit, GRADIENT_BYTES)
        if (computed or is_first) and topology is not None:
            programs = [move.program for _, _, move in members]
            full = _bucket_bytes(programs, topology, limit, gathers=is_first and sends)
        row: list[LaunchBucket] = []
        most = full / 2
        for ready, use, move in reversed(members) if computed else members:
            if row:
                if row[-1].try_add(move, ready, use, most, limit):
                    continue
                most = full
            if is_first or computed or not waits(ready, use):
                row.append(LaunchBucket(sends, ready, use))
                row[-1].try_add(move, ready, use, most, limit)
        for bucket in row if computed else ():
            bucket.moves.reverse()
        result += [x for x in row if is_first or len(x.moves) > 1 or not waits(x.ready, x.use)]
    return result


def _bucket_bytes(
    programs: Sequence[Program], topology: Topology, limit: int, *, gathers: bool
) -> float:
    """Return the bytes of the buckets that programs are best sent in; the first one has half.

    They are gathers of parameters, or else reductions of gradients, forward or backward.
    """
    total = sum(map(_local_bytes, programs))
    prog = programs[0] if _keys(programs[0]) else programs[0].T
    host, least = HOST_SECONDS, 1.0
    if gathers:
        host, least = 0.0, min(MIN_GATHERS, total / MIN_GATHER_BYTES)
    links = [
        step_link(topology, prog.steps[i], *wire_specs(prog)[i : i + 2])
        for i, _ in launch_keys(prog)
    ]
    startup = max((host + topology.launch + link.latency) * link.bandwidth for link in links)
    if not startup:
        return math.inf
    count = math.ceil(math.sqrt(total / (2 * startup) + 0.25))
    return total / (max(1.0, least, count, math.ceil(total / limit + 0.5)) - 0.5)


def _keys(prog: Program) -> LaunchKeys:
    """Return the keys of the collectives of a program; those with equal keys can be one launch."""
    return tuple(key for _, key in launch_keys(prog))


def _local_bytes(prog: Program) -> int:
    """Return the bytes of the larger local of a program, on the first rank: equal on all ranks."""
    rank = prog.src.mesh.ranks[0]
    return max(prog.src.local_nbytes(rank), prog.dst.local_nbytes(rank))


# -- checkpointed calls ------------------------------------------------------------------------


def _with_nested_calls(
    lines: Sequence[Line], outputs: Collection[int], topology: Topology | None
) -> list[Line]:
    """Return lines in which those of every outermost checkpointed call are one line."""
    last_use = {operand: i for i, line in enumerate(lines) for operand in operands_of(line)}
    last_use.update(dict.fromkeys(outputs, len(lines)))
    new_values = itertools.count(1 + max((getattr(x, "out", 0) for x in lines), default=0))
    result: list[Line] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if not isinstance(line, BeginCheckpoint):
            result.append(line)
            continue
        end = _end_of_call(lines, index)
        inner = lines[index:end]
        index = end + 1
        # Tensors that the function closes over are arguments of the call.
        result += [x for x in inner if isinstance(x, ClosureTensor)]
        inner = [x for x in inner if not isinstance(x, ClosureTensor)]
        made = [x.out for x in inner if hasattr(x, "out")]
        results = tuple(value for value in made if last_use.get(value, UNUSED) > end)
        if not results:
            result += [x for x in inner if not isinstance(x, BeginCheckpoint | EndCheckpoint)]
            continue
        used = dict.fromkeys(operand for x in inner for operand in operands_of(x))
        operands = tuple(value for value in used if value not in set(made))
        ordered = tuple(schedule(inner, operands, results, topology))
        out = next(new_values)
        result.append(
            CheckpointedLines(out, line.call, ordered, tuple(map(Ref, operands)), results)
        )
        result += [Pick(value, Ref(out), i) for i, value in enumerate(results)]
    return result


def _end_of_call(lines: Sequence[Line], start: int) -> int:
    """Return the index of the mark that ends the call whose lines begin at `start`."""
    depth = 1
    for index in range(start, len(lines)):
        match lines[index]:
            case BeginCheckpoint():
                depth += 1
            case EndCheckpoint():
                depth -= 1
        if depth == 0:
            return index
    raise AssertionError("a checkpointed call has no end")
