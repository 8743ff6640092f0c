"""Permutations and exchanges of the search, which lead straight to any layout.

They lead to the goal, and to layouts one cheap step from the goal (`exchange_targets.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from fshard.layout.partition_spec import Kinds
from fshard.plan.search.exchange_targets import all_targets, direct_targets, swapped_inside
from fshard.plan.search.layout_state import Axes, LayoutState
from fshard.plan.search.problem import SearchProblem
from fshard.program.cost.traffic import NO_TRAFFIC, Traffic
from fshard.program.steps import AllToAll, CollectivePermute, Exchange

__all__ = ["Edge", "ExchangeEdges", "StepFactory"]

MAX_UNEVEN_RANKS = 16
"""Most ranks for exchanges of even shards in which ranks receive different amounts."""

StepFactory = partial[Any]
Edge = tuple[float, StepFactory, LayoutState]
"""Cost of a step, its constructor, and the layout after it."""
ExchangeTarget = tuple[LayoutState, int, int, float]
"""Layout, ranks that are reduced over, bytes copied into it, and least cost after the exchange."""


class ExchangeEdges:
    """Permutations and exchanges of one problem, and the costs of all edges.

    Edges that cost more than `limit` are useless. `direct` edges lead to the goal only.
    """

    def __init__(self, problem: SearchProblem, direct: bool) -> None:
        self.problem = problem
        self.direct = direct
        self.limit = math.inf
        self.exclude = problem.exclude
        self.targets: dict[object, list[LayoutState]] = {}
        self.aims: dict[tuple[Kinds, frozenset[str]], list[Aim]] = {}
        # Where nothing else moves shards from dim to dim, permutations of finer ones do.
        self.permuting = not direct and {Exchange, AllToAll} <= self.exclude
        # Where ranks receive unlike much no bytes are saved, at best a copy: few ranks are counted.
        few = problem.mesh.size <= MOST_UNLIKE and len(problem.size) - len(problem.unit_axes) < 3
        self.lopsided = few and problem.topology is not None and not direct
        self.found: list[LayoutState] = []

    @property
    def ends(self) -> list[LayoutState]:
        """Layouts worth a jump: the goal, and those of which little makes it."""
        if not self.found:
            find = direct_targets if self.direct else all_targets
            self.found = find(self.problem)
        return self.found

    # -- weights ----------------------------------------------------------------------

    def local(self, make: Make, after: LayoutState, copied: int) -> Move:
        """An edge without traffic."""
        problem = self.problem
        if not problem.is_divisible(after):
            return math.inf, make, after
        return problem.local_cost(copied), make, after

    def collective(
        self,
        make: Make,
        axes: Axes,
        before: LayoutState,
        after: LayoutState,
        moved: Traffic | None,
        copied: int,
        addends: int = 1,
    ) -> Move | None:
        """An edge with traffic, if it is not too heavy; `moved` is None where that is not known."""
        problem = self.problem
        if not problem.is_divisible(after):
            return None
        if moved is None:
            if self.least(before, after, copied, addends) > self.limit:
                return None
            moved = problem.traffic(make(), before, after, addends)
        if moved.launches and not problem.empty:
            weight = problem.cost(axes, moved, copied)
        else:
            weight = problem.local_cost(2 * problem.nbytes(after))
        return (weight, make, after) if weight <= self.limit else None

    def least(self, before: LayoutState, after: LayoutState, copied: int, addends: int) -> float:
        """What a collective between the two and all after it weigh at least."""
        problem = self.problem
        rest, lacks = problem.bound(after), problem.missing_between(before, after, addends)
        if lacks <= 0:
            return rest + problem.local_cost(min(copied, 2 * problem.nbytes(after)))
        wires = problem.min_cost(lacks * problem.itemsize, 0)
        return rest + problem.local_cost(copied) + wires

    # -- edges ------------------------------------------------------------------------

    def permutes(self, state: LayoutState) -> Iterator[Move]:
        """To one of the ends; to other orders in need."""
        problem = self.problem
        if CollectivePermute in self.exclude:
            return
        if not self.targets:
            for target in self.ends:
                self.targets.setdefault(problem.permute_signature(target), []).append(target)
        nbytes = problem.nbytes(state)
        found: Iterable[LayoutState] = self.targets.get(problem.permute_signature(state), ())
        others: Iterable[LayoutState] = ()
        if not self.direct:
            others = self.reordered(state) if self.permuting else swapped_inside(problem, state)
        for target in itertools.chain(found, others):
            if target[:3] != state[:3]:
                before, after = problem.axis_roles(state), problem.axis_roles(target)
                axes = tuple(axis for axis, role in before.items() if role != after[axis])
                make = partial(_permute, target)
                moved = Traffic(nbytes, nbytes, 1, 1) if axes else Traffic()
                if move := self.collective(make, axes, state, target, moved, 0):
                    yield move

    def reordered(self, state: LayoutState) -> Iterator[LayoutState]:
        """The same shards with the axes of every dim in other orders."""
        for dims in itertools.product(*map(itertools.permutations, state.dims)):
            yield state._replace(dims=dims)

    def exchanges(self, state: LayoutState) -> Iterator[Move]:
        """Straight to one of the ends."""
        if Exchange in self.exclude:
            return
        shards = self.problem.goal_unreduced.intersection(itertools.chain(*state.dims))
        key = state.unreduced, shards
        aims = self.aims.get(key)
        if aims is None:
            aims = self.aims[key] = self.find_aims(*key)
        problem, packed = self.problem, 2 * self.problem.nbytes(state)
        begun = problem.min_cost(0, 0) + problem.local_cost(packed)
        for target, addends, unpacked, rest in aims:
            if begun + rest > self.limit and problem.even:
                continue
            if target == state or not is_kept(state.reduced, target):
                continue
            make = partial(_exchange, target)
            moved, copied = None, packed + unpacked
            even, turned = (
                problem.is_even_along(state, target),
                problem.converted_axes(state, target),
            )
            if even:
                moved = problem.exchange_traffic(state, target, addends, turned)
            if moved is None and turned:
                if not self.lopsided:
                    continue
                moved = problem.exchange_traffic_by_rank(state, target, addends, turned)
            if even and moved == NO_TRAFFIC:  # slices do
                continue
            axes = problem.moving_axes(state, target)
            if move := self.collective(make, axes, state, target, moved, copied, addends):
                yield move

    def find_aims(self, unreduced: Kinds, shards: frozenset[str]) -> list[Aim]:
        """The layouts to exchange to where so much is unreduced, and sharded of what will be.

        Shards become addends on the way, or else copies, where ranks would receive unlike much.
        """
        problem = self.problem
        found: dict[LayoutState, Aim] = {}
        for goal, some in itertools.product(self.ends, (shards, ()) if shards else ((),)):
            stay = tuple(a for a in goal.unreduced if a in unreduced or a[0] in some)
            target = goal._replace(unreduced=stay)
            less = [each for each in unreduced if each not in target.unreduced]
            if target not in found and len({kind for _, kind in less}) < 2:
                addends = problem.num_ranks(tuple(axis for axis, _ in less))
                copied = (1 + addends) * problem.nbytes(target)
                rest = problem.bound(target) + problem.local_cost(copied)
                found[target] = target, addends, copied, rest
        return list(found.values())


def is_kept(reduced: Kinds, target: LayoutState) -> bool:
    """Whether all that is reduced stays so or shards the target, as an exchange allows."""
    lost = [axis for axis, kind in reduced if (axis, kind) not in target.reduced]
    return not lost or {*lost} <= {*itertools.chain(*target.dims)}


def _permute(target: LayoutState) -> CollectivePermute:
    return CollectivePermute(state_partition(target))


def _exchange(target: LayoutState) -> Exchange:
    return Exchange(state_partition(target), target.sizes)
