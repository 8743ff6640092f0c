"""Tensors that depend on no argument, created in the layout of each use.

`torch.zeros(n)`, or `torch.full((n, n), -inf).triu(1)`, needs no communication in any layout: a
rank creates its own part. Such a tensor is first created replicated; a use in another layout
creates it again there, and what nothing uses is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import fill_call
from fshard.ops.propagate.propagate import strategy_for
from fshard.ops.strategy.strategy import Strategy
from fshard.partition import ir
from fshard.partition.assignment.tensor_versions import Assignment, TensorVersions
from fshard.partition.ir import Factory, Line, Redistribution, Ref
from fshard.plan.redistribute import redistribute
from fshard.program.cost.topology import Topology

MAX_CREATING_LINES = 48
"""Lines that may create one tensor anew; one of more lines is redistributed."""


@dataclass(frozen=True, slots=True, eq=False)
class CreatedByFactory:
    """Result of an operation without operands."""

    line: Factory

    @property
    def values(self) -> frozenset[int]:
        """The value of the line."""
        return frozenset((self.line.out,))

    def create(self, assignment: Assignment, spec: Spec) -> int | None:
        """Add the line that creates the layout, or slices what each rank creates of one dim."""
        is_created = self.line.can_create(spec)
        if not is_created and spec.ndim > 1:
            return None
        out = assignment.new_value()
        if is_created:
            assignment.lines.append(replace(self.line, out=out, spec=spec))
        else:
            sliced = redistribute(self.line.spec, spec)
            assignment.lines.append(Redistribution(out, Ref(self.line.out), sliced, False))
        assignment.created.add(out)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class CreatedByOperation:
    """Single result of an operation on created tensors.

    `values` are those of the lines that create it.
    """

    line: ir.Operation
    operands: tuple[TensorVersions, ...]
    topology: Topology
    values: frozenset[int]

    def create(self, assignment: Assignment, spec: Spec) -> int | None:
        """Add the lines that create the layout; return its value, None if a strategy sends."""
        line = self.line
        strategy = self._strategy([operand.spec for operand in self.operands], spec)
        if strategy.out_specs != (spec,):
            # Shard sizes are those of operands, which a hint of axes lacks.
            strategy = self._strategy(self._sharded_alike(spec), spec)
        if strategy.out_specs != (spec,) or any(strategy.in_halos):
            return None
        refs = []
        for operand, in_spec in zip(self.operands, strategy.in_specs, strict=True):
            value = operand.create(assignment, in_spec)
            if value is None:
                return None
            refs.append(Ref(value))
        out = assignment.new_value()
        args, kwargs = fill_call(line.args, line.kwargs, Ref, refs)
        assignment.lines.append(replace(line, out=out, strategy=strategy, args=args, kwargs=kwargs))
        assignment.created.add(out)
        return out

    def _strategy(self, operands: Sequence[Spec], spec: Spec) -> Strategy:
        """Return the strategy of operands in layouts, to create a result sharded as `spec`."""
        call = fill_call(self.line.args, self.line.kwargs, Ref, operands)
        op = self.line.strategy.call.op
        return strategy_for(op, *call, self.topology, False, spec.partition)

    def _sharded_alike(self, spec: Spec) -> list[Spec]:
        """Return layouts of the operands whose dims are sharded as those of the result `spec`."""
        rule, specs = self.line.strategy.rule, []
        dims = {factors: dim for dim, factors in enumerate(rule.results[0] or ()) if factors}
        for operand, row in zip(self.operands, rule.operands, strict=True):
            places = [
                at if at is not None and spec.shape[at] == size else None
                for at, size in zip(map(dims.get, row), operand.spec.shape, strict=True)
            ]
            axes = [() if at is None else spec.partition.dims[at] for at in places]
            sizes = {dim: spec.shard_sizes(at) for dim, at in enumerate(places)
                     if at is not None and axes[dim]}  # fmt: skip
            specs.append(operand.spec.replace(partition=PartitionSpec(*axes), sizes=sizes))
        return specs


def created_by(
    line: ir.Operation, operands: Sequence[TensorVersions], topology: Topology
) -> CreatedByOperation | None:
    """Return how an operation creates its result, None if it depends on an argument."""
    values = frozenset((line.out,)).union(*(x.created.values for x in operands if x.created))
    if not line.single or len(values) > MAX_CREATING_LINES or not all(x.created for x in operands):
        return None
    return CreatedByOperation(line, tuple(operands), topology, values)


def with_sources(tensors: Iterable[TensorVersions]) -> list[TensorVersions]:
    """Return tensors, and those that the created ones among them are created from."""
    found: dict[int, TensorVersions] = {}
    left = [*tensors]
    while left:
        tensor = left.pop()
        if id(tensor) not in found:
            found[id(tensor)] = tensor
            if isinstance(tensor.created, CreatedByOperation):
                left += tensor.created.operands
    return [*found.values()]


def without_unused(lines: Sequence[Line], created: set[int], outputs: Sequence[Any]) -> list[Line]:
    """Return the lines without those that create tensors which nothing uses."""
    used = {value for value in outputs if type(value) is int}
    kept: list[Line] = []
    for line in reversed(lines):
        out = getattr(line, "out", None)
        if out in created and out not in used:
            continue
        used.update(ir.operands_of(line))
        kept.append(line)
    return kept[::-1]
