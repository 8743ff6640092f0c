"""Values that the backward pass recomputes, and the lines that recompute them.

A policy says for every operation and every redistribution if the backward pass keeps its results
(as those of `jax.checkpoint`, and PyTorch's selective checkpoints). Results that are not kept are
recomputed from values that are. The unit of recomputation is an operation, or a launch: the
programs of a bucket are launched together again. Random operations take their key as an argument,
so they draw the same values again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from fshard._util.errors import fail
from fshard.ops.core.call import Meta, fill_call, name_of
from fshard.ops.core.registry import overloads, row_of
from fshard.ops.rules.elementwise.pointwise import pointwise
from fshard.partition import ir
from fshard.partition.ir import (
    LaunchBatch,
    Line,
    Operation,
    Pick,
    Redistribution,
    Ref,
    WaitBatch,
    aliases_of,
    operands_of,
)
from fshard.program.program import Program
from fshard.run.autograd.linear_function import ProgramGroup

GATHERS, ALL = "gathers", "all"
Policy = Callable[..., Any]
"""Function of an operation or a `Program`, and of its arguments with specs, that keeps or not."""


@dataclass(frozen=True, slots=True)
class KeptValues:
    """Policy that keeps some values of a plan, by their ids, and recomputes all others."""

    values: frozenset[int]


Remat = str | Policy | Sequence[Any] | None
PlannedRemat = Remat | KeptValues
KEPT = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
RECOMPUTED = (False, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def check_remat(remat: Remat) -> None:
    """Raise `ShardingError` for a value that is not a policy."""
    if remat is None or callable(remat) or remat in (GATHERS, ALL):
        return
    if isinstance(remat, list | tuple):
        _operations(remat)
        return
    fail("fs.partition: remat", repr(remat),
         "remat must be None, 'gathers', 'all', a function of an operation and its arguments, or a "
         "list of operations",
         "remat='gathers' gathers parameters again in the backward pass")  # fmt: skip


def _operations(remat: Sequence[Any]) -> frozenset[Any]:
    """Return the overloads of a list of operations, packets of them, and their names."""
    return frozenset(op for item in remat for op in overloads(item, "fs.partition: remat"))


@dataclass(frozen=True, slots=True, eq=False)
class RecomputedUnit:
    """Lines that run again together: an operation, or a launch and its wait; and picks.

    Attributes:
        lines: the lines.
        outputs: the values that they recompute.
        internals: True if also tensors are recomputed that the operation saves for itself.
    """

    lines: tuple[Line, ...]
    outputs: tuple[int, ...]
    internals: bool = False

    @property
    def operands(self) -> tuple[int, ...]:
        """The values that it is recomputed from."""
        return tuple(dict.fromkeys(operands_of(self.lines[0])))

    @property
    def launch(self) -> LaunchBatch | None:
        """The launch, None for an operation."""
        line = self.lines[0]
        return line if isinstance(line, LaunchBatch) else None

    def restricted(self, outputs: Collection[int], internals: bool) -> RecomputedUnit:
        """Return the unit for some of its outputs; programs without a use are left out."""
        remaining = tuple(value for value in self.outputs if value in outputs)
        launch = self.launch
        if launch is None:
            lines = tuple(x for x in self.lines if not isinstance(x, Pick) or x.out in outputs)
            return RecomputedUnit(lines, remaining, internals)
        indices = [x.index for x in self.lines if isinstance(x, Pick) and x.out in outputs]
        return _launch_unit(launch, self.lines[1], dict(zip(indices, remaining, strict=True)))


def _launch_unit(launch: LaunchBatch, wait: Line, values: Mapping[int, int]) -> RecomputedUnit:
    """Return the unit of some programs of a launch, by index with the value that each defines."""
    assert isinstance(wait, WaitBatch)
    sources = tuple(launch.sources[index] for index in values)
    group = ProgramGroup(tuple(launch.programs[index] for index in values))
    picks = [Pick(value, Ref(wait.out), i) for i, value in enumerate(values.values())]
    again = replace(launch, sources=sources, group=group, grad=False)
    return RecomputedUnit((again, wait, *picks), tuple(values.values()))


@dataclass(frozen=True, slots=True, eq=False)
class RematPlan:
    """Units that are recomputed, in the order of the forward pass.

    Attributes:
        units: the units.
        producers: for each of their outputs the index of the unit.
        bases: the other values that they are recomputed from, which are kept.
    """

    units: tuple[RecomputedUnit, ...]

    @property
    def producers(self) -> dict[int, int]:
        """The index of the unit that recomputes a value."""
        return {value: i for i, unit in enumerate(self.units) for value in unit.outputs}

    @property
    def bases(self) -> frozenset[int]:
        """The values that are kept to recompute others."""
        read = {value for unit in self.units for value in unit.operands}
        return frozenset(read.difference(self.producers))

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines that run again in the backward pass."""
        return tuple(line for unit in self.units for line in unit.lines)

    def restricted(self, values: Collection[int], internals: Collection[int]) -> RematPlan:
        """Return the plan without units that none of these need.

        Args:
            values: values that the backward pass reads.
            internals: indices of units of which it reads tensors that the operation saved.
        """
        needed, units = set(values), []
        for index in reversed(range(len(self.units))):
            unit, reads = self.units[index], index in internals
            if reads or not needed.isdisjoint(unit.outputs):
                units.append(unit.restricted(needed, reads))
                needed.update(units[-1].operands)
        return RematPlan(tuple(units[::-1]))


def remat_candidates(
    lines: Sequence[Line], tensors: Collection[int], remat: PlannedRemat, where: str
) -> RematPlan:
    """Return the units that a policy recomputes, whether or not the backward pass needs them.

    A value that would be recomputed from an argument that the function writes is kept. So are
    results of collectives, where some rank has an empty shard: its operations may not read what the
    other ranks gather again, which would wait for it.

    Args:
        lines: the lines in the order of execution.
        tensors: the values of the arguments' tensors.
        remat: the policy.
        where: name of the function in errors.
    """
    picks: dict[int, list[Pick]] = {}
    waits: dict[int, WaitBatch] = {}
    written = {line.target.value for line in lines if isinstance(line, ir.Write)}
    for line in lines:
        written.update(out for out, operand in aliases_of(line) if operand in written)
        if isinstance(line, Pick):
            picks.setdefault(line.source.value, []).append(line)
        elif isinstance(line, WaitBatch):
            waits[line.source.value] = line
    chooser = _Chooser(remat, lines, tensors, where)
    units: list[RecomputedUnit] = []
    for line in lines:
        if isinstance(line, LaunchBatch):
            wait = waits[line.out]
            values = {
                pick.index: pick.out for pick in picks.get(wait.out, ())
                if line.sources[pick.index].value not in written
                and chooser.recomputes_program(
                    line.programs[pick.index], line.sources[pick.index], pick.out)
            }  # fmt: skip
            units += [_launch_unit(line, wait, values)] if values else []
        elif (
            isinstance(line, Operation | Redistribution | ir.Factory)
            and written.isdisjoint(operands_of(line))
            and chooser.recomputes(line)
        ):
            parts = picks.get(line.out, [])
            outputs = tuple(pick.out for pick in parts) if parts else (line.out,)
            units.append(RecomputedUnit((line, *parts), outputs, isinstance(line, Operation)))
        chooser.recomputed.update(units[-1].outputs if units else ())
    return RematPlan(tuple(units))


class _Chooser:
    """Answers of a policy for lines, in their order; `recomputed` are the values so far."""

    def __init__(
        self, remat: PlannedRemat, lines: Sequence[Line], tensors: Collection[int], where: str
    ) -> None:
        self.tensors, self.where = tensors, where
        self.remat: PlannedRemat = remat
        if isinstance(remat, list | tuple):
            self.remat = self.keeping(_operations(remat), lines)
        self.recomputed: set[int] = set()
        self.sends = not any(isinstance(line, Operation) and _has_empty(line) for line in lines)

    def keeping(self, ops: frozenset[Any], lines: Sequence[Line]) -> Policy:
        """Return the policy that keeps the results of some operations, of which lines have one."""
        found = dict.fromkeys(x.strategy.call.op for x in lines if isinstance(x, Operation))
        if found and ops and ops.isdisjoint(found):
            names = ", ".join(map(str, found))
            fail(f"{self.where}: remat", ", ".join(sorted(map(str, ops))),
                 f"one of the operations must be in the function, whose operations are {names}",
                 f"remat=[torch.ops.{next(iter(found))}]; remat='all' keeps none")  # fmt: skip
        return lambda op, *args, **kwargs: op in ops

    def recomputes(self, line: Operation | Redistribution | ir.Factory) -> bool:
        """Return True if a line's results are not kept."""
        if isinstance(self.remat, KeptValues) and not isinstance(line, Redistribution):
            return line.out not in self.remat.values
        match line:
            case Redistribution():
                return self.recomputes_program(line.program, line.source, line.out)
            case Operation() if self.remat == GATHERS:
                operands = operands_of(line)
                row = row_of(line.strategy.call.op)
                is_pointwise = row is not None and row.generator is pointwise
                return is_pointwise and self.recomputed.issuperset(operands) and bool(operands)
            case Operation():
                call, specs = line.strategy.call, line.strategy.in_specs
                args, kwargs = fill_call(call.args, call.kwargs, Meta, specs)
                return self.answer(call.op, *args, **kwargs)
            case ir.Factory() if self.remat != GATHERS:
                return self.answer(line.op, *line.args, **line.kwargs)
        return False

    def recomputes_program(self, prog: Program, source: Ref, out: int) -> bool:
        """Return True if the result `out` of a redistribution is not kept."""
        if not self.sends and not prog.is_local:
            return False
        if self.remat == GATHERS:
            return source.value in self.tensors and not prog.is_local
        if isinstance(self.remat, KeptValues):
            return out not in self.remat.values
        return self.answer(prog, prog.src)

    def answer(self, op: Any, *args: Any, **kwargs: Any) -> bool:
        """Return True if the policy recomputes a call."""
        if not callable(self.remat):
            return True
        answer = self.remat(op, *args, **kwargs)
        if answer not in (*KEPT, *RECOMPUTED):
            fail(f"{self.where}: remat", f"the policy's answer {answer!r} for {name_of(op)}",
                 "a policy must return True or False, keep or recompute, or a CheckpointPolicy "
                 "that saves or recomputes",
                 "op in (torch.ops.aten.matmul.default,)")  # fmt: skip
        return answer in RECOMPUTED


def _has_empty(line: Operation) -> bool:
    return any(0 in sizes for spec in line.strategy.in_specs for sizes in spec.sizes if sizes)
