"""Local rewrites of programs: `prog.simplify()` keeps source, target and value and lowers the cost.

Every step but a cast and a halo step keeps the global value, so that all steps between the same
two layouts are equivalent. A rule therefore needs no proof: it proposes other layouts to go
through, the steps between them are the cheapest single ones that type-check, and the cost decides.
Four rules suffice:

- inverse steps cancel, and neighbours fuse: all-reduce and slice into reduce-scatter, gather and
  slice into all-to-all, the all-reduce of a value made unreduced just before into nothing or a
  gather (`_direct`: the identities of Shardy's and of JAX's collectives on typed values);
- independent steps trade places, to do the cheap one first and to make those neighbours that
  fuse (`_last_first`, `_first_last`);
- slices go before exchanges of data and gathers behind them, also into other dims or along some of
  the axes (`_around`: the normal form of Rink et al., arXiv 2112.01075).

Casts have rules of their own (`program/cast_rules.py`), and no rewrite changes the rounding of a
sum (`_keeps_rounding`).
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
from fshard.program.cast_rules import commutes, represents
from fshard.program.cost.model import step_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes
from fshard.program.infer import NO_AXES, infer
from fshard.program.program import Program, simplify_hook, wire_specs
from fshard.program.program_arguments import exclude_problems
from fshard.program.single_step import single_steps
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    Exchange,
    HaloExchange,
    HaloReduce,
    InvariantToReduced,
    ReduceScatter,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from fshard.program.transpose import transpose

Path = tuple[Spec, ...]
Steps = tuple[Step, ...]
Rule = Callable[[Path, Steps], Iterator[Path]]
"""Function from the layouts and steps of a stretch of a program to other paths between its ends."""


class _Price(NamedTuple):
    """Seconds of some steps, seconds including their transposes, and the number of steps."""

    time: float
    both: float
    steps: int

    def less(self, other: _Price) -> _Price:
        """Return the difference."""
        times = self.time - other.time, self.both - other.both
        return _Price(*times, self.steps - other.steps)


class _Rewrite(NamedTuple):
    """Steps that replace those from `start` to `stop`, and the price that they save."""

    saved: _Price
    start: int
    stop: int
    steps: Steps


@dataclass(frozen=True, slots=True)
class _Pricing:
    """Options that determine prices: topology, dtypes that are sent, excluded step types."""

    topology: Topology
    forward: torch.dtype | None
    backward: torch.dtype | None
    linear: bool
    exclude: tuple[type, ...]

    def price(self, step: Step, src: Spec, dst: Spec) -> _Price:
        """Return the price of one step, including its transpose if the program has one."""
        ends = _sent(src, self.forward), _sent(dst, self.forward)
        time = step_time(self.topology, step, *ends)
        if not self.linear:
            return _Price(time, time, 1)
        back = _sent(dst.dual, self.backward), _sent(src.dual, self.backward)
        return _Price(time, time + step_time(self.topology, transpose(step, src), *back), 1)


def _sent(spec: Spec, dtype: torch.dtype | None) -> Spec:
    """Return the spec in the dtype that is sent, None for its own."""
    return spec if dtype is None else spec._with(dtype=dtype)


@simplify_hook.set
@lru_cache(maxsize=4096)
def simplify(prog: Program, topology: Topology, exclude: tuple[type, ...] = ()) -> Program:
    """Return the program after all rewrites that lower its cost; see `Program.simplify`."""
    raise_if("Program.simplify", exclude_problems(exclude))
    linear = prog.is_linear and prog.src.dtype != torch.bool  # reduced booleans have no dual
    pricing = _Pricing(topology, prog.forward_dtype, prog.backward_dtype, linear, exclude)
    max_nbytes = max(map(max_local_nbytes, wire_specs(prog)))
    while best := _best(prog, pricing, max_nbytes):
        prog = Program(
            prog.src,
            prog.steps[: best.start] + best.steps + prog.steps[best.stop :],
            prog.dst,
            forward_dtype=prog.forward_dtype,
            backward_dtype=prog.backward_dtype,
            topology=prog.topology,
        )
    return prog


def _best(prog: Program, pricing: _Pricing, max_nbytes: int) -> _Rewrite | None:
    """Return the rewrite that saves most, of the longest stretch that has any."""
    count = len(prog.steps)
    for length in range(count, 0, -1):
        stretches = [(start, start + length) for start in range(count - length + 1)]
        rewrites = [r for ends in stretches for r in _rewrites(prog, *ends, pricing, max_nbytes)]
        if rewrites:
            return max(rewrites, key=lambda rewrite: rewrite.saved)  # the first of equals
    return None


def _rewrites(
    prog: Program, start: int, stop: int, pricing: _Pricing, max_nbytes: int
) -> Iterator[_Rewrite]:
    """Yield every rewrite of a stretch of the program that lowers the cost.

    No layout on the way may have a local of more than `max_nbytes`.
    """
    path, steps = prog.specs[start : stop + 1], prog.steps[start:stop]
    if any(isinstance(step, HaloExchange | HaloReduce) for step in steps):
        return  # they do not keep the global value
    price = _sum([pricing.price(*leg) for leg in zip(steps, path, path[1:], strict=False)])
    for other in (other for rule in RULES for other in rule(path, steps)):
        legs = _legs(other, price, pricing)
        if legs is None or any(_exceeds(spec, pricing, max_nbytes) for spec in other[1:-1]):
            continue
        saved = price.less(_sum([leg_price for leg_price, _ in legs]))
        pays = (saved.time, saved.steps) > (0.0, 0) and saved.both >= 0.0
        if pays and _keeps_rounding(prog, start, stop, other):
            yield _Rewrite(saved, start, stop, tuple(step for _, step in legs))


def _sum(prices: list[_Price]) -> _Price:
    """Return the exact sum, so that the same steps in another order cost the same."""
    time, both = (math.fsum(price[kind] for price in prices) for kind in (0, 1))
    return _Price(time, both, len(prices))


def _exceeds(spec: Spec, pricing: _Pricing, max_nbytes: int) -> bool:
    return max_local_nbytes(_sent(spec, pricing.forward)) > max_nbytes


def _keeps_rounding(prog: Program, start: int, stop: int, other: Path) -> bool:
    """Return True if another path between two layouts rounds no value that the program does not.

    Other partial sums of the same sum are as good, unless they are cast. They differ only if axes
    become unreduced on the way, or, in the transpose, are no longer reduced. A cast that commutes
    with a single step is covered by its own rule.
    """
    path = prog.specs[start : stop + 1]
    dtypes = {spec.dtype for spec in path}
    if len(dtypes) == 2 and len(path) == len(other) == 3:
        return True
    legs = [*itertools.pairwise(path), *itertools.pairwise(other)]
    later = [*legs, *itertools.pairwise(prog.specs[stop:])]
    earlier = [*legs, *itertools.pairwise(prog.specs[: start + 1])]
    partials_cast = any(
        src.dtype != dst.dtype and src.partition.unreduced_kinds for src, dst in later
    )
    gradients_cast = any(
        src.dtype != dst.dtype and src.partition.reduced_kinds for src, dst in earlier
    )
    parts = [(src.partition, dst.partition) for src, dst in legs]
    return not (
        (partials_cast and any({*q.unreduced_kinds} - {*p.unreduced_kinds} for p, q in parts))
        or (gradients_cast and any({*p.reduced_kinds} - {*q.reduced_kinds} for p, q in parts))
    )


def _legs(path: Path, limit: _Price, pricing: _Pricing) -> list[tuple[_Price, Step]] | None:
    """Return the cheapest single steps along a path, None if they take longer than `limit`."""
    ends = list(itertools.pairwise(path))
    legs: dict[int, tuple[_Price, Step]] = {}
    for i in sorted(range(len(ends)), key=lambda i: min(i, len(ends) - 1 - i)):
        leg = _cheapest(*ends[i], pricing)
        if leg is None:
            return None
        legs[i] = leg
        if math.fsum(price.time for price, _ in legs.values()) > limit.time:
            return None
    return [legs[i] for i in range(len(ends))]


@lru_cache(maxsize=65536)
def _cheapest(src: Spec, dst: Spec, pricing: _Pricing) -> tuple[_Price, Step] | None:
    """Return the cheapest single step from one spec to another, with its price."""
    offers = [
        (pricing.price(step, src, dst), step)
        for step in single_steps(src, dst)
        if not isinstance(step, pricing.exclude)
    ]
    return min(offers, key=lambda offer: offer[0], default=None)


# -- rules ----------------------------------------------------------------------------


def _direct(path: Path, steps: Steps) -> Iterator[Path]:
    """Yield the path without intermediate layouts, or of one layout if both ends are the same."""
    if _may_fuse(path, steps):
        yield path[:1] if path[0] == path[-1] else (path[0], path[-1])


def _may_fuse(path: Path, steps: Steps) -> bool:
    """Return True if steps may fuse: no cast, or two whose dtype between holds all values."""
    before, between, *after = (spec.dtype for spec in path)
    if {before, between, *after} == {before}:
        return True
    casts = len(steps) == 2 and all(isinstance(step, Cast) for step in steps)
    return casts and represents(between, before) and represents(between, after[0])


def _last_first(path: Path, steps: Steps) -> Iterator[Path]:
    """Yield the path with the last step done first, or fused with the first."""
    return _trade_places(path, steps, range(len(steps) - 1, 0, -1))


def _first_last(path: Path, steps: Steps) -> Iterator[Path]:
    """Yield the path with the first step done last, or fused with the last."""
    return _trade_places(path, steps, range(1, len(steps)))


def _trade_places(path: Path, steps: Steps, order: range) -> Iterator[Path]:
    """Swap the steps around `path[i]` for each `i` of `order` in turn."""
    for i in order:
        pair = steps[i - 1 : i + 1]
        if i == order[-1] and len(steps) > 2 and _may_fuse(path[i - 1 : i + 2], pair):
            yield path[:i] + path[i + 1 :]
        swapped = _swap(path[i - 1], pair[0], pair[1], path[i + 1])
        if swapped is None:
            return
        first, middle, second = swapped
        path = (*path[:i], middle, *path[i + 1 :])
        steps = (*steps[: i - 1], first, second, *steps[i + 1 :])
    if order:
        yield path


@lru_cache(maxsize=65536)
def _swap(src: Spec, first: Step, second: Step, dst: Spec) -> tuple[Step, Spec, Step] | None:
    """Return the second step, the layout after it, and the first step, if they are independent."""
    if not _casts_commute(src, first, second, dst):
        return None
    for middle in (_after(second, src), _before(first, src, dst)):
        if middle is None:
            continue
        new = _step_of_type(type(second), src, middle), _step_of_type(type(first), middle, dst)
        if new[0] is not None and new[1] is not None:
            return new[0], middle, new[1]
    return None


def _step_of_type(kind: type, src: Spec, dst: Spec) -> Step | None:
    return next((step for step in single_steps(src, dst) if isinstance(step, kind)), None)


def _after(step: Step, spec: Spec) -> Spec | None:
    try:
        return infer(step, spec)
    except ShardingError:
        return None


def _before(step: Step, src: Spec, dst: Spec) -> Spec | None:
    """Return the layout from which a step of `src` leads to `dst`, by transposing the step."""
    try:
        return infer(transpose(step, src), dst.dual).dual
    except ShardingError:
        return None


def _casts_commute(src: Spec, first: Step, second: Step, dst: Spec) -> bool:
    """Return True if casts among two steps commute with the other step."""
    between = infer(first, src)
    if isinstance(first, Cast):
        return commutes(second, between, dst)
    return not isinstance(second, Cast) or commutes(first, src, between)


def _around(path: Path, steps: Steps) -> Iterator[Path]:
    """Yield paths through results of one of the steps, or of a part of it, done first or last.

    An exchange does several things at once, and its slices and reductions may go first. So may a
    permutation that moves the axes that stay in a dim to the front, in their final order.
    """
    src, dst = path[0], path[-1]
    if len({spec.dtype for spec in path}) > 1:
        return
    early = [spec for step in steps for spec in _results(step, src)]
    late = [spec for leg in zip(steps, path, strict=False) for spec in _results_back(*leg, dst)]
    if any(isinstance(step, Exchange) for step in steps) and src.mesh == dst.mesh:
        early += _exchange_parts(src, dst)
        late += _exchange_parts_back(src, dst)
    if src.mesh == dst.mesh:
        early.append(_in_order_of(dst, src))
        late.append(_in_order_of(src, dst))
    first, last = dict.fromkeys(early), dict.fromkeys(late)
    yield from ((src, middle, dst) for middle in first | last)
    yield from ((src, *pair, dst) for pair in itertools.product(first, last))


def _in_order_of(other: Spec, spec: Spec) -> Spec:
    """Return the spec with axes that `other` has in the same dim in front, all in its order."""
    p, order = spec.partition, [axis for axes in other.partition.dims for axis in axes]
    ranking = {axis: i for i, axis in enumerate(order)}
    dims = tuple(
        tuple(sorted(axes, key=lambda axis: (axis not in same, ranking.get(axis, len(order)))))
        for axes, same in zip(p.dims, other.partition.dims, strict=True)
    )
    return spec._with(partition=PartitionSpec._of(dims, p.unreduced_kinds, p.reduced_kinds))


def _results_back(step: Step, src: Spec, dst: Spec) -> list[Spec]:
    try:
        return [spec.dual for spec in _results(transpose(step, src), dst.dual)]
    except ShardingError:
        return []


def _exchange_parts_back(src: Spec, dst: Spec) -> list[Spec]:
    try:
        return [spec.dual for spec in _exchange_parts(dst.dual, src.dual)]
    except ShardingError:
        return []


@lru_cache(maxsize=65536)
def _exchange_parts(src: Spec, dst: Spec) -> tuple[Spec, ...]:
    """Return layouts after slices and reductions along axes that an exchange shards or reduces."""
    p, q = src.partition, dst.partition
    sharded = {axis for axes in p.dims for axis in axes}
    runs = [run for axes in q.dims for run in _runs(axes) if sharded.isdisjoint(run)]
    steps: list[Step] = [
        (ReduceScatter if run[0] in p.unreduced else AllSlice)(run, dim)
        for run, dim in itertools.product(runs, range(src.ndim))
    ]
    steps += [AllReduce((axis,)) for axis in p.unreduced if axis not in q.unreduced]
    results = (_after(step, src) for step in steps)
    return tuple(spec for spec in results if spec is not None)


@lru_cache(maxsize=65536)
def _results(step: Step, spec: Spec) -> tuple[Spec, ...]:
    """Return the layouts after a step, or a part of it, into any dim."""
    results = (_after(similar, spec) for similar in _similar_steps(step, spec.ndim))
    return tuple(dict.fromkeys(result for result in results if result is not None))


def _similar_steps(step: Step, ndim: int) -> Iterator[Step]:
    """Yield steps that do the same to some of the axes."""
    if isinstance(step, NO_AXES):
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
    """Yield every run of consecutive axes."""
    for start, stop in itertools.combinations(range(len(axes) + 1), 2):
        yield axes[start:stop]


RULES: tuple[Rule, ...] = (_direct, _last_first, _first_last, _around)
"""Rules, in the order in which equally good rewrites are preferred."""
