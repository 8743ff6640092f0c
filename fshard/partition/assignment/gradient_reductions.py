"""Places of the casts from invariant to reduced, whose transposes are all-reduces of gradients.

The pass over a graph casts an invariant value to reduced where an operation uses it for different
work on every rank. The cast may as well be before any computation that leads to the value, which
then runs on reduced operands: the gradients stay partial sums through its backward. So the sum of
the statistics of a batch norm has one gradient to reduce, not the mean and the deviation one each.

For each mesh axis the best places are a minimum cut: computations are invariant or reduced, those
of what is reduced alone are reduced, and a value that is invariant with a reduced use costs the
all-reduce of its gradient. A cast from reduced to invariant sends nothing. A gather may as well be
to reduced: its transpose is a reduce-scatter then. Of equal cuts the one nearest to the arguments
is taken, whose all-reduces share a launch with others. The change is made if the backward pass,
with its launches coalesced, takes less time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fshard._util.dtypes import is_inexact
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.validation import has_mixed_reductions
from fshard.ops.core.call import map_call
from fshard.ops.propagate.foreach import is_foreach
from fshard.ops.strategy.axis_roles import REDUCED, Role, roles_of
from fshard.ops.strategy.strategy import Strategy
from fshard.ops.trace.functionalize import has_no_gradient
from fshard.partition.assignment.tensor_versions import Assignment, TensorVersions, redistributed
from fshard.partition.execution.schedule import schedule
from fshard.partition.ir import (
    BeginCheckpoint,
    CheckpointedLines,
    ClosureTensor,
    CustomGradient,
    EndCheckpoint,
    GradMode,
    Line,
    NumberOperation,
    Operation,
    Pick,
    Redistribution,
    Ref,
    RegionCall,
    Write,
    backward_plans,
    flattened,
    has_halo,
    operands_of,
    plan_time,
)
from fshard.program.cost.topology import Topology
from fshard.program.program import Program

SOURCE, SINK = "invariant", "reduced"
SHORTER = 0.999
"""Share of the backward programs' time that a change must not exceed."""


@dataclass(frozen=True, slots=True)
class ValueTable:
    """Specs of the values that lines use, those with a gradient of the results, and numbers."""

    specs: dict[int, Spec]
    differentiated: set[int]
    numbers: set[int]
    results: dict[int, Sequence[Spec | None]] = field(default_factory=dict)
    """Specs of all results of operations."""

    @classmethod
    def of(
        cls, assignment: Assignment, inputs: Sequence[tuple[Spec, bool]], outputs: Sequence[Any],
        differentiated: Sequence[bool],
    ) -> ValueTable:  # fmt: skip
        """Return the table of an assignment's lines; arguments are `place_gradient_reductions`'."""
        tensors = dict(zip(assignment.inputs, inputs, strict=False))
        numbers = {*assignment.inputs[len(inputs) :]}
        table = cls({value: spec for value, (spec, _) in tensors.items()}, set(), numbers)
        has_grad = {value for value, (_, grad) in tensors.items() if grad}
        enabled = True
        for line in assignment.lines:
            if isinstance(line, GradMode):
                enabled = line.enabled
            elif isinstance(line, NumberOperation):
                table.numbers.add(line.out)
            elif table.add(line, has_grad) and enabled:
                has_grad.update(
                    x.out
                    for x in [line]
                    if not isinstance(x, Write | BeginCheckpoint | EndCheckpoint)
                )
        needed = {x for x, grad in zip(outputs, differentiated, strict=False) if grad}
        for line in reversed(assignment.lines):
            if getattr(line, "out", None) in needed:
                needed.update(operands_of(line))
        table.differentiated.update(has_grad & needed)
        return table

    def add(self, line: Line, has_grad: set[int]) -> bool:
        """Add the specs of a line's operands and result; return True if it has a gradient."""
        grad = not has_grad.isdisjoint(operands_of(line))
        match line:
            case Operation():
                values = [value for value in operands_of(line) if value not in self.numbers]
                self.specs.update(zip(values, line.strategy.in_specs, strict=True))
                computed = line.strategy.computed_specs
                self.results[line.out] = computed
                spec = computed[0] if line.single else None
                if spec is not None:
                    self.specs[line.out] = spec
                exact = spec is not None and not is_inexact(spec)
                return grad and not exact and not has_no_gradient(line.strategy.op)
            case Redistribution():
                self.specs.update({line.source.value: line.program.src, line.out: line.program.dst})
                return line.grad
            case Pick():
                picked = self.results.get(line.source.value)
                if picked and (spec := picked[line.index]) is not None:
                    self.specs[line.out] = spec
            case ClosureTensor():
                return line.tensor.requires_grad
            case RegionCall():
                self.specs.update(zip(operands_of(line), line.region.in_specs, strict=True))
                return grad or line.region.grad
        return grad


def place_gradient_reductions(
    assignment: Assignment,
    inputs: Sequence[tuple[Spec, bool]],
    outputs: Sequence[Any],
    differentiated: Sequence[bool],
    topology: Topology,
) -> list[Any]:
    """Move casts to reduced so that the gradients' all-reduces take the least time.

    Args:
        assignment: the lines, which are replaced.
        inputs: the spec of every tensor among the inputs, and True if its gradient is requested.
        outputs: the results, value ids or other objects.
        differentiated: for the first results, True for one with a gradient.
        topology: the topology to cost programs on.

    Returns:
        The results after the change, with the same specs.
    """
    results = list(outputs)
    for axis in inputs[0][0].mesh.axes if any(differentiated) else ():
        table = ValueTable.of(assignment, inputs, results, differentiated)
        flipped = _reduced_lines(assignment.lines, table, axis, topology)
        if not flipped:
            continue
        trial = Assignment(inputs=assignment.inputs, count=assignment.count)
        rewriter = _Rewriter(table, flipped, axis, trial, topology)
        for line in assignment.lines:
            rewriter.add(line)
        new = [
            rewriter.unchanged(Ref(value)).value if type(value) is int else value
            for value in results
        ]
        time, new_time = (
            _backward_time(schedule(x.lines, x.inputs), topology) for x in (assignment, trial)
        )
        if new_time < SHORTER * time:
            assignment.lines, assignment.count, results = trial.lines, trial.count, new
    return results


def _backward_time(lines: Iterable[Line], topology: Topology) -> float:
    return sum(
        plan_time(plan, topology)
        for line in flattened(lines)
        if not isinstance(line, RegionCall | CheckpointedLines)
        for plan in backward_plans(line)
    )


# -- states ----------------------------------------------------------------------------------


def _is_invariant(spec: Spec, axis: str) -> bool:
    return axis not in spec.partition.axes


def _may_be_reduced(prog: Program, axis: str) -> bool:
    """Return True if the result of a program may be reduced along an axis in place of invariant.

    A gather to reduced has a reduce-scatter as its transpose, in place of a slice.
    """
    src, dst = prog.src, prog.dst
    is_gather = any(axis in names for names in src.partition.dims) and _is_invariant(dst, axis)
    return _is_invariant(src, axis) or is_gather


def _reduced(spec: Spec, axis: str) -> Spec:
    """Return a spec that is reduced along an axis along which it was invariant."""
    if not _is_invariant(spec, axis):
        return spec
    p = spec.partition
    kinds = tuple(sorted((*p.reduced_kinds, (axis, "sum"))))
    return spec.replace(partition=PartitionSpec._of(p.dims, p.unreduced_kinds, kinds))


def _reduced_role(strategy: Strategy, axis: str) -> Role | None:
    """Return the role of an axis on reduced operands, None if the axis is not invariant now."""
    if dict(strategy.roles)[axis].label != "invariant" or is_foreach(strategy.call.op):
        return None
    specs = [spec for spec in (*strategy.in_specs, *strategy.out_specs) if spec is not None]
    sums = ((axis, "sum"),)
    if any(has_mixed_reductions(spec.partition.unreduced_kinds, sums) for spec in specs):
        return None
    roles = roles_of(strategy.rule, strategy.call, grad=True)
    return next((role for role in roles if role.label == "reduced"), None)


def _on_reduced(strategy: Strategy, axis: str, role: Role) -> Strategy:
    """Return a strategy with another role of an axis, which was invariant."""
    pairs = zip(strategy.in_specs, role.operands, strict=True)
    in_specs = tuple(_reduced(spec, axis) if state == REDUCED else spec for spec, state in pairs)
    out_specs = tuple(
        _reduced(spec, axis) if spec is not None and state == REDUCED else spec
        for spec, state in zip(strategy.out_specs, role.results, strict=True)
    )
    roles = tuple((name, role if name == axis else old) for name, old in strategy.roles)
    halos, reductions = (
        tuple(halo and Program(_reduced(halo.src, axis), halo.steps) for halo in row)
        for row in (strategy.in_halos, strategy.out_halos)
    )
    return replace(strategy, roles=roles, in_specs=in_specs, out_specs=out_specs, in_halos=halos,
                   out_halos=reductions)  # fmt: skip


# -- the cut ---------------------------------------------------------------------------------


def _reduced_lines(
    lines: Sequence[Line], table: ValueTable, axis: str, topology: Topology
) -> set[int]:
    """Return the values of the lines that are reduced along an axis in the minimum cut."""
    producers: dict[int, int] = {}
    network = FlowNetwork()

    def cast_time(spec: Spec, target: Spec) -> float:
        value = TensorVersions(spec, True, {spec: 0})
        trial = Assignment()
        redistributed(trial, value, target, topology, grad=True)
        return _backward_time(trial.lines, topology)

    for line in lines:
        if isinstance(line, Pick) and line.source.value in producers:
            producers[line.out] = producers[line.source.value]
            continue
        if isinstance(line, Operation):
            if _reduced_role(line.strategy, axis) is None:
                continue
        elif not isinstance(line, Redistribution) or not _may_be_reduced(line.program, axis):
            continue
        producers[line.out] = line.out
        for value in operands_of(line):
            if value in table.differentiated and _is_invariant(table.specs[value], axis):
                network.add((value,), line.out)
        if isinstance(line, Redistribution) and line.out in table.differentiated:
            prog = line.program
            target = _reduced(prog.src, axis), _reduced(prog.dst, axis)
            saved = 0.0
            if not has_halo(prog):
                saved = cast_time(prog.src, prog.dst) - cast_time(*target)
            edge = (line.out, SINK) if saved > 0 else (SOURCE, line.out)
            network.add(edge[0], edge[1], abs(saved))
    for node in [node for node in network.nodes() if isinstance(node, tuple)]:
        spec = table.specs[node[0]]
        time = cast_time(spec, _reduced(spec, axis))
        network.add(producers.get(node[0], SOURCE), node, time)
    return {value for value in network.sink_side() if isinstance(value, int)}


class FlowNetwork:
    """Directed graph with capacities, and its minimum cut, found by Dinic's algorithm."""

    def __init__(self) -> None:
        self.capacity: dict[Any, dict[Any, float]] = defaultdict(dict)

    def add(self, tail: Any, head: Any, capacity: float = float("inf")) -> None:
        """Add an edge; parallel edges add up."""
        self.capacity[tail][head] = self.capacity[tail].get(head, 0.0) + capacity
        self.capacity[head].setdefault(tail, 0.0)

    def nodes(self) -> list[Any]:
        """Return the nodes of all edges."""
        return list(self.capacity)

    def sink_side(self) -> set[Any]:
        """Return the nodes that lead to the sink from the minimum cut nearest to the source."""
        leads = set(self._levels(SINK, forward=False))
        while SINK in (levels := self._levels(SOURCE, forward=True)):
            rest = {node: deque(heads) for node, heads in self.capacity.items()}
            while self._augment(levels, rest):
                pass
        return leads.difference(levels)

    def _levels(self, start: Any, *, forward: bool) -> dict[Any, int]:
        """Return the distances from a node, or to it, along edges with free capacity."""
        levels, queue = {start: 0}, deque([start])
        while queue:
            node = queue.popleft()
            for other in self.capacity[node]:
                tail, head = (node, other) if forward else (other, node)
                if other not in levels and self.capacity[tail][head] > 1e-12:
                    levels[other] = levels[node] + 1
                    queue.append(other)
        return levels

    def _augment(self, levels: dict[Any, int], rest: dict[Any, deque[Any]]) -> bool:
        """Add a flow along one shortest path; return False if there is none."""
        path = [SOURCE]
        while path and path[-1] != SINK:
            node = path[-1]
            while rest[node]:
                head = rest[node][0]
                if self.capacity[node][head] > 1e-12 and levels.get(head) == levels[node] + 1:
                    break
                rest[node].popleft()
            if rest[node]:
                path.append(rest[node][0])
            else:
                path.pop()
                if path:
                    rest[path[-1]].popleft()
        edges = list(itertools.pairwise(path))
        flow = min((self.capacity[tail][head] for tail, head in edges), default=0.0)
        for tail, head in edges:
            self.capacity[tail][head] -= flow
            self.capacity[head][tail] += flow
        return bool(edges)


# -- the change ------------------------------------------------------------------------------


class _Rewriter:
    """Copy of lines to `trial` in which those of `flipped` run on reduced operands."""

    def __init__(
        self, table: ValueTable, flipped: set[int], axis: str, trial: Assignment, topology: Topology
    ) -> None:
        self.table, self.flipped, self.axis = table, flipped, axis
        self.trial, self.topology, self.grad = trial, topology, True
        self.tensors: dict[int, TensorVersions] = {}
        self.results: dict[int, Sequence[Spec | None]] = {}

    def define(self, value: int, spec: Spec | None, new: int) -> None:
        """Give a value of the lines a layout, and its id in the new lines."""
        if spec is not None:
            self.tensors[value] = TensorVersions(spec, value in self.table.differentiated,
                                                 {spec: new})  # fmt: skip

    def use(self, value: int, spec: Spec) -> int:
        """Return the new id of a value in a layout."""
        if value not in self.tensors:
            self.define(value, self.table.specs[value], value)
        return redistributed(self.trial, self.tensors[value], spec, self.topology, grad=self.grad)

    def unchanged(self, ref: Ref) -> Ref:
        """Return the reference to a value in the layout that it had."""
        spec = self.table.specs.get(ref.value)
        return ref if spec is None else Ref(self.use(ref.value, spec))

    def add(self, line: Line) -> None:
        """Add a line of the original."""
        match line:
            case Redistribution():
                prog, flipped = line.program, line.out in self.flipped
                spec = _reduced(prog.dst, self.axis) if flipped else prog.dst
                if has_halo(prog):
                    src = _reduced(prog.src, self.axis) if flipped else prog.src
                    prog = Program(src, prog.steps, topology=prog.topology)
                    source = self.use(line.source.value, src)
                    out = self.trial.add_halo(source, prog, self.topology, grad=line.grad)
                    return self.define(line.out, spec, out)
                return self.define(line.out, spec, self.use(line.source.value, spec))
            case Operation():
                line = self.operation(line)
                specs = line.strategy.computed_specs
                self.results[line.out] = specs
                self.define(line.out, specs[0] if line.single else None, line.out)
            case Pick() if line.source.value in self.results:
                self.define(line.out, self.results[line.source.value][line.index], line.out)
            case CustomGradient() | RegionCall():
                line = replace(line, operands=tuple(map(self.unchanged, line.operands)))
            case GradMode():
                self.grad = line.enabled
            case BeginCheckpoint():
                return self.trial.begin_checkpoint(line.call)
            case EndCheckpoint():
                return self.trial.end_checkpoint()
        self.trial.lines.append(line)

    def operation(self, line: Operation) -> Operation:
        """Return an operation on its operands in the new lines."""
        role = _reduced_role(line.strategy, self.axis) if line.out in self.flipped else None
        strategy = _on_reduced(line.strategy, self.axis, role) if role else line.strategy
        specs = iter(strategy.in_specs)

        def operand(ref: Ref) -> Ref:
            return ref if ref.value in self.table.numbers else Ref(self.use(ref.value, next(specs)))

        args, kwargs = map_call(line.args, line.kwargs, Ref, operand)
        return replace(line, strategy=strategy, args=args, kwargs=kwargs)
