"""The roles that each mesh axis can take in a call, with their costs, the preferred ones alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fshard.layout.partition_spec import LINEAR
from fshard.layout.spec import Spec
from fshard.ops.core.call import OpCall
from fshard.ops.core.rule import Mode, Rule
from fshard.ops.propagate import role_costs
from fshard.ops.propagate.choice_hints import Arguments, OperandAxes
from fshard.ops.propagate.role_costs import ChangeCost, compute_time, nbytes
from fshard.ops.strategy.axis_roles import AxisState, Role, axis_states, roles_of
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes


class AxisOption(NamedTuple):
    """A role of one axis, its cost, and True if it sends.

    The cost is seconds forward, then, between equals, seconds of the gradients' redistribution,
    then the position of the role in the rule. `moves` are the seconds of it in which operands are
    redistributed, each on its own.
    """

    cost: tuple[float, float, int]
    role: Role
    sends: bool
    moves: float


class Query(NamedTuple):
    """A call whose strategy is selected, and what it is selected by.

    Attributes:
        call: the call.
        rule: the sharding rule of the call.
        specs: the layouts of the operands as given.
        topology: the topology to cost collectives on.
        lengths: the lengths of the rule's factors.
        grad: leave out the roles whose gradients would be wrong.
        local: leave out roles that send.
        factors: the factor that an axis is to shard, by axis, where a later use suggests one.
        roles: the name of the role that is requested for an axis, by axis.
        held: operands that must stay sharded along axes.
        kept: operands of which some must stay sharded along axes.
        arguments: operands that exist before the call.
    """

    call: OpCall
    rule: Rule
    specs: Sequence[Spec]
    topology: Topology
    lengths: Mapping[str, int]
    grad: bool
    local: bool
    factors: Mapping[str, str]
    roles: Mapping[str, str]
    held: OperandAxes
    kept: OperandAxes
    arguments: Arguments


def options_by_axis(query: Query, relaxed: int) -> list[list[AxisOption]]:
    """Return the options of every axis in the order of their costs.

    The first `relaxed` preferences of an axis are left out: no combination of such roles exists.
    """
    _, rule, specs, topology, lengths, *_ = query
    mesh = specs[0].mesh
    states = [axis_states(d, s, lengths) for d, s in zip(rule.operands, specs, strict=True)]
    operands = [(max_local_nbytes(spec), spec.dtype.itemsize) for spec in specs]
    results = [(0, 1) if m is None else (nbytes(m), m.dtype.itemsize) for m in query.call.results]
    total = compute_time(topology, rule, query.call, lengths).total
    roles = roles_of(rule, query.call, grad=query.grad)
    by_axis: list[list[AxisOption]] = []
    cached: dict[tuple[Any, ...], list[AxisOption]] = {}
    for axis in mesh.axes:
        n, links = mesh.shape[axis], role_costs.axis_links(topology, mesh, axis)
        on_axis = tuple(by_name[axis] for by_name in states)
        stays, keeps = (
            frozenset(i for i, of in pairs if of == axis and on_axis[i].name == "sharded")
            for pairs in (query.held, query.kept)
        )
        launched = frozenset(kind[1:] for kind in query.arguments.launched if kind[0] == axis)
        factor, role = query.factors.get(axis), query.roles.get(axis)
        key = n, links, factor, role, stays, keeps, on_axis, launched
        if key not in cached:
            names = frozenset(state.name for state in on_axis)
            # A lower bound for the results: all other axes may shard them.
            least = [(size * n // mesh.size, item) for size, item in results]
            context = _AxisContext(query, links, n, on_axis, names, operands, least,
                                   total * n / mesh.size, launched, factor, role,
                                   [{} for _ in specs])  # fmt: skip
            sets = _preferences(roles, on_axis, stays, keeps)
            if role is not None:
                sets.insert(0, (tuple(r for r in roles if r.name == role), False))
            cached[key] = _preferred(sets[min(relaxed, len(sets) - 1) :], context)
        by_axis.append(cached[key])
    return by_axis


def _preferred(
    sets: Sequence[tuple[tuple[Role, ...], bool]], axis: _AxisContext
) -> list[AxisOption]:
    """Return the options of the first set of roles that has some, in the order of their costs."""
    for roles, uneven in sets:
        options = [_option(role, index, axis, uneven) for index, role in enumerate(roles)]
        if found := [option for option in options if option is not None]:
            return sorted(found, key=lambda option: option.cost)
    return []


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
    """One axis of a call's mesh, and inputs of the cost of its roles.

    Attributes:
        query: the call, and what its strategy is selected by.
        links: the links along the axis.
        n: the number of devices along it.
        states: the states of the operands on it.
        names: the names of these states.
        operands: for each operand its local bytes, and those of an element.
        results: the same of the results.
        work: seconds to compute if the axis shards nothing.
        launched: the kinds of collectives that are launched anyway.
        factor: the factor that a later use suggests, or None.
        role: the name of the role that is requested, or None.
        changes: by operand, known costs of a change to a state.
    """

    query: Query
    links: role_costs.AxisLinks
    n: int
    states: Sequence[AxisState]
    names: frozenset[str]
    operands: Sequence[tuple[int, int]]
    results: Sequence[tuple[int, int]]
    work: float
    launched: frozenset[tuple[str, str, int]]
    factor: str | None
    role: str | None
    changes: list[dict[AxisState, ChangeCost | None]]

    @property
    def unsharded_bytes(self) -> int:
        """The local bytes of all operands, unsharded on this axis."""
        return sum(
            size * (self.n if state.name == "sharded" else 1)
            for (size, _), state in zip(self.operands, self.states, strict=True)
        )

    def suggests(self, role: Role) -> bool:
        """Return True if the role is requested, or shards the factor that a later use suggests."""
        return role.name == self.role or (role.factor is not None and role.factor == self.factor)


def _option(role: Role, index: int, axis: _AxisContext, uneven: bool) -> AxisOption | None:
    """Return a role with its cost on an axis.

    None if a state change is impossible, or if no operand suggests the role (`_is_plausible`).
    """
    hinted = axis.suggests(role)
    topology, links, n = axis.query.topology, axis.links, axis.n
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
        if change.sends and operand in axis.query.arguments.operands:
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
        size = min(sum(size for size, _ in axis.results), axis.unsharded_bytes)
        time += role_costs.new_sharding_time(topology, links, n, axis.states, role, size)
    return AxisOption((time + axis.work / (n if shards else 1), back, index), role, sends, moves)


def _change(axis: _AxisContext, operand: int, dst: AxisState) -> ChangeCost | None:
    """Return the cost to change an operand's state, None if that is impossible or excluded."""
    src, (size, item) = axis.states[operand], axis.operands[operand]
    change = None
    if _can_become(src, dst, grad=axis.query.grad):
        change = role_costs.change_cost(
            axis.query.topology, axis.links, axis.n, src, dst, size, item
        )
        change = None if axis.query.local and change.sends else change
    axis.changes[operand][dst] = change
    return change


def _is_plausible(role: Role, axis: _AxisContext, uneven: bool) -> bool:
    """Return True if the role shards or keeps unreduced only where some operand already is so.

    New shards are of equal sizes, unless they may be `uneven`.
    """
    if role.factor is not None:
        if "sharded" not in axis.names and "unreduced" not in axis.names:
            return False
        length = axis.query.lengths[role.factor]
        divides = length >= axis.n if uneven else length > 0 and length % axis.n == 0
        return divides or _keeps(role, axis.states, "sharded")
    if isinstance(role.label, Mode):
        return "unreduced" in axis.names and _keeps(role, axis.states, "unreduced")
    return role.label != "reduced" or "reduced" in axis.names


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
