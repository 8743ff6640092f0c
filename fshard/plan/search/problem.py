"""What a search knows: the problem, layouts on the way as light values, weights and bounds.

The weight of a step is `step_time` of `cost/model.py`, or what the busiest rank receives; for
even shards both are closed forms of a few numbers, for others sums over ranks (`rank_overlap`),
or the specs are built and asked. The bound of a layout is what any program from it to the goal
costs at least, by the same numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import Kinds, PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.cost.model import (
    Parts,
    Traffic,
    axis_roles,
    dim_parts,
    joined,
    seconds,
    traffic,
)
from fshard.program.cost.overlap import NONE
from fshard.program.cost.rank_overlap import Cuts, Held
from fshard.program.cost.topology import Link, Topology
from fshard.program.infer import cut_sizes, join_sizes, permute_signature
from fshard.program.steps import AllToAll, Exchange, Step

__all__ = ["LAUNCH", "Axes", "Problem", "State", "partition_of", "subsets", "with_kinds"]

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]
DimSizes = tuple[int, ...] | None

LAUNCH = 1e-2
"""The weight of a launch where bytes are what counts: launches break ties."""

MESSAGE = 1e-6
"""That of a message: they break ties of launches."""

LOCAL = 1e-9
"""That of a local step: fewer steps break ties of messages."""


THOROUGH = 3
"""The most axes on which programs are looked for that sum what may stay unreduced."""

_ANY = Topology()
_NEVER: tuple[int, ...] = (-1,)
_EVEN: tuple[None, ...] = (None,) * 64


class State(NamedTuple):
    """A layout on the way."""

    dims: Dims
    unreduced: Kinds
    reduced: Kinds
    sizes: tuple[DimSizes, ...]


@dataclass(slots=True)
class Problem:
    """The constants of one search and its memo tables; `topology=None` weighs bytes alone."""

    src: Spec
    dst: Spec
    topology: Topology | None
    max_memory: int | None
    exclude: frozenset[type]
    mesh: Mesh = field(init=False)
    item: int = field(init=False)
    size: dict[str, int] = field(init=False)
    start: State = field(init=False)
    goal: State = field(init=False)
    goals: dict[str, tuple[str, object]] = field(init=False)
    added: frozenset[str] = field(init=False)
    fixed: list[int] = field(init=False)
    stand_ins: frozenset[str] = field(init=False)
    ones: frozenset[str] = field(init=False)
    thorough: bool = field(init=False)
    even: bool = field(init=False)
    empty: bool = field(init=False)
    slow: frozenset[str] = field(init=False)
    fastest: Link = field(init=False)
    slower: Link = field(init=False)
    fast_ranks: int = field(init=False)
    links: dict[Axes, Link] = field(init=False, default_factory=dict)
    volumes: dict[tuple[Dims, tuple[DimSizes, ...]], int] = field(init=False, default_factory=dict)
    bounds: dict[State, float] = field(init=False, default_factory=dict)
    specs: dict[State, Spec] = field(init=False, default_factory=dict)
    held: Held | None = field(init=False, default=None)
    finer: dict[tuple[int, DimSizes, Axes, Axes], DimSizes] = field(
        init=False, default_factory=dict
    )
    counts: dict[Axes, int] = field(init=False, default_factory=dict)
    parts: dict[tuple[int, Axes, Axes, Set[str]], Parts | None] = field(
        init=False, default_factory=dict
    )
    cuts: dict[Cuts, dict[str, object]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh = self.src.mesh
        self.item = self.src.dtype.itemsize
        self.size = dict(self.mesh.shape)
        self.ones = frozenset(axis for axis, n in self.size.items() if n == 1)
        # With more axes, what stays unreduced is left alone: it is not summed and embedded anew.
        self.thorough = len(self.size) - len(self.ones) <= THOROUGH
        self.start, self.goal = _state(self.src), _state(self.dst)
        self.even = self.is_even(self.start) and self.is_even(self.goal)
        self.empty = 0 in self.src.shape
        p = self.dst.partition
        self.added = frozenset([axis for axis, _ in p.unreduced_kinds])
        self.goals = dict.fromkeys(self.mesh.axes, ("invariant", "sum"))
        self.goals |= {axis: ("sharded", dim) for dim, axes in enumerate(p.dims) for axis in axes}
        self.goals |= {axis: ("unreduced", kind) for axis, kind in p.unreduced_kinds}
        self.goals |= {axis: ("reduced", kind) for axis, kind in p.reduced_kinds}
        # What both ends begin a dim with stays: each such shard is a problem of its own.
        self.fixed = [
            _common(have, need) if self.even else 0
            for have, need in zip(self.start.dims, self.goal.dims, strict=True)
        ]
        # Axes that may take another's place in a dim: rare, so looked for only where they can.
        self.stand_ins = frozenset(
            [
                by
                for mine, theirs in zip(self.start.dims, self.goal.dims, strict=True)
                for axis, by in itertools.product(mine, theirs)
                if axis in self.added and self.size[axis] == self.size[by]
            ]
        )
        self._tiers()

    def _tiers(self) -> None:
        """Which axes leave the fastest links: for the bound of what crosses them."""
        links = {axis: self.link((axis,)) for axis, n in self.size.items() if n > 1}
        best = max((link.bandwidth for link in links.values()), default=1.0)
        quick = min((link.latency for link in links.values()), default=0.0)
        self.fastest = Link(quick, best)
        self.slow = frozenset(axis for axis, link in links.items() if link.bandwidth < best)
        rest = [links[axis].bandwidth for axis in self.slow]
        self.slower = Link(quick, max(rest, default=best))
        self.fast_ranks = math.prod(self.size[axis] for axis in links if axis not in self.slow)

    # -- sizes ------------------------------------------------------------------------

    def count(self, axes: Axes) -> int:
        """The devices along `axes`."""
        found = self.counts.get(axes)
        if found is None:
            found = self.counts[axes] = math.prod([self.size[axis] for axis in axes])
        return found

    def link(self, axes: Axes) -> Link:
        """The slowest link along `axes`; without a topology any will do."""
        topology = self.topology or _ANY
        return topology.link(self.mesh, tuple(axis for axis in axes if self.size[axis] > 1))

    def nbytes(self, state: State) -> int:
        """Bytes of the largest local."""
        key = (state.dims, state.sizes)
        found = self.volumes.get(key)
        if found is None:
            found = self.item
            for size, axes, sizes in zip(self.src.shape, state.dims, state.sizes, strict=True):
                found *= size // self.count(axes) if sizes is None else max(sizes)
            self.volumes[key] = found
        return found

    def spec(self, state: State) -> Spec:
        """The state as a spec."""
        found = self.specs.get(state)
        if found is None:
            found = self.specs[state] = self.src._with(
                partition=partition_of(state), sizes=state.sizes
            )
        return found

    def is_even(self, state: State) -> bool:
        """Whether closed forms hold: equal shards, and some elements at all."""
        return state.sizes == _EVEN[: len(state.sizes)] and 0 not in self.src.shape

    def is_possible(self, state: State) -> bool:
        """Whether a dim divides by the axes that were put on it, where it has to."""
        return not self.even or _NEVER not in state.sizes

    def is_even_along(self, before: State, after: State, dims: Iterable[int] | None = None) -> bool:
        """Whether all shards of a dim, of some or of all of them are equal."""
        if self.even:
            return True
        if dims is None:
            return self.is_even(before) and self.is_even(after)
        return all(before.sizes[dim] is after.sizes[dim] is None for dim in dims)

    # -- weights ----------------------------------------------------------------------

    def weigh(self, axes: Axes, moved: Traffic, copied: int) -> float:
        """The weight of a collective over `axes` that moves and copies that much."""
        if self.topology is None:
            return moved.received + LAUNCH + MESSAGE * moved.messages
        link = self.links.get(axes)
        if link is None:
            link = self.links[axes] = self.link(axes)
        return seconds(self.topology, link, moved, copied)

    def weigh_local(self, copied: int) -> float:
        """The weight of a step without traffic."""
        return LOCAL if self.topology is None else copied / self.topology.memory

    def traffic(self, step: Step, before: State, after: State, addends: int) -> Traffic:
        """What any step moves: where closed forms do not hold."""
        if self.ranks().all and not self.empty:
            if isinstance(step, Exchange):
                return self.exchanged_by_rank(before, after, addends, self.turned(before, after))
            if isinstance(step, AllToAll) and step.also:
                moved = self.exchanged_by_rank(before, after, 1, NONE)
                axes = tuple(axis for pair in step.pairs for axis in pair.axes)
                return moved._replace(messages=self.count(axes) - 1, rounds=1)
        return traffic(step, self.spec(before), self.spec(after))

    # -- parts of moves ---------------------------------------------------------------

    def take(self, state: State, dim: int, axes: Axes) -> State:
        """The state without `axes`, the most minor ones of `dim`."""
        mine = state.dims[dim][: -len(axes)]
        sizes = state.sizes[dim]
        if sizes is not None:
            sizes = join_sizes(sizes, self.count(axes))
        return State(
            (*state.dims[:dim], mine, *state.dims[dim + 1 :]),
            state.unreduced,
            state.reduced,
            (*state.sizes[:dim], sizes, *state.sizes[dim + 1 :]),
        )

    def put(self, state: State, dim: int, axes: Axes) -> State:
        """The state with `axes` at the minor end of `dim`, cut as the goal or the source is."""
        mine = (*state.dims[dim], *axes)
        sizes = state.sizes[dim]
        ends = self.start.sizes[dim] is self.goal.sizes[dim] is None
        if sizes is not None or not ends or self.src.shape[dim] % self.count(mine):
            sizes = self.cut(state, dim, axes, mine)
        return State(
            (*state.dims[:dim], mine, *state.dims[dim + 1 :]),
            state.unreduced,
            state.reduced,
            (*state.sizes[:dim], sizes, *state.sizes[dim + 1 :]),
        )

    def cut(self, state: State, dim: int, axes: Axes, mine: Axes) -> DimSizes:
        """The shard sizes of a dim that is cut further: those of an end where it is on its way.

        Between even ends nothing on the way is uneven: of many devices most would have nothing.
        """
        if self.even:
            return _NEVER
        key = (dim, state.sizes[dim], axes, mine)
        if key not in self.finer:
            self.finer[key] = self._cut(state, dim, axes, mine)
        return self.finer[key]

    def _cut(self, state: State, dim: int, axes: Axes, mine: Axes) -> DimSizes:
        n, shards = self.count(axes), self.count(state.dims[dim])
        whole = state.sizes[dim]
        for end in (self.dst, self.src):
            if end.partition.dims[dim][: len(mine)] == mine:
                sizes = join_sizes(end.sizes[dim], end.dim_shards(dim) // (shards * n))
                if join_sizes(sizes, n) == whole and (
                    sizes is not None or self.src.shape[dim] % (shards * n) == 0
                ):
                    return sizes
        cut = cut_sizes(self.src.shape[dim], shards, whole, n, chunk=True)
        assert not isinstance(cut, str)
        return cut if cut is None or len(set(cut)) > 1 else None

    def replicated_goal(self, axes: Axes) -> tuple[bool, str]:
        """Whether all of `axes` end reduced by one kind, and that kind."""
        goals = {self.goals[axis] for axis in axes}
        word, kind = next(iter(goals))
        return (True, str(kind)) if len(goals) == 1 and word == "reduced" else (False, "sum")

    def ranks(self) -> Held:
        """What ranks hold, for where closed forms do not."""
        if self.held is None:
            self.held = Held(self.mesh, self.src.shape)
        return self.held

    def exchanged(
        self, before: State, after: State, addends: int = 1, turned: Set[str] = NONE
    ) -> Traffic | None:
        """What moves between any two even layouts, each rank receiving what it lacks.

        None where `turned` axes make some ranks receive more than others.
        """
        found = []
        for at, (have, need) in enumerate(zip(before.dims, after.dims, strict=True)):
            key = at, have, need, turned
            if key not in self.parts:
                self.parts[key] = dim_parts(self.src.shape[at], self.size, have, need, turned)
            part = self.parts[key]
            if part is None:
                return None
            found.append(part)
        return joined(found, self.item, addends)

    def turned(self, before: State, after: State) -> Set[str]:
        """The axes whose shards become addends, or whose copies shards: `turned_axes`."""
        if not after.unreduced and not before.reduced:
            return NONE
        made = {axis for axis, _ in after.unreduced}.intersection(itertools.chain(*before.dims))
        lent = {axis for axis, _ in before.reduced}.intersection(itertools.chain(*after.dims))
        return frozenset(made | lent)

    def swapped(self, before: State, after: State, axes: Axes) -> Traffic:
        """What an all-to-all of several dims moves between even layouts."""
        moved = self.exchanged(before, after)
        assert moved is not None
        return moved._replace(messages=self.count(axes) - 1, rounds=1)

    def exchanged_by_rank(
        self, before: State, after: State, addends: int, turned: Set[str]
    ) -> Traffic:
        """The same between layouts of any sizes, of the busiest of all ranks."""
        lent = {axis for axis, _ in before.reduced if axis in turned}
        holders, needers = (
            self.mesh.size
            // self.count((*itertools.chain(*end.dims), *(a for a, _ in end.unreduced)))
            for end in (before, after)
        )
        have, need, item = _cuts(before), _cuts(after), self.item
        holders //= self.count(tuple(lent))
        return self.ranks().exchanged(have, need, item, addends, needers, holders, turned)

    def signature(self, state: State) -> object:
        """What a permutation keeps, the sizes of the shards among it."""
        return permute_signature(self.size, *state[:3]), state.sizes

    def roles(self, state: State) -> dict[str, object]:
        """What each axis of several devices does."""
        return axis_roles(self.size, *state[:3])

    def moving(self, before: State, after: State) -> Axes:
        """The axes along which layouts exchange anything: `moving_axes` of light values."""
        was, now, turned = self.places(before), self.places(after), self.turned(before, after)
        return tuple(
            [axis for axis in self.size if was.get(axis) != now.get(axis) and axis not in turned]
        )

    def places(self, state: State) -> dict[str, object]:
        """Where each axis cuts a dim and into what, or the reduction of its addends."""
        key = _cuts(state)
        found = self.cuts.get(key)
        if found is None:
            found = self.cuts[key] = {}
            for dim, (axes, sizes) in enumerate(key):
                major = 1
                for at, axis in enumerate(axes):
                    cut = sizes and join_sizes(sizes, self.count(axes[at + 1 :]))
                    found[axis] = (dim, major, cut)
                    major *= self.size[axis]
        return {**found, **dict(state.unreduced)} if state.unreduced else found

    # -- bounds -----------------------------------------------------------------------

    def bound(self, state: State) -> float:
        """What any program from `state` to the goal weighs at least: the heuristic of A*.

        A launch where anything is missing, with what the busiest rank must receive over the
        fastest link, or a whole node over the next slower ones.
        """
        found = self.bounds.get(state)
        if found is None:
            found = self.bounds[state] = self._bound(state)
        return found

    def _bound(self, state: State) -> float:
        if self.empty:
            return 0.0
        # Ranks that end with addends of one tensor may hold what they need between them.
        group = self.added
        addends: Axes = ()
        if state.unreduced:
            if group and self.even and not self.thorough:
                stay = set(state.unreduced)
                group = frozenset([each[0] for each in self.goal.unreduced if each not in stay])
            addends = tuple([axis for axis, _ in state.unreduced if axis not in self.added])
        members = self.count(tuple(group))
        even = self.even or (self.is_even(state) and self.is_even(self.goal))
        lacks = self.missing if even else self.missing_uneven
        missing = -(-lacks(state, group, addends) // members)
        if missing <= 0:
            return 0.0
        across = 0
        if self.slow and members == 1 and even:
            fast = frozenset(self.size) - self.slow
            slow_addends = tuple(axis for axis in addends if axis in self.slow)
            across = -(-self.missing(state, fast, slow_addends) // self.fast_ranks)
        return self.weigh_at_least(missing * self.item, across * self.item)

    def weigh_at_least(self, nbytes: int, across: int) -> float:
        """A launch that moves so many bytes, `across` of them between nodes."""
        if self.topology is None:
            return nbytes + LAUNCH
        time = across / self.slower.bandwidth + max(0, nbytes - across) / self.fastest.bandwidth
        return self.topology.launch + self.fastest.latency + time

    def missing(self, state: State, within: frozenset[str], addends: Axes) -> int:
        """Elements that the worst placed rank lacks, or the worst group of ranks along `within`.

        Even layouts: behind the common axes of a dim, other axes on both sides leave some
        rank with nothing of what it needs, and axes of the source alone with an n-th of it.
        Of what is still to be reduced each rank must receive all that it needs, and all ranks
        together one message an element for every addend but one, and every copy but one.
        """
        whole = held = 1
        for length, *ends in zip(self.src.shape, state.dims, self.goal.dims, strict=True):
            have, need = (
                [tuple(a for a in axes if a not in self.ones) for axes in ends]
                if self.ones
                else ends
            )
            at, here = 0, length
            for one, other in zip(have, need, strict=False):
                if one != other:
                    break
                if one not in within:
                    here //= self.size[one]
                at += 1
            mine, theirs, there = have[at:], need[at:], here
            for axis in theirs:
                here //= 1 if axis in within else self.size[axis]
            for axis in mine:
                there //= 1 if axis in within else self.size[axis]
            whole *= here
            clash = mine and theirs and mine[0] not in within and theirs[0] not in within
            held *= 0 if clash else min(here, there)
        if self.count(addends) == 1:
            return whole - held
        return self._summed(whole, within, addends)

    def missing_uneven(self, state: State, within: frozenset[str], addends: Axes) -> int:
        """The same of shards of any sizes."""
        if self.count(addends) == 1:
            return self.lacking(state, self.goal, 1, within)
        return self._summed(self.nbytes(self.goal) // self.item, within, addends)

    def lacking(
        self, before: State, after: State, addends: int, within: Collection[str] = ()
    ) -> int:
        """Elements that some rank has to receive from one layout to another, of any sizes."""
        return self.ranks().lacking(_cuts(before), _cuts(after), addends, within)

    def _summed(self, whole: int, within: frozenset[str], addends: Axes) -> int:
        """Elements to be received of what is to be reduced, where a rank needs so many."""
        groups = copies = 1
        for axis, size in self.size.items():
            if axis not in within:
                groups *= size
                copies *= size if self.goals[axis][0] in ("invariant", "reduced") else 1
        messages = self.count(addends) - 1 + copies - 1
        return max(whole, -(-math.prod(self.src.shape) * messages // groups))


def _state(spec: Spec) -> State:
    p = spec.partition
    return State(p.dims, p.unreduced_kinds, p.reduced_kinds, spec.sizes)


def _common(have: Axes, need: Axes) -> int:
    """How many axes both begin with."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(have, need, strict=False))
    return sum(1 for _ in same)


def _cuts(state: State) -> Cuts:
    return tuple(zip(state.dims, state.sizes, strict=True))


def partition_of(state: State) -> PartitionSpec:
    """The partition of a state."""
    return PartitionSpec._of(state.dims, state.unreduced, state.reduced)


def with_kinds(kinds: Kinds, axes: Axes, kind: object) -> Kinds:
    """The states with those of `axes` among them."""
    return tuple(sorted((*kinds, *((axis, str(kind)) for axis in axes))))


def subsets(names: Sequence[str]) -> Iterator[Axes]:
    """Every non-empty choice of axes, in the order given."""
    for count in range(1, len(names) + 1):
        yield from itertools.combinations(names, count)
