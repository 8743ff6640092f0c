"""Lines of a partitioned call: local operations, programs between layouts, writes and copies.

Every line but `GradMode`, `Write` and the marks of checkpointed calls defines a value with the id
`out`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard._torch.operators import schema_or_none
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten
from fshard.ops.core.call import map_call, map_instances
from fshard.ops.core.rule import Rule
from fshard.ops.strategy.local_call import RankContext
from fshard.ops.strategy.strategy import Strategy
from fshard.ops.trace.checkpoints import CheckpointedCall
from fshard.ops.trace.mapped_regions import MappedRegion
from fshard.plan.batch.batch import Batch, batch_from_leaves
from fshard.program.cost.topology import Topology
from fshard.program.halo_steps import HaloStep
from fshard.program.program import Program, program_time
from fshard.run.autograd.linear_function import ProgramGroup
from fshard.run.autograd.planned_gradient import OutputGradient
from fshard.run.transports.shape_only import RecordedCollective


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to a value of an earlier line, by its id."""

    value: int


class NeedsValue(Exception):
    """Raised where a plan needs the value of a symbolic number."""


@dataclass(frozen=True, slots=True)
class Number:
    """Symbolic number of a plan, by the id of its value; `is_float` or an int."""

    value: int
    is_float: bool


@dataclass(frozen=True, slots=True, eq=False)
class NumberOperation:
    """Python function of numbers, the same on every rank."""

    out: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Operation on locals by its strategy; `single` if it returns one tensor.

    `place` is the user's source line as `file:line`, `module` the path of the module whose forward
    ran it. The result is written into the local of the value `into`, if there is one.
    """

    out: int
    strategy: Strategy
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    single: bool
    name: str
    place: str = ""
    module: str = ""
    into: Ref | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Redistribution:
    """Program from the layout of a value to another; with `grad` its transpose runs backward.

    `module` is that of `with_modules`.
    """

    out: int
    source: Ref
    program: Program
    grad: bool
    module: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Pick:
    """One of several results of an operation."""

    out: int
    source: Ref
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class ClosureTensor:
    """Tensor that the function closes over, replicated."""

    out: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Factory:
    """Operation without operands, of which every rank creates its part of the layout `spec`."""

    out: int
    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str
    spec: Spec
    rule: Rule | None

    def can_create(self, spec: Spec) -> bool:
        """Return True if each rank can create its part of this layout, as the rule says."""
        p = spec.partition
        if p.unreduced_kinds or not p.dims:
            return not p.unreduced_kinds
        dims = self.rule.results[0] if self.rule else None
        return dims is not None and all(
            factors or not axes for factors, axes in zip(dims, p.dims, strict=True)
        )

    def create(self, rank: int) -> torch.Tensor:
        """Return the local of a rank."""
        local = self.rule.local if self.rule else None
        if local is None or not any(self.spec.partition.dims):
            result: torch.Tensor = self.op(*self.args, **self.kwargs)
            return result
        part: torch.Tensor = local(self.op, self.args, self.kwargs,
                                   RankContext(rank, (), (self.spec,)))  # fmt: skip
        return part


@dataclass(frozen=True, slots=True, eq=False)
class GradMode:
    """Switch of the grad mode for the lines that follow."""

    enabled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Write of a value into the local of an argument, without gradient."""

    target: Ref
    source: Ref
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Copy of a value whose memory is written, or under `no_grad` one without its gradient."""

    out: int
    source: Ref


@dataclass(frozen=True, slots=True, eq=False)
class CustomGradient:
    """Outputs of a forward with a gradient of their own: the custom backward of a function.

    `operands` are the inputs, the outputs, and the saved tensors that are not outputs.
    """

    out: int
    gradient: OutputGradient
    operands: tuple[Ref, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RegionCall:
    """Call of a mapped function on locals; its gradient is that of the function's body.

    `grads` says for every operand if its gradient is requested; None if nothing is differentiated.
    `products` are the operations that it stands for, in `steps` equal parts. A part reads and
    writes `step_bytes`, and collectives run beside all parts but one. The work of other functions
    is unknown. `place` is a source line, `module` the path of a module.
    """

    out: int
    region: MappedRegion
    operands: tuple[Ref, ...]
    grads: tuple[bool, ...] | None
    products: tuple[Strategy, ...] = ()
    steps: int = 1
    step_bytes: int = 0
    place: str = ""
    module: str = ""

    @property
    def forward(self) -> tuple[RecordedCollective, ...]:
        """The collectives of the body."""
        return self.region.forward

    @property
    def backward(self) -> tuple[RecordedCollective, ...]:
        """The collectives of the body's backward pass."""
        return () if self.grads is None else self.region.backward(self.grads)


@dataclass(frozen=True, slots=True, eq=False)
class BeginCheckpoint:
    """Mark before the lines of a checkpointed call, which the next `EndCheckpoint` ends."""

    call: CheckpointedCall


@dataclass(frozen=True, slots=True, eq=False)
class EndCheckpoint:
    """Mark after the lines of the innermost checkpointed call."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointedLines:
    """Lines of a checkpointed call in the order of execution; a `Pick` takes one of `outputs`."""

    out: int
    call: CheckpointedCall
    lines: tuple[Line, ...]
    operands: tuple[Ref, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory of tensors of the layouts `specs`, one after the other; a `Pick` takes one of them."""

    out: int
    specs: tuple[Spec, ...]
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class LaunchBatch:
    """Start of linear programs as one batch; the value is what a `WaitBatch` waits for.

    With `grad` the batch of their transposes runs backward: the backward of the `WaitBatch`
    launches it, and that of the launch waits for it. With `waits` the `WaitBatch` is the next line:
    the two are one operation for autograd. `module` is the common part of the programs' modules.
    The sources of the indices `owned` may be written. Those of the indices `buffered` are sent from
    the parts of `buffer`, which operations have written, or to which they are copied.
    """

    out: int
    sources: tuple[Ref, ...]
    group: ProgramGroup
    grad: bool
    waits: bool = False
    module: str = ""
    owned: frozenset[int] = frozenset()
    buffered: tuple[int, ...] = ()
    buffer: Ref | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs, one for each source."""
        return self.group.progs

    @property
    def batch(self) -> Batch:
        """The programs as a value that has launches and a cost."""
        return batch_from_leaves(self.programs, flatten([*self.programs])[1], None)


@dataclass(frozen=True, slots=True, eq=False)
class WaitBatch:
    """Results of a launched batch, of which a `Pick` takes one."""

    out: int
    source: Ref


Line = (
    Operation
    | NumberOperation
    | Redistribution
    | Pick
    | ClosureTensor
    | Factory
    | GradMode
    | Write
    | Copy
    | CustomGradient
    | RegionCall
    | BeginCheckpoint
    | EndCheckpoint
    | CheckpointedLines
    | Buffer
    | LaunchBatch
    | WaitBatch
)


def operands_of(line: Line) -> list[int]:
    """Return the ids of the values that a line reads or writes."""
    match line:
        case Operation() | NumberOperation():
            operands: list[int] = []
            into = getattr(line, "into", None)
            for arg in (*line.args, *line.kwargs.values(), into):
                map_instances(arg, Ref, lambda ref: operands.append(ref.value))
            return operands
        case Redistribution() | Pick() | Copy() | WaitBatch():
            return [line.source.value]
        case LaunchBatch():
            return [ref.value for ref in (*line.sources, line.buffer) if ref is not None]
        case Write():
            return [line.target.value, line.source.value]
        case CustomGradient() | RegionCall() | CheckpointedLines():
            return [ref.value for ref in line.operands]
        case _:
            return []


REFERENCES = ("args", "source", "sources", "operands", "target", "into", "buffer")
"""Attributes of lines that have references, beside `kwargs`."""


def map_references(line: Line, fn: Callable[[Ref], Ref]) -> Line:
    """Return a line in which `fn` of every reference is in its place."""
    names = [name for name in REFERENCES if hasattr(line, name)]
    changes: dict[str, Any] = {name: map_instances(getattr(line, name), Ref, fn) for name in names}
    if isinstance(line, Operation | NumberOperation):
        changes["kwargs"] = map_call((), line.kwargs, Ref, fn)[1]
    elif isinstance(line, CheckpointedLines):
        changes["lines"] = tuple([map_references(inner, fn) for inner in line.lines])
    return replace(line, **changes)


def without_grad_modes(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of a call without gradient, in which the grad mode is not switched on.

    The bodies of mapped functions run in the mode that is set: it is kept for them.
    """
    if any(isinstance(line, RegionCall) for line in lines):
        return [*lines]
    return [line for line in lines if not isinstance(line, GradMode)]


def flattened(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines, and after those of checkpointed calls the lines in them."""
    for line in lines:
        yield line
        if isinstance(line, CheckpointedLines):
            yield from flattened(line.lines)


def aliases_of(line: Line) -> list[tuple[int, int]]:
    """Return pairs of a value that a line defines and an operand whose memory it may share."""
    match line:
        case Redistribution() | Pick():
            return [(line.out, line.source.value)]
        case Operation():
            schema = schema_or_none(line.strategy.call.op)
            is_view = schema is None or any(result.alias_info for result in schema.returns)
            return [(line.out, operand) for operand in operands_of(line) if is_view]
        case CustomGradient():
            return [(line.out, operand) for operand in operands_of(line)]
        case _:
            return []


def backward_programs(line: Line) -> tuple[Program, ...]:
    """Return the programs that run backward for a line."""
    match line:
        case Redistribution() if line.grad and line.program.is_linear:
            return (line.program.T,)
        case CustomGradient():
            return line.gradient.call.programs
        case _:
            return ()


def has_halo(program: Program) -> bool:
    """Return True for a halo exchange or reduction, whose result is another global value."""
    return any(isinstance(step, HaloStep) for step in program.steps)


Plan = Program | Batch | RecordedCollective
"""Program, batch or recorded collective that a line launches."""


def forward_plans(line: Line) -> tuple[Plan, ...]:
    """Return what runs forward for a line; the programs of a batch are one."""
    match line:
        case LaunchBatch():
            return (line.batch,)
        case Redistribution():
            return (line.program,)
        case RegionCall():
            return line.forward
        case CheckpointedLines():
            return tuple(plan for inner in line.lines for plan in forward_plans(inner))
        case _:
            return ()


def backward_plans(line: Line) -> tuple[Plan, ...]:
    """Return what runs backward for a line; the programs of a batch are one.

    A checkpointed call runs its forward programs again, without those whose results leave it.
    """
    match line:
        case LaunchBatch():
            return (line.batch.T,) if line.grad else ()
        case RegionCall():
            return line.backward
        case CheckpointedLines():
            used = {operand for inner in line.lines for operand in operands_of(inner)}
            again = [x for x in line.lines if not isinstance(x, Redistribution) or x.out in used]
            return (
                *(plan for inner in again for plan in forward_plans(inner)),
                *(plan for inner in line.lines for plan in backward_plans(inner)),
            )
        case _:
            return backward_programs(line)


def plan_time(plan: Plan, topology: Topology) -> float:
    """Return the seconds of a plan."""
    return program_time(plan, topology) if isinstance(plan, Program) else plan.cost(topology).time


def keep_gradients_of(lines: Sequence[Line], outputs: Sequence[int]) -> list[Line]:
    """Return the lines, with gradients only for values that some of the outputs depend on."""
    differentiated = set(outputs)
    kept: list[Line] = []
    for line in reversed(lines):
        out = getattr(line, "out", None)
        differentiated.update(operands_of(line) if out in differentiated else ())
        if isinstance(line, Redistribution) and line.grad and out not in differentiated:
            kept.append(replace(line, grad=False))
        elif isinstance(line, RegionCall) and out not in differentiated:
            kept.append(replace(line, grads=None))
        else:
            kept.append(line)
    return kept[::-1]


def with_modules(lines: Sequence[Line]) -> list[Line]:
    """Return the lines, in which redistributions have the modules of operations.

    A redistribution has the module of the first operation that uses its result, else that of the
    operation that computed the value. Views are passed over.
    """
    made: dict[int, str] = {}
    used: dict[int, str] = {}
    for line in lines:
        module = getattr(line, "module", "")
        sources = [made.get(operand, "") for _, operand in aliases_of(line)]
        if hasattr(line, "out"):
            made[line.out] = module or next(filter(None, sources), "")
    result: list[Line] = []
    for line in reversed(lines):
        module = getattr(line, "module", "") or used.get(getattr(line, "out", -1), "")
        used.update(dict.fromkeys(operands_of(line), module))
        if isinstance(line, Redistribution):
            result.append(replace(line, module=module or made[line.out]))
        else:
            result.append(line)
    return result[::-1]


def specs_text(specs: Sequence[Spec | None]) -> str:
    """Return specs as text, separated by commas."""
    return ", ".join("none" if spec is None else str(spec) for spec in specs)


def write_value(local: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a local, without gradient."""
    with torch.no_grad():
        local.copy_(value)
