"""Oracle of planning: every single step between layouts of a small mesh, and shortest paths.

It uses only the steps that `single_steps` finds between two specs, and their costs by specs: none
of the planner's edges, bounds and closed forms.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch

from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.plan.search.problem import LAUNCH_COST, LOCAL_COST, MESSAGE_COST
from fshard.program.cost.model import step_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import traffic
from fshard.program.infer import infer
from fshard.program.single_step import single_steps
from fshard.program.steps import Exchange, Step
from tests.helpers import spec_grid

__all__ = ["Paths", "paths", "shortest", "step_cost", "steps_cost"]

Graph = Mapping[Spec, Mapping[Spec, tuple[float, Step]]]
Distances = dict[Spec, float]
Excluded = frozenset[type]


def step_cost(topology: Topology | None, step: Step, src: Spec, dst: Spec) -> float:
    """Return the cost of a step as the planner defines it: seconds, or bytes received."""
    if topology is not None:
        return step_time(topology, step, src, dst)
    moved = traffic(step, src, dst)
    if not moved.launches:
        return LOCAL_COST
    return moved.received + LAUNCH_COST + MESSAGE_COST * moved.messages


def steps_cost(topology: Topology | None, steps: Iterable[Step], src: Spec) -> float:
    """Return the cost of the steps of a program from `src`."""
    total = 0.0
    for step in steps:
        dst = infer(step, src)
        total += step_cost(topology, step, src, dst)
        src = dst
    return total


@lru_cache(maxsize=4)
def graph(specs: Sequence[Spec], topology: Topology | None, exclude: Excluded) -> Graph:
    """Map each spec to its successors, with the cheapest single step to each."""
    edges: dict[Spec, dict[Spec, tuple[float, Step]]] = {spec: {} for spec in specs}
    for src, dst in itertools.permutations(specs, 2):
        for step in single_steps(src, dst):
            if type(step) in exclude:
                continue
            if isinstance(step, Exchange) and not traffic(step, src, dst).launches:
                continue  # these are slices, which have step types of their own
            cost = step_cost(topology, step, src, dst)
            if dst not in edges[src] or cost < edges[src][dst][0]:
                edges[src][dst] = cost, step
    return edges


def shortest(edges: Graph, src: Spec, *, plain: bool = False) -> Distances:
    """Return the cost of the cheapest path to every reachable spec (Dijkstra).

    With `plain` no spec on the path is unreduced.
    """
    least, ticket = {src: 0.0}, itertools.count()
    queue = [(0.0, next(ticket), src)]
    while queue:
        cost, _, spec = heapq.heappop(queue)
        if cost > least[spec]:
            continue
        for after, (edge_cost, _) in edges[spec].items():
            new_cost = cost + edge_cost
            allowed = not (plain and after.partition.unreduced)
            if allowed and new_cost < least.get(after, math.inf):
                least[after] = new_cost
                heapq.heappush(queue, (new_cost, next(ticket), after))
    return least


class Paths:
    """Shortest paths between all specs; unreduced specs are used only if an end is unreduced."""

    def __init__(self, edges: Graph) -> None:
        self.edges = edges
        self.free = {spec: shortest(edges, spec) for spec in edges}
        self.plain = {
            spec: shortest(edges, spec, plain=True)
            for spec in edges
            if not spec.partition.unreduced
        }

    def cost(self, src: Spec, dst: Spec) -> float:
        """Return the cost of the cheapest path; infinite if there is none."""
        plain = not (src.partition.unreduced or dst.partition.unreduced)
        return (self.plain if plain else self.free)[src].get(dst, math.inf)


@lru_cache(maxsize=2)
def paths(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology | None, exclude: Excluded = frozenset()
) -> tuple[tuple[Spec, ...], Paths]:
    """Return all sharded, invariant and unreduced specs, and the paths between all specs."""
    ends = spec_grid.all_specs(mesh, shape, ("invariant", "unreduced"), dtype=torch.float32)
    nodes = spec_grid.all_specs(mesh, shape, dtype=torch.float32)
    return tuple(ends), Paths(graph(tuple(nodes), topology, exclude))
