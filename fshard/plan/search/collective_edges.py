"""The edges of the search: every step out of a layout, several axes at once, and its weight.

Of orders in which axes can be put on a dim only those count that the goal asks for: its axes
first, in its order, then the others in mesh order or the reverse. All other orders differ from
these by a permutation of devices, which costs the same before and after, unless it can be one
inside of nodes: on several nodes the reverse of the goal's order counts as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

from fshard.layout.spec import mixed_kinds
from fshard.plan.search.all_to_all_edges import Runs
from fshard.plan.search.exchange_edges import Jumps, Make, Move
from fshard.plan.search.problem import Axes, LayoutState, SearchProblem, add_kinds, subsets
from fshard.program.cost.model import Traffic, all_reduced, gathered, swapped
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

__all__ = ["Moves"]


class Moves(Jumps):
    """The edges of one problem.

    The `direct` ones alone lead to the goal from everywhere, if not in the best way.
    """

    def __init__(self, problem: SearchProblem, direct: bool) -> None:
        super().__init__(problem, direct)
        self.size = problem.size
        self.goals = problem.goals
        self.num_fixed = problem.num_fixed
        self.runs = Runs(problem)
        self.helpers = self.find_helpers()
        self.replacement_axes = problem.replacement_axes
        self.traded = self.find_traded()

    def find_helpers(self) -> dict[str, tuple[str, ...]]:
        """Axes that both ends leave replicated, each with those before it that do as well.

        To slice along them and gather again saves bytes of reductions and of slow links, and
        copies.
        """
        problem = self.problem
        busy, state = _busy(problem.start), dict(problem.start.reduced)
        found: dict[str, tuple[str, ...]] = {}
        alike: dict[object, list[str]] = {}
        for axis, n in self.size.items():
            word, kind = self.goals[axis]
            if axis not in busy and word in ("invariant", "reduced"):
                like = alike.setdefault((n, problem.link((axis,)), state.get(axis), word, kind), [])
                found[axis] = tuple(like)
                like.append(axis)
        return found

    def find_traded(self) -> frozenset[str]:
        """Axes that come into use where others of their size go out of it, and end reduced."""
        busy, goals, size = _busy(self.problem.start), self.goals, self.size
        kept = {size[axis] for axis in busy if goals[axis] == ("reduced", "sum")}
        free = [axis for axis in size if axis not in busy and size[axis] in kept]
        return frozenset([a for a in free if goals[a][0] in ("sharded", "unreduced")])

    def of(self, state: LayoutState) -> Iterator[Move]:
        """Every edge out of a state, in a fixed order."""
        yield from self.changes_of_state(state)
        yield from (move for move in self.slices(state) if move[0] < math.inf)
        yield from self.embeddings(state)
        if self.replacement_axes:
            yield from self.substitutes(state)
        if self.problem.min_cost(0, 0) > self.limit:
            return
        yield from self.reductions(state)
        yield from self.transfers(state)
        yield from self.gathers(state)
        yield from self.permutes(state)
        yield from self.exchanges(state)

    # -- local steps ------------------------------------------------------------------

    def changes_of_state(self, state: LayoutState) -> Iterator[Move]:
        """The free casts between states, for all axes whose goal they are."""
        reduced = dict(state.reduced)
        busy = _busy(state)
        by_goal: dict[tuple[str, object, str | None], list[str]] = {}
        for axis in self.size:
            if axis not in busy:
                by_goal.setdefault((*self.goals[axis], reduced.get(axis)), []).append(axis)
        nbytes = self.problem.nbytes(state)
        for (word, kind, now), names in by_goal.items():
            axes = tuple(names)
            kept = tuple(each for each in state.reduced if each[0] not in axes)
            copied = 0
            if now is not None:  # an exchange keeps what is reduced
                less, cast = state._replace(reduced=kept), partial(ReducedToInvariant, axes)
                yield self.local(cast, less, 2 * nbytes if now == "avg" else 0)
            elif lent := self.lent(axes):
                new = state._replace(reduced=add_kinds(state.reduced, lent, "sum"))
                if not mixed_kinds(new.unreduced, new.reduced):
                    yield self.local(partial(InvariantToReduced, lent), new, 0)
            if word == "unreduced":
                if mixed_kinds(add_kinds(state.unreduced, axes, kind), kept):
                    continue
                new = state._replace(unreduced=add_kinds(state.unreduced, axes, kind), reduced=kept)
                make: Make = partial(ReplicatedToUnreduced, axes, str(kind))
                copied = 2 * nbytes
            elif word == "reduced" and now is None:
                new = state._replace(reduced=add_kinds(state.reduced, axes, kind))
                make = partial(InvariantToReduced, axes, str(kind))
                copied = 2 * nbytes if kind == "avg" else 0
            else:
                continue
            yield self.local(make, new, copied)

    def lent(self, axes: Axes) -> Axes:
        """Those of invariant axes with one goal that are better reduced before.

        Where they are to cut a dim nothing moves along them then, not over a slow link either.
        Where others end reduced a permutation may have them take the place of these.
        """
        traded = () if self.direct else tuple([axis for axis in axes if axis in self.traded])
        if self.goals[axes[0]][0] != "sharded":
            return traded
        if self.replacement_axes.issuperset(axes):
            return axes
        slow = () if self.direct or Exchange in self.exclude else self.problem.slow_axes
        return tuple([axis for axis in axes if axis in slow or axis in traded])

    def slices(self, state: LayoutState) -> Iterator[Move]:
        """Replicated axes of one state onto every dim."""
        busy = _busy(state)
        kinds = dict(state.reduced)
        free: dict[str | None, list[str]] = {}
        for axis in self.size:
            if axis not in busy:
                free.setdefault(kinds.get(axis), []).append(axis)
        for names in free.values():
            for axes in self.choices(names):
                if not self.useful(axes, names):
                    continue
                kept = tuple(each for each in state.reduced if each[0] not in axes)
                less = state._replace(reduced=kept) if kept != state.reduced else state
                for dim in range(len(state.dims)):
                    for order in self.orders(state, dim, axes):
                        new = self.problem.append_axes(less, dim, order)
                        make = partial(AllSlice, order, dim, new.sizes[dim])
                        yield self.local(make, new, 2 * self.problem.nbytes(new))

    def choices(self, names: list[str]) -> Iterator[Axes]:
        """The axes that one step may act along: any, or one and all of them."""
        if not self.direct:
            return subsets(names)
        each = [(axis,) for axis in names] if len(names) > 1 else []
        return iter([tuple(names), *each])

    def useful(self, axes: Axes, free: list[str]) -> bool:
        """Whether to slice along `axes` can help; of helpers that are alike the first do."""
        for axis in axes:
            before = self.helpers.get(axis)
            if before is None:
                continue
            if any(each in free and each not in axes for each in before):
                return False
        return True

    def orders(self, state: LayoutState, dim: int, axes: Axes) -> list[Axes]:
        """The orders in which a dim takes axes: the goal's first, then the others."""
        if len(axes) == 1:
            return [axes]
        goal = self.problem.goal.dims[dim]
        first = tuple(axis for axis in goal if axis in axes)
        rest = tuple(axis for axis in axes if axis not in first)
        found = [first + rest]
        if len(rest) > 1:
            found.append(first + rest[::-1])
        if first and rest:
            found.append(rest + first)
        if self.problem.slow_axes and not self.direct and len(first) > 1:
            found.append(first[::-1] + rest)
        return found

    def substitutes(self, state: LayoutState) -> Iterator[Move]:
        """Reduced axes in the place of equally many ranks' that become unreduced."""
        free = [axis for axis, _ in state.reduced if axis in self.replacement_axes]
        for dim, mine in enumerate(state.dims):
            for at, by in itertools.product(range(len(mine)), free):
                word, kind = self.goals[mine[at]]
                if word != "unreduced" or self.size[mine[at]] != self.size[by]:
                    continue
                dims = (*mine[:at], by, *mine[at + 1 :])
                new = state._replace(
                    dims=(*state.dims[:dim], dims, *state.dims[dim + 1 :]),
                    unreduced=add_kinds(state.unreduced, (mine[at],), kind),
                    reduced=tuple(each for each in state.reduced if each[0] != by),
                )
                make = partial(ShardedToUnreduced, (mine[at],), dim, str(kind), (by,))
                if not mixed_kinds(new.unreduced, new.reduced):
                    yield self.local(make, new, 2 * self.problem.nbytes(new))

    def embeddings(self, state: LayoutState) -> Iterator[Move]:
        """Every minor run of axes of a dim becomes addends, where the goal or others are some.

        Where nothing is to be added nothing is: a change of place adds no zeros, and candidates of
        a maximum stay those that there are, whose gradients are known.
        """
        problem = self.problem
        pending = set()
        if problem.few_axes and any(
            kind == "sum" and self.goals[axis][0] != "unreduced" for axis, kind in state.unreduced
        ):
            pending = {"sum"}
        for dim, axes in enumerate(state.dims):
            for at in range(self.num_fixed[dim], len(axes)):
                taken = axes[at:]
                goals = {self.goals[axis] for axis in taken}
                kinds = {str(kind) for word, kind in goals if word == "unreduced"}
                for kind in sorted(pending | (kinds if len(goals) == 1 else set())):
                    less = problem.remove_axes(state, dim, taken)
                    new = less._replace(unreduced=add_kinds(less.unreduced, taken, kind))
                    make = partial(ShardedToUnreduced, taken, dim, kind)
                    if not mixed_kinds(new.unreduced, new.reduced):
                        yield self.local(make, new, 2 * problem.nbytes(new))

    # -- collectives ------------------------------------------------------------------

    def reductions(self, state: LayoutState) -> Iterator[Move]:
        """All-reduce and reduce-scatter over every subset of the axes to be reduced."""
        by_kind: dict[str, list[str]] = {}
        for axis, kind in state.unreduced:
            if self.problem.few_axes or self.goals[axis] != ("unreduced", kind):
                by_kind.setdefault(kind, []).append(axis)
        problem, nbytes = self.problem, self.problem.nbytes(state)
        for names in by_kind.values():
            for axes in self.choices(names):
                rest = tuple(each for each in state.unreduced if each[0] not in axes)
                less = state._replace(unreduced=rest)
                to, kind = problem.replicated_goal(axes)
                new = less._replace(reduced=add_kinds(less.reduced, axes, kind)) if to else less
                n = problem.num_ranks(axes)
                moved: Traffic | None = all_reduced(n, nbytes, problem.itemsize)
                make: Make = partial(AllReduce, axes, "reduced" if to else "invariant", kind)
                if move := self.collective(make, axes, state, new, moved, 0):
                    yield move
                for dim in range(len(state.dims)):
                    for order in self.orders(state, dim, axes):
                        new = problem.append_axes(less, dim, order)
                        even = problem.is_even_along(state, new, (dim,))
                        moved = gathered(n, nbytes // n) if even else None
                        copied = 2 * nbytes if dim else 0
                        make = partial(ReduceScatter, order, dim, new.sizes[dim])
                        if move := self.collective(make, order, state, new, moved, copied):
                            yield move

    def transfers(self, state: LayoutState) -> Iterator[Move]:
        """All-to-all of minor runs of axes: of one run to any dim, of several to the goal's."""
        if AllToAll in self.exclude:
            return
        problem, nbytes = self.problem, self.problem.nbytes(state)
        for dim, axes in enumerate(state.dims):
            for at in range(self.num_fixed[dim], len(axes)):
                taken = axes[at:]
                less = problem.remove_axes(state, dim, taken)
                n = problem.num_ranks(taken)
                for to in range(len(state.dims)):
                    if to != dim:
                        new = problem.append_axes(less, to, taken)
                        copied = 2 * (nbytes * bool(to) + problem.nbytes(new) * bool(dim))
                        even = problem.is_even_along(state, new, (dim, to))
                        moved = swapped(n, nbytes) if even else None
                        make = partial(AllToAll, taken, dim, to, new.sizes[to])
                        if move := self.collective(make, taken, state, new, moved, copied):
                            yield move
        if not self.direct:
            yield from self.fused(state)

    def fused(self, state: LayoutState) -> Iterator[Move]:
        """Several runs at once, or one run to several dims; each axis where the goal has it."""
        problem, nbytes = self.problem, self.problem.nbytes(state)
        plans = [self.runs.of(dim, axes) for dim, axes in enumerate(state.dims)]
        for chosen in itertools.product(*plans):
            pairs = [pair for plan in chosen for pair in plan]
            going = tuple([axis for taken, dim, to in pairs if dim != to for axis in taken])
            if len(pairs) < 2 or not going:
                continue
            axes = tuple([axis for taken, _, _ in pairs for axis in taken])
            # Of even shards that leave their dims some rank keeps no more than an n-th.
            least = nbytes - nbytes // problem.num_ranks(going) if problem.even else 0
            moved = Traffic(least, least, problem.num_ranks(axes) - 1, 1)
            if problem.cost(axes, moved, 4 * nbytes if problem.even else 2 * nbytes) > self.limit:
                continue
            new = state
            for taken, dim, _ in reversed(pairs):
                new = problem.remove_axes(new, dim, taken)
            made = []
            for taken, dim, to in self.runs.sorted(tuple(pairs)):
                new = problem.append_axes(new, to, taken)
                made.append((taken, dim, to, new.sizes[to]))
            if not problem.is_divisible(new):
                continue
            swap = (
                problem.all_to_all_traffic(state, new, axes)
                if problem.is_even_along(state, new)
                else None
            )
            copied = 2 * nbytes + 2 * problem.nbytes(new)
            make = partial(_all_to_all, tuple(made))
            if move := self.collective(make, axes, state, new, swap, copied):
                yield move

    def gathers(self, state: LayoutState) -> Iterator[Move]:
        """All-gather of every minor run of axes of a dim."""
        problem, nbytes = self.problem, self.problem.nbytes(state)
        for dim, axes in enumerate(state.dims):
            for at in range(self.num_fixed[dim], len(axes)):
                taken = axes[at:]
                less = problem.remove_axes(state, dim, taken)
                to, kind = problem.replicated_goal(taken)
                new = less._replace(reduced=add_kinds(less.reduced, taken, kind)) if to else less
                n = problem.num_ranks(taken)
                even = problem.is_even_along(state, new, (dim,))
                moved = gathered(n, nbytes) if even else None
                copied = 2 * problem.nbytes(new) if dim else 0
                make = partial(AllGather, taken, dim, "reduced" if to else "invariant", kind)
                if move := self.collective(make, taken, state, new, moved, copied):
                    yield move


def _busy(state: LayoutState) -> set[str]:
    """The axes that cut a dim or have addends: the others are replicated."""
    return {axis for axes in state.dims for axis in axes} | set(dict(state.unreduced))


def _all_to_all(pairs: tuple[tuple[Axes, int, int, tuple[int, ...] | None], ...]) -> AllToAll:
    first, *others = pairs
    return AllToAll(*first, also=tuple(AllToAll(*each) for each in others))
