"""Search problem of one redistribution: light layout values, costs of steps, and lower bounds.

The cost of a step is `step_time` of `cost/model.py` in seconds, or the bytes that the busiest rank
receives. Even shards have closed forms, uneven ones are summed over ranks (`rank_overlap`), and
remaining cases build the specs. The bound of a layout is a lower bound of the cost of every
program from it to the goal, in the same units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Set
from typing import Literal

from fshard.layout.spec import Spec
from fshard.plan.search.search_layout import (
    Axes,
    Dims,
    DimSizes,
    SearchLayout,
    all_to_all_of,
    exchange_to,
    subsets,
)
from fshard.plan.search.size_tables import size_tables
from fshard.program.cost.links import JOIN, Link
from fshard.program.cost.model import collective_time, copy_time
from fshard.program.cost.rank_overlap import (
    MAX_RANKS,
    DimShardings,
    RankOverlap,
    index_of_largest,
)
from fshard.program.cost.shard_overlap import NO_AXES, even_dim_overlap
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import (
    DimTraffic,
    Traffic,
    axis_roles,
    dim_traffic,
    join_dims,
    traffic,
)
from fshard.program.exchange_boxes import axis_positions, converted
from fshard.program.infer import permute_signature
from fshard.program.steps import AllGather, AllToAll, ReduceScatter, Step

LAUNCH_COST = 1e-2
"""Cost of a launch in bytes: launches break ties of programs that receive equally many bytes."""

MESSAGE_COST = 1e-6
"""Cost of a message in bytes: messages break ties of launches."""

LOCAL_COST = 1e-9
"""Cost of a local step in bytes: fewer steps break ties of messages."""


FEW_AXES = 3
"""Most axes of a mesh on which goal axes that stay unreduced may also be reduced and embedded."""

MAX_EXACT_RANKS = 1024
"""Most ranks for exact traffic of exchanges between uneven layouts; of more, some are sampled."""

_ANY = Topology()
_INDIVISIBLE: tuple[int, ...] = (-1,)
_EVEN: tuple[None, ...] = (None,) * 64


class SearchProblem:
    """Endpoints and restrictions of one search, with its memo tables.

    `topology=None` minimizes the bytes that the busiest rank receives, else time is minimized.
    `goals` maps each axis to its state in the goal and the dim or reduction; `num_fixed` counts
    the major axes of each dim that all layouts share; along `slow_axes` links are not the fastest.
    """

    def __init__(
        self,
        src: Spec,
        dst: Spec,
        topology: Topology | None,
        max_memory: int | None,
        exclude: frozenset[type],
    ) -> None:
        self.src, self.dst, self.topology = src, dst, topology
        self.max_memory, self.exclude = max_memory, exclude
        self.itemsize = src.dtype.itemsize
        self.size = dict(src.mesh.shape)
        self.unit_axes = frozenset(axis for axis, n in self.size.items() if n == 1)
        self.few_axes = len(self.size) - len(self.unit_axes) <= FEW_AXES
        self.start, self.goal = SearchLayout.of(src), SearchLayout.of(dst)
        self.empty = 0 in src.shape
        self.even = self.is_even(self.start) and self.is_even(self.goal)
        self.links: dict[tuple[Axes, bool], Link] = {}
        self.local_sizes: dict[tuple[Dims, tuple[DimSizes, ...]], int] = {}
        self.bounds: dict[SearchLayout, float] = {}
        self.specs: dict[SearchLayout, Spec] = {}
        self.rank_overlaps: dict[int, RankOverlap] = {}
        self.sizes = size_tables()
        self.split_cache: dict[tuple[int, DimSizes, Axes, Axes], DimSizes] = {}
        self.rank_counts: dict[Axes, int] = {}
        self.parts: dict[tuple[int, Axes, Axes, Set[str]], DimTraffic | None] = {}
        self.dim_overlaps: dict[tuple[int, Axes, frozenset[str]], tuple[int, int, bool]] = {}
        self.placements: dict[DimShardings, dict[str, object]] = {}
        self._classify_axes()
        self._classify_links()

    def _classify_axes(self) -> None:
        """Set `goals`, `goal_unreduced`, `num_fixed` and `replacement_axes`."""
        p = self.dst.partition
        self.goal_unreduced = frozenset([axis for axis, _ in p.unreduced_kinds])
        self.goals: dict[str, tuple[str, object]] = dict.fromkeys(self.size, ("invariant", "sum"))
        self.goals |= {axis: ("sharded", dim) for dim, axes in enumerate(p.dims) for axis in axes}
        self.goals |= {axis: ("unreduced", kind) for axis, kind in p.unreduced_kinds}
        self.goals |= {axis: ("reduced", kind) for axis, kind in p.reduced_kinds}
        ends = list(zip(self.start.dims, self.goal.dims, strict=True))
        # Major axes that both ends share stay in place: each such shard is a separate problem.
        self.num_fixed = [_num_common(*axes) if self.even else 0 for axes in ends]
        # Axes that may replace another axis of a dim: rare, so searched only where they exist.
        self.replacement_axes = frozenset(
            [
                new
                for have, need in ends
                for old, new in itertools.product(have, need)
                if old in self.goal_unreduced and self.size[old] == self.size[new]
            ]
        )

    def _classify_links(self) -> None:
        """Set `slow_axes`, `fast_ranks`, and `speeds`: latency, the fastest bandwidth, the next."""
        links = {axis: self.link((axis,)) for axis, n in self.size.items() if n > 1}
        best = max((link.bandwidth for link in links.values()), default=1.0)
        self.slow_axes = frozenset(axis for axis, link in links.items() if link.bandwidth < best)
        slower = max((links[axis].bandwidth for axis in self.slow_axes), default=best)
        self.fast_ranks = math.prod(self.size[axis] for axis in links if axis not in self.slow_axes)
        latency = min((link.latency for link in links.values()), default=0.0)
        # Several axes may have another link together than each of them, also in exchanges.
        self.joint_links = self.topology is not None and not _is_plain(self.topology)
        if self.joint_links:
            effective = [
                self.link(axes, exchange)
                for axes in subsets([*links])
                for exchange in (False, True)
            ]
            latency = min((link.latency for link in effective), default=0.0)
            best = slower = max((link.bandwidth for link in effective), default=1.0)
        self.speeds = latency, best, slower

    # -- sizes ------------------------------------------------------------------------

    def num_ranks(self, axes: Axes) -> int:
        """Return the number of devices along `axes`."""
        count = self.rank_counts.get(axes)
        if count is None:
            count = self.rank_counts[axes] = math.prod([self.size[axis] for axis in axes])
        return count

    def link(self, axes: Axes, exchange: bool = False) -> Link:
        """Return the effective link along `axes`; any link if only bytes count."""
        topology, several = self.topology or _ANY, tuple(a for a in axes if self.size[a] > 1)
        return topology.link(self.src.mesh, several, exchange=exchange)

    def nbytes(self, layout: SearchLayout) -> int:
        """Return the bytes of the largest local."""
        key = (layout.dims, layout.sizes)
        nbytes = self.local_sizes.get(key)
        if nbytes is None:
            nbytes = self.itemsize
            for n, axes, sizes in zip(self.src.shape, layout.dims, layout.sizes, strict=True):
                nbytes *= n // self.num_ranks(axes) if sizes is None else self.sizes.widest(sizes)
            self.local_sizes[key] = nbytes
        return nbytes

    def spec(self, layout: SearchLayout) -> Spec:
        """Return the layout as a `Spec`."""
        spec = self.specs.get(layout)
        if spec is None:
            spec = self.src._with(partition=layout.partition, sizes=layout.sizes)
            self.specs[layout] = spec
        return spec

    def is_even(self, layout: SearchLayout) -> bool:
        """Return True if closed forms hold: equal shards of a tensor that has elements."""
        return layout.sizes == _EVEN[: len(layout.sizes)] and 0 not in self.src.shape

    def is_divisible(self, layout: SearchLayout) -> bool:
        """Return True unless an even problem has a dim that its axes do not divide."""
        return not self.even or _INDIVISIBLE not in layout.sizes

    def is_even_along(
        self, before: SearchLayout, after: SearchLayout, dims: Iterable[int] | None = None
    ) -> bool:
        """Return True if all shards of each of `dims` (default: of all dims) are equal."""
        if self.even:
            return True
        if dims is None:
            return self.is_even(before) and self.is_even(after)
        return all(before.sizes[dim] is after.sizes[dim] is None for dim in dims)

    # -- costs ------------------------------------------------------------------------

    def cost(self, axes: Axes, moved: Traffic, copies: tuple[int, ...], exchange: bool) -> float:
        """Return the cost of a collective over `axes`, and of `copies` around it, in bytes."""
        if self.topology is None:
            return moved.received + LAUNCH_COST + MESSAGE_COST * moved.messages
        link = self.links.get((axes, exchange))
        if link is None:
            link = self.links[axes, exchange] = self.link(axes, exchange)
        return collective_time(self.topology, link, moved, *copies)

    def local_cost(self, copied: int) -> float:
        """Return the cost of a step without traffic that copies `copied` bytes."""
        return LOCAL_COST if self.topology is None else copy_time(self.topology, copied)

    def traffic(
        self,
        make_step: Callable[[], Step],
        axes: Axes,
        before: SearchLayout,
        after: SearchLayout,
        reduced_ranks: int,
    ) -> Traffic:
        """Return the traffic of a step that has no closed form, of some ranks of large meshes."""
        kind, large = getattr(make_step, "func", None), self.src.mesh.size > MAX_EXACT_RANKS
        if not self.empty:
            if kind is exchange_to:
                converted = self.converted_axes(before, after)
                return self.exchange_traffic_by_rank(before, after, reduced_ranks, converted)
            if kind is all_to_all_of or (large and kind is AllToAll):
                sent, received = (
                    self.missing_between(*ends, 1, max_ranks=MAX_EXACT_RANKS) * self.itemsize
                    for ends in ((after, before), (before, after))
                )
                return Traffic(sent, received, self.num_ranks(axes) - 1, 1)
        step = make_step()
        if isinstance(step, AllGather | ReduceScatter) and not self.empty:
            gathered = before if isinstance(step, AllGather) else after
            sizes, n = gathered.sizes[step.dim], self.num_ranks(axes)
            if sizes is not None and n > 1:
                item = self.nbytes(gathered) // self.sizes.widest(sizes)
                moved = self.sizes.gather_traffic(sizes, n, item)
                return moved if gathered is before else moved.transposed()
        return traffic(step, self.spec(before), self.spec(after))

    # -- parts of edges ---------------------------------------------------------------

    def remove_axes(self, layout: SearchLayout, dim: int, axes: Axes) -> SearchLayout:
        """Return the layout without `axes`, the most minor ones of `dim`."""
        sizes = self.sizes.joined(layout.sizes[dim], self.num_ranks(axes))
        return layout.replace_dim(dim, layout.dims[dim][: -len(axes)], sizes)

    def append_axes(self, layout: SearchLayout, dim: int, axes: Axes) -> SearchLayout:
        """Return the layout with `axes` at the minor end of `dim`, sized as in an end."""
        dim_axes = (*layout.dims[dim], *axes)
        sizes = layout.sizes[dim]
        even_ends = self.start.sizes[dim] is self.goal.sizes[dim] is None
        if sizes is not None or not even_ends or self.src.shape[dim] % self.num_ranks(dim_axes):
            sizes = self.split_sizes(layout, dim, axes, dim_axes)
        return layout.replace_dim(dim, dim_axes, sizes)

    def split_sizes(self, layout: SearchLayout, dim: int, axes: Axes, dim_axes: Axes) -> DimSizes:
        """Return the shard sizes of a dim sharded further: an end's sizes if it leads there.

        Between even ends uneven layouts are refused: most of many devices would hold nothing.
        """
        if self.even:
            return _INDIVISIBLE
        key = (dim, layout.sizes[dim], axes, dim_axes)
        if key not in self.split_cache:
            self.split_cache[key] = self._split_sizes(layout, dim, axes, dim_axes)
        return self.split_cache[key]

    def _split_sizes(self, layout: SearchLayout, dim: int, axes: Axes, dim_axes: Axes) -> DimSizes:
        n, shards = self.num_ranks(axes), self.num_ranks(layout.dims[dim])
        coarse, size = layout.sizes[dim], self.src.shape[dim]
        for end in (self.goal, self.start):
            if end.dims[dim][: len(dim_axes)] == dim_axes:
                minor = self.num_ranks(end.dims[dim][len(dim_axes) :])
                sizes = self.sizes.joined(end.sizes[dim], minor)
                if self.sizes.joined(sizes, n) == coarse and (
                    sizes is not None or size % (shards * n) == 0
                ):
                    return sizes
        return self.sizes.chunks(size, shards, coarse, n)

    def replicated_goal(self, axes: Axes) -> tuple[Literal["invariant", "reduced"], str]:
        """Return ("reduced", kind) if the goal has all of `axes` reduced by one kind."""
        goals = {self.goals[axis] for axis in axes}
        state, kind = next(iter(goals))
        all_reduced = len(goals) == 1 and state == "reduced"
        return ("reduced", str(kind)) if all_reduced else ("invariant", "sum")

    def overlap(self, max_ranks: int = MAX_RANKS) -> RankOverlap:
        """Return the boxes of all of at most `max_ranks` ranks, else of some of them."""
        mesh, shape = self.src.mesh, self.src.shape
        key = max_ranks if MAX_RANKS < mesh.size <= max_ranks else MAX_RANKS
        if key not in self.rank_overlaps:
            largest = index_of_largest(self.src), index_of_largest(self.dst)
            self.rank_overlaps[key] = RankOverlap(mesh, shape, largest, self.sizes.stops, key)
        return self.rank_overlaps[key]

    def exchange_traffic(
        self,
        before: SearchLayout,
        after: SearchLayout,
        reduced_ranks: int = 1,
        converted: Set[str] = NO_AXES,
    ) -> Traffic | None:
        """Return the traffic between two even layouts if each rank receives what it lacks.

        None if `converted` axes make some ranks receive more than others.
        """
        parts = []
        for dim, (have, need) in enumerate(zip(before.dims, after.dims, strict=True)):
            key = dim, have, need, converted
            if key not in self.parts:
                self.parts[key] = dim_traffic(self.src.shape[dim], self.size, have, need, converted)
            part = self.parts[key]
            if part is None:
                return None
            parts.append(part)
        return join_dims(parts, self.itemsize, reduced_ranks)

    def converted_axes(self, before: SearchLayout, after: SearchLayout) -> Set[str]:
        """Return the axes that turn from sharded to unreduced, or from reduced to sharded."""
        return converted(before.dims, before.reduced, after.dims, after.unreduced)

    def all_to_all_traffic(self, before: SearchLayout, after: SearchLayout, axes: Axes) -> Traffic:
        """Return the traffic of an all-to-all of several dims between even layouts."""
        moved = self.exchange_traffic(before, after)
        assert moved is not None
        return moved._replace(messages=self.num_ranks(axes) - 1, rounds=1)

    def exchange_traffic_by_rank(
        self, before: SearchLayout, after: SearchLayout, reduced_ranks: int, converted: Set[str]
    ) -> Traffic:
        """Return the busiest rank's traffic of an exchange between layouts of any sizes."""
        sliced = {axis for axis, _ in before.reduced if axis in converted}
        holders, needers = (
            self.src.mesh.size
            // self.num_ranks((*itertools.chain(*end.dims), *(a for a, _ in end.unreduced)))
            for end in (before, after)
        )
        holders //= self.num_ranks(tuple(sliced))
        ends = _dim_shards(before), _dim_shards(after), self.itemsize
        overlap = self.overlap(MAX_EXACT_RANKS)
        return overlap.exchange_traffic(*ends, reduced_ranks, needers, holders, converted)

    def permute_signature(self, layout: SearchLayout) -> object:
        """Return what a permutation of devices keeps, including the sizes of the shards."""
        return permute_signature(self.size, *layout[:3]), layout.sizes

    def axis_roles(self, layout: SearchLayout) -> dict[str, object]:
        """Return the role of each axis that has several devices."""
        return axis_roles(self.size, *layout[:3])

    def moving_axes(self, before: SearchLayout, after: SearchLayout) -> Axes:
        """Return the axes along which an exchange sends: `moving_axes` of layouts."""
        old, new = self.axis_placements(before), self.axis_placements(after)
        fixed = self.converted_axes(before, after)
        return tuple([a for a in self.size if old.get(a) != new.get(a) and a not in fixed])

    def axis_placements(self, layout: SearchLayout) -> dict[str, object]:
        """Map each axis to the dim, stride and sizes that it shards, or to its reduction."""
        key = _dim_shards(layout)
        placements = self.placements.get(key)
        if placements is None:
            placements = axis_positions(self.size, layout.dims, layout.sizes, self.sizes.joined)
            self.placements[key] = placements
        return {**placements, **dict(layout.unreduced)} if layout.unreduced else placements

    # -- bounds -----------------------------------------------------------------------

    def bound(self, layout: SearchLayout) -> float:
        """Return a lower bound of the cost from `layout` to the goal: the heuristic of A*.

        It counts one launch if any rank misses elements, and the missing bytes of the busiest rank
        over the fastest link, or those of a node over the next slower links.
        """
        bound = self.bounds.get(layout)
        if bound is None:
            bound = self.bounds[layout] = self._bound(layout)
        return bound

    def _bound(self, layout: SearchLayout) -> float:
        if self.empty:
            return 0.0
        # Ranks that end with partial sums of one tensor may share its elements between them.
        group = self.goal_unreduced
        reduced: Axes = ()
        if layout.unreduced:
            if group and self.even and not self.few_axes:
                group = frozenset(axis for axis, _ in {*self.goal.unreduced} - {*layout.unreduced})
            reduced = tuple(
                [axis for axis, _ in layout.unreduced if axis not in self.goal_unreduced]
            )
        members = self.num_ranks(tuple(group))
        even = self.even or (self.is_even(layout) and self.is_even(self.goal))
        count = self.missing_elements if even else self.missing_uneven
        missing = -(-count(layout, group, reduced) // members)
        if missing <= 0:
            return 0.0
        slow = 0
        if self.slow_axes and members == 1 and even:
            fast = frozenset(self.size) - self.slow_axes
            slow_reduced = tuple(axis for axis in reduced if axis in self.slow_axes)
            slow = -(-self.missing_elements(layout, fast, slow_reduced) // self.fast_ranks)
        return self.min_cost(missing * self.itemsize, slow * self.itemsize)

    def min_cost(self, nbytes: int, slow_nbytes: int) -> float:
        """Return the least cost of a launch that moves `nbytes`, `slow_nbytes` between nodes."""
        if self.topology is None:
            return nbytes + LAUNCH_COST
        latency, fastest, slower = self.speeds
        # A collective over several nodes uses both links at once.
        time = max(slow_nbytes / slower, nbytes / fastest)
        return self.topology.launch + latency + time

    def missing_elements(self, layout: SearchLayout, within: frozenset[str], reduced: Axes) -> int:
        """Return the elements that the worst rank, or group of ranks along `within`, misses.

        Even layouts only. After the common major axes of a dim, different axes on both sides leave
        some rank without any needed element, and axes of the source alone leave it an n-th. Axes
        still to be reduced: each rank receives all that it needs, and all ranks together receive
        one message an element for all but one partial sum, and for all but one copy.
        """
        needed = available = 1
        for dim, (length, have) in enumerate(zip(self.src.shape, layout.dims, strict=True)):
            key = dim, have, within
            overlap = self.dim_overlaps.get(key)
            if overlap is None:
                need = self.goal.dims[dim]
                overlap = even_dim_overlap(length, self.size, have, need, within)
                self.dim_overlaps[key] = overlap
            needed *= overlap[0]
            available *= overlap[1]
        if self.num_ranks(reduced) == 1:
            return needed - available
        return self._reduction_elements(needed, within, reduced)

    def missing_uneven(self, layout: SearchLayout, within: frozenset[str], reduced: Axes) -> int:
        """Return the same as `missing_elements`, for shards of any sizes."""
        if self.num_ranks(reduced) == 1:
            return self.missing_between(layout, self.goal, 1, within)
        needed = self.nbytes(self.goal) // self.itemsize
        return self._reduction_elements(needed, within, reduced)

    def missing_between(
        self,
        before: SearchLayout,
        after: SearchLayout,
        reduced_ranks: int,
        within: Collection[str] = (),
        max_ranks: int = MAX_RANKS,
    ) -> int:
        """Return the elements that some rank must receive between layouts of any sizes."""
        have, need = _dim_shards(before), _dim_shards(after)
        return self.overlap(max_ranks).max_lack(have, need, reduced_ranks, within)

    def _reduction_elements(self, needed: int, within: frozenset[str], reduced: Axes) -> int:
        """Return the elements received to reduce over `reduced` if a rank needs `needed`."""
        groups = copies = 1
        for axis, size in self.size.items():
            if axis not in within:
                groups *= size
                copies *= size if self.goals[axis][0] in ("invariant", "reduced") else 1
        messages = self.num_ranks(reduced) - 1 + copies - 1
        return max(needed, -(-math.prod(self.src.shape) * messages // groups))


def _num_common(have: Axes, need: Axes) -> int:
    """Return the number of major axes that both have in common."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(have, need, strict=False))
    return sum(1 for _ in same)


def _dim_shards(layout: SearchLayout) -> DimShardings:
    """Return the axes and the shard sizes of each dim."""
    return tuple(zip(layout.dims, layout.sizes, strict=True))


def _is_plain(topology: Topology) -> bool:
    """Return True if several axes have the slowest of their links, also in exchanges."""
    links = (topology.inner, topology.outer, *(link for _, link in topology.links))
    plain = all(isinstance(link, Link) and link.exchange is None for link in links)
    return plain and not any(JOIN in name for name, _ in topology.links)
