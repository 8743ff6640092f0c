"""The edges of the search: every step out of a layout, several axes at once, and its weight.

Of orders in which axes can be put on a dim only those count that the goal asks for: its axes
first, in its order, then the others in mesh order or the reverse. All other orders differ from
these by a permutation of devices, which costs the same before and after.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from fshard.partition_spec import Kinds
from fshard.plan.runs import Runs
from fshard.plan.state import Axes, Problem, State, partition_of, subsets, with_kinds
from fshard.plan.targets import all_targets, direct_targets
from fshard.program.cost import NOTHING, Traffic, all_reduced, gathered, swapped
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    CollectivePermute,
    Exchange,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
)
from fshard.spec import mixed_kinds

__all__ = ["Move", "Moves"]

MOST_UNLIKE = 16
"""On more ranks no exchanges are tried in which they receive unlike much of even shards."""

Make = partial[Any]
Move = tuple[float, Make, State]
Aim = tuple[State, int, int, float]


class Moves:
    """The edges of one problem; `limit` is what an edge may weigh, at most, to be of use.

    The `direct` ones alone lead to the goal from everywhere, if not in the best way.
    """

    def __init__(self, problem: Problem, direct: bool) -> None:
        self.problem = problem
        self.direct = direct
        self.limit = math.inf
        self.size = problem.size
        self.goals = problem.goals
        self.exclude = problem.exclude
        self.targets: dict[object, list[State]] = {}
        self.aims: dict[tuple[Kinds, frozenset[str]], list[Aim]] = {}
        # What both ends begin a dim with stays: each such shard is a problem of its own.
        self.fixed = [
            next((at for at, (a, b) in enumerate(zip(*ends, strict=False)) if a != b),
                 min(map(len, ends)))
            for ends in zip(problem.start.dims, problem.goal.dims, strict=True)
        ]  # fmt: skip
        if not problem.even:
            self.fixed = [0] * len(self.fixed)
        self.runs = Runs(problem, self.fixed)
        # Where nothing else moves shards from dim to dim, permutations of finer ones do.
        self.permuting = not direct and {Exchange, AllToAll} <= self.exclude
        # Where ranks receive unlike much no bytes are saved, at best a copy: few ranks are counted.
        few = problem.mesh.size <= MOST_UNLIKE and len(problem.size) - len(problem.ones) < 3
        self.lopsided = few and problem.topology is not None and not direct
        self.helpers = self.find_helpers()
        self.found: list[State] = []
        p, q = problem.src.partition, problem.dst.partition
        # Axes that may take another's place in a dim: rare, so looked for only where they can.
        self.stand_ins = frozenset(
            by
            for dim, mine in enumerate(p.dims)
            for axis, by in itertools.product(mine, q.dims[dim])
            if self.goals[axis][0] == "unreduced" and self.size[axis] == self.size[by]
        )

    @property
    def ends(self) -> list[State]:
        """Layouts worth moving to in one step: the goal, and what one more step makes it of."""
        if not self.found:
            find = direct_targets if self.direct else all_targets
            self.found = find(self.problem, self.fixed)
        return self.found

    def find_helpers(self) -> dict[str, tuple[str, ...]]:
        """Axes that both ends leave replicated, each with those before it that do as well.

        To slice along them and gather again saves bytes of reductions and of slow links, and
        copies.
        """
        problem = self.problem
        p = problem.src.partition
        busy = {axis for axes in p.dims for axis in axes} | set(dict(p.unreduced_kinds))
        state = dict(p.reduced_kinds)
        found: dict[str, tuple[str, ...]] = {}
        alike: dict[object, list[str]] = {}
        for axis, n in self.size.items():
            word, kind = self.goals[axis]
            if axis not in busy and word in ("invariant", "reduced"):
                like = alike.setdefault((n, problem.link((axis,)), state.get(axis), word, kind), [])
                found[axis] = tuple(like)
                like.append(axis)
        return found

    def of(self, state: State) -> Iterator[Move]:
        """Every edge out of a state, in a fixed order."""
        yield from self.changes_of_state(state)
        yield from (move for move in self.slices(state) if move[0] < math.inf)
        yield from self.embeddings(state)
        if self.stand_ins:
            yield from self.substitutes(state)
        if self.problem.weigh_at_least(0, 0) > self.limit:
            return
        yield from self.reductions(state)
        yield from self.transfers(state)
        yield from self.gathers(state)
        yield from self.permutes(state)
        yield from self.exchanges(state)

    def local(self, make: Make, after: State, copied: int) -> Move:
        """An edge without traffic."""
        problem = self.problem
        if not problem.is_possible(after):
            return math.inf, make, after
        return problem.weigh_local(copied), make, after

    def collective(
        self,
        make: Make,
        axes: Axes,
        before: State,
        after: State,
        moved: Traffic | None,
        copied: int,
        addends: int = 1,
    ) -> Move | None:
        """An edge with traffic, if it is not too heavy; `moved` is None where that is not known."""
        problem = self.problem
        if not problem.is_possible(after):
            return None
        if moved is None:
            if self.least(before, after, copied, addends) > self.limit:
                return None
            moved = problem.traffic(make(), before, after, addends)
        if moved.launches and not problem.empty:
            weight = problem.weigh(axes, moved, copied)
        else:
            weight = problem.weigh_local(2 * problem.nbytes(after))
        return (weight, make, after) if weight <= self.limit else None

    def least(self, before: State, after: State, copied: int, addends: int) -> float:
        """What a collective between the two and all after it weigh at least."""
        problem = self.problem
        rest, lacks = problem.bound(after), problem.lacking(before, after, addends)
        if lacks <= 0:
            return rest + problem.weigh_local(min(copied, 2 * problem.nbytes(after)))
        wires = problem.weigh_at_least(lacks * problem.item, 0)
        return rest + problem.weigh_local(copied) + wires

    # -- local steps ------------------------------------------------------------------

    def changes_of_state(self, state: State) -> Iterator[Move]:
        """The free casts between states, for all axes whose goal they are."""
        reduced = dict(state.reduced)
        busy = {axis for axes in state.dims for axis in axes} | set(dict(state.unreduced))
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
            if word == "unreduced":
                if mixed_kinds(with_kinds(state.unreduced, axes, kind), kept):
                    continue
                new = state._replace(
                    unreduced=with_kinds(state.unreduced, axes, kind), reduced=kept
                )
                make: Make = partial(ReplicatedToUnreduced, axes, str(kind))
                copied = 2 * nbytes
            elif word == "reduced" and now is None:
                new = state._replace(reduced=with_kinds(state.reduced, axes, kind))
                make = partial(InvariantToReduced, axes, str(kind))
                copied = 2 * nbytes if kind == "avg" else 0
            elif now is None and word == "sharded" and (lent := self.lent(axes)):
                new = state._replace(reduced=with_kinds(state.reduced, lent, "sum"))
                make = partial(InvariantToReduced, lent)
            else:
                continue
            yield self.local(make, new, copied)

    def lent(self, axes: Axes) -> Axes:
        """Those of invariant axes that are to cut a dim that are better reduced before.

        Then nothing moves along them: not over a slow link either.
        """
        if self.stand_ins.issuperset(axes):
            return axes
        slow = () if self.direct or Exchange in self.exclude else self.problem.slow
        return tuple([axis for axis in axes if axis in slow])

    def slices(self, state: State) -> Iterator[Move]:
        """Replicated axes of one state onto every dim."""
        busy = {axis for axes in state.dims for axis in axes} | set(dict(state.unreduced))
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
                        new = self.problem.put(less, dim, order)
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

    def orders(self, state: State, dim: int, axes: Axes) -> list[Axes]:
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
        return found

    def substitutes(self, state: State) -> Iterator[Move]:
        """Reduced axes in the place of equally many ranks' that become unreduced."""
        free = [axis for axis, _ in state.reduced if axis in self.stand_ins]
        for dim, mine in enumerate(state.dims):
            for at, by in itertools.product(range(len(mine)), free):
                word, kind = self.goals[mine[at]]
                if word != "unreduced" or self.size[mine[at]] != self.size[by]:
                    continue
                dims = (*mine[:at], by, *mine[at + 1 :])
                new = state._replace(
                    dims=(*state.dims[:dim], dims, *state.dims[dim + 1 :]),
                    unreduced=with_kinds(state.unreduced, (mine[at],), kind),
                    reduced=tuple(each for each in state.reduced if each[0] != by),
                )
                make = partial(ShardedToUnreduced, (mine[at],), dim, str(kind), (by,))
                if not mixed_kinds(new.unreduced, new.reduced):
                    yield self.local(make, new, 2 * self.problem.nbytes(new))

    def embeddings(self, state: State) -> Iterator[Move]:
        """Every minor run of axes of a dim becomes addends, where the goal or others are some.

        Where nothing is to be added nothing is: a change of place adds no zeros, and candidates of
        a maximum stay those that there are, whose gradients are known.
        """
        problem = self.problem
        pending = set()
        if problem.thorough and any(
            kind == "sum" and self.goals[axis][0] != "unreduced" for axis, kind in state.unreduced
        ):
            pending = {"sum"}
        for dim, axes in enumerate(state.dims):
            for at in range(self.fixed[dim], len(axes)):
                taken = axes[at:]
                goals = {self.goals[axis] for axis in taken}
                kinds = {str(kind) for word, kind in goals if word == "unreduced"}
                for kind in sorted(pending | (kinds if len(goals) == 1 else set())):
                    less = problem.take(state, dim, taken)
                    new = less._replace(unreduced=with_kinds(less.unreduced, taken, kind))
                    make = partial(ShardedToUnreduced, taken, dim, kind)
                    if not mixed_kinds(new.unreduced, new.reduced):
                        yield self.local(make, new, 2 * problem.nbytes(new))

    # -- collectives ------------------------------------------------------------------

    def reductions(self, state: State) -> Iterator[Move]:
        """All-reduce and reduce-scatter over every subset of the axes to be reduced."""
        by_kind: dict[str, list[str]] = {}
        for axis, kind in state.unreduced:
            if self.problem.thorough or self.goals[axis] != ("unreduced", kind):
                by_kind.setdefault(kind, []).append(axis)
        problem, nbytes = self.problem, self.problem.nbytes(state)
        for names in by_kind.values():
            for axes in self.choices(names):
                rest = tuple(each for each in state.unreduced if each[0] not in axes)
                less = state._replace(unreduced=rest)
                to, kind = problem.replicated_goal(axes)
                new = less._replace(reduced=with_kinds(less.reduced, axes, kind)) if to else less
                n = problem.count(axes)
                moved: Traffic | None = all_reduced(n, nbytes, problem.item)
                make: Make = partial(AllReduce, axes, "reduced" if to else "invariant", kind)
                if move := self.collective(make, axes, state, new, moved, 0):
                    yield move
                for dim in range(len(state.dims)):
                    for order in self.orders(state, dim, axes):
                        new = problem.put(less, dim, order)
                        even = problem.is_even_along(state, new, (dim,))
                        moved = gathered(n, nbytes // n) if even else None
                        copied = 2 * nbytes if dim else 0
                        make = partial(ReduceScatter, order, dim, new.sizes[dim])
                        if move := self.collective(make, order, state, new, moved, copied):
                            yield move

    def transfers(self, state: State) -> Iterator[Move]:
        """All-to-all of minor runs of axes: of one run to any dim, of several to the goal's."""
        if AllToAll in self.exclude:
            return
        problem, nbytes = self.problem, self.problem.nbytes(state)
        for dim, axes in enumerate(state.dims):
            for at in range(self.fixed[dim], len(axes)):
                taken = axes[at:]
                less = problem.take(state, dim, taken)
                n = problem.count(taken)
                for to in range(len(state.dims)):
                    if to != dim:
                        new = problem.put(less, to, taken)
                        copied = 2 * (nbytes * bool(to) + problem.nbytes(new) * bool(dim))
                        even = problem.is_even_along(state, new, (dim, to))
                        moved = swapped(n, nbytes) if even else None
                        make = partial(AllToAll, taken, dim, to, new.sizes[to])
                        if move := self.collective(make, taken, state, new, moved, copied):
                            yield move
        if not self.direct:
            yield from self.fused(state)

    def fused(self, state: State) -> Iterator[Move]:
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
            least = nbytes - nbytes // problem.count(going) if problem.even else 0
            moved = Traffic(least, least, problem.count(axes) - 1, 1)
            if problem.weigh(axes, moved, 4 * nbytes if problem.even else 2 * nbytes) > self.limit:
                continue
            new = state
            for taken, dim, _ in reversed(pairs):
                new = problem.take(new, dim, taken)
            made = []
            for taken, dim, to in self.runs.sorted(tuple(pairs)):
                new = problem.put(new, to, taken)
                made.append((taken, dim, to, new.sizes[to]))
            if not problem.is_possible(new):
                continue
            swap = problem.swapped(state, new, axes) if problem.is_even_along(state, new) else None
            copied = 2 * nbytes + 2 * problem.nbytes(new)
            make = partial(_all_to_all, tuple(made))
            if move := self.collective(make, axes, state, new, swap, copied):
                yield move

    def gathers(self, state: State) -> Iterator[Move]:
        """All-gather of every minor run of axes of a dim."""
        problem, nbytes = self.problem, self.problem.nbytes(state)
        for dim, axes in enumerate(state.dims):
            for at in range(self.fixed[dim], len(axes)):
                taken = axes[at:]
                less = problem.take(state, dim, taken)
                to, kind = problem.replicated_goal(taken)
                new = less._replace(reduced=with_kinds(less.reduced, taken, kind)) if to else less
                n = problem.count(taken)
                even = problem.is_even_along(state, new, (dim,))
                moved = gathered(n, nbytes) if even else None
                copied = 2 * problem.nbytes(new) if dim else 0
                make = partial(AllGather, taken, dim, "reduced" if to else "invariant", kind)
                if move := self.collective(make, taken, state, new, moved, copied):
                    yield move

    # -- to the goal ------------------------------------------------------------------

    def permutes(self, state: State) -> Iterator[Move]:
        """To the goal, or to what one more step makes the goal of; to other orders in need."""
        problem = self.problem
        if CollectivePermute in self.exclude:
            return
        if not self.targets:
            for target in self.ends:
                self.targets.setdefault(problem.signature(target), []).append(target)
        nbytes = problem.nbytes(state)
        found: Iterable[State] = self.targets.get(problem.signature(state), ())
        for target in itertools.chain(found, self.reordered(state) if self.permuting else ()):
            if target[:3] != state[:3]:
                before, after = problem.roles(state), problem.roles(target)
                axes = tuple(axis for axis, role in before.items() if role != after[axis])
                make = partial(_permute, target)
                moved = Traffic(nbytes, nbytes, 1, 1) if axes else Traffic()
                if move := self.collective(make, axes, state, target, moved, 0):
                    yield move

    def reordered(self, state: State) -> Iterator[State]:
        """The same shards with the axes of every dim in other orders."""
        for dims in itertools.product(*map(itertools.permutations, state.dims)):
            yield state._replace(dims=dims)

    def exchanges(self, state: State) -> Iterator[Move]:
        """Straight to the goal, or to what one more step makes the goal of."""
        if Exchange in self.exclude:
            return
        shards = self.problem.added.intersection(itertools.chain(*state.dims))
        key = state.unreduced, shards
        aims = self.aims.get(key)
        if aims is None:
            aims = self.aims[key] = self.find_aims(*key)
        problem, packed = self.problem, 2 * self.problem.nbytes(state)
        begun = problem.weigh_at_least(0, 0) + problem.weigh_local(packed)
        for target, addends, unpacked, rest in aims:
            if begun + rest > self.limit and problem.even:
                continue
            if target == state or not is_kept(state.reduced, target):
                continue
            make = partial(_exchange, target)
            moved, copied = None, packed + unpacked
            even, turned = problem.is_even_along(state, target), problem.turned(state, target)
            if even:
                moved = problem.exchanged(state, target, addends, turned)
            if moved is None and turned:
                if not self.lopsided:
                    continue
                moved = problem.exchanged_by_rank(state, target, addends, turned)
            if even and moved == NOTHING:  # slices do
                continue
            axes = problem.moving(state, target)
            if move := self.collective(make, axes, state, target, moved, copied, addends):
                yield move

    def find_aims(self, unreduced: Kinds, shards: frozenset[str]) -> list[Aim]:
        """The layouts to exchange to where so much is unreduced, and sharded of what will be.

        Shards become addends on the way, or else copies, where ranks would receive unlike much.
        """
        problem = self.problem
        found: dict[State, Aim] = {}
        for goal, some in itertools.product(self.ends, (shards, ()) if shards else ((),)):
            stay = tuple(a for a in goal.unreduced if a in unreduced or a[0] in some)
            target = goal._replace(unreduced=stay)
            less = [each for each in unreduced if each not in target.unreduced]
            if target not in found and len({kind for _, kind in less}) < 2:
                addends = problem.count(tuple(axis for axis, _ in less))
                copied = (1 + addends) * problem.nbytes(target)
                rest = problem.bound(target) + problem.weigh_local(copied)
                found[target] = target, addends, copied, rest
        return list(found.values())


def is_kept(reduced: Kinds, target: State) -> bool:
    """Whether all that is reduced stays so or shards the target, as an exchange allows."""
    lost = [axis for axis, kind in reduced if (axis, kind) not in target.reduced]
    return not lost or {*lost} <= {*itertools.chain(*target.dims)}


def _permute(target: State) -> CollectivePermute:
    return CollectivePermute(partition_of(target))


def _exchange(target: State) -> Exchange:
    return Exchange(partition_of(target), target.sizes)


def _all_to_all(pairs: tuple[tuple[Axes, int, int, tuple[int, ...] | None], ...]) -> AllToAll:
    first, *others = pairs
    return AllToAll(*first, also=tuple(AllToAll(*each) for each in others))
