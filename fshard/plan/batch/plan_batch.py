"""How all leaves of a tree are planned together: launches are shared, and ranks take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

from fshard._util.errors import raise_if
from fshard.layout.spec import Spec
from fshard.layout.tree import TreeDef, flatten, matching, paths, unflatten
from fshard.plan.batch.batch import Batch, batch_of, of_leaves
from fshard.plan.batch.coalesce import Leaves, kinds, ranks_of, row_of
from fshard.program.cost.rank_loads import load
from fshard.program.cost.topology import Topology
from fshard.program.program import Program, endpoint_problems

__all__ = ["plan_batch"]

SHARED = 8
"""Of how many leaves a launch is thought to be, at most, while one of them is planned.

What is left of its cost is little beside latency and bytes; with less, searches would take long.
"""

Plan = Callable[..., Program]
Offer = Callable[..., Program | None]


def plan_batch(
    src: Any,
    dst: Any,
    plan: Plan,
    offer: Offer,
    cost: Topology | str,
    options: tuple[Any, ...],
    bucket_bytes: int | None,
) -> Batch:
    """The batch from a tree of specs to another: what is cheapest together, not leaf by leaf.

    `plan(src, dst, cost, *options)` makes the program of one leaf, `offer` another, or None.
    Where launches cost time, each leaf is also planned as if others shared its launch. Leaves
    that are alike take, of these, what makes the batch cheapest: it never costs more than its
    leaves one by one. It is cached by value.

    Raises `ShardingError` where the trees are of different structures, and all that `plan`
    raises, with the path of the leaf.
    """
    sources, structure = flatten(src)
    targets = matching(src, dst, ("src", "dst"), "fs.redistribute")
    values = all(each is None or isinstance(each, Spec) for each in (*sources, *targets))
    planned = _planned if values else _planned.__wrapped__  # what has no hash is refused there
    ends = tuple(zip(sources, targets, strict=True))
    return planned(ends, structure, plan, offer, cost, options, bucket_bytes)


@lru_cache(maxsize=256)
def _planned(
    ends: tuple[tuple[Any, Any], ...],
    structure: TreeDef,
    plan: Plan,
    offer: Offer,
    cost: Topology | str,
    options: tuple[Any, ...],
    bucket_bytes: int | None,
) -> Batch:
    names = paths(unflatten(structure, [a for a, _ in ends]), "")
    one = cache(lambda a, b: plan(a, b, cost, *options))
    make = [partial(_plan_leaf, a, b, one) for a, b in ends]
    leaves = tuple(of_leaves("fs.redistribute", names, make))
    moving = [a != b for a, b in ends]
    if sum(moving) < 2:
        return batch_of(leaves, structure, bucket_bytes)
    others: list[Offer] = [_sparing(lambda a, b: offer(a, b, cost, *options), one)]
    if isinstance(cost, Topology):
        shared = replace(cost, launch=cost.launch / min(sum(moving), SHARED))
        others.append(lambda a, b: plan(a, b, shared, *options))
    ways: list[Leaves] = [leaves]
    for other in map(cache, others):
        found = [other(*each) if moves else None for each, moves in zip(ends, moving, strict=True)]
        ways.append(tuple(map(_first, found, leaves)))
    batch = partial(batch_of, structure=structure, bucket_bytes=bucket_bytes)
    return _cheapest(ways, batch, partial(_measure, cost))


def _first(one: Program | None, other: Program | None) -> Program | None:
    return other if one is None else one


def _sparing(offer: Offer, plan: Plan) -> Offer:
    """Those offers in which all ranks together receive less than by the plan."""

    def spares(a: Spec, b: Spec) -> Program | None:
        other = offer(a, b)
        return other if other is not None and _received(other) < _received(plan(a, b)) else None

    return spares


def _received(prog: Program) -> int:
    """Bytes that all ranks receive."""
    ranks, rows = ranks_of((prog,)), (row_of((prog,), 0, at) for at in range(len(prog.steps)))
    return sum(sum(load(*row, ranks).received) for row in rows)


def _cheapest(
    ways: Sequence[Leaves],
    batch: Callable[[Iterable[Program | None]], Batch],
    measure: Callable[[Batch], tuple[int, ...]],
) -> Batch:
    """The cheapest batch in which each leaf goes one of several ways, as far as it is looked for.

    From the cheapest way for all, the leaves whose programs are alike in every way change theirs
    together: a launch is saved or shared by all of them or by none.
    """
    best = min(map(batch, dict.fromkeys(ways)), key=measure)
    least = measure(best)
    alike: dict[Any, set[int]] = {}
    for at, programs in enumerate(zip(*ways, strict=True)):
        if any(prog != programs[0] for prog in programs):
            key = tuple(tuple(kind for _, kind in kinds(prog)) for prog in programs)
            alike.setdefault(key, set()).add(at)
    for places in alike.values() if len(alike) > 1 else ():
        for leaves in ways:
            pairs = enumerate(zip(leaves, best.leaves, strict=True))
            changed = batch(mine if at in places else its for at, (mine, its) in pairs)
            if (now := measure(changed)) < least:
                best, least = changed, now
    return best


def _measure(cost: Topology | str, batch: Batch) -> tuple[int, ...]:
    """What is to be least: time, to a picosecond, or bytes, and then launches and messages."""
    if isinstance(cost, Topology):
        return (round(batch.cost(cost).time * 1e12),)
    its = batch.cost()
    return its.bytes_received, its.launches, its.messages


def _plan_leaf(a: Any, b: Any, plan: Callable[[Spec, Spec], Program]) -> Program | None:
    if a is None and b is None:
        return None
    if not isinstance(a, Spec) or not isinstance(b, Spec):
        raise_if("fs.redistribute", endpoint_problems("redistribute", a, b))
    return plan(a, b)
