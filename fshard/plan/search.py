"""Uniform-cost search over the typed steps, on light states instead of specs.

Nodes are layouts, edges are steps (several axes at once are single edges), weights come from
the same traffic formulas and topology as `Program.cost`. The first search keeps to a normal
form after Rink et al. (arXiv 2112.01075): slices, then moves and reductions, gathers last, so
that no layout on the way is larger than both ends. Only where that finds nothing (rebalancing
a lone dim) does a second search lift the restriction. Ties are broken by the number of steps,
then by the order of the moves: the result is deterministic.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from fshard.mesh import Mesh
from fshard.partition import Kinds, PartitionSpec
from fshard.program.cost import Traffic, axis_roles, hops, seconds, share
from fshard.program.infer import cut_sizes, join_sizes, permute_signature
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    CollectivePermute,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from fshard.program.topology import Link, Topology
from fshard.spec import Spec, mixed_kinds

__all__ = ["search"]

Dims = tuple[tuple[str, ...], ...]
DimSizes = tuple[int, ...] | None
Make = partial[Any]

UNIT = 1e-8
"""The weight of a local step, far below a launch (in seconds) and below a byte."""

LAUNCH = 1e-2
"""The weight of a launch where bytes are what counts."""


class State(NamedTuple):
    """A layout on the way; `gathered` once a gather has happened (the normal form's end)."""

    dims: Dims
    unreduced: Kinds
    reduced: Kinds
    sizes: tuple[DimSizes, ...]
    gathered: bool


Move = tuple[float, Make, State]


@dataclass(slots=True)
class Search:
    """One search: the constants of the problem and its memo tables."""

    src: Spec
    dst: Spec
    topology: Topology | None
    max_memory: int | None
    exclude: frozenset[type]
    normal_form: bool
    mesh: Mesh = field(init=False)
    size: dict[str, int] = field(init=False)
    goal: dict[str, tuple[str, object]] = field(init=False)
    stand_ins: frozenset[str] = field(init=False)
    permute_targets: dict[object, list[State]] | None = field(init=False, default=None)
    links: dict[tuple[str, ...], tuple[int, Link]] = field(init=False, default_factory=dict)
    local_bytes: dict[tuple[Dims, tuple[DimSizes, ...]], int] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self.mesh = self.src.mesh
        self.size = dict(self.mesh.shape)
        p = self.dst.partition
        self.goal = dict.fromkeys(self.mesh.axes, ("invariant", "sum"))
        self.goal |= {axis: ("sharded", dim) for dim, axes in enumerate(p.dims) for axis in axes}
        self.goal |= {axis: ("unreduced", kind) for axis, kind in p.unreduced_kinds}
        self.goal |= {axis: ("reduced", kind) for axis, kind in p.reduced_kinds}
        # Axes that may take another's place in a dim: rare, so looked for only where they can.
        self.stand_ins = frozenset(
            by
            for dim, mine in enumerate(self.src.partition.dims)
            for axis, by in itertools.product(mine[:-1], p.dims[dim])
            if self.goal[axis][0] == "unreduced" and self.size[axis] == self.size[by]
        ) - {axis for mine in self.src.partition.dims for axis in mine}

    # -- weights ----------------------------------------------------------------------

    def nbytes(self, state: State) -> int:
        """Bytes of the largest local."""
        key = (state.dims, state.sizes)
        found = self.local_bytes.get(key)
        if found is None:
            found = self.src.dtype.itemsize
            for size, axes, sizes in zip(self.src.shape, state.dims, state.sizes, strict=True):
                if sizes is not None:
                    found *= max(sizes)
                else:
                    found *= size // self.count(axes)
            self.local_bytes[key] = found
        return found

    def held(self, before: State, make: Make, after: State) -> int:
        """Bytes of a step's input and output; a change of state alone makes no copy."""
        casts = (InvariantToReduced, ReducedToInvariant)
        averaged = any(kind == "avg" for _, kind in (*before.reduced, *after.reduced))
        if make.func in casts and not averaged:
            return self.nbytes(before)
        return self.nbytes(before) + self.nbytes(after)

    def count(self, axes: tuple[str, ...]) -> int:
        """The devices along `axes`."""
        return math.prod(self.size[axis] for axis in axes)

    def local(self, before: State, after: State) -> float:
        """The weight of a step without traffic: grows with its bytes, but between 1 and 2 units.

        Never 0, so that fewer steps win; never near a launch, so that no collective is ever
        used where local steps do.
        """
        copied = self.nbytes(before) + self.nbytes(after)
        return UNIT * (1 + copied / (copied + 1e9))

    def wire(self, axes: tuple[str, ...], nbytes: int, rounds: int = 1) -> float:
        """The weight of a collective in which the busiest rank moves (n-1)/n of `nbytes`."""
        found = self.links.get(axes)
        if found is None:
            n = self.count(axes)
            link = (self.topology or Topology()).link(
                self.mesh, tuple(axis for axis in axes if self.size[axis] > 1)
            )
            found = self.links[axes] = (n, link)
        n, link = found
        if n == 1 or 0 in self.src.shape:
            return UNIT
        item = self.src.dtype.itemsize
        moved = share(rounds * (n - 1), nbytes // item, n) * item
        if self.topology is None:
            return moved + LAUNCH
        return seconds(self.topology, link, Traffic(moved, moved, rounds * hops(n)), 0)

    # -- moves ------------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[Move]:
        """Every edge out of a state, in a fixed order."""
        free = not (self.normal_form and state.gathered)
        yield from self.changes_of_state(state)
        if free:
            yield from self.slices(state)
            yield from self.reductions(state)
            yield from self.transfers(state)
            yield from self.permutes(state)
        yield from self.gathers(state)
        if self.stand_ins:
            yield from self.substitutes(state)

    def changes_of_state(self, state: State) -> Iterator[Move]:
        """The free casts between states, for all axes whose goal they are."""
        reduced = dict(state.reduced)
        busy = {axis for axes in state.dims for axis in axes} | set(dict(state.unreduced))
        by_goal: dict[tuple[str, object, str | None], list[str]] = {}
        for axis in self.mesh.axes:
            if axis not in busy:
                by_goal.setdefault((*self.goal[axis], reduced.get(axis)), []).append(axis)
        for (word, kind, now), names in by_goal.items():
            axes = tuple(names)
            kept = tuple(each for each in state.reduced if each[0] not in axes)
            if word == "unreduced":
                if mixed_kinds(_with(state.unreduced, axes, kind), kept):
                    continue
                new = state._replace(unreduced=_with(state.unreduced, axes, kind), reduced=kept)
                make: Make = partial(ReplicatedToUnreduced, axes, str(kind))
            elif word == "reduced" and now is None:
                new = state._replace(reduced=_with(state.reduced, axes, kind))
                make = partial(InvariantToReduced, axes, str(kind))
            elif now is None and word == "sharded" and self.stand_ins.issuperset(axes):
                new = state._replace(reduced=_with(state.reduced, axes, "sum"))
                make = partial(InvariantToReduced, axes)
            elif now is not None and (word == "invariant" or (word == "reduced" and now != kind)):
                new, make = state._replace(reduced=kept), partial(ReducedToInvariant, axes)
            else:
                continue
            yield self.local(state, new), make, new

    def slices(self, state: State) -> Iterator[Move]:
        """Every order of replicated axes of one state onto every dim."""
        busy = {axis for axes in state.dims for axis in axes} | set(dict(state.unreduced))
        kinds = dict(state.reduced)
        free: dict[str | None, list[str]] = {}
        for axis in self.mesh.axes:
            if axis not in busy:
                free.setdefault(kinds.get(axis), []).append(axis)
        for names in free.values():
            for axes in _orders(names):
                kept = tuple(each for each in state.reduced if each[0] not in axes)
                less = state._replace(reduced=kept)
                for dim in range(len(state.dims)):
                    new = self.put(less, dim, axes)
                    make = partial(AllSlice, axes, dim, new.sizes[dim])
                    yield self.local(state, new), make, new

    def reductions(self, state: State) -> Iterator[Move]:
        """All-reduce over every subset of the axes to be reduced, reduce-scatter in every order."""
        by_kind: dict[str, list[str]] = {}
        for axis, kind in state.unreduced:
            if self.goal[axis] != ("unreduced", kind):
                by_kind.setdefault(kind, []).append(axis)
        for names in by_kind.values():
            for count in range(len(names), 0, -1):
                for axes in itertools.combinations(names, count):
                    rest = tuple(each for each in state.unreduced if each[0] not in axes)
                    less = state._replace(unreduced=rest)
                    to, kind = self.replicated_goal(axes)
                    new = less._replace(reduced=_with(less.reduced, axes, kind)) if to else less
                    yield (
                        self.wire(axes, self.nbytes(state), rounds=2),
                        partial(AllReduce, axes, "reduced" if to else "invariant", kind),
                        new,
                    )
                    for order, dim in itertools.product(
                        itertools.permutations(axes), range(len(state.dims))
                    ):
                        new = self.put(less, dim, order)
                        n = self.count(order)
                        yield (
                            self.wire(order, n * self.nbytes(new)),
                            partial(ReduceScatter, order, dim, new.sizes[dim]),
                            new,
                        )

    def transfers(self, state: State) -> Iterator[Move]:
        """All-to-all of every minor run of axes of a dim onto every other dim."""
        for dim, axes in enumerate(state.dims):
            for at in range(len(axes)):
                taken = axes[at:]
                less = self.take(state, dim, taken)
                for to in range(len(state.dims)):
                    if to != dim:
                        new = self.put(less, to, taken)
                        most = max(self.nbytes(state), self.nbytes(new))
                        yield (
                            self.wire(taken, most),
                            partial(AllToAll, taken, dim, to, new.sizes[to]),
                            new,
                        )

    def gathers(self, state: State) -> Iterator[Move]:
        """All-gather of every minor run of axes of a dim, or its embedding as addends."""
        for dim, axes in enumerate(state.dims):
            for at in range(len(axes)):
                taken = axes[at:]
                less = self.take(state, dim, taken)
                to, kind = self.replicated_goal(taken)
                new = less._replace(gathered=True)
                if to:
                    new = new._replace(reduced=_with(less.reduced, taken, kind))
                yield (
                    self.wire(taken, self.nbytes(new)),
                    partial(AllGather, taken, dim, "reduced" if to else "invariant", kind),
                    new,
                )
                goals = {self.goal[axis] for axis in taken}
                word, reduction = goals.pop()
                if not goals and word == "unreduced":
                    new = less._replace(unreduced=_with(less.unreduced, taken, reduction))
                    make = partial(ShardedToUnreduced, taken, dim, str(reduction))
                    if not mixed_kinds(new.unreduced, new.reduced):
                        yield self.local(state, new), make, new

    def substitutes(self, state: State) -> Iterator[Move]:
        """Reduced axes in the place of equally many ranks' that become unreduced."""
        free = [axis for axis, _ in state.reduced if axis in self.stand_ins]
        for dim, mine in enumerate(state.dims):
            for at, by in itertools.product(range(len(mine) - 1), free):
                word, kind = self.goal[mine[at]]
                if word != "unreduced" or self.size[mine[at]] != self.size[by]:
                    continue
                dims = (*mine[:at], by, *mine[at + 1 :])
                new = state._replace(
                    dims=(*state.dims[:dim], dims, *state.dims[dim + 1 :]),
                    unreduced=_with(state.unreduced, (mine[at],), kind),
                    reduced=tuple(each for each in state.reduced if each[0] != by),
                )
                make = partial(ShardedToUnreduced, (mine[at],), dim, str(kind), (by,))
                if not mixed_kinds(new.unreduced, new.reduced):
                    yield self.local(state, new), make, new

    def permutes(self, state: State) -> Iterator[Move]:
        """To the goal, or to what the last gather makes the goal of."""
        if self.permute_targets is None:
            self.permute_targets = self.find_permute_targets()
        for target in self.permute_targets.get(self.signature(state), ()):
            if target[:3] != state[:3]:
                new = target._replace(gathered=state.gathered)
                yield self.permuting(state, new), partial(CollectivePermute, _partition(new)), new

    def permuting(self, state: State, new: State) -> float:
        """The weight of moving every local whole along the axes whose role changes."""
        before, after = (axis_roles(self.size, _partition(each)) for each in (state, new))
        axes = tuple(axis for axis, role in before.items() if role != after[axis])
        moved = self.nbytes(state)
        if not axes or moved == 0:
            return UNIT
        if self.topology is None:
            return moved + LAUNCH
        link = self.topology.link(self.mesh, axes)
        return seconds(self.topology, link, Traffic(moved, moved, 1), 0)

    def find_permute_targets(self) -> dict[object, list[State]]:
        """The goal and its sources under one gather or slice, by what a permutation keeps."""
        p = self.dst.partition
        goal = State(p.dims, p.unreduced_kinds, p.reduced_kinds, self.dst.sizes, False)
        targets = [goal]
        for kind in (None, "sum", "avg"):
            free = [
                a
                for a in self.mesh.axes
                if self.size[a] > 1
                and self.goal[a] == (("reduced", kind) if kind else ("invariant", "sum"))
            ]
            for count in range(1, len(free) + 1):
                for axes, dim in itertools.product(
                    itertools.permutations(free, count), range(len(p.dims))
                ):
                    kept = tuple(each for each in goal.reduced if each[0] not in axes)
                    targets.append(self.put(goal._replace(reduced=kept), dim, axes))
        found: dict[object, list[State]] = {}
        for target in targets:
            found.setdefault(self.signature(target), []).append(target)
        return found

    def signature(self, state: State) -> object:
        """What a permutation keeps, the sizes of the shards among it."""
        return permute_signature(self.size, _partition(state)), state.sizes

    # -- parts of moves ---------------------------------------------------------------

    def replicated_goal(self, axes: tuple[str, ...]) -> tuple[bool, str]:
        """Whether all of `axes` end reduced by one kind, and that kind."""
        goals = {self.goal[axis] for axis in axes}
        word, kind = next(iter(goals))
        return (True, str(kind)) if len(goals) == 1 and word == "reduced" else (False, "sum")

    def take(self, state: State, dim: int, axes: tuple[str, ...]) -> State:
        """The state without `axes`, the most minor ones of `dim`."""
        mine = state.dims[dim][: -len(axes)]
        n = self.count(axes)
        return state._replace(
            dims=(*state.dims[:dim], mine, *state.dims[dim + 1 :]),
            sizes=(*state.sizes[:dim], join_sizes(state.sizes[dim], n), *state.sizes[dim + 1 :]),
        )

    def put(self, state: State, dim: int, axes: tuple[str, ...]) -> State:
        """The state with `axes` at the minor end of `dim`, cut as the goal or the source is."""
        mine = (*state.dims[dim], *axes)
        sizes = self.cut(state, dim, axes, mine)
        return state._replace(
            dims=(*state.dims[:dim], mine, *state.dims[dim + 1 :]),
            sizes=(*state.sizes[:dim], sizes, *state.sizes[dim + 1 :]),
        )

    def cut(self, state: State, dim: int, axes: tuple[str, ...], mine: tuple[str, ...]) -> DimSizes:
        n = self.count(axes)
        shards = self.count(state.dims[dim])
        whole = state.sizes[dim]
        for end in (self.dst, self.src):
            if end.partition.dims[dim][: len(mine)] == mine:
                minor = end.dim_shards(dim) // (shards * n)
                sizes = join_sizes(end.sizes[dim], minor)
                if join_sizes(sizes, n) == whole and (
                    sizes is not None or self.src.shape[dim] % (shards * n) == 0
                ):
                    return sizes
        cut = cut_sizes(self.src.shape[dim], shards, whole, n, chunk=True)
        assert not isinstance(cut, str)
        return cut if cut is None or len(set(cut)) > 1 else None


def _partition(state: State) -> PartitionSpec:
    return PartitionSpec._of(state.dims, state.unreduced, state.reduced)


def _orders(names: list[str]) -> Iterator[tuple[str, ...]]:
    """Every non-empty choice of axes in every order."""
    for count in range(1, len(names) + 1):
        yield from itertools.permutations(names, count)


def _with(kinds: Kinds, axes: tuple[str, ...], kind: object) -> Kinds:
    return tuple(sorted((*kinds, *((axis, str(kind)) for axis in axes))))


def search(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    max_memory: int | None = None,
    exclude: frozenset[type] = frozenset(),
) -> list[Step] | None:
    """The cheapest steps from `src` to `dst`, specs of one mesh, shape and dtype.

    `topology=None` weighs bytes alone. `None` where no program keeps to the restrictions.
    """
    for normal_form in (True, False):
        found = _run(Search(src, dst, topology, max_memory, exclude, normal_form))
        if found is not None:
            return found
    return None


def _run(problem: Search) -> list[Step] | None:
    p, q = problem.src.partition, problem.dst.partition
    start = State(p.dims, p.unreduced_kinds, p.reduced_kinds, problem.src.sizes, False)
    goal = (q.dims, q.unreduced_kinds, q.reduced_kinds, problem.dst.sizes)
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, Make]] = {}
    done: set[State] = set()
    ticket = itertools.count()
    most = problem.max_memory or 0
    queue: list[tuple[float, int, int, State]] = [(0.0, 0, next(ticket), start)]
    while queue:
        weight, steps, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state[:4] == goal:
            return _walk_back(state, came)
        for cost, make, new in problem.moves(state):
            reached = weight + cost
            if new in done or reached >= best.get(new, math.inf):
                continue
            if problem.exclude and make.func in problem.exclude:
                continue
            if problem.max_memory is not None and problem.held(state, make, new) > most:
                continue
            best[new] = reached
            came[new] = (state, make)
            heapq.heappush(queue, (reached, steps + 1, next(ticket), new))
    return None


def _walk_back(state: State, came: dict[State, tuple[State, Make]]) -> list[Step]:
    steps = []
    while state in came:
        state, make = came[state]
        steps.append(make())
    return steps[::-1]
