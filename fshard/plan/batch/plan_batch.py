"""Planning of all leaves of a tree together: launches are shared, and ranks take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

from fshard._util.errors import raise_if
from fshard.layout.spec import Spec
from fshard.layout.tree import TreeDef, flatten, flatten_like, paths, unflatten
from fshard.plan.batch.batch import Batch, batch_from_leaves, map_leaves
from fshard.plan.batch.coalesce import Leaves, cost_ranks, launch_keys, typed_step
from fshard.plan.plan_options import PlanOptions
from fshard.program.cost.rank_loads import step_load
from fshard.program.program import Program
from fshard.program.program_arguments import endpoint_problems

MAX_SHARERS = 8
"""Most leaves that are assumed to share a launch while one of them is planned.

An eighth of a launch is already small beside latency and bytes; less would slow searches down.
"""

Plan = Callable[..., Program]
TryPlan = Callable[..., Program | None]


def plan_batch(
    src: Any,
    dst: Any,
    plan: Plan,
    plan_exchange: TryPlan,
    options: PlanOptions,
    bucket_bytes: int | None,
) -> Batch:
    """Return the batch from one tree of specs to another that is cheapest as a whole.

    `plan(src, dst, options)` plans one leaf, `plan_exchange` tries an alternative. To minimize
    time, each leaf is also planned as if other leaves shared its launches. Leaves with the same
    candidates choose together what makes the batch cheapest, so it never costs more than its leaves
    one by one. Batches are cached by value.

    Raises:
        ShardingError: If the trees have different structures, and for all that `plan` raises, with
            the path of the leaf.
    """
    sources, structure = flatten(src)
    targets = flatten_like(src, dst, ("src", "dst"), "fs.redistribute")
    hashable = all(x is None or isinstance(x, Spec) for x in (*sources, *targets))
    planned = _planned if hashable else _planned.__wrapped__  # other leaves are refused there
    ends = tuple(zip(sources, targets, strict=True))
    return planned(ends, structure, plan, plan_exchange, options, bucket_bytes)


@lru_cache(maxsize=256)
def _planned(
    ends: tuple[tuple[Any, Any], ...],
    structure: TreeDef,
    plan: Plan,
    plan_exchange: TryPlan,
    options: PlanOptions,
    bucket_bytes: int | None,
) -> Batch:
    names = paths(unflatten(structure, [src for src, _ in ends]), "")
    plan_alone = cache(lambda a, b: plan(a, b, options))
    planners = [partial(_plan_leaf, *pair, plan_alone) for pair in ends]
    leaves = tuple(map_leaves("fs.redistribute", names, planners))
    moving = [src != dst for src, dst in ends]
    if sum(moving) < 2:
        return batch_from_leaves(leaves, structure, bucket_bytes)
    others = [_if_fewer_bytes(lambda a, b: plan_exchange(a, b, options), plan_alone)]
    if options.objective == "time":
        sharing = options._replace(sharers=min(sum(moving), MAX_SHARERS))
        others.append(lambda a, b: plan(a, b, sharing))
    candidates: list[Leaves] = [leaves]
    for planner in map(cache, others):
        progs = [planner(*ends[i]) if moves else None for i, moves in enumerate(moving)]
        candidates.append(tuple(a if b is None else b for a, b in zip(leaves, progs, strict=True)))
    batch = partial(batch_from_leaves, structure=structure, bucket_bytes=bucket_bytes)
    return _cheapest(
        candidates, batch, _batch_time if options.objective == "time" else _batch_bytes
    )


def _if_fewer_bytes(try_plan: TryPlan, plan: Plan) -> TryPlan:
    """Return `try_plan` restricted to programs in which all ranks together receive less."""

    def plan_fewer_bytes(a: Spec, b: Spec) -> Program | None:
        prog = try_plan(a, b)
        return prog if prog is not None and _received(prog) < _received(plan(a, b)) else None

    return plan_fewer_bytes


def _received(prog: Program) -> int:
    """Return the bytes that all ranks receive together."""
    ranks = cost_ranks((prog,))
    steps = (typed_step((prog,), 0, i) for i in range(len(prog.steps)))
    return sum(sum(step_load(*step, ranks).received) for step in steps)


def _cheapest(
    candidates: Sequence[Leaves],
    batch: Callable[[Iterable[Program | None]], Batch],
    measure: Callable[[Batch], tuple[int, ...]],
) -> Batch:
    """Return the cheapest batch found that takes the program of each leaf from some candidate.

    It starts from the cheapest candidate. Leaves whose programs have equal launch keys in every
    candidate change theirs together: a launch is saved or shared by all of them or by none.
    """
    best = min(map(batch, dict.fromkeys(candidates)), key=measure)
    least = measure(best)
    groups: dict[Any, set[int]] = {}
    for i, programs in enumerate(zip(*candidates, strict=True)):
        if any(prog != programs[0] for prog in programs):
            key = tuple(tuple(key for _, key in launch_keys(prog)) for prog in programs)
            groups.setdefault(key, set()).add(i)
    for group in groups.values() if len(groups) > 1 else ():
        for leaves in candidates:
            pairs = enumerate(zip(leaves, best.leaves, strict=True))
            changed = batch(new if i in group else old for i, (new, old) in pairs)
            if (measured := measure(changed)) < least:
                best, least = changed, measured
    return best


def _batch_time(batch: Batch) -> tuple[int, ...]:
    """Return the estimated time in picoseconds."""
    return (round(batch.cost().time * 1e12),)


def _batch_bytes(batch: Batch) -> tuple[int, ...]:
    """Return bytes received, then launches, then messages."""
    cost = batch.cost()
    return cost.bytes_received, cost.launches, cost.messages


def _plan_leaf(src: Any, dst: Any, plan: Callable[[Spec, Spec], Program]) -> Program | None:
    if src is None and dst is None:
        return None
    if not isinstance(src, Spec) or not isinstance(dst, Spec):
        raise_if("fs.redistribute", endpoint_problems("redistribute", src, dst))
    return plan(src, dst)
