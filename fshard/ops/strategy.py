"""`Strategy`: one way to run one call on layouts, and how its specs are put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fshard.layout import mixed_kinds
from fshard.lines import folded
from fshard.mesh import Mesh
from fshard.ops.call import Call, Meta, name_of
from fshard.ops.roles import Role, State
from fshard.ops.rule import Dims, Rule
from fshard.partition_spec import Kinds, PartitionSpec, chunk_sizes
from fshard.plan.redistribute import redistribute
from fshard.program.cost import Cost
from fshard.program.program import Program
from fshard.program.topology import Topology
from fshard.spec import Spec
from fshard.units import bytes_text, time_text

__all__ = ["Strategy", "lay"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Strategy:
    """One way to run a call: what it asks of the operands, what it gives, and what that costs.

    `roles` says of every mesh axis what it does. `sources` are the operands' specs as given,
    `in_specs` as the operation runs on them, `out_specs` those of the results (None where the
    operation returns none). `time` is what the
    ways were ordered by, in seconds: moving, computing, and reducing later what stays unreduced.
    """

    op: Any
    rule: Rule
    call: Call = field(repr=False)
    roles: tuple[tuple[str, Role], ...]
    sources: tuple[Spec, ...]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec | None, ...]
    tree: Any
    time: float
    sends: bool
    topology: Topology | None = field(repr=False)
    _others: Callable[[], tuple[Strategy, ...]] = field(repr=False, default=tuple)

    @property
    def alternatives(self) -> tuple[Strategy, ...]:
        """Other ways, the best first; laid out when they are asked for."""
        return self._others()

    @property
    def programs(self) -> tuple[Program, ...]:
        """For every operand the program from its spec to the one the operation runs on."""
        pairs = zip(self.sources, self.in_specs, strict=True)
        return tuple(redistribute(src, dst, cost=self.topology) for src, dst in pairs)

    @property
    def is_local(self) -> bool:
        """Whether no operand needs communication."""
        return not self.sends or all(prog.is_local for prog in self.programs)

    @property
    def cost(self) -> Cost:
        """The exact cost of the programs, one after the other."""
        return Cost.in_turn(prog.cost(self.topology) for prog in self.programs)

    @property
    def summary(self) -> str:
        """One line: what every axis does, and what must be sent for it."""
        doing = ", ".join(f"{axis}: {role.name}" for axis, role in self.roles)
        cost = self.cost
        if not cost.launches:
            return f"{doing}  (nothing is sent)"
        return f"{doing}  ({bytes_text(cost.bytes_received)} received, {time_text(cost.time)})"

    def __str__(self) -> str:
        made = ", ".join("none" if spec is None else str(spec) for spec in self.out_specs)
        taken = ", ".join(map(str, self.in_specs))
        lines = [*folded(f"{name_of(self.op)}: {taken} -> {made}"), self.summary]
        lines += [
            f"operand {at}: {prog}" for at, prog in enumerate(self.programs) if not prog.is_local
        ]
        return "\n".join(lines)

    __repr__ = __str__


# -- from roles to specs -------------------------------------------------------------------


class _Infeasible(Exception):
    """Roles that no spec can say together."""


def lay(
    call: Call,
    rule: Rule,
    mesh: Mesh,
    chosen: Mapping[str, Role],
    sources: Sequence[Spec],
    lengths: Mapping[str, int],
) -> tuple[tuple[Spec, ...], tuple[Spec | None, ...]] | None:
    """The specs of operands and results under one role for every axis; None if there are none.

    Factors that several axes cut are cut in the order in which the largest operand is; sizes of
    shards are those of an operand that is cut by the same axes, else as `torch.chunk`'s, which
    they also are where operands differ and the largest one's are far from even.
    """
    order, sizes = _cuts(rule, mesh, chosen, sources, lengths)
    cut = _Cut(mesh, chosen, order, sizes, lengths)
    try:
        ins = tuple(
            sources[at] if at in rule.unread
            else cut.spec(dims, meta, [role.operands[at] for role in chosen.values()])
            for at, (dims, meta) in enumerate(zip(rule.operands, call.operands, strict=True))
        )  # fmt: skip
        outs = tuple(
            None if dims is None or meta is None
            else cut.spec(dims, meta, [role.results[at] for role in chosen.values()])
            for at, (dims, meta) in enumerate(zip(rule.results, call.results, strict=True))
        )  # fmt: skip
    except _Infeasible:
        return None
    return ins, outs


Orders = dict[str, tuple[str, ...]]
Sizes = dict[str, tuple[int, ...] | None]


def _cuts(
    rule: Rule,
    mesh: Mesh,
    chosen: Mapping[str, Role],
    sources: Sequence[Spec],
    lengths: Mapping[str, int],
) -> tuple[Orders, Sizes]:
    """Of every factor that is cut the axes, major to minor, and the sizes of its parts."""
    by_factor: dict[str, list[str]] = {}
    for axis, role in chosen.items():
        if role.factor is not None:
            by_factor.setdefault(role.factor, []).append(axis)
    largest = sorted(range(len(sources)), key=lambda at: -sources[at].nbytes)
    order: Orders = {}
    sizes: Sizes = {}
    for factor, axes in by_factor.items():
        seen: list[str] = []
        for at in largest:
            dim = _dim_of(rule.operands[at], factor)
            if dim is not None:
                seen += [a for a in sources[at].partition.dims[dim] if a in axes and a not in seen]
        order[factor] = (*seen, *(axis for axis in axes if axis not in seen))
        sizes[factor] = _parts(rule, mesh, order[factor], factor, sources, largest, lengths)
    for each in rule.slices:
        if each.of in order:
            n = math.prod(mesh.shape[axis] for axis in order[each.of])
            parts = sizes[each.of] or (lengths[each.of] // n,) * n
            order[each.name], sizes[each.name] = order[each.of], each.sizes(parts)
    return order, sizes


def _dim_of(dims: Dims, factor: str) -> int | None:
    return next((at for at, factors in enumerate(dims) if factor in factors), None)


def _parts(
    rule: Rule,
    mesh: Mesh,
    axes: tuple[str, ...],
    factor: str,
    sources: Sequence[Spec],
    largest: Sequence[int],
    lengths: Mapping[str, int],
) -> tuple[int, ...] | None:
    """The sizes of a factor's parts: an operand's own, none if it divides, else chunks.

    Where operands differ some are sent anyway: then no rank is given twice its share of the work.
    """
    whole = lengths[factor]
    parts = [mesh.shape[axis] for axis in axes]
    n, found = math.prod(parts), list[tuple[int, ...] | None]()
    for at in largest:
        dim = _dim_of(rule.operands[at], factor)
        if dim is None:
            continue
        factors, spec = rule.operands[at][dim], sources[at]
        if spec.partition.dims[dim] == axes and factors[0] == factor:
            own, minor = spec.sizes[dim], math.prod(lengths[f] for f in factors[1:])
            if own is None and whole % spec.dim_shards(dim) == 0:
                found.append(None)
            if own is not None and minor and all(size % minor == 0 for size in own):
                found.append(tuple(size // minor for size in own))
    if found and (len({*found}) == 1 or max(found[0] or (0,)) < 2 * -(-whole // n)):
        return found[0]
    return None if whole % n == 0 else chunk_sizes(whole, parts)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How every factor is cut, from which the specs of all tensors follow."""

    mesh: Mesh
    chosen: Mapping[str, Role]
    order: Orders
    sizes: Sizes
    lengths: Mapping[str, int]

    def spec(self, dims: Dims, meta: Meta, states: Sequence[State | None]) -> Spec:
        """The spec of a tensor whose dims have these factors, in these states on the axes."""
        unreduced: list[tuple[str, str]] = []
        reduced: list[tuple[str, str]] = []
        for axis, state in zip(self.chosen, states, strict=True):
            assert state is not None
            if state.word == "unreduced":
                unreduced.append((axis, state.kind))
            elif state.word == "reduced":
                reduced.append((axis, "sum"))
        if mixed_kinds(tuple(unreduced), tuple(reduced)):
            raise _Infeasible
        axes, sizes = zip(*map(self._dim, dims), strict=True) if dims else ((), ())
        kinds: tuple[Kinds, Kinds] = tuple(unreduced), tuple(reduced)
        return Spec._of(self.mesh, PartitionSpec._of(tuple(axes), *kinds), meta.shape, meta.dtype,
                        tuple(sizes))  # fmt: skip

    def _dim(self, factors: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
        """The axes and shard sizes of a dim; all factors before the last cut are cut to ones."""
        cut = [at for at, factor in enumerate(factors) if factor in self.order]
        if not cut:
            return (), None
        last, axes = cut[-1], tuple(a for at in cut for a in self.order[factors[at]])
        before = factors[:last]
        for factor in before:
            parts = math.prod(self.mesh.shape[a] for a in self.order.get(factor, ()))
            if parts != self.lengths[factor] or self.sizes.get(factor) is not None:
                raise _Infeasible
        sizes = self.sizes[factors[last]]
        if sizes is None:
            return axes, None
        minor = math.prod(self.lengths[f] for f in factors[last + 1 :])
        repeats = math.prod(self.lengths[f] for f in before)
        made = tuple(size * minor for size in sizes) * repeats
        return axes, None if len(set(made)) == 1 else made
