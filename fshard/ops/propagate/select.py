"""The roles of the axes that a call takes the least time with.

Every axis is weighed for itself, so the work grows with the number of axes and of what each can
do, not with their product. What axes cannot say alone - results that others leave whole, sizes of
shards that differ - only adds to their sum, so combinations are looked at by their sums, and no
more of them once the sums are above the best there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import LINEAR, PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import OpCall
from fshard.ops.core.rule import Mode, Rule
from fshard.ops.propagate.weights import Weight, compute_time, leftover, moving, nbytes, undone
from fshard.ops.strategy.axis_roles import Role, AxisState, factor_sizes, roles_of, axis_states
from fshard.ops.strategy.strategy import Layouts, Strategy
from fshard.program.cost.model import max_local_nbytes
from fshard.program.cost.topology import Link, Topology

__all__ = ["choose"]

KEPT = 6
"""How many alternatives are told of."""
ALIKE = 0.999


class _Option(NamedTuple):
    """A role that an axis may have, and what it is weighed by: seconds, and of equals the order.

    Equals are told apart by the gradient's way back, and then by the rule's order.
    """

    weight: tuple[float, float, int]
    role: Role
    sends: bool


def choose(
    call: OpCall,
    tree: Any,
    rule: Rule,
    specs: Sequence[Spec],
    topology: Topology,
    *,
    grad: bool,
    local: bool = False,
    wish: PartitionSpec | None = None,
) -> Strategy | None:
    """The best strategy of a call whose operands lie as `specs`.

    With `local` the best that sends nothing; None if there is none.
    """
    mesh = specs[0].mesh
    lengths = factor_sizes(rule, call)
    wished = _wished(call, rule, mesh, lengths, wish)
    layouts = Layouts(call, rule, mesh, specs, lengths)
    axes = _axes(call, rule, specs, topology, lengths, grad, local, wished)

    def way(picked: Sequence[_Option]) -> Strategy | None:
        """These options together, where they can be laid out."""
        chosen = {axis: each.role for axis, each in zip(axes, picked, strict=True)}
        laid = layouts.specs(chosen)
        if laid is None:
            return None
        time, sends = _joint(mesh, topology, chosen, picked, specs, *laid)
        if local and sends:
            return None
        return Strategy(call.op, rule, call, tuple(chosen.items()), tuple(specs),
                        *laid, tree, time, sends, topology, others)  # fmt: skip

    def others() -> tuple[Strategy, ...]:
        return tuple(_least(list(axes.values()), way, 1 + KEPT)[1:])

    found = _least(list(axes.values()), way, 1)
    return found[0] if found else None


def _least(
    axes: Sequence[list[_Option]], way: Callable[[Sequence[_Option]], Strategy | None], count: int
) -> list[Strategy]:
    """The `count` ways of the least time, the best first: none takes less than its axes' sum.

    Those that could be faster by a thousandth at the most are not looked at: small tensors have
    many.
    """
    found: list[Strategy] = []
    for least, picked in _best_first(axes):
        if len(found) >= count and least >= ALIKE * found[count - 1].time:
            break
        made = way(picked)
        if made is not None:
            found = sorted([*found, made], key=lambda each: each.time)[:count]
    return found


def _best_first(axes: Sequence[list[_Option]]) -> Iterator[tuple[float, tuple[_Option, ...]]]:
    """The combinations of the axes' options by their sums, least first."""
    if not all(axes):
        return
    first = (0,) * len(axes)

    def weight(places: tuple[int, ...]) -> tuple[float, float, int]:
        picked = [options[at].weight for options, at in zip(axes, places, strict=True)]
        return (sum(w[0] for w in picked), sum(w[1] for w in picked), sum(w[2] for w in picked))

    heap, seen = [(weight(first), first)], {first}
    while heap:
        (time, _, _), places = heapq.heappop(heap)
        yield time, tuple(options[at] for options, at in zip(axes, places, strict=True))
        for axis, at in enumerate(places):
            other = (*places[:axis], at + 1, *places[axis + 1 :])
            if at + 1 < len(axes[axis]) and other not in seen:
                seen.add(other)
                heapq.heappush(heap, (weight(other), other))


def _axes(
    call: OpCall,
    rule: Rule,
    specs: Sequence[Spec],
    topology: Topology,
    lengths: Mapping[str, int],
    grad: bool,
    local: bool,
    wished: Mapping[str, str],
) -> dict[str, list[_Option]]:
    mesh = specs[0].mesh
    states = [axis_states(d, s, lengths) for d, s in zip(rule.operands, specs, strict=True)]
    held = [(max_local_nbytes(spec), spec.dtype.itemsize) for spec in specs]
    made = [(0, 1) if m is None else (nbytes(m), m.dtype.itemsize) for m in call.results]
    total = compute_time(topology, rule, call, lengths)
    roles = roles_of(rule, call, grad=grad)
    axes: dict[str, list[_Option]] = {}
    alike: dict[tuple[Any, ...], list[_Option]] = {}
    for axis in mesh.axes:
        n, link, wish = mesh.shape[axis], topology.link(mesh, axis), wished.get(axis)
        on = tuple(each[axis] for each in states)
        key = n, link, wish, on
        if key not in alike:
            # Of results the least: all other axes may cut them.
            least = [(size * n // mesh.size, item) for size, item in made]
            words = frozenset(state.name for state in on)
            here = _Here(topology, link, n, on, words, held, least, total * n / mesh.size, lengths,
                         grad, local, [{} for _ in specs])  # fmt: skip
            found = (_weighed(role, at, here, role.factor is not None and role.factor == wish)
                     for at, role in enumerate(roles))  # fmt: skip
            alike[key] = sorted((each for each in found if each), key=lambda each: each.weight)
        axes[axis] = alike[key]
    return axes


class _Here(NamedTuple):
    """An axis of `n`, the states of the operands on it, and what its roles are weighed with.

    `held` and `made` are bytes of operands and results, each with those of an element; `ways` are
    those of every operand that were weighed before, by the state that they lead to.
    """

    topology: Topology
    link: Link
    n: int
    states: Sequence[AxisState]
    words: frozenset[str]
    held: list[tuple[int, int]]
    made: list[tuple[int, int]]
    work: float
    lengths: Mapping[str, int]
    grad: bool
    local: bool
    ways: list[dict[AxisState, Weight | None]]


def _weighed(role: Role, at: int, here: _Here, asked: bool) -> _Option | None:
    """A role on an axis; None where it is not worth weighing, or cannot be."""
    topology, link, n = here.topology, here.link, here.n
    if not asked and not _plausible(role, here):
        return None
    time = back = 0.0
    sends = False
    for place, dst in enumerate(role.operands):
        known = here.ways[place]
        way = known[dst] if dst in known else _way(here, place, dst)
        if way is None:
            return None
        time, back, sends = time + way.time, back + way.back, sends or way.sends
    cuts = role.factor is not None
    for state, (size, item) in zip(role.results, here.made, strict=True):
        if state is not None and state.name == "unreduced":
            time += leftover(topology, link, n, state, size, item, made=cuts)
    if cuts and not asked:
        time += undone(topology, link, n, here.states, role, sum(size for size, _ in here.made))
    return _Option((time + here.work / (n if cuts else 1), back, at), role, sends)


def _way(here: _Here, place: int, dst: AxisState) -> Weight | None:
    """An operand's way to a state; None where it has none, or none that will do."""
    src, (size, item) = here.states[place], here.held[place]
    way = None
    if _can_be(src, dst, grad=here.grad):
        way = moving(here.topology, here.link, here.n, src, dst, size, item)
        way = None if here.local and way.sends else way
    here.ways[place][dst] = way
    return way


def _wished(
    call: OpCall, rule: Rule, mesh: Mesh, lengths: Mapping[str, int], wish: PartitionSpec | None
) -> dict[str, str]:
    """The factor that each axis cuts where the first result lies as it is wished to."""
    if wish is None or not call.results:
        return {}
    meta, dims = call.results[0], rule.results[0]
    if meta is None or dims is None or len(wish.dims) > len(dims):
        return {}
    spec = Spec(mesh, wish, shape=meta.shape, dtype=meta.dtype, uneven="chunk")
    return {
        axis: dims[state.dim][state.position]
        for axis, state in axis_states(dims, spec, lengths).items()
        if state.name == "sharded" and state.position >= 0 and dims[state.dim]
    }


def _plausible(role: Role, here: _Here) -> bool:
    """Whether a role is worth weighing: nothing is cut or summed that no operand already is."""
    if role.factor is not None:
        if "sharded" not in here.words and "unreduced" not in here.words:
            return False
        length = here.lengths[role.factor]
        return (length % here.n == 0 and length > 0) or _keeps(role, here.states, "sharded")
    if isinstance(role.label, Mode):
        return "unreduced" in here.words and _keeps(role, here.states, "unreduced")
    return role.label != "reduced" or "reduced" in here.words


def _keeps(role: Role, here: Sequence[AxisState], word: str) -> bool:
    """Whether some operand is in a state of that word, and stays in it."""
    pairs = zip(here, role.operands, strict=True)
    return any(src.name == word and src == dst for src, dst in pairs)


def _can_be(src: AxisState, dst: AxisState, *, grad: bool) -> bool:
    """Whether one program changes a state so, and gradients pass it where they are asked for.

    Candidates of a maximum are no addends, nor are addends candidates; and neutral elements of a
    maximum beside a value have no gradient.
    """
    if dst.name != "unreduced" or src == dst:
        return True
    kinds = {dst.kind, src.kind} if src.name == "unreduced" else {dst.kind}
    return kinds <= set(LINEAR) or (src.name != "unreduced" and not grad)


def _joint(
    mesh: Mesh,
    topology: Topology,
    chosen: Mapping[str, Role],
    picked: Sequence[_Option],
    specs: Sequence[Spec],
    asked: Sequence[Spec],
    made: Sequence[Spec | None],
) -> tuple[float, bool]:
    """Time of a combination, and whether it sends: what the axes say, and what they cannot.

    That are other sizes or another order of the same axes on a dim, and results that the other
    axes leave whole.
    """
    time = sum(each.weight[0] for each in picked)
    sends = any(each.sends for each in picked)
    for spec in made:
        if spec is None or not spec.partition.unreduced_kinds:
            continue
        whole, least = max_local_nbytes(spec), spec.nbytes // mesh.size
        for axis, kind in spec.partition.unreduced_kinds:
            n, link = mesh.shape[axis], topology.link(mesh, axis)
            state = AxisState("unreduced", kind=kind)
            weigh = partial(leftover, topology, link, n, state, item=spec.dtype.itemsize,
                            made=chosen[axis].factor is not None)  # fmt: skip
            time += weigh(local=whole) - weigh(local=least * n)
    for src, dst in zip(specs, asked, strict=True):
        if any(_recut(src, dst, dim) for dim in range(src.ndim)):
            sends = True
            time += topology.launch + max_local_nbytes(src) / topology.inner.bandwidth
    return time, sends


def _recut(src: Spec, dst: Spec, dim: int) -> bool:
    """Whether the same axes cut a dim otherwise."""
    one, other = src.partition.dims[dim], dst.partition.dims[dim]
    return set(one) == set(other) and (one != other or src.sizes[dim] != dst.sizes[dim])
