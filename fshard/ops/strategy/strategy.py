"""`Strategy`: one way to run one call on layouts, and how its specs are put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fshard._util.text import bytes_text, folded, time_text
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import Kinds, PartitionSpec, chunk_sizes
from fshard.layout.spec import Spec
from fshard.layout.validation import mixed_kinds
from fshard.ops.core.call import Meta, OpCall, name_of
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.strategy.axis_roles import Role, AxisState
from fshard.plan.redistribute import redistribute
from fshard.program.cost.model import Cost
from fshard.program.cost.topology import Topology
from fshard.program.program import Program

__all__ = ["Layouts", "Strategy"]


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
    call: OpCall = field(repr=False)
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


Cuts = tuple[tuple[str, ...], tuple[int, ...] | None]
"""The axes that cut a factor or a dim, and the sizes of its parts where these are not equal."""


class Layouts:
    """The specs of the operands and results of one call, by what its axes do.

    Factors that several axes cut are cut in the order in which the largest operand is; sizes of
    shards are those of an operand that is cut by the same axes, else as `torch.chunk`'s, which
    they also are where operands differ and the largest one's are far from even.
    """

    __slots__ = ("_call", "_dims", "_known", "_lengths", "_mesh", "_places", "_rule", "_sources")

    def __init__(
        self,
        call: OpCall,
        rule: Rule,
        mesh: Mesh,
        sources: Sequence[Spec],
        lengths: Mapping[str, int],
    ) -> None:
        self._call, self._rule, self._mesh = call, rule, mesh
        self._sources, self._lengths = sources, lengths
        self._places: dict[str, list[tuple[int, int]]] = {}
        largest = sorted(range(len(sources)), key=lambda at: -sources[at].nbytes)
        for at in largest:
            for dim, factors in enumerate(rule.operands[at]):
                for factor in factors:
                    self._places.setdefault(factor, []).append((at, dim))
        read = (dims for at, dims in enumerate(rule.operands) if at not in rule.unread)
        made = (d for d, meta in zip(rule.results, call.results, strict=True) if d and meta)
        self._dims = tuple(dict.fromkeys(dim for dims in (*made, *read) for dim in dims))
        self._known: dict[tuple[str, tuple[str, ...]], Cuts] = {}

    def specs(
        self, chosen: Mapping[str, Role]
    ) -> tuple[tuple[Spec, ...], tuple[Spec | None, ...]] | None:
        """Those of operands and of results under one role for every axis; None if none can be."""
        rule, call, roles = self._rule, self._call, chosen.values()
        cuts = self._cuts(chosen)
        try:
            dims = {dim: self._dim(dim, cuts) for dim in self._dims}
            spec = partial(_spec, self._mesh, tuple(chosen), dims)
            ins = tuple(
                self._sources[at] if at in rule.unread
                else spec(dims, meta, [role.operands[at] for role in roles])
                for at, (dims, meta) in enumerate(zip(rule.operands, call.operands, strict=True))
            )  # fmt: skip
            outs = tuple(
                None if dims is None or meta is None
                else spec(dims, meta, [role.results[at] for role in roles])
                for at, (dims, meta) in enumerate(zip(rule.results, call.results, strict=True))
            )  # fmt: skip
        except _Infeasible:
            return None
        return ins, outs

    def _cuts(self, chosen: Mapping[str, Role]) -> dict[str, Cuts]:
        """Of every factor that is cut the axes, major to minor, and the sizes of its parts."""
        by_factor: dict[str, tuple[str, ...]] = {}
        for axis, role in chosen.items():
            if role.factor is not None:
                by_factor[role.factor] = (*by_factor.get(role.factor, ()), axis)
        made: dict[str, Cuts] = {}
        for each in by_factor.items():
            if each not in self._known:
                self._known[each] = self._cut(*each)
            made[each[0]] = self._known[each]
        for part in self._rule.slices:
            if part.of in made:
                axes, sizes = made[part.of]
                n = math.prod(self._mesh.shape[axis] for axis in axes)
                parts = sizes or (self._lengths[part.of] // n,) * n
                made[part.name] = axes, part.sizes(parts)
        return made

    def _cut(self, factor: str, axes: tuple[str, ...]) -> Cuts:
        places = self._places.get(factor, [])
        if len(axes) > 1:
            found = [self._sources[at].partition.dims[dim] for at, dim in places]
            seen = dict.fromkeys(axis for dims in found for axis in dims if axis in axes)
            axes = tuple(seen | dict.fromkeys(axes))
        return axes, self._parts(factor, axes, places)

    def _parts(
        self, factor: str, axes: tuple[str, ...], places: Sequence[tuple[int, int]]
    ) -> tuple[int, ...] | None:
        """The sizes of a factor's parts: an operand's own, none if it divides, else chunks.

        Where operands differ some are sent anyway: then no rank is given twice its share of the
        work.
        """
        whole, parts = self._lengths[factor], [self._mesh.shape[axis] for axis in axes]
        n, found = math.prod(parts), list[tuple[int, ...] | None]()
        for at, dim in places:
            factors, spec = self._rule.operands[at][dim], self._sources[at]
            if spec.partition.dims[dim] != axes or factors[0] != factor:
                continue
            own, minor = spec.sizes[dim], math.prod(self._lengths[f] for f in factors[1:])
            if own is None:
                found += [None] if whole % n == 0 else []
            elif minor == 1:
                found.append(own)
            elif minor and all(size % minor == 0 for size in own):
                found.append(tuple(size // minor for size in own))
        if found and (len({*found}) == 1 or max(found[0] or (0,)) < 2 * -(-whole // n)):
            return found[0]
        return None if whole % n == 0 else chunk_sizes(whole, parts)

    def _dim(self, factors: tuple[str, ...], cuts: Mapping[str, Cuts]) -> Cuts:
        """The axes and shard sizes of a dim; all factors before the last cut are cut to ones."""
        if len(factors) == 1:
            axes, sizes = cuts.get(factors[0], UNCUT)
            return axes, None if sizes is None or len({*sizes}) == 1 else sizes
        cut = [at for at, factor in enumerate(factors) if factor in cuts]
        if not cut:
            return UNCUT
        last, axes = cut[-1], tuple(a for at in cut for a in cuts[factors[at]][0])
        before = factors[:last]
        for factor in before:
            others, sizes = cuts.get(factor, UNCUT)
            parts = math.prod(self._mesh.shape[axis] for axis in others)
            if parts != self._lengths[factor] or sizes is not None:
                raise _Infeasible
        sizes = cuts[factors[last]][1]
        if sizes is None:
            return axes, None
        minor = math.prod(self._lengths[f] for f in factors[last + 1 :])
        repeats = math.prod(self._lengths[f] for f in before)
        made = tuple(size * minor for size in sizes) * repeats
        return axes, None if len({*made}) == 1 else made


UNCUT: Cuts = (), None


def _spec(
    mesh: Mesh,
    axes: Sequence[str],
    cuts: Mapping[tuple[str, ...], Cuts],
    dims: Dims,
    meta: Meta,
    states: Sequence[AxisState | None],
) -> Spec:
    """The spec of a tensor whose dims have these factors, in these states on the axes."""
    unreduced: list[tuple[str, str]] = []
    reduced: list[tuple[str, str]] = []
    for axis, state in zip(axes, states, strict=True):
        assert state is not None
        if state.name == "unreduced":
            unreduced.append((axis, state.kind))
        elif state.name == "reduced":
            reduced.append((axis, "sum"))
    kinds: tuple[Kinds, Kinds] = tuple(unreduced), tuple(reduced)
    if len(unreduced) > 1 and mixed_kinds(*kinds):
        raise _Infeasible
    laid, sizes = zip(*[cuts[dim] for dim in dims], strict=True) if dims else ((), ())
    return Spec._of(mesh, PartitionSpec._of(laid, *kinds), meta.shape, meta.dtype, sizes)
