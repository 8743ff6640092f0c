"""Tensors that depend on no argument, created in the layout of each use.

`torch.zeros(n)`, or `torch.full((n, n), -inf).triu(1)`, needs no communication in any layout: a
rank creates its own part. Such a tensor is first created replicated; a use in another layout
creates it again there, and what nothing uses is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fshard.layout.spec import Spec
from fshard.ops.core.call import fill_call
from fshard.ops.propagate.propagate import strategy_for
from fshard.partition import ir
from fshard.partition.assignment.tensor_versions import Assignment, TensorVersions
from fshard.partition.ir import Factory, Line, Ref
from fshard.program.cost.topology import Topology

MAX_CREATING_LINES = 16
"""Lines that may create one tensor anew; one of more lines is redistributed."""


@dataclass(frozen=True, slots=True, eq=False)
class CreatedByFactory:
    """Result of an operation without operands."""

    line: Factory
    size: int = 1

    def create(self, assignment: Assignment, spec: Spec) -> int | None:
        """Add the line that creates the layout; return its value, None if the rule forbids it."""
        if not self.line.can_create(spec):
            return None
        out = assignment.new_value()
        assignment.lines.append(replace(self.line, out=out, spec=spec))
        assignment.created.add(out)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class CreatedByOperation:
    """Single result of an operation on created tensors.

    `size` is the number of lines that create it.
    """

    line: ir.Operation
    operands: tuple[TensorVersions, ...]
    topology: Topology
    size: int

    def create(self, assignment: Assignment, spec: Spec) -> int | None:
        """Add the lines that create the layout; return its value, None if a strategy sends."""
        specs = [operand.spec for operand in self.operands]
        line = self.line
        call = fill_call(line.args, line.kwargs, Ref, specs)
        strategy = strategy_for(line.strategy.call.op, *call, self.topology, False, spec.partition)
        if strategy.out_specs != (spec,) or any(strategy.in_halos):
            return None
        refs = []
        for operand, in_spec in zip(self.operands, strategy.in_specs, strict=True):
            value: int | None = operand.versions[operand.spec]
            if in_spec != operand.spec:
                value = operand.created.create(assignment, in_spec) if operand.created else None
            if value is None:
                return None
            refs.append(Ref(value))
        out = assignment.new_value()
        args, kwargs = fill_call(line.args, line.kwargs, Ref, refs)
        assignment.lines.append(replace(line, out=out, strategy=strategy, args=args, kwargs=kwargs))
        assignment.created.add(out)
        return out


def created_by(
    line: ir.Operation, operands: Sequence[TensorVersions], topology: Topology
) -> CreatedByOperation | None:
    """Return how an operation creates its result, None if it depends on an argument."""
    size = 1 + sum(operand.created.size for operand in operands if operand.created)
    if not line.single or size > MAX_CREATING_LINES or not all(x.created for x in operands):
        return None
    return CreatedByOperation(line, tuple(operands), topology, size)


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
