"""Permutations and exchanges of the search, which lead straight to any layout.

They lead to the goal, and to layouts one cheap step from the goal (`exchange_targets.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from fshard.layout.partition_spec import Kinds
from fshard.plan.search.exchange_targets import all_targets, direct_targets, swapped_inside
from fshard.plan.search.problem import SearchProblem
from fshard.plan.search.search_layout import Axes, SearchLayout, exchange_to
from fshard.program.cost.model import GATHERS, exchange_copies_twice
from fshard.program.cost.traffic import NO_TRAFFIC, Traffic
from fshard.program.steps import AllToAll, CollectivePermute, Exchange

MAX_UNEVEN_RANKS = 16
"""Most ranks for exchanges of even shards in which ranks receive different amounts."""

StepFactory = partial[Any]
Edge = tuple[float, StepFactory, SearchLayout]
"""Cost of a step, its constructor, and the layout after it."""
ExchangeTarget = tuple[SearchLayout, int, int, float]
"""Layout, ranks that are reduced over, bytes copied into it, and least cost after that."""


class ExchangeEdges:
    """Permutations and exchanges of one problem, and the costs of all edges.

    Edges that cost more than `limit` are useless. `direct` edges lead to the goal only.
    """

    def __init__(self, problem: SearchProblem, direct: bool) -> None:
        self.problem = problem
        self.direct = direct
        self.limit = math.inf
        # What the search has found: costs of layouts, the steps to them, and this layout's cost.
        self.best: dict[SearchLayout, float] = {}
        self.previous: dict[SearchLayout, tuple[SearchLayout, StepFactory]] = {}
        self.cost = 0.0
        self.exclude = problem.exclude
        self.by_signature: dict[object, list[SearchLayout]] = {}
        self.exchange_targets: dict[tuple[Kinds, frozenset[str]], list[ExchangeTarget]] = {}
        # If no other step moves shards from dim to dim, permutations of finer shards do.
        self.permutes_any = not direct and {Exchange, AllToAll} <= self.exclude
        # Exchanges with different amounts per rank save a copy at best: tried on few ranks only.
        few = (
            problem.src.mesh.size <= MAX_UNEVEN_RANKS
            and len(problem.size) - len(problem.unit_axes) < 3
        )
        self.allows_uneven = few and problem.topology is not None and not direct
        self.cached_ends: list[SearchLayout] = []

    @property
    def ends(self) -> list[SearchLayout]:
        """The layouts that permutations and exchanges lead to: the goal, and some close to it."""
        if not self.cached_ends:
            find = direct_targets if self.direct else all_targets
            self.cached_ends = find(self.problem)
        return self.cached_ends

    # -- costs ------------------------------------------------------------------------

    def local(self, make_step: StepFactory, after: SearchLayout, copied: int) -> Edge:
        """Return an edge without traffic that copies `copied` bytes."""
        problem = self.problem
        if not problem.is_divisible(after):
            return math.inf, make_step, after
        return problem.local_cost(copied), make_step, after

    def collective(
        self,
        make_step: StepFactory,
        axes: Axes,
        before: SearchLayout,
        after: SearchLayout,
        moved: Traffic | None,
        copies: tuple[int, ...],
        reduced_ranks: int = 1,
    ) -> Edge | None:
        """Return an edge with traffic, or None if it costs more than `limit`.

        The cost may be a lower bound if another way to `after` is known to cost less.
        `moved` is None if the traffic has no closed form; it is then computed if it may matter.
        `copies` are the bytes of the copies around it.
        """
        problem, exchange = self.problem, make_step.func not in GATHERS
        if not problem.is_divisible(after) or make_step.func in self.exclude:
            return None
        if moved is None:
            cost_of = partial(problem.cost, axes, copies=copies, exchange=exchange)
            limit, known = self.limit - problem.bound(after), math.inf
            if limit == math.inf:  # no program is known: many edges lead to known layouts
                known = self.best.get(after, math.inf) - self.cost
            least = self.min_cost(
                before, after, sum(copies), reduced_ranks, cost_of, min(limit, known)
            )
            if least > limit:
                return None
            if least > known:  # the search drops it
                return least, make_step, after
            moved = problem.traffic(make_step, axes, before, after, reduced_ranks)
        if moved.launches and not problem.empty:
            cost = problem.cost(axes, moved, copies, exchange)
        else:
            cost = problem.local_cost(2 * problem.nbytes(after))
        return (cost, make_step, after) if cost <= self.limit else None

    def min_cost(
        self,
        before: SearchLayout,
        after: SearchLayout,
        copied: int,
        reduced_ranks: int,
        cost_of: Callable[[Traffic], float],
        limit: float,
    ) -> float:
        """Return a lower bound of the cost of a collective, the simplest that exceeds `limit`.

        `cost_of` returns the cost of the collective if it has some traffic.
        """
        problem = self.problem
        local = problem.local_cost(min(copied, 2 * problem.nbytes(after)))
        if local > limit:
            return local
        missing = problem.missing_between(before, after, reduced_ranks)
        return cost_of(Traffic(0, missing * problem.itemsize, 1, 1)) if missing > 0 else local

    # -- edges ------------------------------------------------------------------------

    def permutations(self, layout: SearchLayout) -> Iterator[Edge]:
        """Yield the permutations to `ends`, and to other orders of axes where that helps."""
        problem = self.problem
        if CollectivePermute in self.exclude:
            return
        if not self.by_signature:
            for target in self.ends:
                self.by_signature.setdefault(problem.permute_signature(target), []).append(target)
        nbytes = problem.nbytes(layout)
        targets: Iterable[SearchLayout] = self.by_signature.get(
            problem.permute_signature(layout), ()
        )
        others: Iterable[SearchLayout] = ()
        if not self.direct:
            others = (
                self.reordered(layout) if self.permutes_any else swapped_inside(problem, layout)
            )
        for target in itertools.chain(targets, others):
            if target[:3] != layout[:3]:
                before, after = problem.axis_roles(layout), problem.axis_roles(target)
                axes = tuple(axis for axis, role in before.items() if role != after[axis])
                make_step = partial(_permute, target)
                moved = Traffic(nbytes, nbytes, 1, 1) if axes else Traffic()
                if edge := self.collective(make_step, axes, layout, target, moved, ()):
                    yield edge

    def reordered(self, layout: SearchLayout) -> Iterator[SearchLayout]:
        """Yield the layouts with the axes of every dim in all orders, unless it is one of them."""
        last, step = self.previous.get(layout, (layout, None))
        if step is not None and step.func is _permute and _same_axes(last, layout):
            return
        for dims in itertools.product(*map(itertools.permutations, layout.dims)):
            yield layout._replace(dims=dims)

    def exchanges(self, layout: SearchLayout) -> Iterator[Edge]:
        """Yield the exchanges to `ends`."""
        if Exchange in self.exclude:
            return
        sharded = self.problem.goal_unreduced.intersection(itertools.chain(*layout.dims))
        key = layout.unreduced, sharded
        targets = self.exchange_targets.get(key)
        if targets is None:
            targets = self.exchange_targets[key] = self.find_exchange_targets(*key)
        problem, packed = self.problem, 2 * self.problem.nbytes(layout)
        least = problem.min_cost(0, 0)
        for target, reduced_ranks, unpacked, rest in targets:
            copied = problem.local_cost(packed + unpacked)
            if least + copied + rest > self.limit and problem.even:
                continue
            if target == layout or not _can_exchange(layout.reduced, target):
                continue
            make_step = partial(exchange_to, target)
            moved, copies = None, (packed, unpacked)
            if not exchange_copies_twice(layout.dims, target.dims, adds=reduced_ranks > 1):
                copies = packed + unpacked, 0
            even = problem.is_even_along(layout, target)
            converted = problem.converted_axes(layout, target)
            if even:
                moved = problem.exchange_traffic(layout, target, reduced_ranks, converted)
            if moved is None and converted and not problem.empty:
                if not self.allows_uneven:
                    continue
                moved = problem.exchange_traffic_by_rank(layout, target, reduced_ranks, converted)
            if even and moved == NO_TRAFFIC:  # slices suffice
                continue
            axes = problem.moving_axes(layout, target)
            if edge := self.collective(
                make_step, axes, layout, target, moved, copies, reduced_ranks
            ):
                yield edge

    def find_exchange_targets(
        self, unreduced: Kinds, sharded: frozenset[str]
    ) -> list[ExchangeTarget]:
        """Return the targets from layouts with these unreduced axes.

        `sharded` axes end unreduced. The exchange makes them unreduced, or else replicated, because
        ranks could receive different amounts.
        """
        problem = self.problem
        targets: dict[SearchLayout, ExchangeTarget] = {}
        for end, converted in itertools.product(self.ends, (sharded, ()) if sharded else ((),)):
            kept = tuple(a for a in end.unreduced if a in unreduced or a[0] in converted)
            target = end._replace(unreduced=kept)
            reduced = [item for item in unreduced if item not in target.unreduced]
            if target not in targets and len({kind for _, kind in reduced}) < 2:
                reduced_ranks = problem.num_ranks(tuple(axis for axis, _ in reduced))
                copied = (1 + reduced_ranks) * problem.nbytes(target)
                targets[target] = target, reduced_ranks, copied, problem.bound(target)
        return list(targets.values())


def _can_exchange(reduced: Kinds, target: SearchLayout) -> bool:
    """Return True if every reduced axis stays reduced or shards a dim of `target`."""
    lost = [axis for axis, kind in reduced if (axis, kind) not in target.reduced]
    return not lost or {*lost} <= {*itertools.chain(*target.dims)}


def _same_axes(a: SearchLayout, b: SearchLayout) -> bool:
    """Return True if the dims of both layouts are sharded over the same axes, in any order."""
    return [*map(sorted, a.dims)] == [*map(sorted, b.dims)]


def _permute(target: SearchLayout) -> CollectivePermute:
    return CollectivePermute(target.partition)
