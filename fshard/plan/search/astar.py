"""A* over typed steps, on light layout values instead of specs.

Nodes are layouts, edges are steps (several axes at once are one edge), and costs are those of
`Program.cost`. The bytes that the busiest rank still misses bound the remaining cost from below, so
that the first program found is the cheapest one that the edges of `collective_edges` can form. A
first search along direct edges finds some program fast; the second skips every layout from which
nothing better can follow. Programs are short, because every launch must pay for itself, so that
most layouts are never visited. The search does not depend on the number of devices. After Rink et
al. (arXiv 2112.01075), whose normal form (slices, then moves, gathers last) results wherever bytes
outweigh launches.

Partial sums come from steps of their own, or from the exchange that moves their elements. The
exchange leaves each element at its place along the axes that become unreduced, and so receives what
its transpose sends of reduced copies. If no other axes shard a dim that such an axis leaves, all
ranks receive equally much, less than in an exchange to replicated values. Otherwise some rank holds
no element that it needs: it receives as much as in an exchange to shards that are embedded
afterwards, so that only a copy is saved; this is tried on few ranks.

For even layouts without invariant axes a plan has the same bytes as the plan for the cotangents,
from the dual of its target to the dual of its source. Seconds are equal except for local copies (a
slice reads a part of what its transpose fills with zeros), for messages of tensors so small that
messages dominate, and if only one of the two is unreduced: no zeros are added there, because
adding them would change the signs of zeros.

After so many edges that a user would notice (thousands, on four axes and more, and fewer if layouts
have thousands of uneven shards), only programs better by a growing share are searched for. Ties are
broken by the number of steps, then by the order of the edges: the result is deterministic.
"""

from __future__ import annotations

import heapq
import itertools
import math

from fshard.layout.spec import Spec
from fshard.plan.search.collective_edges import CollectiveEdges
from fshard.plan.search.exchange_edges import StepFactory
from fshard.plan.search.problem import SearchProblem
from fshard.plan.search.reachability import is_unreachable
from fshard.plan.search.search_layout import SearchLayout
from fshard.program.cost.topology import Topology
from fshard.program.steps import Step

SLACK = ((800, 0.02), (1_600, 0.05), (3_000, 0.1), (4_500, 0.3), (6_000, 1.0))
"""Numbers of edges, and the share by which a program must then be better to be searched for."""

MAX_FULL_AXES, HASTE = 3, 6
"""On more axes a greedy search goes first, and both searches look at `HASTE` times fewer edges.

On fewer axes of several nodes, where exchanges have more targets, they look at twice as many.
"""

MAX_QUICK_RANKS = 4096
"""Ranks of larger meshes are many uneven shards: searches look at proportionally fewer edges."""


def search(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    max_memory: int | None = None,
    exclude: frozenset[type] = frozenset(),
    limit: float = math.inf,
    enough: float = 0.0,
) -> tuple[list[Step], float] | None:
    """Return the cheapest steps from `src` to `dst` and their cost, or any of at most `enough`.

    Both specs have one mesh, shape and dtype. The cost is in seconds, or in bytes received by the
    busiest rank with `topology=None`. The result is None if no program meets the restrictions, or
    none costs less than `limit`.
    """
    if exclude and is_unreachable(src, dst, exclude):
        return None
    problem = SearchProblem(src, dst, topology, max_memory, exclude)
    ends = problem.start, problem.goal
    if max_memory is not None and src != dst and max(map(problem.nbytes, ends)) > max_memory:
        return None
    many_axes = len(problem.size) - len(problem.unit_axes) > MAX_FULL_AXES
    slowness = 1 if problem.even else max(1, src.mesh.size / MAX_QUICK_RANKS)
    haste = slowness * (HASTE if many_axes else 0.5 if problem.slow_axes else 1)
    best = _first_program(problem, CollectiveEdges(problem, direct=True), limit, 10, slowness)
    for greed in (2, 1) if many_axes else (1,):
        if best is not None and best[1] <= enough:
            break
        edges = CollectiveEdges(problem, direct=False)
        most = best[1] if best else limit
        best = _first_program(problem, edges, most, greed, haste) or best
        if best is None and most == math.inf:  # all that can be reached was looked at
            break
    return best


def _first_program(
    problem: SearchProblem, edges: CollectiveEdges, limit: float, greed: float, haste: float
) -> tuple[list[Step], float] | None:
    """Return the first program found that costs less than `limit`, and its cost.

    The bound of the remaining cost counts `greed` times: with 1 the program is the cheapest, with
    more it is found sooner.
    """
    start, goal, bound = problem.start, problem.goal, problem.bound
    best: dict[SearchLayout, float] = {start: 0.0}
    previous: dict[SearchLayout, tuple[SearchLayout, StepFactory]] = {}
    ticket = itertools.count()
    # A result must be better than `limit` by more than rounding.
    limit, slack, num_edges, schedule = limit * (1 - 1e-9), 0.0, 0, list(SLACK)
    queue: list[tuple[float, int, int, SearchLayout, float]] = [
        (bound(start), 0, next(ticket), start, 0.0)
    ]
    while queue:
        _, steps, _, layout, cost = heapq.heappop(queue)
        if layout == goal:
            return _steps_to(goal, previous), cost
        if cost > best[layout] or cost + bound(layout) > limit:
            continue
        edges.limit = limit - cost
        edges.cost, edges.best, edges.previous = cost, best, previous
        for edge_cost, make_step, new in edges.of(layout):
            num_edges += 1
            new_cost = cost + edge_cost
            if new_cost >= best.get(new, math.inf) or make_step.func in problem.exclude:
                continue
            if problem.max_memory is not None and problem.nbytes(new) > problem.max_memory:
                continue
            rest = bound(new)
            if new_cost + rest > limit:
                continue
            if new == goal:
                limit = min(limit, new_cost)
                edges.limit = limit - cost
            best[new] = new_cost
            previous[new] = (layout, make_step)
            order = new_cost + greed * rest
            heapq.heappush(queue, (order, steps + 1, next(ticket), new, new_cost))
        while limit < math.inf and schedule and haste * num_edges > schedule[0][0]:
            new_slack = schedule.pop(0)[1]
            limit = limit * (1 - new_slack) / (1 - slack) if slack < 1 else 0.0
            slack = new_slack
    return None


def _steps_to(
    layout: SearchLayout, previous: dict[SearchLayout, tuple[SearchLayout, StepFactory]]
) -> list[Step]:
    steps = []
    while layout in previous:
        layout, make_step = previous[layout]
        steps.append(make_step())
    return steps[::-1]
