"""The search for the roles of the mesh axes that run a call in the least time.

Every axis is costed by itself, so the work grows with the number of axes and of their roles, not
with the product of the roles. Effects between axes (results that other axes leave unsharded, shard
sizes that differ) only add to the sum over the axes. So combinations are tried in the order of
their sums, and the search ends when the next sum is above the best time. One collective over
several axes can take less than one over each: if the best combination moves an operand over several
axes, the first ones are ordered by the time of their programs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import OpCall
from fshard.ops.core.rule import Rule
from fshard.ops.propagate import role_costs
from fshard.ops.propagate.axis_options import AxisOption, Query, options_by_axis
from fshard.ops.propagate.choice_hints import (
    NO_ARGUMENTS,
    Arguments,
    LayoutHint,
    OperandAxes,
    RoleHint,
    gathers,
)
from fshard.ops.strategy.axis_roles import AxisState, Role, axis_states, factor_sizes
from fshard.ops.strategy.strategy import Layouts, OperandLayouts, Strategy, operand_program
from fshard.plan.search.size_tables import shared_size_tables
from fshard.plan.split_axes import least_cost
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes
from fshard.program.program import num_launches, program_time

MAX_ALTERNATIVES = 6
MAX_PREFERENCES = 7
"""Number of sets of roles that an axis prefers one to the other."""
RELATIVE_TOLERANCE = 0.999
"""Strategies that could be faster by less than a thousandth are not looked for."""


def select_strategy(
    call: OpCall,
    tree: Any,
    rule: Rule,
    specs: Sequence[Spec],
    topology: Topology,
    *,
    grad: bool,
    local: bool = False,
    hint: LayoutHint = None,
    held: OperandAxes = frozenset(),
    kept: OperandAxes = frozenset(),
    arguments: Arguments = NO_ARGUMENTS,
) -> Strategy | None:
    """Return the fastest strategy of a call whose operands have the layouts `specs`.

    Args:
        call: the call.
        tree: the tree of its results.
        rule: the sharding rule of the call.
        specs: the layouts of the operands as given.
        topology: the topology to cost collectives on.
        grad: leave out the roles whose gradients would be wrong.
        local: leave out strategies that send; None is returned if all do.
        hint: the partition that the first result is requested in later, or the roles of the axes,
            which are taken if operands can be redistributed for them.
        held: operands that must stay sharded along axes, where the rule has such a role.
        kept: operands that must stay sharded along axes where the rule has such a role, else one of
            them along any dim: work is not repeated on all ranks, and no such operand is gathered.
        arguments: operands that exist before the call.
    """
    lengths = factor_sizes(rule, call)
    requested = dict(hint.roles) if isinstance(hint, RoleHint) else {}
    factors = _hinted_factors(call, rule, specs[0].mesh, lengths, hint)
    search = _Search(Query(call, rule, specs, topology, lengths, grad, local, factors, requested,
                           held, kept, arguments), tree)  # fmt: skip
    for relaxed in range(MAX_PREFERENCES if held or kept or requested else 1):
        if found := search.fastest(1, relaxed):
            return replace(found[0], _alternatives=lambda: search.alternatives(found[0]))
    return None


class _Search:
    """The search for the fastest strategies of a call whose results have the tree `tree`."""

    def __init__(self, query: Query, tree: Any) -> None:
        self.query, self.tree = query, tree
        self.layouts = Layouts(
            query.call, query.rule, query.specs[0].mesh, query.specs, query.lengths
        )
        self.moves: dict[int, tuple[Strategy, float]] = {}
        """By the id of a strategy, which it keeps alive, the estimated seconds of its programs."""

    def fastest(self, count: int, relaxed: int) -> list[Strategy]:
        """Return the `count` fastest strategies without the first `relaxed` preferences."""
        axes = options_by_axis(self.query, relaxed)
        best = self.least(axes, count)
        if not best or not _moves_several_axes(best[0]):
            return best
        best = []
        with shared_size_tables():
            for strategy in self.least(axes, 1 + MAX_ALTERNATIVES):
                limit = best[count - 1].time if len(best) >= count else math.inf
                planned = self.planned(strategy, limit)
                if planned is not None:
                    best = sorted([*best, planned], key=lambda strategy: strategy.time)
        return best[:count]

    def alternatives(self, best: Strategy) -> tuple[Strategy, ...]:
        """Return the fastest other strategies, also those that keep no operand sharded."""
        others = self.fastest(1 + MAX_ALTERNATIVES, MAX_PREFERENCES)
        return tuple(x for x in others if x.roles != best.roles)[:MAX_ALTERNATIVES]

    def least(self, axes: Sequence[list[AxisOption]], count: int) -> list[Strategy]:
        """Return the strategies of least estimated time; the sum over the axes is a lower bound."""
        best: list[Strategy] = []
        for bound, options in _by_sum(axes):
            if len(best) >= count and bound >= RELATIVE_TOLERANCE * best[count - 1].time:
                break
            strategy = self.combined(options)
            if strategy is not None:
                best = sorted([*best, strategy], key=lambda strategy: strategy.time)[:count]
        return best

    def combined(self, options: Sequence[AxisOption]) -> Strategy | None:
        """Return the strategy of one option per axis, None if no specs have these roles."""
        call, rule, specs, topology, *_ = self.query
        mesh = specs[0].mesh
        roles = {axis: option.role for axis, option in zip(mesh.axes, options, strict=True)}
        in_out = self.layouts.specs(roles)
        if in_out is None:
            return None
        time, sends, moves = _combined_cost(mesh, topology, roles, options, specs, in_out)
        if self.query.local and sends:
            return None
        strategy = Strategy(call.op, rule, call, tuple(roles.items()), tuple(specs), *in_out,
                            self.tree, time, sends, topology)  # fmt: skip
        self.moves[id(strategy)] = strategy, moves
        return strategy

    def planned(self, strategy: Strategy, limit: float) -> Strategy | None:
        """Return a strategy with the time of its programs in place of their estimate.

        Lower bounds stand for programs that are not planned yet; None if the sum exceeds `limit`.
        """
        if not _moves_several_axes(strategy):
            return strategy if strategy.time <= limit else None
        arguments, topology = self.query.arguments, self.query.topology
        ends = list(zip(strategy.sources, strategy.shard_specs, strict=True))
        moves, launched = [least_cost(*pair, topology) for pair in ends], {*arguments.launched}
        for operand in arguments.operands:
            moves[operand] = max(0.0, moves[operand] - topology.launch)
        others = strategy.time - self.moves[id(strategy)][1]
        for operand in range(len(ends)):
            if others + sum(moves) > limit:
                return None
            prog = operand_program(strategy, operand)
            moves[operand] = program_time(prog, topology)
            kinds = gathers(prog.src, prog.dst)
            if operand in arguments.operands and kinds:
                saves = kinds <= launched
                moves[operand] -= num_launches(prog) * topology.launch if saves else 0.0
                launched |= kinds
        return replace(strategy, time=others + sum(moves))


def _by_sum(axes: Sequence[list[AxisOption]]) -> Iterator[tuple[float, tuple[AxisOption, ...]]]:
    """Yield the combinations of the axes' options by the sum of their costs, least first."""
    if not all(axes):
        return
    first = (0,) * len(axes)

    def total(indices: tuple[int, ...]) -> tuple[float, float, int]:
        costs = [options[index].cost for options, index in zip(axes, indices, strict=True)]
        return (sum(c[0] for c in costs), sum(c[1] for c in costs), sum(c[2] for c in costs))

    heap, seen = [(total(first), first)], {first}
    while heap:
        (time, _, _), indices = heapq.heappop(heap)
        yield time, tuple(options[index] for options, index in zip(axes, indices, strict=True))
        for axis, index in enumerate(indices):
            successor = (*indices[:axis], index + 1, *indices[axis + 1 :])
            if index + 1 < len(axes[axis]) and successor not in seen:
                seen.add(successor)
                heapq.heappush(heap, (total(successor), successor))


def _hinted_factors(
    call: OpCall, rule: Rule, mesh: Mesh, lengths: Mapping[str, int], hint: LayoutHint
) -> dict[str, str]:
    """Return the factor that each axis shards where the first result has the hinted partition."""
    if not isinstance(hint, PartitionSpec) or not call.results:
        return {}
    meta, dims = call.results[0], rule.results[0]
    if meta is None or dims is None or len(hint.dims) > len(dims):
        return {}
    spec = Spec(mesh, hint, shape=meta.shape, dtype=meta.dtype, uneven="chunk")
    return {
        axis: dims[state.dim][state.position]
        for axis, state in axis_states(dims, spec, lengths).items()
        if state.name == "sharded" and state.position >= 0 and dims[state.dim]
    }


def _combined_cost(
    mesh: Mesh,
    topology: Topology,
    roles: Mapping[str, Role],
    options: Sequence[AxisOption],
    specs: Sequence[Spec],
    layouts: OperandLayouts,
) -> tuple[float, bool, float]:
    """Return the time of a combination of options, True if it sends, and the time of its moves.

    The sum over the axes assumes results that all axes shard. Added to it are the reductions of
    larger results, the gathers of what other axes have gathered, redistributions between shard
    sizes or axis orders of the same axes, and the halos of windows.
    """
    time = sum(option.cost[0] for option in options)
    sends, moves = any(option.sends for option in options), 0.0
    for spec in layouts.out_specs:
        if spec is None or not spec.partition.unreduced_kinds:
            continue
        local, least = max_local_nbytes(spec), spec.nbytes // mesh.size
        for axis, kind in spec.partition.unreduced_kinds:
            n, link = mesh.shape[axis], topology.link(mesh, axis)
            state = AxisState("unreduced", kind=kind)
            pending = partial(role_costs.pending_reduction_time, topology, link, n, state,
                              item=spec.dtype.itemsize,
                              created=roles[axis].factor is not None)  # fmt: skip
            time += pending(local=local) - pending(local=least * n)
    halos, reductions = (
        [halo.cost(topology) for halo in row if halo]
        for row in (layouts.in_halos, layouts.out_halos)
    )
    moves += sum(cost.time for cost in halos)
    time += sum(cost.time for cost in reductions)
    sends = sends or any(cost.launches for cost in (*halos, *reductions))
    for src, spec, halo in zip(specs, layouts.in_specs, layouts.in_halos, strict=True):
        dst = halo.src if halo else spec
        if any(_is_recut(src, dst, dim) for dim in range(src.ndim)):
            sends = True
            time += topology.launch + max_local_nbytes(src) / topology.inner_link.bandwidth
        time += _later_gathers_time(mesh, topology, src, dst)
    return time + moves, sends, moves + sum(option.moves for option in options)


def _later_gathers_time(mesh: Mesh, topology: Topology, src: Spec, dst: Spec) -> float:
    """Return the seconds that gathers over several axes take beyond each of them on its own."""
    kept = {axis for dim in dst.partition.dims for axis in dim}
    gathered = [axis for dim in src.partition.dims for axis in dim if axis not in kept]
    local, time = max_local_nbytes(src), 0.0
    grown = local
    for axis in gathered:
        n, link = mesh.shape[axis], topology.link(mesh, axis)
        gather = partial(role_costs.gather_time, topology, link, n)
        time += gather(grown) - gather(local)
        grown *= n
    return time


def _moves_several_axes(strategy: Strategy) -> bool:
    """Return True if an operand is sent along several axes, or for other blocks along one."""
    return strategy.sends and any(
        len({axis for axis, _ in _axis_items(src) ^ _axis_items(dst)}) > 1
        or any(_is_recut(src, dst, dim) for dim in range(src.ndim))
        for src, dst in zip(strategy.sources, strategy.shard_specs, strict=True)
    )


def _axis_items(spec: Spec) -> set[tuple[str, object]]:
    """Return the axes that a spec mentions, each with its dim or its kind of reduction."""
    p = spec.partition
    kinds = [*p.unreduced_kinds, *((axis, ("reduced", kind)) for axis, kind in p.reduced_kinds)]
    return {*kinds, *((axis, dim) for dim, axes in enumerate(p.dims) for axis in axes)}


def _is_recut(src: Spec, dst: Spec, dim: int) -> bool:
    """Return True if axes that shard a dim before and after have other blocks of it.

    They keep theirs if they are the major axes both times, in one order and with the same sizes.
    """
    before, after = src.partition.dims[dim], dst.partition.dims[dim]
    count = len({*before} & {*after})
    if before[:count] != after[:count]:
        return True
    return count == len(before) == len(after) > 0 and src.sizes[dim] != dst.sizes[dim]
