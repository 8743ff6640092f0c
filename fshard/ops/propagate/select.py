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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import LINEAR, PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import OpCall
from fshard.ops.core.rule import Mode, Rule
from fshard.ops.propagate import role_costs
from fshard.ops.propagate.choice_hints import (
    NO_ARGUMENTS,
    Arguments,
    LayoutHint,
    OperandAxes,
    RoleHint,
    gathers,
)
from fshard.ops.propagate.role_costs import ChangeCost, compute_time, nbytes
from fshard.ops.strategy.axis_roles import AxisState, Role, axis_states, factor_sizes, roles_of
from fshard.ops.strategy.strategy import Layouts, OperandLayouts, Strategy
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes

MAX_ALTERNATIVES = 6
MAX_PREFERENCES = 7
"""Number of sets of roles that an axis prefers one to the other."""
RELATIVE_TOLERANCE = 0.999
"""Strategies that could be faster by less than a thousandth are not looked for."""


class _Option(NamedTuple):
    """A role of one axis, its cost, and True if it sends.

    The cost is seconds forward, then, between equals, seconds of the gradients' redistribution,
    then the position of the role in the rule. `moves` are the seconds of it in which operands are
    redistributed, each on its own.
    """

    cost: tuple[float, float, int]
    role: Role
    sends: bool
    moves: float


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
    mesh = specs[0].mesh
    lengths = factor_sizes(rule, call)
    requested = dict(hint.roles) if isinstance(hint, RoleHint) else {}
    hinted = _hinted_factors(call, rule, mesh, lengths, hint)
    layouts = Layouts(call, rule, mesh, specs, lengths)
    options = partial(_options_by_axis, call, rule, specs, topology, lengths, grad, local, hinted,
                      requested, held, kept, arguments)  # fmt: skip

    def combine(options: Sequence[_Option]) -> Strategy | None:
        """Return the strategy of one option per axis, None if no specs have these roles."""
        roles = {axis: option.role for axis, option in zip(mesh.axes, options, strict=True)}
        in_out = layouts.specs(roles)
        if in_out is None:
            return None
        time, sends, moves = _combined_cost(mesh, topology, roles, options, specs, in_out)
        if local and sends:
            return None
        strategy = Strategy(call.op, rule, call, tuple(roles.items()), tuple(specs),
                            *in_out, tree, time, sends, topology)  # fmt: skip
        estimated[id(strategy)] = strategy, moves
        return strategy

    estimated: dict[int, tuple[Strategy, float]] = {}

    def planned(strategy: Strategy) -> Strategy:
        """Return a strategy with the time of its programs in place of their estimate."""
        moves, launched = 0.0, {*arguments.launched}
        for operand, prog in enumerate(strategy.programs):
            cost, kinds = prog.cost(topology), gathers(prog.src, prog.dst)
            moves += cost.time
            if operand in arguments.operands and kinds:
                moves -= cost.launches * topology.launch if kinds <= launched else 0.0
                launched |= kinds
        return replace(strategy, time=strategy.time - estimated[id(strategy)][1] + moves)

    def fastest(count: int, relaxed: int) -> list[Strategy]:
        axes = options(relaxed)
        best = _fastest(axes, combine, count)
        if not best or not _moves_several_axes(best[0]):
            return best
        best = _fastest(axes, combine, 1 + MAX_ALTERNATIVES)
        best = [planned(x) if _moves_several_axes(x) else x for x in best]
        return sorted(best, key=lambda strategy: strategy.time)[:count]

    def alternatives(best: Strategy) -> tuple[Strategy, ...]:
        """Return the fastest other strategies, also those that keep no operand sharded."""
        others = fastest(1 + MAX_ALTERNATIVES, MAX_PREFERENCES)
        return tuple(x for x in others if x.roles != best.roles)[:MAX_ALTERNATIVES]

    for relaxed in range(MAX_PREFERENCES if held or kept or requested else 1):
        if found := fastest(1, relaxed):
            return replace(found[0], _alternatives=lambda: alternatives(found[0]))
    return None


def _fastest(
    axes: Sequence[list[_Option]],
    combine: Callable[[Sequence[_Option]], Strategy | None],
    count: int,
) -> list[Strategy]:
    """Return the `count` fastest strategies in order; the sum over the axes is a lower bound."""
    best: list[Strategy] = []
    for bound, options in _by_sum(axes):
        if len(best) >= count and bound >= RELATIVE_TOLERANCE * best[count - 1].time:
            break
        strategy = combine(options)
        if strategy is not None:
            best = sorted([*best, strategy], key=lambda strategy: strategy.time)[:count]
    return best


def _by_sum(axes: Sequence[list[_Option]]) -> Iterator[tuple[float, tuple[_Option, ...]]]:
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


def _options_by_axis(
    call: OpCall,
    rule: Rule,
    specs: Sequence[Spec],
    topology: Topology,
    lengths: Mapping[str, int],
    grad: bool,
    local: bool,
    hinted: Mapping[str, str],
    requested: Mapping[str, str],
    held: OperandAxes,
    kept: OperandAxes,
    arguments: Arguments,
    relaxed: int,
) -> list[list[_Option]]:
    """Return the options of every axis in the order of their costs.

    The first `relaxed` preferences of an axis are left out: no combination of such roles exists.
    """
    mesh = specs[0].mesh
    states = [axis_states(d, s, lengths) for d, s in zip(rule.operands, specs, strict=True)]
    operands = [(max_local_nbytes(spec), spec.dtype.itemsize) for spec in specs]
    results = [(0, 1) if m is None else (nbytes(m), m.dtype.itemsize) for m in call.results]
    total = compute_time(topology, rule, call, lengths)
    roles = roles_of(rule, call, grad=grad)
    by_axis: list[list[_Option]] = []
    cached: dict[tuple[Any, ...], list[_Option]] = {}
    for axis in mesh.axes:
        n, hint = mesh.shape[axis], hinted.get(axis)
        links = role_costs.axis_links(topology, mesh, axis)
        on_axis = tuple(by_name[axis] for by_name in states)
        stays, keeps = (
            frozenset(i for i, of in pairs if of == axis and on_axis[i].name == "sharded")
            for pairs in (held, kept)
        )
        launched = frozenset(kind[1:] for kind in arguments.launched if kind[0] == axis)
        role_name = requested.get(axis)
        key = n, links, hint, role_name, stays, keeps, on_axis, launched
        if key not in cached:
            # A lower bound for the results: all other axes may shard them.
            least = [(size * n // mesh.size, item) for size, item in results]
            names = frozenset(state.name for state in on_axis)
            sources = sum(
                size * (n if state.name == "sharded" else 1)
                for (size, _), state in zip(operands, on_axis, strict=True)
            )
            context = _AxisContext(topology, links, n, on_axis, names, operands, sources, least,
                                   total * n / mesh.size, lengths, grad, local,
                                   arguments.operands, launched,
                                   [{} for _ in specs])  # fmt: skip
            sets = _preferences(roles, on_axis, stays, keeps)
            if role_name is not None:
                requested_roles = tuple(role for role in roles if role.name == role_name)
                sets.insert(0, (requested_roles, False))
            for choice, uneven in sets[min(relaxed, len(sets) - 1) :]:
                options = (
                    _option(role, index, context, role.name == role_name
                            or (role.factor is not None and role.factor == hint), uneven)
                    for index, role in enumerate(choice)
                )  # fmt: skip
                cached[key] = sorted((o for o in options if o), key=lambda option: option.cost)
                if cached[key]:
                    break
        by_axis.append(cached[key])
    return by_axis


def _preferences(
    roles: tuple[Role, ...], states: Sequence[AxisState], held: frozenset[int],
    kept: frozenset[int],
) -> list[tuple[tuple[Role, ...], bool]]:  # fmt: skip
    """Return sets of roles, the most preferred first; the last has all.

    Operands `held` keep their states. So do those `kept`, unless others are sharded too; else the
    results stay sharded along the dims that they then were, as the product of two sharded dims;
    else one of the operands is sharded, evenly or not. With a set comes True if its shards may be
    uneven.
    """
    sharded = frozenset(i for i, state in enumerate(states) if state.name == "sharded")
    stay = tuple(r for r in roles if all(r.operands[i] == states[i] for i in held))
    works = tuple(r for r in roles if any(r.operands[i].name == "sharded" for i in sharded))
    sets = [(stay, False)]
    if kept:
        both = tuple(r for r in stay if r in works)
        sets = [(both, False), (both, True), *sets, (works, False)]
    if kept == sharded:
        exact = tuple(r for r in stay if all(r.operands[i] == states[i] for i in kept))
        dims = {dim for role in exact for dim in role.sharded_dims}
        near = tuple(r for r in stay if r in works and dims & r.sharded_dims)
        sets[:0] = [(exact, False), (near, True)]
    return [*sets, (roles, False)]


class _AxisContext(NamedTuple):
    """One axis of `n` devices, the states of the operands on it, and inputs of the cost of roles.

    `operands` and `results` are pairs of a tensor's local bytes and the bytes of an element;
    `unsharded_operands` are the local bytes of all operands, unsharded on this axis; `work`
    is the seconds to compute if the axis shards nothing; equal collectives of the operands
    `arguments` are one launch, and those in `launched` have none of their own; `changes` caches for
    every operand the cost of a change to a state.
    """

    topology: Topology
    links: role_costs.AxisLinks
    n: int
    states: Sequence[AxisState]
    state_names: frozenset[str]
    operands: list[tuple[int, int]]
    unsharded_operands: int
    results: list[tuple[int, int]]
    work: float
    lengths: Mapping[str, int]
    grad: bool
    local: bool
    arguments: frozenset[int]
    launched: frozenset[tuple[str, str, int]]
    changes: list[dict[AxisState, ChangeCost | None]]


def _option(
    role: Role, index: int, axis: _AxisContext, hinted: bool, uneven: bool
) -> _Option | None:
    """Return a role with its cost on an axis.

    None if a state change is impossible, or if no operand suggests the role (`_is_plausible`).
    """
    topology, links, n = axis.topology, axis.links, axis.n
    if not hinted and not _is_plausible(role, axis, uneven):
        return None
    time = back = saved = 0.0
    sends = False
    launched = {*axis.launched}
    for operand, dst in enumerate(role.operands):
        changes = axis.changes[operand]
        change = changes[dst] if dst in changes else _change(axis, operand, dst)
        if change is None:
            return None
        time, back, sends = time + change.time, back + change.back, sends or change.sends
        if change.sends and operand in axis.arguments:
            kind = axis.states[operand].name, dst.name, axis.operands[operand][1]
            if kind in launched:  # coalesced with that of another argument
                saved += change.startup
            launched.add(kind)
    moves = time = time - saved
    shards = role.factor is not None
    for state, (size, item) in zip(role.results, axis.results, strict=True):
        if state is not None and state.name == "unreduced":
            time += role_costs.pending_reduction_time(
                topology, links.gather, n, state, size, item, created=shards
            )
    if shards and not hinted:
        size = min(sum(size for size, _ in axis.results), axis.unsharded_operands)
        time += role_costs.new_sharding_time(topology, links, n, axis.states, role, size)
    return _Option((time + axis.work / (n if shards else 1), back, index), role, sends, moves)


def _change(axis: _AxisContext, operand: int, dst: AxisState) -> ChangeCost | None:
    """Return the cost to change an operand's state, None if that is impossible or excluded."""
    src, (size, item) = axis.states[operand], axis.operands[operand]
    change = None
    if _can_become(src, dst, grad=axis.grad):
        change = role_costs.change_cost(axis.topology, axis.links, axis.n, src, dst, size, item)
        change = None if axis.local and change.sends else change
    axis.changes[operand][dst] = change
    return change


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


def _is_plausible(role: Role, axis: _AxisContext, uneven: bool) -> bool:
    """Return True if the role shards or keeps unreduced only where some operand already is so.

    New shards are of equal sizes, unless they may be `uneven`.
    """
    if role.factor is not None:
        if "sharded" not in axis.state_names and "unreduced" not in axis.state_names:
            return False
        length = axis.lengths[role.factor]
        divides = length >= axis.n if uneven else length > 0 and length % axis.n == 0
        return divides or _keeps(role, axis.states, "sharded")
    if isinstance(role.label, Mode):
        return "unreduced" in axis.state_names and _keeps(role, axis.states, "unreduced")
    return role.label != "reduced" or "reduced" in axis.state_names


def _keeps(role: Role, states: Sequence[AxisState], name: str) -> bool:
    """Return True if some operand stays in a state of that name, or on a dim without a factor."""
    pairs = [(src, dst) for src, dst in zip(states, role.operands, strict=True) if src.name == name]
    return any(src == dst or (src.position < 0 and src[:2] == dst[:2]) for src, dst in pairs)


def _can_become(src: AxisState, dst: AxisState, *, grad: bool) -> bool:
    """Return True if a program makes the state change, and passes gradients where `grad` is set.

    Unreduced `max` cannot become unreduced `sum`, nor the reverse. The neutral elements of a
    maximum have no gradient.
    """
    if dst.name != "unreduced" or src == dst:
        return True
    kinds = {dst.kind, src.kind} if src.name == "unreduced" else {dst.kind}
    return kinds <= set(LINEAR) or (src.name != "unreduced" and not grad)


def _combined_cost(
    mesh: Mesh,
    topology: Topology,
    roles: Mapping[str, Role],
    options: Sequence[_Option],
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
