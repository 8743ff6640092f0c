"""An oracle of planning: every step between any two layouts of a small mesh, and shortest paths.

It knows of steps only what `single_steps` says leads from one spec to another, and weighs them by
their specs: nothing of the planner's moves, bounds and closed forms.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from fshard.layout.spec import Spec
from fshard.plan.search.problem import LAUNCH_COST, LOCAL_COST, MESSAGE_COST
from fshard.program.cost.model import step_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import traffic
from fshard.program.infer import infer
from fshard.program.single_step import single_steps
from fshard.program.steps import Exchange, Step
from tests.helpers import spec_grid

__all__ = ["Paths", "paths", "shortest", "weigh", "weigh_all"]

Graph = Mapping[Spec, Mapping[Spec, tuple[float, Step]]]
Distances = dict[Spec, float]
Excluded = frozenset[type]


def weigh(topology: Topology | None, step: Step, src: Spec, dst: Spec) -> float:
    """What a step should weigh: its time, or what the busiest rank receives."""
    if topology is not None:
        return step_time(topology, step, src, dst)
    moved = traffic(step, src, dst)
    return moved.received + LAUNCH_COST + MESSAGE_COST * moved.messages if moved.launches else LOCAL_COST


def weigh_all(topology: Topology | None, steps: Iterable[Step], src: Spec) -> float:
    """What a program from `src` weighs."""
    total = 0.0
    for step in steps:
        dst = infer(step, src)
        total += weigh(topology, step, src, dst)
        src = dst
    return total


@lru_cache(maxsize=4)
def graph(specs: Sequence[Spec], topology: Topology | None, exclude: Excluded) -> Graph:
    """The lightest single step from each spec to each other."""
    found: dict[Spec, dict[Spec, tuple[float, Step]]] = {spec: {} for spec in specs}
    for src, dst in itertools.permutations(specs, 2):
        for step in single_steps(src, dst):
            if type(step) in exclude:
                continue
            if isinstance(step, Exchange) and not traffic(step, src, dst).launches:
                continue  # slices, which steps of their own do
            weight = weigh(topology, step, src, dst)
            if dst not in found[src] or weight < found[src][dst][0]:
                found[src][dst] = weight, step
    return found


def shortest(edges: Graph, src: Spec, *, plain: bool = False) -> Distances:
    """The weight of the lightest path to every spec that one leads to (Dijkstra).

    By specs without addends alone where the way is to be `plain`.
    """
    least, ticket = {src: 0.0}, itertools.count()
    queue = [(0.0, next(ticket), src)]
    while queue:
        weight, _, spec = heapq.heappop(queue)
        if weight > least[spec]:
            continue
        for after, (more, _) in edges[spec].items():
            reached = weight + more
            allowed = not (plain and after.partition.unreduced)
            if allowed and reached < least.get(after, math.inf):
                least[after] = reached
                heapq.heappush(queue, (reached, next(ticket), after))
    return least


class Paths:
    """Shortest paths between all specs; no addends are made where neither end has any."""

    def __init__(self, edges: Graph) -> None:
        self.edges = edges
        self.free = {spec: shortest(edges, spec) for spec in edges}
        self.plain = {
            spec: shortest(edges, spec, plain=True)
            for spec in edges
            if not spec.partition.unreduced
        }

    def weight(self, src: Spec, dst: Spec) -> float:
        """The lightest path's; infinite where there is none."""
        plain = not (src.partition.unreduced or dst.partition.unreduced)
        return (self.plain if plain else self.free)[src].get(dst, math.inf)


@lru_cache(maxsize=2)
def paths(
    mesh: Any,
    shape: tuple[int, ...],
    topology: Topology | None,
    exclude: Excluded = frozenset(),
    max_memory: int | None = None,
) -> tuple[tuple[Spec, ...], Paths]:
    """All sharded, invariant and unreduced specs of a mesh, and what lies between all specs."""
    import torch

    specs = spec_grid.all_specs(mesh, shape, ("invariant", "unreduced"), dtype=torch.float32)
    every = spec_grid.all_specs(mesh, shape, dtype=torch.float32)
    return tuple(specs), Paths(graph(tuple(every), topology, exclude))
