"""`prog.simplify(topology)`: rewrites that keep source, target and value and lower the cost.

Every step but a cast keeps the global value, so all steps between the same two layouts mean the
same. A rule therefore needs no proof of its own: it names other layouts to go through, the steps
between them are the cheapest single ones that type-check, and the cost decides. Four rules make

- inverse steps cancel, and neighbours fuse: all-reduce and slice into reduce-scatter, gather and
  slice into all-to-all, an all-reduce of what was only made unreduced into nothing or a gather
  (`_straight`: the identities of Shardy's and of JAX's collectives on typed values);
- steps that do not depend on each other trade places, to do the cheap one first and to bring
  together what fuses (`_last_first`, `_first_last`);
- slices go ahead of moves and gathers behind, also into other dims or along some of the axes
  (`_around`: the normal form of Rink et al., arXiv 2112.01075).

Casts alone have laws of their own (`program/cast_rules.py`), and no sum changes under a cast
(`_keeps_addends`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from fshard._util.errors import ShardingError, raise_if
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.cast_rules import holds, passes
from fshard.program.cost.model import step_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes
from fshard.program.infer import infer
from fshard.program.program import Program, exclude_problems, simplify_hook, wire_specs
from fshard.program.single_step import single_steps
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    InvariantToReduced,
    ReduceScatter,
    Remesh,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from fshard.program.transpose import transpose

__all__ = ["simplify"]

Path = tuple[Spec, ...]
Steps = tuple[Step, ...]
Rule = Callable[[Path, Steps], Iterator[Path]]
"""Other paths with the same ends as a stretch of a program, whose layouts and steps are given."""


class Price(NamedTuple):
    """Of steps: seconds, seconds with those of the transpose, and how many steps there are."""

    time: float
    both: float
    steps: int

    def less(self, other: Price) -> Price:
        """The difference."""
        times = self.time - other.time, self.both - other.both
        return Price(*times, self.steps - other.steps)


class Found(NamedTuple):
    """Steps that take the place of those from `start` to `stop`, and what that saves."""

    saved: Price
    start: int
    stop: int
    steps: Steps


@dataclass(frozen=True, slots=True)
class Market:
    """What sets prices: a topology, the dtypes that are sent, step types that are not for sale."""

    topology: Topology
    forward: torch.dtype | None
    backward: torch.dtype | None
    linear: bool
    exclude: tuple[type, ...]

    def price(self, step: Step, src: Spec, dst: Spec) -> Price:
        """Of one step, with its transpose where the program has one."""
        ends = _sent(src, self.forward), _sent(dst, self.forward)
        time = step_time(self.topology, step, *ends)
        if not self.linear:
            return Price(time, time, 1)
        back = _sent(dst.dual, self.backward), _sent(src.dual, self.backward)
        return Price(time, time + step_time(self.topology, transpose(step, src), *back), 1)


def _sent(spec: Spec, dtype: torch.dtype | None) -> Spec:
    """The spec in the dtype that is sent, where that is another one."""
    return spec if dtype is None else spec._with(dtype=dtype)


@simplify_hook.set
@lru_cache(maxsize=4096)
def simplify(prog: Program, topology: Topology, exclude: tuple[type, ...] = ()) -> Program:
    """The program after all rewrites that pay; `Program.simplify` documents it."""
    raise_if("Program.simplify", exclude_problems(exclude))
    linear = prog.is_linear and prog.src.dtype != torch.bool  # reduced booleans have no dual
    market = Market(topology, prog.forward_dtype, prog.backward_dtype, linear, exclude)
    most = max(map(max_local_nbytes, wire_specs(prog)))
    while best := _best(prog, market, most):
        prog = Program(
            prog.src,
            prog.steps[: best.start] + best.steps + prog.steps[best.stop :],
            prog.dst,
            forward_dtype=prog.forward_dtype,
            backward_dtype=prog.backward_dtype,
            topology=prog.topology,
        )
    return prog


def _best(prog: Program, market: Market, most: int) -> Found | None:
    """The rewrite that saves most, of the longest stretch where there is any."""
    count = len(prog.steps)
    for length in range(count, 0, -1):
        stretches = [(start, start + length) for start in range(count - length + 1)]
        found = [each for ends in stretches for each in _rewrites(prog, *ends, market, most)]
        if found:
            return max(found, key=lambda each: each.saved)  # the first of equals
    return None


def _rewrites(prog: Program, start: int, stop: int, market: Market, most: int) -> Iterator[Found]:
    """Every rewrite of a stretch of the program that saves something and costs nothing.

    `most` are the bytes that the largest layout on the way may have.
    """
    path, steps = prog.specs[start : stop + 1], prog.steps[start:stop]
    now = _sum([market.price(*each) for each in zip(steps, path, path[1:], strict=False)])
    for other in (other for rule in RULES for other in rule(path, steps)):
        legs = _legs(other, now, market)
        if legs is None or any(_over(spec, market, most) for spec in other[1:-1]):
            continue
        saved = now.less(_sum([price for price, _ in legs]))
        pays = (saved.time, saved.steps) > (0.0, 0) and saved.both >= 0.0
        if pays and _keeps_addends(prog, start, stop, other):
            yield Found(saved, start, stop, tuple(step for _, step in legs))


def _sum(prices: list[Price]) -> Price:
    """Exact, so that the same steps in another order cost the same."""
    time, both = (math.fsum(each[kind] for each in prices) for kind in (0, 1))
    return Price(time, both, len(prices))


def _over(spec: Spec, market: Market, most: int) -> bool:
    return max_local_nbytes(_sent(spec, market.forward)) > most


def _keeps_addends(prog: Program, start: int, stop: int, other: Path) -> bool:
    """Whether another path between two layouts rounds nothing that this one does not.

    Other addends of the same sum are as good, but for a cast of them. They can be others only
    where axes become unreduced on the way: in the transpose, where they are no longer reduced.
    A cast that trades places with one step does so by a law of its own.
    """
    now = prog.specs[start : stop + 1]
    dtypes = {spec.dtype for spec in now}
    if len(dtypes) == 2 and len(now) == len(other) == 3:
        return True
    legs = [*itertools.pairwise(now), *itertools.pairwise(other)]
    onwards = [*legs, *itertools.pairwise(prog.specs[stop:])]
    so_far = [*legs, *itertools.pairwise(prog.specs[: start + 1])]
    addends_rounded = any(
        src.dtype != dst.dtype and src.partition.unreduced_kinds for src, dst in onwards
    )
    gradients_rounded = any(
        src.dtype != dst.dtype and src.partition.reduced_kinds for src, dst in so_far
    )
    parts = [(src.partition, dst.partition) for src, dst in legs]
    return not (
        (addends_rounded and any({*q.unreduced_kinds} - {*p.unreduced_kinds} for p, q in parts))
        or (gradients_rounded and any({*p.reduced_kinds} - {*q.reduced_kinds} for p, q in parts))
    )


def _legs(path: Path, now: Price, market: Market) -> list[tuple[Price, Step]] | None:
    """The cheapest single steps along a path; None where some of them cost more than now all."""
    legs = list(itertools.pairwise(path))
    found: dict[int, tuple[Price, Step]] = {}
    for at in sorted(range(len(legs)), key=lambda at: min(at, len(legs) - 1 - at)):
        leg = _cheapest(*legs[at], market)
        if leg is None:
            return None
        found[at] = leg
        if math.fsum(price.time for price, _ in found.values()) > now.time:
            return None
    return [found[at] for at in range(len(legs))]


@lru_cache(maxsize=65536)
def _cheapest(src: Spec, dst: Spec, market: Market) -> tuple[Price, Step] | None:
    """The single step from one spec to another that takes the least time, and its price."""
    offers = [
        (market.price(step, src, dst), step)
        for step in single_steps(src, dst)
        if not isinstance(step, market.exclude)
    ]
    return min(offers, key=lambda each: each[0], default=None)


# -- rules ----------------------------------------------------------------------------


def _straight(path: Path, steps: Steps) -> Iterator[Path]:
    """Straight from the first layout to the last, or nothing where they are the same."""
    if _are_one(path, steps):
        yield path[:1] if path[0] == path[-1] else (path[0], path[-1])


def _are_one(path: Path, steps: Steps) -> bool:
    """Whether steps may become one: no cast among them, or two that lose nothing between them."""
    before, between, *after = (spec.dtype for spec in path)
    if {before, between, *after} == {before}:
        return True
    casts = len(steps) == 2 and all(isinstance(step, Cast) for step in steps)
    return casts and holds(between, before) and holds(between, after[0])


def _last_first(path: Path, steps: Steps) -> Iterator[Path]:
    """The last step done before all others, or joined with the first on its way there."""
    return _moved(path, steps, range(len(steps) - 1, 0, -1))


def _first_last(path: Path, steps: Steps) -> Iterator[Path]:
    """The first step done after all others, or joined with the last on its way there."""
    return _moved(path, steps, range(1, len(steps)))


def _moved(path: Path, steps: Steps, places: range) -> Iterator[Path]:
    """Neighbours trade places, at one place after the other."""
    for at in places:
        pair = steps[at - 1 : at + 1]
        if at == places[-1] and len(steps) > 2 and _are_one(path[at - 1 : at + 2], pair):
            yield path[:at] + path[at + 1 :]
        swapped = _swap(path[at - 1], pair[0], pair[1], path[at + 1])
        if swapped is None:
            return
        first, middle, second = swapped
        path = (*path[:at], middle, *path[at + 1 :])
        steps = (*steps[: at - 1], first, second, *steps[at + 1 :])
    if places:
        yield path


@lru_cache(maxsize=65536)
def _swap(src: Spec, first: Step, second: Step, dst: Spec) -> tuple[Step, Spec, Step] | None:
    """The second step, the layout after it, then the first: where they are independent."""
    if not _casts_pass(src, first, second, dst):
        return None
    for middle in (_after(second, src), _before(first, src, dst)):
        if middle is None:
            continue
        new = _of_type(type(second), src, middle), _of_type(type(first), middle, dst)
        if new[0] is not None and new[1] is not None:
            return new[0], middle, new[1]
    return None


def _of_type(kind: type, src: Spec, dst: Spec) -> Step | None:
    return next((step for step in single_steps(src, dst) if isinstance(step, kind)), None)


def _after(step: Step, spec: Spec) -> Spec | None:
    try:
        return infer(step, spec)
    except ShardingError:
        return None


def _before(step: Step, src: Spec, dst: Spec) -> Spec | None:
    """The layout that a step of `src` would make `dst` of: what its transpose makes of the dual."""
    try:
        return infer(transpose(step, src), dst.dual).dual
    except ShardingError:
        return None


def _casts_pass(src: Spec, first: Step, second: Step, dst: Spec) -> bool:
    """Whether no cast among two steps keeps them from trading places."""
    between = infer(first, src)
    if isinstance(first, Cast):
        return passes(second, between, dst)
    return not isinstance(second, Cast) or passes(first, src, between)


def _around(path: Path, steps: Steps) -> Iterator[Path]:
    """Through what one of the steps, done first, would make of the source, or last the target.

    An exchange does several things at once: what it slices or reduces may go first. So may a
    permutation that brings the axes that stay in a dim to the front, in their last order.
    """
    src, dst = path[0], path[-1]
    if len({spec.dtype for spec in path}) > 1:
        return
    early = [spec for step in steps for spec in _made(step, src)]
    late = [spec for each in zip(steps, path, strict=False) for spec in _made_back(*each, dst)]
    if any(isinstance(step, Exchange) for step in steps) and src.mesh == dst.mesh:
        early += _parts_of_exchange(src, dst)
        late += _parts_back(src, dst)
    if src.mesh == dst.mesh:
        early.append(_in_order_of(dst, src))
        late.append(_in_order_of(src, dst))
    first, last = dict.fromkeys(early), dict.fromkeys(late)
    yield from ((src, way, dst) for way in first | last)
    yield from ((src, *ways, dst) for ways in itertools.product(first, last))


def _in_order_of(other: Spec, spec: Spec) -> Spec:
    """The spec with the axes of each dim that the other has there in front, all in its order."""
    p, order = spec.partition, [axis for axes in other.partition.dims for axis in axes]
    places = {axis: place for place, axis in enumerate(order)}
    dims = tuple(
        tuple(sorted(axes, key=lambda axis: (axis not in mine, places.get(axis, len(order)))))
        for axes, mine in zip(p.dims, other.partition.dims, strict=True)
    )
    return spec._with(partition=PartitionSpec._of(dims, p.unreduced_kinds, p.reduced_kinds))


def _made_back(step: Step, src: Spec, dst: Spec) -> list[Spec]:
    try:
        return [spec.dual for spec in _made(transpose(step, src), dst.dual)]
    except ShardingError:
        return []


def _parts_back(src: Spec, dst: Spec) -> list[Spec]:
    try:
        return [spec.dual for spec in _parts_of_exchange(dst.dual, src.dual)]
    except ShardingError:
        return []


@lru_cache(maxsize=65536)
def _parts_of_exchange(src: Spec, dst: Spec) -> tuple[Spec, ...]:
    """What slices and reductions make of a layout along axes that become sharded, or whole."""
    p, q = src.partition, dst.partition
    sharded = {axis for axes in p.dims for axis in axes}
    runs = [run for axes in q.dims for run in _runs(axes) if sharded.isdisjoint(run)]
    steps: list[Step] = [
        (ReduceScatter if run[0] in p.unreduced else AllSlice)(run, dim)
        for run, dim in itertools.product(runs, range(src.ndim))
    ]
    steps += [AllReduce((axis,)) for axis in p.unreduced if axis not in q.unreduced]
    made = (_after(step, src) for step in steps)
    return tuple(each for each in made if each is not None)


@lru_cache(maxsize=65536)
def _made(step: Step, spec: Spec) -> tuple[Spec, ...]:
    """What a step, or a part of it, into this dim or another, makes of a layout."""
    made = (_after(each, spec) for each in _alike(step, spec.ndim))
    return tuple(dict.fromkeys(each for each in made if each is not None))


def _alike(step: Step, ndim: int) -> Iterator[Step]:
    """Steps that do the same to some of the axes."""
    if isinstance(step, Cast | CollectivePermute | Exchange | Remesh):
        return
    if isinstance(step, AllToAll):
        for pair, dim in itertools.product(step.pairs, range(ndim)):
            for axes in _runs(pair.axes):
                yield AllToAll(axes, pair.src_dim, dim)
        return
    for axes in _runs(step.axes):
        match step:
            case AllSlice():
                yield from (AllSlice(axes, dim) for dim in range(ndim))
                yield InvariantToReduced(axes)
                yield ReplicatedToUnreduced(axes)
            case AllReduce() | ReduceScatter():
                yield from (ReduceScatter(axes, dim) for dim in range(ndim))
                yield AllReduce(axes)
            case AllGather() | ShardedToUnreduced():
                yield from (AllGather(axes, dim) for dim in range(ndim))
                yield from (ShardedToUnreduced(axes, dim) for dim in range(ndim))
            case _:
                yield replace(step, axes=axes)


def _runs(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every stretch of neighbours."""
    for start, stop in itertools.combinations(range(len(axes) + 1), 2):
        yield axes[start:stop]


RULES: tuple[Rule, ...] = (_straight, _last_first, _first_last, _around)
"""In the order in which equals are preferred."""
