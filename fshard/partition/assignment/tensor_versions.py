"""Tensors of a graph with all their layouts, and the programs between layouts.

A use takes the fastest program from one of the layouts that a tensor has by then. For a tensor with
a gradient its transpose counts too, so both plans are compared: the one from the layout to that of
the use, and the transpose of the one for the gradient, from the dual of the use. So a weight that
is sharded over some axes and replicated over others becomes reduced before it is gathered: its
gradient is scattered first and reduced over the other axes then, as hybrid FSDP does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fshard.layout.partition_spec import LINEAR, PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.propagate.choice_hints import Arguments, gathers
from fshard.ops.trace.checkpoints import CheckpointedCall
from fshard.partition import ir
from fshard.partition.ir import Line, Ref
from fshard.plan.redistribute import redistribute
from fshard.program.cost.topology import Topology
from fshard.program.program import Program, program_time


class Created(Protocol):
    """Creation of a tensor that depends on no argument."""

    @property
    def values(self) -> frozenset[int]:
        """Values of the lines that create it."""

    def create(self, assignment: Assignment, spec: Spec) -> int | None:
        """Add the lines that create the layout; return its value, None if that is impossible."""


@dataclass(slots=True)
class TensorVersions:
    """Tensor of a graph with its layouts, each with the id of the value that has it.

    `spec` is its first layout, `grad` is True if it has a gradient. `no_grad_versions` are layouts
    made under `no_grad`, reused only there. Operations keep it sharded along the axes `held`,
    and along the axes `kept` they keep it or another operand sharded.
    The collectives of those with `is_argument` are launched together, ahead of their uses.
    `created` creates a tensor that depends on no argument in other layouts. `windows` are its
    versions with shards extended to windows, by the halo exchange and whether it has a gradient.
    """

    spec: Spec
    grad: bool
    versions: dict[Spec, int]
    no_grad_versions: dict[Spec, int] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    is_argument: bool = False
    created: Created | None = None
    windows: dict[tuple[Program, bool], int] = field(default_factory=dict)

    def available(self, grad: bool) -> dict[Spec, int]:
        """Return the versions that can be used in the grad mode `grad`."""
        if grad or not self.no_grad_versions:
            return self.versions
        return {**self.no_grad_versions, **self.versions}

    def create(self, assignment: Assignment, spec: Spec) -> int | None:
        """Return the value in a layout, created if it has none, None if that is impossible."""
        if spec in self.versions or self.created is None:
            return self.versions.get(spec)
        p, value = spec.partition, None
        if p.reduced_kinds:  # the same values, of which none has a gradient
            plain = spec.replace(partition=PartitionSpec._of(p.dims, p.unreduced_kinds, ()))
            source = self.create(assignment, plain)
            if source is not None:
                value = assignment.new_value()
                prog = redistribute(plain, spec)
                assignment.lines.append(ir.Redistribution(value, Ref(source), prog, False))
        else:
            value = self.created.create(assignment, spec)
        if value is not None:
            self.versions[spec] = value
            if assignment.checkpoints:
                assignment.checkpoints[-1].append((self, spec))
        return value

    def sources(self, grad: bool) -> list[Spec]:
        """Return the layouts that operations choose among, sharded along the axes `kept`."""
        layouts = list(self.available(grad))
        kept = [axis for axis in self.kept if _is_sharded(self.spec, axis)]
        return [spec for spec in layouts if all(_is_sharded(spec, axis) for axis in kept)]


def _is_sharded(spec: Spec, axis: str) -> bool:
    return any(axis in axes for axes in spec.partition.dims)


@dataclass(slots=True)
class Assignment:
    """Lines of a graph, the value ids of its inputs, and the seconds of its redistributions.

    `moved` are bytes of operands that do not stay sharded as they should. `count` is the number of
    value ids so far. `checkpoints` has for every open checkpointed call
    the layouts that tensors were redistributed to in it: a later use would keep these alive.
    `created` are the values that depend on no argument. `launched` are the collectives of arguments
    as for `Arguments`: they are launched together, whatever uses their results.
    """

    lines: list[Line] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    time: float = 0.0
    moved: int = 0
    count: int = 0
    checkpoints: list[list[tuple[TensorVersions, Spec | Program]]] = field(default_factory=list)
    created: set[int] = field(default_factory=set)
    launched: frozenset[tuple[str, str, str, int]] = frozenset()

    def arguments_of(self, operands: Sequence[TensorVersions]) -> Arguments:
        """Return the operands that are arguments of the function, and what is launched for them."""
        indices = frozenset(i for i, operand in enumerate(operands) if operand.is_argument)
        return Arguments(indices, self.launched if indices else frozenset())

    @property
    def cost(self) -> tuple[int, float]:
        """Order of assignments: bytes moved against their layouts, then seconds."""
        return self.moved, self.time

    def copy(self) -> Assignment:
        """Return a copy to which lines can be added on trial."""
        return replace(self, lines=list(self.lines), created=set(self.created))

    def begin_checkpoint(self, call: CheckpointedCall) -> None:
        """Add the mark before the lines of a checkpointed call."""
        self.lines.append(ir.BeginCheckpoint(call))
        self.checkpoints.append([])

    def end_checkpoint(self) -> None:
        """Add the mark after a checkpointed call's lines, and forget the layouts made in it."""
        self.lines.append(ir.EndCheckpoint())
        for tensor, layout in self.checkpoints.pop():
            if isinstance(layout, Program):
                tensor.windows = {k: v for k, v in tensor.windows.items() if k[0] != layout}
                continue
            tensor.versions.pop(layout, None)
            tensor.no_grad_versions.pop(layout, None)

    def add_halo(self, source: int, halo: Program, topology: Topology, *, grad: bool) -> int:
        """Add a halo exchange or reduction of a value; return the value of its result."""
        out = self.new_value()
        self.lines.append(ir.Redistribution(out, Ref(source), halo, grad))
        self.time += program_time(halo, topology) + (
            program_time(halo.T, topology) if grad else 0.0
        )
        return out

    def add_copy(self, source: int) -> int:
        """Add a copy of a value in memory of its own; return its value."""
        out = self.new_value()
        self.lines.append(ir.Copy(out, Ref(source)))
        return out

    def new_value(self) -> int:
        """Return the id of a new value."""
        self.count += 1
        return self.count - 1


def redistributed(
    assignment: Assignment, tensor: TensorVersions, spec: Spec, topology: Topology, *, grad: bool
) -> int:
    """Return the id of the tensor's value in the layout `spec`.

    If it has none, create it, or add the fastest program from one of its layouts.
    `grad` is the grad mode. In equivalent layouts, which differ along axes of size 1, say, it is
    the same value.
    """
    available = tensor.available(grad)
    if spec in available:
        return available[spec]
    for src, value in available.items():
        if src.is_equivalent(spec):
            return value

    out = tensor.create(assignment, spec)
    if out is not None:
        return out
    out = _add_program(assignment, tensor, available, spec, topology, grad=grad)
    (tensor.no_grad_versions if tensor.grad and not grad else tensor.versions)[spec] = out
    if assignment.checkpoints:
        assignment.checkpoints[-1].append((tensor, spec))
    return out


def in_one_layout(
    assignment: Assignment, tensor: TensorVersions, spec: Spec, topology: Topology, *, grad: bool
) -> TensorVersions:
    """Return the tensor in the layout `spec` alone, under `no_grad` without its gradient."""
    value = redistributed(assignment, tensor, spec, topology, grad=grad)
    if tensor.grad and not grad and value in tensor.versions.values():
        value = assignment.add_copy(value)
    return TensorVersions(spec, tensor.grad and grad, {spec: value}, kept=tensor.kept)


def extended(
    assignment: Assignment, tensor: TensorVersions, halo: Program, topology: Topology, *, grad: bool
) -> int:
    """Return the id of the tensor's value with shards extended to windows.

    Args:
        assignment: the lines; if no line extends it so yet, one is added.
        tensor: the tensor.
        halo: the halo exchange, from one of its layouts.
        topology: the topology to cost programs on.
        grad: the grad mode.
    """
    tracked = grad and tensor.grad
    for key in (halo, True), (halo, tracked):
        if key in tensor.windows:
            return tensor.windows[key]
    source = redistributed(assignment, tensor, halo.src, topology, grad=grad)
    out = tensor.windows[halo, tracked] = assignment.add_halo(source, halo, topology, grad=tracked)
    if assignment.checkpoints:
        assignment.checkpoints[-1].append((tensor, halo))
    return out


def _add_program(
    assignment: Assignment, tensor: TensorVersions, available: Mapping[Spec, int], spec: Spec,
    topology: Topology, *, grad: bool,
) -> int:  # fmt: skip
    """Add the fastest program from one of the available layouts to `spec`; return its value."""

    def seconds(prog: Program) -> float:
        """Return a program's time, with that of its transpose if the tensor has a gradient."""
        time = program_time(prog, topology)
        has_backward = tensor.grad and prog.is_linear
        return time + program_time(prog.T, topology) if has_backward else time

    progs = [
        (prog, value)
        for src, value in available.items()
        for prog in _programs(src, spec, topology, grad=tensor.grad)
    ]
    prog, value = min(progs, key=lambda item: seconds(item[0]))
    out = assignment.new_value()
    assignment.lines.append(ir.Redistribution(out, Ref(value), prog, grad and tensor.grad))
    assignment.time += seconds(prog)
    if tensor.is_argument:
        assignment.launched |= gathers(prog.src, prog.dst)
    return out


def _programs(src: Spec, dst: Spec, topology: Topology, *, grad: bool) -> list[Program]:
    """Return programs between two layouts, with `grad` the one with the fastest transpose too.

    Axes unreduced by a maximum, say, that are to be unreduced by a sum are reduced first.
    """
    p, target = src.partition, dict(dst.partition.unreduced_kinds)
    kept = tuple(
        (axis, kind) for axis, kind in p.unreduced_kinds
        if target.get(axis, kind) == kind or {kind, target[axis]} <= set(LINEAR)
    )  # fmt: skip
    if kept != p.unreduced_kinds:
        via = src.replace(partition=PartitionSpec._of(p.dims, kept, p.reduced_kinds))
        first, second = ((src, via), (via, dst))
        return [redistribute(*first, topology=topology) >> redistribute(*second, topology=topology)]
    prog = redistribute(src, dst, topology=topology)
    if not grad or not prog.is_linear:
        return [prog]
    transposed = redistribute(dst.dual, src.dual, topology=topology)
    return [prog, transposed.T] if transposed.is_linear else [prog]
