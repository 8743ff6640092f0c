"""The roles of the axes that a call takes the least time with.

Every axis is weighed for itself, so the work grows with the number of axes and of what each can
do, not with their product. What axes cannot say alone - results that others leave whole, sizes of
shards that differ - only adds to their sum, so combinations are looked at by their sums, and no
more of them once the sums are above the best there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fshard.mesh import Mesh
from fshard.ops.call import Call
from fshard.ops.roles import Role, State, factor_sizes, roles_of, states_of
from fshard.ops.rule import Rule
from fshard.ops.strategy import Strategy, lay
from fshard.ops.weigh import compute_time, leftover, moving, nbytes, undone
from fshard.partition_spec import LINEAR, PartitionSpec
from fshard.program.cost import max_local_nbytes
from fshard.program.topology import Topology
from fshard.spec import Spec

__all__ = ["choose"]

KEPT = 6
"""How many alternatives are told of."""


class _Option(NamedTuple):
    """A role that an axis may have, and what it is weighed by: seconds, and of equals the order.

    Equals are told apart by the gradient's way back, and then by the rule's order.
    """

    weight: tuple[float, float, int]
    role: Role
    sends: bool


def choose(
    call: Call,
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
    axes = _axes(call, rule, specs, topology, lengths, grad, local, wished)

    def ways() -> Iterator[tuple[float, Strategy]]:
        """The ways that can be laid out by the axes' sum, which is at most their time."""
        for least, picked in _best_first(list(axes.values())):
            chosen = {axis: each.role for axis, each in zip(axes, picked, strict=True)}
            laid = lay(call, rule, mesh, chosen, specs, lengths)
            if laid is None:
                continue
            time, sends = _joint(mesh, topology, chosen, picked, specs, *laid)
            if not (local and sends):
                yield least, Strategy(call.op, rule, call, tuple(chosen.items()), tuple(specs),
                                      *laid, tree, time, sends, topology, others)  # fmt: skip

    def others() -> tuple[Strategy, ...]:
        return tuple(_least(ways(), 1 + KEPT)[1:])

    found = _least(ways(), 1)
    return found[0] if found else None


def _least(ways: Iterator[tuple[float, Strategy]], count: int) -> list[Strategy]:
    """The `count` ways of the least time, the best first."""
    found: list[Strategy] = []
    for least, way in ways:
        if len(found) >= count and least >= found[count - 1].time:
            break
        found = sorted([*found, way], key=lambda each: each.time)[:count]
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
    call: Call,
    rule: Rule,
    specs: Sequence[Spec],
    topology: Topology,
    lengths: Mapping[str, int],
    grad: bool,
    local: bool,
    wished: Mapping[str, str],
) -> dict[str, list[_Option]]:
    mesh = specs[0].mesh
    states = [states_of(d, s, lengths) for d, s in zip(rule.operands, specs, strict=True)]
    held = [max_local_nbytes(spec) for spec in specs]
    total = compute_time(topology, rule, call, lengths)
    roles = roles_of(rule, call, grad=grad)
    axes: dict[str, list[_Option]] = {}
    for axis in mesh.axes:
        here = [each[axis] for each in states]
        n, link = mesh.shape[axis], topology.link(mesh, axis)
        weighed = []
        for at, role in enumerate(roles):
            asked = role.factor is not None and wished.get(axis) == role.factor
            if not asked and not _plausible(role, here, lengths, n):
                continue
            if not all(_can_be(*ends, grad=grad) for ends in zip(here, role.operands, strict=True)):
                continue
            ways = [
                moving(topology, link, n, src, dst, size, meta.dtype.itemsize)
                for src, dst, size, meta
                in zip(here, role.operands, held, call.operands, strict=True)
            ]  # fmt: skip
            if local and any(way.sends for way in ways):
                continue
            # Of results the least: all other axes may cut them.
            later = sum(
                leftover(topology, link, n, state, nbytes(meta) * n // mesh.size,
                         meta.dtype.itemsize, made=role.factor is not None)
                for meta, state in zip(call.results, role.results, strict=True)
                if meta is not None and state is not None
            )  # fmt: skip
            made = sum(nbytes(meta) * n // mesh.size for meta in call.results if meta is not None)
            later += 0.0 if asked else undone(topology, link, n, here, role, made)
            work = total * n / mesh.size / (n if role.factor else 1)
            time = sum(way.time for way in ways) + later + work
            back = sum(way.back for way in ways)
            weighed.append(_Option((time, back, at), role, any(way.sends for way in ways)))
        axes[axis] = sorted(weighed, key=lambda each: each.weight)
    return axes


def _wished(
    call: Call, rule: Rule, mesh: Mesh, lengths: Mapping[str, int], wish: PartitionSpec | None
) -> dict[str, str]:
    """The factor that each axis cuts where the first result lies as it is wished to."""
    if wish is None or not call.results:
        return {}
    meta, dims = call.results[0], rule.results[0]
    if meta is None or dims is None or len(wish.dims) > len(dims):
        return {}
    spec = Spec(mesh, wish, shape=meta.shape, dtype=meta.dtype, uneven="chunk")
    return {
        axis: dims[state.dim][state.place]
        for axis, state in states_of(dims, spec, lengths).items()
        if state.word == "sharded" and state.place >= 0 and dims[state.dim]
    }


def _plausible(role: Role, here: Sequence[State], lengths: Mapping[str, int], n: int) -> bool:
    """Whether a role is worth weighing: nothing is cut or summed that no operand already is."""
    words = {state.word for state in here}
    if role.factor is not None:
        if not words & {"sharded", "unreduced"}:
            return False
        pairs = zip(here, role.operands, strict=True)
        if any(src.word == "sharded" and src == dst for src, dst in pairs):
            return True
        return lengths[role.factor] % n == 0 and lengths[role.factor] > 0
    if any(state.word == "unreduced" for state in role.operands):
        return any(src == dst and src.word == "unreduced"
                   for src, dst in zip(here, role.operands, strict=True))  # fmt: skip
    if role.name == "reduced":
        return "reduced" in words
    return True


def _can_be(src: State, dst: State, *, grad: bool) -> bool:
    """Whether one program changes a state so, and gradients pass it where they are asked for.

    Candidates of a maximum are no addends, nor are addends candidates; and neutral elements of a
    maximum beside a value have no gradient.
    """
    if dst.word != "unreduced" or src == dst:
        return True
    kinds = {dst.kind, src.kind} if src.word == "unreduced" else {dst.kind}
    return kinds <= set(LINEAR) or (src.word != "unreduced" and not grad)


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
            state = State("unreduced", kind=kind)
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
