"""A* over the typed steps, on light states instead of specs.

Nodes are layouts, edges are steps (several axes at once are single edges), weights are the
model of `Program.cost`. What the busiest rank still lacks bounds the rest from below, so that
the first program that comes out is the cheapest one there is among the edges of `collective_edges`.
A first search along direct edges finds a program fast; the second looks at no layout from which
nothing better can come. Programs are short, for every launch has to pay for itself: this is
what keeps the search away from most of the layouts that there are. It does not depend on the
number of devices. After Rink et al. (arXiv 2112.01075), whose normal form (slices, then moves,
gathers last) is what comes out wherever bytes outweigh launches.

Addends are made by steps of their own, or by the exchange that moves their elements. The exchange
leaves each at its place along the axes that become unreduced, and so receives what its transpose
sends of reduced copies. Where no other axes cut a dim that such an axis leaves, all ranks receive
the same, less than in an exchange to whole copies. Elsewhere some rank holds nothing of what it
needs: to shards that are embedded afterwards each receives its share and no more, so that nothing
is gained but a copy, which is looked for on few ranks.

So of even layouts without invariant axes the bytes of a plan are those of the plan for the
cotangents, from the dual of its target to that of its source. Seconds are alike but for local
copies (a slice reads a part of what its transpose fills up with zeros), for messages of tensors so
small that these count, and where one of the two has addends and the other none: there no zeros
are added, which would change the signs of zeros.

After so many edges that planning would be felt (thousands, on four axes and more), only what is
better by a growing share is looked for. Ties are broken by the number of steps, then by the order
of the edges: the result is deterministic.
"""

from __future__ import annotations

import heapq
import itertools
import math

from fshard.layout.spec import Spec
from fshard.plan.search.collective_edges import Moves
from fshard.plan.search.exchange_edges import Make
from fshard.plan.search.problem import LayoutState, SearchProblem
from fshard.plan.search.reachability import is_out_of_reach
from fshard.program.cost.topology import Topology
from fshard.program.steps import Step

__all__ = ["search"]

SLACK = ((800, 0.02), (1_600, 0.05), (3_000, 0.1), (4_500, 0.3), (6_000, 1.0))
"""After so many edges a program has to be better by that share to be looked for."""

FEW, HASTE = 3, 6
"""On more axes than `FEW` a greedy search goes first, and both look at so many times fewer.

On few axes of several nodes, where more layouts are jumped to, they look at twice as many.
"""


def search(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    max_memory: int | None = None,
    exclude: frozenset[type] = frozenset(),
    most: float = math.inf,
) -> tuple[list[Step], float] | None:
    """The cheapest steps from `src` to `dst`, specs of one mesh, shape and dtype; their weight.

    `topology=None` weighs bytes alone. `None` where no program keeps to the restrictions, or
    none weighs less than `most`.
    """
    if exclude and is_out_of_reach(src, dst, exclude):
        return None
    problem = SearchProblem(src, dst, topology, max_memory, exclude)
    ends = problem.start, problem.goal
    if max_memory is not None and src != dst and max(map(problem.nbytes, ends)) > max_memory:
        return None
    many = len(problem.size) - len(problem.unit_axes) > FEW
    haste = HASTE if many else 0.5 if problem.slow_axes else 1
    found = _run(problem, Moves(problem, direct=True), most, 10, 1)
    for greed in (2, 1) if many else (1,):
        moves = Moves(problem, direct=False)
        found = _run(problem, moves, found[1] if found else most, greed, haste) or found
    return found


def _run(
    problem: SearchProblem, moves: Moves, most: float, greed: float, haste: float
) -> tuple[list[Step], float] | None:
    """The first program that comes out, of what weighs less than `most`.

    What is left to do counts `greed` times: with 1 the program is the cheapest, with more it
    comes sooner.
    """
    start, goal, bound = problem.start, problem.goal, problem.bound
    best: dict[LayoutState, float] = {start: 0.0}
    came: dict[LayoutState, tuple[LayoutState, Make]] = {}
    ticket = itertools.count()
    # What is to be found is better than `most`, not by a rounding only.
    most, slack, edges, schedule = most * (1 - 1e-9), 0.0, 0, list(SLACK)
    queue: list[tuple[float, int, int, LayoutState, float]] = [
        (bound(start), 0, next(ticket), start, 0.0)
    ]
    while queue:
        _, steps, _, state, weight = heapq.heappop(queue)
        if state == goal:
            return _walk_back(goal, came), weight
        if weight > best[state] or weight + bound(state) > most:
            continue
        moves.limit = most - weight
        for cost, make, new in moves.of(state):
            edges += 1
            reached = weight + cost
            if reached >= best.get(new, math.inf) or make.func in problem.exclude:
                continue
            if problem.max_memory is not None and problem.nbytes(new) > problem.max_memory:
                continue
            rest = bound(new)
            if reached + rest > most:
                continue
            if new == goal:
                most = min(most, reached)
                moves.limit = most - weight
            best[new] = reached
            came[new] = (state, make)
            order = reached + greed * rest
            heapq.heappush(queue, (order, steps + 1, next(ticket), new, reached))
        while most < math.inf and schedule and haste * edges > schedule[0][0]:
            more = schedule.pop(0)[1]
            most, slack = most * (1 - more) / (1 - slack) if slack < 1 else 0.0, more
    return None


def _walk_back(state: LayoutState, came: dict[LayoutState, tuple[LayoutState, Make]]) -> list[Step]:
    steps = []
    while state in came:
        state, make = came[state]
        steps.append(make())
    return steps[::-1]
