"""`Strategy`: one choice of layouts for one operation call, and the specs that its roles imply."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

from fshard._torch.operators import dereference, reference_of
from fshard._util.cache import CACHE_SIZE
from fshard._util.notebook_view import NotebookView
from fshard._util.text import bytes_text, folded, time_text
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import Kinds, PartitionSpec, chunk_sizes
from fshard.layout.spec import Spec
from fshard.layout.validation import has_mixed_reductions
from fshard.ops.core.call import Meta, OpCall, StaticResult, name_of
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.strategy.axis_roles import AxisState, Role
from fshard.plan.redistribute import redistribute
from fshard.program.cost.model import Cost
from fshard.program.cost.rank_overlap import DimSharding
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes
from fshard.program.halo_boxes import reversed_halo
from fshard.program.halo_steps import HaloExchange, Windows
from fshard.program.program import Program


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Strategy(NotebookView):
    """One choice of layouts for one operation call, as `fs.propagate` returns it.

    Attributes:
        op: the operation, a `torch.ops` overload or a function with a rule.
        rule: the sharding rule of the call.
        call: the call with shapes and dtypes in the places of tensors.
        roles: for every mesh axis its name and its role: a factor that it shards, a mode of
            unreduced operands, `reduced` or `invariant`.
        sources: the specs of the operands as they were given.
        in_specs: the specs of the operands that the operation runs on.
        out_specs: the specs of the results, None where the operation returns no tensor.
        in_halos: for every operand the halo exchange that extends its shards to windows, at the
            end of its program, or None.
        out_halos: for every result the halo reduction that adds up overlapping windows of it, or
            None.
        tree: the tree of the results, with an index into `out_specs` for every tensor.
        time: seconds by which strategies are ordered: to redistribute the operands, to compute,
            and to reduce later what stays unreduced.
        sends: False if no operand needs communication.
        topology: the topology that the strategy was chosen on, None for one node.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=4)
    >>> x = fs.Spec(mesh, fs.P("x"), shape=(8, 16))
    >>> strategy = fs.propagate(torch.sum, x, 0)
    >>> print(strategy)
    sum.dim_IntList: f32[8@x,16] -> f32[16]{unreduced: x}
    x: d0  (nothing is sent)
    """

    op: Any
    rule: Rule
    call: OpCall = field(repr=False)
    roles: tuple[tuple[str, Role], ...]
    sources: tuple[Spec, ...]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec | None, ...]
    in_halos: tuple[Program | None, ...]
    out_halos: tuple[Program | None, ...]
    tree: Any
    time: float
    sends: bool
    topology: Topology | None = field(repr=False)
    _alternatives: Callable[[], tuple[Strategy, ...]] = field(repr=False, default=tuple)

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, item.name) for item in fields(self)]
        others = tuple(replace(x, _alternatives=tuple) for x in self.alternatives)
        return _rebuild, (reference_of(self.op), *values[1:-1], others)

    @property
    def alternatives(self) -> tuple[Strategy, ...]:
        """Other strategies of the call, the fastest first; computed on access."""
        return self._alternatives()

    @property
    def programs(self) -> tuple[Program, ...]:
        """For every operand the program from its given spec to the one the operation runs on."""
        return _operand_programs(self)

    @property
    def shard_specs(self) -> tuple[Spec, ...]:
        """Specs of the operands before their halo exchanges."""
        rows = zip(self.in_specs, self.in_halos, strict=True)
        return tuple(halo.src if halo else spec for spec, halo in rows)

    @property
    def computed_specs(self) -> tuple[Spec | None, ...]:
        """Specs of the results as the operation computes them, before their halo reductions."""
        rows = zip(self.out_specs, self.out_halos, strict=True)
        return tuple(halo.src if halo else spec for spec, halo in rows)

    @property
    def is_local(self) -> bool:
        """True if no operand and no result needs communication."""
        return not self.sends or _is_local(self)

    @property
    def cost(self) -> Cost:
        """Cost of the programs and of the results' halo reductions, one after the other."""
        reductions = [halo for halo in self.out_halos if halo]
        return Cost.in_turn(x.cost(self.topology) for x in (*self.programs, *reductions))

    @property
    def local_nbytes(self) -> int:
        """Bytes of the operands and results that the fullest rank holds while it computes."""
        specs = (*self.in_specs, *self.computed_specs)
        return sum(max_local_nbytes(spec) for spec in specs if spec is not None)

    @property
    def summary(self) -> str:
        """One line of text: the role of every axis, and the bytes received for it."""
        roles = ", ".join(f"{axis}: {role.name}" for axis, role in self.roles)
        cost = self.cost
        if not cost.launches:
            return f"{roles}  (nothing is sent)"
        return f"{roles}  ({bytes_text(cost.bytes_received)} received, {time_text(cost.time)})"

    def in_tree(self, results: Sequence[Any]) -> Any:
        """Return a list of results in the tree in which the operation returns them."""
        return _in_tree(self.tree, results)

    def __str__(self) -> str:
        results = ", ".join("none" if spec is None else str(spec) for spec in self.out_specs)
        operands = ", ".join(map(str, self.in_specs))
        lines = [*folded(f"{name_of(self.op)}: {operands} -> {results}"), self.summary]
        lines += [
            f"operand {index}: {prog}"
            for index, prog in enumerate(self.programs) if not prog.is_local
        ]  # fmt: skip
        return "\n".join(lines)

    __repr__ = __str__


@lru_cache(maxsize=CACHE_SIZE)
def _operand_programs(strategy: Strategy) -> tuple[Program, ...]:
    return tuple(operand_program(strategy, operand) for operand in range(len(strategy.sources)))


def operand_program(strategy: Strategy, operand: int) -> Program:
    """Return the program from an operand's given spec to the one the operation runs on."""
    ends = strategy.sources[operand], strategy.shard_specs[operand]
    prog, halo = redistribute(*ends, topology=strategy.topology), strategy.in_halos[operand]
    return prog >> halo if halo else prog


@lru_cache(maxsize=CACHE_SIZE)
def _is_local(strategy: Strategy) -> bool:
    programs = (*strategy.programs, *(halo for halo in strategy.out_halos if halo))
    return all(prog.is_local for prog in programs)


def _rebuild(op: Any, *values: Any) -> Strategy:
    alternatives = values[-1]
    others: Any = (*values[:-1], lambda: alternatives)
    return Strategy(dereference(op), *others)


def has_unspecified_results(strategy: Strategy) -> bool:
    """Return True if a result is a tensor whose layout the rule leaves out."""
    results = zip(strategy.out_specs, strategy.call.results, strict=True)
    return any(spec is None and meta is not None for spec, meta in results)


def _in_tree(tree: Any, results: Sequence[Any]) -> Any:
    if isinstance(tree, StaticResult):
        return tree.value
    if isinstance(tree, int):
        return results[tree]
    items = [_in_tree(item, results) for item in tree]
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


# -- from roles to specs -------------------------------------------------------------------


class _Infeasible(Exception):
    """No spec has the states that a combination of roles requires."""


UNSHARDED: DimSharding = (), None


class OperandLayouts(NamedTuple):
    """Fields `in_specs`, `out_specs`, `in_halos` and `out_halos` of a strategy."""

    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec | None, ...]
    in_halos: tuple[Program | None, ...]
    out_halos: tuple[Program | None, ...]


class Layouts:
    """Specs of the operands and results of one call, by the roles of the mesh axes.

    If several axes shard one factor, their order is that of the largest operand. The shard sizes
    are those of an operand that the same axes shard, else those of `torch.chunk`. Where operands
    differ they are the most even ones of the largest operands, or chunks if those are far from
    even: shifted parts of a dim, as stencils add them up, return to the layout of the dim.
    """

    __slots__ = ("_call", "_dims", "_factor_shardings", "_lengths", "_mesh", "_places", "_rule",
                 "_sources")  # fmt: skip

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
        for index in sorted(range(len(sources)), key=lambda index: -sources[index].nbytes):
            for dim, factors in enumerate(rule.operands[index]):
                for factor in factors:
                    self._places.setdefault(factor, []).append((index, dim))
        operands = (dims for index, dims in enumerate(rule.operands) if index not in rule.unread)
        results = (d for d, meta in zip(rule.results, call.results, strict=True) if d and meta)
        self._dims = tuple(dict.fromkeys(dim for dims in (*results, *operands) for dim in dims))
        self._factor_shardings: dict[tuple[str, tuple[str, ...]], DimSharding] = {}

    def specs(self, roles: Mapping[str, Role]) -> OperandLayouts | None:
        """Return the layouts of a call under one role per axis, None if none exist."""
        rule, call = self._rule, self._call
        shardings = self._shardings(roles)
        try:
            dim_shardings = {dim: self._dim_sharding(dim, shardings) for dim in self._dims}
            spec = partial(_spec, self._mesh, tuple(roles), dim_shardings)
            ins = tuple(
                self._sources[index] if index in rule.unread
                else spec(dims, meta, [role.operands[index] for role in roles.values()])
                for index, (dims, meta) in enumerate(zip(rule.operands, call.operands, strict=True))
            )  # fmt: skip
            outs = tuple(
                None if dims is None or meta is None
                else spec(dims, meta, [role.results[index] for role in roles.values()])
                for index, (dims, meta) in enumerate(zip(rule.results, call.results, strict=True))
            )  # fmt: skip
        except _Infeasible:
            return None
        halo = partial(self._halo, shardings)
        halos = tuple(map(halo, ins, rule.operands))
        reductions = tuple(
            None if spec is None or dims is None else halo(spec, dims, reverse=True)
            for spec, dims in zip(outs, rule.results, strict=True)
        )
        extended = tuple(halo.dst if halo else spec for spec, halo in zip(ins, halos, strict=True))
        return OperandLayouts(extended, outs, halos, reductions)

    def _halo(
        self, shardings: Mapping[str, DimSharding], spec: Spec, dims: Dims, reverse: bool = False
    ) -> Program | None:
        """Return the halo exchange of a tensor with factors that windows read, None without one.

        With `reverse` return the halo reduction of a result, to `spec`.
        """
        windows: list[Windows | None] = [None] * spec.ndim
        boundary = "circular"
        for dim, factors in enumerate(dims):
            window = self._rule.windows.get(factors[0]) if factors else None
            if window is not None and window.of in shardings:
                sizes = spec.shard_sizes(dim)
                rows, ends = window.windows(sizes), tuple(itertools.accumulate(sizes, initial=0))
                windows[dim] = None if rows == tuple(itertools.pairwise(ends)) else rows
                boundary = window.step_boundary
        if not any(windows):
            return None
        step = HaloExchange(tuple(windows), boundary)
        program = Program(spec, (step,))
        return Program(program.dst, (reversed_halo(step, spec),)) if reverse else program

    def _shardings(self, roles: Mapping[str, Role]) -> dict[str, DimSharding]:
        """Return for every sharded factor its axes, major to minor, and its shard sizes."""
        axes_of: dict[str, tuple[str, ...]] = {}
        for axis, role in roles.items():
            if role.factor is not None:
                axes_of[role.factor] = (*axes_of.get(role.factor, ()), axis)
        shardings: dict[str, DimSharding] = {}
        for item in axes_of.items():
            if item not in self._factor_shardings:
                self._factor_shardings[item] = self._factor_sharding(*item)
            shardings[item[0]] = self._factor_shardings[item]
        for part in self._rule.slices:
            if part.of in shardings:
                axes, sizes = shardings[part.of]
                n = math.prod(self._mesh.shape[axis] for axis in axes)
                shardings[part.name] = axes, part.sizes(sizes or (self._lengths[part.of] // n,) * n)
        return shardings

    def _factor_sharding(self, factor: str, axes: tuple[str, ...]) -> DimSharding:
        if len(axes) > 1:
            places = self._places.get(factor, [])
            dims = [self._sources[index].partition.dims[dim] for index, dim in places]
            ordered = dict.fromkeys(axis for dim in dims for axis in dim if axis in axes)
            axes = tuple(ordered | dict.fromkeys(axes))
        return axes, self._shard_sizes(factor, axes)

    def _shard_sizes(self, factor: str, axes: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return the shard sizes of a factor: an operand's sizes, None if even, else chunks.

        Where operands differ, some must be redistributed anyway; then sizes that give one rank
        twice its share of the work are not used.
        """
        length, parts = self._lengths[factor], [self._mesh.shape[axis] for axis in axes]
        n, choices = math.prod(parts), self._source_sizes(factor, axes)
        window = self._rule.windows.get(factor)
        if not choices and window is not None:  # no operand has the factor, as of gradients
            choices = [window.read_sizes(x) for x in self._source_sizes(window.name, axes)]
        if choices and (len({*choices}) == 1 or max(choices[0]) < 2 * -(-length // n)):
            return choices[0] if len({*choices[0]}) > 1 else None
        return None if length % n == 0 else chunk_sizes(length, parts)

    def _source_sizes(self, factor: str, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return the shard sizes of a factor in each operand in which these axes shard it.

        The largest operands are first, and of those of one size the ones with the most even shards.
        Where only the first of the axes do, each shard is sharded further. In a dim that is a
        product, the factors before it must be sharded into parts of size 1, and the sizes are those
        whose ends are nearest to the dim's.
        """
        rows, shape = list[tuple[int, int, tuple[int, ...]]](), self._mesh.shape
        for index, dim in self._places.get(factor, []):
            factors, spec = self._rule.operands[index][dim], self._sources[index]
            entry, position = spec.partition.dims[dim], factors.index(factor)
            start = entry.index(axes[0]) if axes[0] in entry else len(entry)
            own, repeats, minor = entry[start:], *(
                math.prod(self._lengths[f] for f in part)
                for part in (factors[:position], factors[position + 1 :])
            )  # fmt: skip
            is_sharded = own and own == axes[: len(own)]
            if not is_sharded or math.prod(shape[axis] for axis in entry[:start]) != repeats:
                continue
            sizes = spec.shard_sizes(dim)
            sizes = sizes[: len(sizes) // repeats]
            if len(own) < len(axes):
                parts = [shape[axis] for axis in axes[len(own) :]]
                sizes = tuple(part for size in sizes for part in chunk_sizes(size, parts))
            if minor and sum(sizes) == self._lengths[factor] * minor:
                rows.append((-spec.nbytes, max(sizes), _nearest_sizes(sizes, minor)))
        return [sizes for *_, sizes in sorted(rows, key=itemgetter(0, 1))]

    def _dim_sharding(
        self, factors: tuple[str, ...], shardings: Mapping[str, DimSharding]
    ) -> DimSharding:
        """Return the axes and shard sizes of a dim that is a product of `factors`.

        All factors before the last sharded one must be sharded into parts of size 1.
        """
        if len(factors) == 1:
            axes, sizes = shardings.get(factors[0], UNSHARDED)
            return axes, None if sizes is None or len({*sizes}) == 1 else sizes
        sharded = [position for position, factor in enumerate(factors) if factor in shardings]
        if not sharded:
            return UNSHARDED
        last, axes = sharded[-1], tuple(a for i in sharded for a in shardings[factors[i]][0])
        before = factors[:last]
        for factor in before:
            factor_axes, sizes = shardings.get(factor, UNSHARDED)
            parts = math.prod(self._mesh.shape[axis] for axis in factor_axes)
            if parts != self._lengths[factor] or sizes is not None:
                raise _Infeasible
        sizes = shardings[factors[last]][1]
        if sizes is None:
            return axes, None
        minor = math.prod(self._lengths[f] for f in factors[last + 1 :])
        repeats = math.prod(self._lengths[f] for f in before)
        dim_sizes = tuple(size * minor for size in sizes) * repeats
        return axes, None if len({*dim_sizes}) == 1 else dim_sizes


def _nearest_sizes(sizes: Sequence[int], minor: int) -> tuple[int, ...]:
    """Return sizes in rows of `minor` elements, whose ends are nearest to those of the elements."""
    ends = [(end + minor // 2) // minor for end in itertools.accumulate(sizes)]
    return tuple(b - a for a, b in itertools.pairwise((0, *ends)))


def _spec(
    mesh: Mesh,
    axes: Sequence[str],
    dim_shardings: Mapping[tuple[str, ...], DimSharding],
    dims: Dims,
    meta: Meta,
    states: Sequence[AxisState | None],
) -> Spec:
    """Return the spec of a tensor whose dims have these factors, in these states on the axes."""
    unreduced: list[tuple[str, str]] = []
    reduced: list[tuple[str, str]] = []
    for axis, state in zip(axes, states, strict=True):
        assert state is not None
        if state.name == "unreduced":
            unreduced.append((axis, state.kind))
        elif state.name == "reduced":
            reduced.append((axis, "sum"))
    kinds: tuple[Kinds, Kinds] = tuple(unreduced), tuple(reduced)
    if len(unreduced) > 1 and has_mixed_reductions(*kinds):
        raise _Infeasible
    entries, sizes = zip(*[dim_shardings[dim] for dim in dims], strict=True) if dims else ((), ())
    return Spec._of(mesh, PartitionSpec._of(entries, *kinds), meta.shape, meta.dtype, sizes)
