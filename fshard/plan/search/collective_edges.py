"""Edges of the search: every step out of a layout, several axes at once, with its cost.

A dim gets new axes only in the orders that the goal suggests: the goal's axes first, in its order,
then the others in mesh order or its reverse. Every other order differs from these by a permutation
of devices, which costs the same before and after, unless it can stay inside of nodes: on several
nodes the reverse of the goal's order is tried as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from functools import partial

from fshard.layout.partition_spec import remove_kinds
from fshard.layout.validation import has_mixed_reductions
from fshard.plan.search.all_to_all_edges import AxisRuns
from fshard.plan.search.exchange_edges import Edge, ExchangeEdges, StepFactory
from fshard.plan.search.problem import SearchProblem
from fshard.plan.search.search_layout import Axes, SearchLayout, add_kinds, all_to_all_of, subsets
from fshard.program.cost.traffic import (
    Traffic,
    all_gather_traffic,
    all_reduce_traffic,
    all_to_all_traffic,
)
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Exchange,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
)


class CollectiveEdges(ExchangeEdges):
    """All edges of one problem.

    The `direct` edges alone lead from every layout to the goal, but not at the least cost.
    """

    def __init__(self, problem: SearchProblem, direct: bool) -> None:
        super().__init__(problem, direct)
        self.size = problem.size
        self.goals = problem.goals
        self.num_fixed = problem.num_fixed
        self.runs = AxisRuns(problem)
        self.helpers = self.find_helpers()
        self.replacement_axes = problem.replacement_axes
        self.traded_axes = self.find_traded_axes()

    def find_helpers(self) -> dict[str, tuple[str, ...]]:
        """Map each axis that both ends replicate to the earlier, equivalent ones.

        Slicing along them and gathering again saves bytes of reductions and of slow links, and
        copies.
        """
        problem = self.problem
        busy, reduced = _busy(problem.start), dict(problem.start.reduced)
        helpers: dict[str, tuple[str, ...]] = {}
        groups: dict[object, list[str]] = {}
        for axis, n in self.size.items():
            goal, kind = self.goals[axis]
            if axis not in busy and goal in ("invariant", "reduced"):
                key = n, problem.link((axis,)), reduced.get(axis), goal, kind
                group = groups.setdefault(key, [])
                helpers[axis] = tuple(group)
                group.append(axis)
        return helpers

    def find_traded_axes(self) -> frozenset[str]:
        """Return replicated axes that the goal uses, while used axes of their size end reduced."""
        busy, goals, size = _busy(self.problem.start), self.goals, self.size
        freed = {size[axis] for axis in busy if goals[axis] == ("reduced", "sum")}
        free = [axis for axis in size if axis not in busy and size[axis] in freed]
        return frozenset([a for a in free if goals[a][0] in ("sharded", "unreduced")])

    def of(self, layout: SearchLayout) -> Iterator[Edge]:
        """Yield every edge out of a layout, in a fixed order."""
        yield from self.state_casts(layout)
        yield from (edge for edge in self.slices(layout) if edge[0] < math.inf)
        yield from self.embeddings(layout)
        if self.replacement_axes:
            yield from self.replacements(layout)
        if self.problem.min_cost(0, 0) > self.limit:
            return
        yield from self.reductions(layout)
        yield from self.all_to_alls(layout)
        yield from self.gathers(layout)
        yield from self.permutations(layout)
        yield from self.exchanges(layout)

    # -- local steps ------------------------------------------------------------------

    def state_casts(self, layout: SearchLayout) -> Iterator[Edge]:
        """Yield the steps of replicated axes to their goal states, equal goals together."""
        reduced = dict(layout.reduced)
        busy = _busy(layout)
        by_goal: dict[tuple[str, object, str | None], list[str]] = {}
        for axis in self.size:
            if axis not in busy:
                by_goal.setdefault((*self.goals[axis], reduced.get(axis)), []).append(axis)
        nbytes = self.problem.nbytes(layout)
        for (goal, kind, reduced_kind), names in by_goal.items():
            axes = tuple(names)
            other_reduced = remove_kinds(layout.reduced, axes)
            copied = 0
            if reduced_kind is not None:  # an exchange keeps reduced axes
                new = layout._replace(reduced=other_reduced)
                cast = partial(ReducedToInvariant, axes)
                yield self.local(cast, new, 2 * nbytes if reduced_kind == "avg" else 0)
            elif first := self.reduced_first(axes):
                new = layout._replace(reduced=add_kinds(layout.reduced, first, "sum"))
                if not has_mixed_reductions(new.unreduced, new.reduced):
                    yield self.local(partial(InvariantToReduced, first), new, 0)
            if goal == "unreduced":
                unreduced = add_kinds(layout.unreduced, axes, kind)
                if has_mixed_reductions(unreduced, other_reduced):
                    continue
                new = layout._replace(unreduced=unreduced, reduced=other_reduced)
                make_step: StepFactory = partial(ReplicatedToUnreduced, axes, str(kind))
                copied = 2 * nbytes
            elif goal == "reduced" and reduced_kind is None:
                new = layout._replace(reduced=add_kinds(layout.reduced, axes, kind))
                make_step = partial(InvariantToReduced, axes, str(kind))
                copied = 2 * nbytes if kind == "avg" else 0
            else:
                continue
            yield self.local(make_step, new, copied)

    def reduced_first(self, axes: Axes) -> Axes:
        """Return the invariant axes, all with one goal, that are better reduced first.

        An exchange that shards a dim over reduced axes sends nothing along them, so nothing over
        slow links either, nor over the link that they have together with other axes. If other axes
        end reduced, a permutation may exchange them.
        """
        traded = () if self.direct else tuple([a for a in axes if a in self.traded_axes])
        if self.goals[axes[0]][0] != "sharded":
            return traded
        if self.replacement_axes.issuperset(axes):
            return axes
        slow: Collection[str] = ()
        if not self.direct and Exchange not in self.exclude:
            slow = self.size if self.problem.joint_links else self.problem.slow_axes
        return tuple([axis for axis in axes if axis in slow or axis in traded])

    def slices(self, layout: SearchLayout) -> Iterator[Edge]:
        """Yield the slices of every dim along replicated axes, of axes that have one state."""
        busy = _busy(layout)
        kinds = dict(layout.reduced)
        free: dict[str | None, list[str]] = {}
        for axis in self.size:
            if axis not in busy:
                free.setdefault(kinds.get(axis), []).append(axis)
        for names in free.values():
            for axes in self.choices(names):
                if not self.is_useful_slice(axes, names):
                    continue
                reduced = remove_kinds(layout.reduced, axes)
                old = layout._replace(reduced=reduced) if reduced != layout.reduced else layout
                for dim in range(len(layout.dims)):
                    for order in self.orders(layout, dim, axes):
                        new = self.problem.append_axes(old, dim, order)
                        make_step = partial(AllSlice, order, dim, new.sizes[dim])
                        yield self.local(make_step, new, 2 * self.problem.nbytes(new))

    def choices(self, names: list[str]) -> Iterator[Axes]:
        """Return the choices of axes of one step: every subset; if `direct` all or one of them."""
        if not self.direct:
            return subsets(names)
        single = [(axis,) for axis in names] if len(names) > 1 else []
        return iter([tuple(names), *single])

    def is_useful_slice(self, axes: Axes, free: list[str]) -> bool:
        """Return True unless an equivalent helper that is free comes before one of `axes`."""
        for axis in axes:
            earlier = self.helpers.get(axis, ())
            if any(helper in free and helper not in axes for helper in earlier):
                return False
        return True

    def orders(self, layout: SearchLayout, dim: int, axes: Axes) -> list[Axes]:
        """Return the orders in which axes are appended to a dim, the goal's order first."""
        if len(axes) == 1:
            return [axes]
        goal = self.problem.goal.dims[dim]
        first = tuple(axis for axis in goal if axis in axes)
        rest = tuple(axis for axis in axes if axis not in first)
        orders = [first + rest]
        if len(rest) > 1:
            orders.append(first + rest[::-1])
        if first and rest:
            orders.append(rest + first)
        if self.problem.slow_axes and not self.direct and len(first) > 1:
            orders.append(first[::-1] + rest)
        return orders

    def replacements(self, layout: SearchLayout) -> Iterator[Edge]:
        """Yield embeddings of one axis in which a reduced axis of its size takes its place."""
        free = [axis for axis, _ in layout.reduced if axis in self.replacement_axes]
        for dim, axes in enumerate(layout.dims):
            for i, replacement in itertools.product(range(len(axes)), free):
                goal, kind = self.goals[axes[i]]
                if goal != "unreduced" or self.size[axes[i]] != self.size[replacement]:
                    continue
                old = axes[i : i + 1]
                new = layout.replace_dim(
                    dim, (*axes[:i], replacement, *axes[i + 1 :]), layout.sizes[dim]
                )._replace(
                    unreduced=add_kinds(layout.unreduced, old, kind),
                    reduced=remove_kinds(layout.reduced, (replacement,)),
                )
                make_step = partial(ShardedToUnreduced, old, dim, str(kind), (replacement,))
                if not has_mixed_reductions(new.unreduced, new.reduced):
                    yield self.local(make_step, new, 2 * self.problem.nbytes(new))

    def embeddings(self, layout: SearchLayout) -> Iterator[Edge]:
        """Yield the embeddings of minor runs of axes in zeros, if the goal or other axes are sums.

        Otherwise nothing is embedded: a mere move adds no zeros, and an unreduced maximum gets no
        new candidates, so that its gradient is defined.
        """
        problem = self.problem
        pending = set()
        if problem.few_axes and any(
            kind == "sum" and self.goals[axis][0] != "unreduced" for axis, kind in layout.unreduced
        ):
            pending = {"sum"}
        for dim, axes in enumerate(layout.dims):
            for start in range(self.num_fixed[dim], len(axes)):
                run = axes[start:]
                goals = {self.goals[axis] for axis in run}
                kinds = {str(kind) for goal, kind in goals if goal == "unreduced"}
                for kind in sorted(pending | (kinds if len(goals) == 1 else set())):
                    rest = problem.remove_axes(layout, dim, run)
                    new = rest._replace(unreduced=add_kinds(rest.unreduced, run, kind))
                    make_step = partial(ShardedToUnreduced, run, dim, kind)
                    if not has_mixed_reductions(new.unreduced, new.reduced):
                        yield self.local(make_step, new, 2 * problem.nbytes(new))

    # -- collectives ------------------------------------------------------------------

    def reductions(self, layout: SearchLayout) -> Iterator[Edge]:
        """Yield all-reduces and reduce-scatters over every subset of the axes to be reduced."""
        by_kind: dict[str, list[str]] = {}
        for axis, kind in layout.unreduced:
            if self.problem.few_axes or self.goals[axis] != ("unreduced", kind):
                by_kind.setdefault(kind, []).append(axis)
        problem, nbytes = self.problem, self.problem.nbytes(layout)
        for names in by_kind.values():
            for axes in self.choices(names):
                rest = layout._replace(unreduced=remove_kinds(layout.unreduced, axes))
                new, (to, kind) = rest, problem.replicated_goal(axes)
                if to == "reduced":
                    new = rest._replace(reduced=add_kinds(rest.reduced, axes, kind))
                n = problem.num_ranks(axes)
                moved: Traffic | None = all_reduce_traffic(n, nbytes, problem.itemsize)
                make_step: StepFactory = partial(AllReduce, axes, to, kind)
                if edge := self.collective(make_step, axes, layout, new, moved, ()):
                    yield edge
                for dim in range(len(layout.dims)):
                    for order in self.orders(layout, dim, axes):
                        new = problem.append_axes(rest, dim, order)
                        even = problem.is_even_along(layout, new, (dim,))
                        moved = all_gather_traffic(n, nbytes // n) if even else None
                        copies = (2 * nbytes,) if dim else ()
                        make_step = partial(ReduceScatter, order, dim, new.sizes[dim])
                        if edge := self.collective(make_step, order, layout, new, moved, copies):
                            yield edge

    def all_to_alls(self, layout: SearchLayout) -> Iterator[Edge]:
        """Yield all-to-alls of minor runs of axes: one run to any dim, several to goal dims."""
        if AllToAll in self.exclude:
            return
        problem, nbytes = self.problem, self.problem.nbytes(layout)
        for dim, axes in enumerate(layout.dims):
            for start in range(self.num_fixed[dim], len(axes)):
                run = axes[start:]
                rest = problem.remove_axes(layout, dim, run)
                n = problem.num_ranks(run)
                for to in range(len(layout.dims)):
                    if to != dim:
                        new = problem.append_axes(rest, to, run)
                        copies = 2 * nbytes * bool(to), 2 * problem.nbytes(new) * bool(dim)
                        even = problem.is_even_along(layout, new, (dim, to))
                        moved = all_to_all_traffic(n, nbytes) if even else None
                        make_step = partial(AllToAll, run, dim, to, new.sizes[to])
                        if edge := self.collective(make_step, run, layout, new, moved, copies):
                            yield edge
        if not self.direct:
            yield from self.fused_all_to_alls(layout)

    def fused_all_to_alls(self, layout: SearchLayout) -> Iterator[Edge]:
        """Yield all-to-alls of several runs, or of one run whose axes go to several goal dims."""
        problem, nbytes = self.problem, self.problem.nbytes(layout)
        choices = [self.runs.of(dim, axes) for dim, axes in enumerate(layout.dims)]
        for choice in itertools.product(*choices):
            pairs = [pair for runs in choice for pair in runs]
            moving = tuple([axis for run, dim, to in pairs if dim != to for axis in run])
            if len(pairs) < 2 or not moving:
                continue
            axes = tuple([axis for run, _, _ in pairs for axis in run])
            # When even shards leave their dims, some rank keeps at most an n-th.
            least = nbytes - nbytes // problem.num_ranks(moving) if problem.even else 0
            moved = Traffic(least, least, problem.num_ranks(axes) - 1, 1)
            copies = (2 * nbytes,) * (1 + problem.even)
            if problem.cost(axes, moved, copies, True) > self.limit:
                continue
            new = layout
            for run, dim, _ in reversed(pairs):
                new = problem.remove_axes(new, dim, run)
            arguments = []
            for run, dim, to in self.runs.in_goal_order(tuple(pairs)):
                new = problem.append_axes(new, to, run)
                arguments.append((run, dim, to, new.sizes[to]))
            if not problem.is_divisible(new):
                continue
            swap = (
                problem.all_to_all_traffic(layout, new, axes)
                if problem.is_even_along(layout, new)
                else None
            )
            copies = 2 * nbytes, 2 * problem.nbytes(new)
            make_step = partial(all_to_all_of, tuple(arguments))
            if edge := self.collective(make_step, axes, layout, new, swap, copies):
                yield edge

    def gathers(self, layout: SearchLayout) -> Iterator[Edge]:
        """Yield the all-gather of every minor run of axes of a dim."""
        problem, nbytes = self.problem, self.problem.nbytes(layout)
        for dim, axes in enumerate(layout.dims):
            for start in range(self.num_fixed[dim], len(axes)):
                run = axes[start:]
                new = problem.remove_axes(layout, dim, run)
                to, kind = problem.replicated_goal(run)
                if to == "reduced":
                    new = new._replace(reduced=add_kinds(new.reduced, run, kind))
                even = problem.is_even_along(layout, new, (dim,))
                moved = all_gather_traffic(problem.num_ranks(run), nbytes) if even else None
                copies = (2 * problem.nbytes(new),) if dim else ()
                make_step = partial(AllGather, run, dim, to, kind)
                if edge := self.collective(make_step, run, layout, new, moved, copies):
                    yield edge


def _busy(layout: SearchLayout) -> set[str]:
    """Return the axes that shard a dim or are unreduced; the others are replicated."""
    return {axis for axes in layout.dims for axis in axes} | set(dict(layout.unreduced))
