"""Choice of layouts, and of values that the backward pass recomputes, within a limit of memory.

Autograd keeps what it keeps; or gathered parameters are gathered again; or all but products is
recomputed; or values between checkpoints (Chen et al., arXiv 1604.06174), where the values that few
bytes pass through are kept. Each is planned with parameters gathered and with parameters that stay
sharded. Of those that fit the fastest is taken. A step without recomputation is recorded first: it
and the operations that run again are a lower bound of a plan's time, so that most need no record.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, NoReturn

from fshard._util.errors import fail
from fshard._util.text import plural
from fshard.layout.spec import Spec
from fshard.ops.propagate.role_costs import contracts
from fshard.ops.strategy.axis_roles import factor_sizes
from fshard.partition.execution.remat_plan import GATHERS, KeptValues, PlannedRemat
from fshard.partition.execution.saved_bytes import moved_arguments
from fshard.partition.ir import (
    LaunchBatch,
    Operation,
    Pick,
    Redistribution,
    WaitBatch,
    aliases_of,
    operands_of,
)
from fshard.partition.partitioned_call import PartitionedCall
from fshard.partition.step_cost.memory_timeline import MemoryChoice
from fshard.partition.step_cost.roofline import COMMUNICATION, COMPUTE, FORWARD
from fshard.program.cost.shard_overlap import shard_indices

SEGMENTS = (2, 4, 8, 16, 32, 64)
"""Numbers of segments between checkpoints that are tried."""
TIME_SHARE = 0.99
"""Plans are looked for only if they may take less than this share of the best one's time."""


def check_memory(memory: int | None, where: str, *, optional: bool = True) -> None:
    """Raise `ShardingError` for a limit that is not a number of bytes, nor None if `optional`."""
    if memory is None and optional:
        return
    if type(memory) is not int or memory < 1:
        rule = "memory must be an int of at least 1 byte" + (", or None" if optional else "")
        fail(where, f"memory={memory!r}", rule, "memory=80 * 10**9")


def within_memory(
    plan: Callable[[tuple[str, ...]], PartitionedCall], holds: Sequence[tuple[str, ...]],
    limit: int, where: str,
) -> PartitionedCall:  # fmt: skip
    """Return a call that holds at most `limit` bytes on every rank.

    Args:
        plan: a function from the axes that parameters stay sharded along to the call.
        holds: the axes to try.
        limit: bytes.
        where: name of the function in errors.

    Raises:
        ShardingError: if no choice fits.
    """
    call, tried = fitting_call(plan, holds, limit)
    if call is None:
        refuse_memory(limit, tried, where)
    return call


def refuse_memory(limit: int, tried: Sequence[MemoryChoice], where: str) -> NoReturn:
    """Raise `ShardingError` for a limit that no choice fits."""
    least = min(tried, key=lambda choice: choice.peak)
    fail(where, f"memory={limit}",
         f"the peak of a rank must be at most that; of {plural(len(tried), 'plan')} the least "
         f"is {least.peak} bytes ({least.text})",
         f"memory={least.peak}, a larger mesh, or a smaller batch")  # fmt: skip


def fitting_call(
    plan: Callable[[tuple[str, ...]], PartitionedCall], holds: Sequence[tuple[str, ...]], limit: int
) -> tuple[PartitionedCall | None, tuple[MemoryChoice, ...]]:
    """Return a call that holds at most `limit` bytes, None if none does, and the choices tried.

    Arguments are those of `within_memory`.
    """
    calls = [plan(hold) for hold in holds]
    calls = [replace(call, _compiled={}) for i, call in enumerate(calls)
             if not i or call.programs != calls[0].programs]  # fmt: skip
    tried = list[Planned]()
    best: Planned | None = None
    policies = _policies(calls[0])
    layouts = dict(zip(map(id, calls), ("", "parameters stay sharded; "), strict=False))

    def record(text: str, call: PartitionedCall, base: PartitionedCall) -> None:
        nonlocal best
        text = layouts[id(base)] + text
        choice = MemoryChoice(limit, text, peak_of(call), call.roofline().time)
        tried.append((choice, call))
        if choice.peak <= limit and (best is None or choice.time < best[0].time):
            best = tried[-1]

    for call in calls:
        record(policies[0][0], call, call)
    bases = [call for call in calls if best is None or call.roofline().time < best[0].time]
    others = sorted((x for call in bases for x in _recomputing(call, policies[1:])),
                    key=lambda other: other.least_time)  # fmt: skip
    for other in others:
        if best is not None and other.least_time >= TIME_SHARE * best[0].time:
            break
        record(other.text, other.call, other.base)
    if best is None:
        return None, tuple(choice for choice, _ in tried)
    choice, fastest = best
    rest = tuple(x for x, _ in tried if x is not choice)
    choice = replace(choice, others=rest)
    return replace(fastest, memory_choice=choice, _compiled=None), (choice, *rest)


class _Recomputing(NamedTuple):
    """Call that recomputes values, the call that does not, and a lower bound of its seconds."""

    text: str
    call: PartitionedCall
    base: PartitionedCall
    least_time: float


def _recomputing(
    base: PartitionedCall, policies: Sequence[tuple[str, Policy]]
) -> list[_Recomputing]:
    """Return the calls that differ in what the backward pass recomputes."""
    roofline, calls = base.roofline(), dict[object, _Recomputing]()
    seconds: dict[tuple[str, int | None], float] = defaultdict(float)
    for event in roofline.of(phase=FORWARD):
        seconds[event.kind, event.value] += event.time
    launches = {x.out: x for x in base.schedule if isinstance(x, LaunchBatch)}
    for text, policy in policies:
        call = replace(base, remat=policy(base), _derived={})
        units = call.remat_plan.units
        again = {
            getattr(unit.lines[0], "out", None):
            1.0 if unit.launch is None else _share(unit.launch, launches[unit.launch.out])
            for unit in units
        }  # fmt: skip
        least = max(roofline.time, *(
            total + sum(share * seconds[kind, value] for value, share in again.items())
            for kind, total in ((COMPUTE, roofline.compute),
                                (COMMUNICATION, roofline.communication))
        ))  # fmt: skip
        key = frozenset((unit.outputs, unit.internals) for unit in units)
        if units:
            calls.setdefault(key, _Recomputing(text, call, base, least))
    return [*calls.values()]


def _share(part: LaunchBatch, whole: LaunchBatch) -> float:
    """Return the least share of a launch's bytes, of its steps, that a part of it sends.

    Times are concave functions of the bytes, so that it takes at least this share of the time.
    """
    sent, total = ([sum(step) for step in itertools.zip_longest(
                        *(program.step_bytes for program in launch.programs), fillvalue=0)]
                   for launch in (part, whole))  # fmt: skip
    shares = [a / b for a, b in itertools.zip_longest(sent, total, fillvalue=0) if b]
    return min(shares, default=0.0)


def peak_of(call: PartitionedCall) -> int:
    """Return the most bytes that a rank of a call holds."""
    return max(call.memory(rank=rank).peak for rank in different_ranks(call))


Policy = Callable[[PartitionedCall], PlannedRemat]
Planned = tuple[MemoryChoice, PartitionedCall]


def _policies(call: PartitionedCall) -> list[tuple[str, Policy]]:
    """Return texts and functions from a call to the values that its backward pass recomputes."""
    given = call.remat
    text = "nothing is recomputed" if given is None else "remat as requested"
    policies: list[tuple[str, Policy]] = [(text, lambda _: given)]
    if given is not None or not call.grad:
        return policies
    policies += [
        ("parameters are gathered again", lambda _: GATHERS),
        ("all but products is recomputed", _products),
    ]
    most = len(_products(call).values)
    policies += [
        (f"recomputed between {plural(n - 1, 'checkpoint')}", partial(checkpoints, segments=n))
        for n in SEGMENTS if n <= most
    ]  # fmt: skip
    return policies


def _products(call: PartitionedCall) -> KeptValues:
    """Return the policy that keeps the results of products alone."""
    return KeptValues(frozenset(
        line.out for line in call.schedule if isinstance(line, Operation)
        and contracts(rule := line.strategy.rule, line.strategy.call,
                      factor_sizes(rule, line.strategy.call))
    ))  # fmt: skip


def checkpoints(call: PartitionedCall, segments: int) -> KeptValues:
    """Return the policy that keeps the values between segments of a call's forward pass.

    The values of a segment take about an equal share of the memory. Each ends near its share, where
    the values that later lines read are the fewest bytes.
    """
    lines, rank = call.schedule, call.mesh.ranks[0]
    sizes = {value: spec.local_nbytes(rank) for value, spec in _specs(call).items()}
    for value in moved_arguments(lines, call._inputs[: len(call.in_specs)]):
        sizes.pop(value, None)
    base: dict[int, tuple[int, ...]] = {}  # a value and those in whose memory it is
    last = {value: i for i, line in enumerate(lines) for value in operands_of(line)}
    live: dict[int, None] = {}
    cuts: list[tuple[int, int, frozenset[int]]] = []  # bytes so far, bytes that are live, values
    total = 0
    for index, line in enumerate(lines):
        out = getattr(line, "out", None)
        if out in sizes:
            bases = [x for value, x in aliases_of(line) if value == out and x in sizes]
            base[out] = (out, *(x for value in bases for x in base[value]))
            total += 0 if bases else sizes[out]
            live[out] = None
        for value in [value for value in live if last.get(value, -1) <= index]:
            del live[value]
        kept = frozenset(x for value in live for x in base[value])
        cuts.append((total, sum(sizes[base[x][-1]] for x in live), kept))
    values: frozenset[int] = frozenset()
    for number in range(1, segments):
        near = [cut for cut in cuts if abs(cut[0] * segments - number * total) <= total / 2]
        values |= min(near, key=lambda cut: cut[1])[2] if near else frozenset()
    return KeptValues(values)


def _specs(call: PartitionedCall) -> dict[int, Spec]:
    """Return the specs of the values that lines compute."""
    specs: dict[int, Spec] = {}
    results: dict[int, Sequence[Spec | None]] = {}
    for line in call.schedule:
        match line:
            case Operation():
                results[line.out] = line.strategy.computed_specs
                if line.single and (spec := line.strategy.computed_specs[0]) is not None:
                    specs[line.out] = spec
            case Redistribution():
                specs[line.out] = line.program.dst
            case LaunchBatch():
                results[line.out] = [program.dst for program in line.programs]
            case WaitBatch():
                results[line.out] = results[line.source.value]
            case Pick() if line.source.value in results:
                spec = results[line.source.value][line.index]
                specs |= {} if spec is None else {line.out: spec}
    return specs


def different_ranks(call: PartitionedCall) -> list[int]:
    """Return the first rank, and the ranks that hold the most of an uneven argument."""
    ranks = {call.mesh.ranks[0]}
    for spec in call.in_specs:
        if not spec.is_even:
            rows = [
                map(spec.shard_sizes(dim).__getitem__, shard_indices(spec.mesh, axes))
                for dim, axes in enumerate(spec.partition.dims)
            ]
            numels = [*map(math.prod, zip(*rows, strict=True))]
            ranks.add(spec.mesh.devices[numels.index(max(numels))])
    return sorted(ranks)
