"""The assignment of layouts to a whole call: the fastest of two, and the layouts of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fshard._util.errors import Problem, ShardingError, add_place, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.layout.tree import non_tensor_problem
from fshard.ops.propagate.choice_hints import LayoutHint, RoleHint
from fshard.partition import arguments
from fshard.partition.arguments import CallSignature
from fshard.partition.assignment.assign_layouts import LayoutAssigner
from fshard.partition.assignment.created_tensors import without_unused
from fshard.partition.assignment.gradient_reductions import place_gradient_reductions
from fshard.partition.assignment.layout_hints import layout_hints
from fshard.partition.assignment.overlapped_products import overlap_products
from fshard.partition.assignment.tensor_versions import (
    Assignment,
    TensorVersions,
    redistributed,
)
from fshard.partition.ir import Number, aliases_of, keep_gradients_of, with_modules
from fshard.partition.partitioned_call import NonTensor
from fshard.partition.training_time import step_times
from fshard.program.cost.topology import Topology


def fastest_assignment(
    graph: fx.GraphModule, inputs: Sequence[tuple[Spec, bool]], signature: CallSignature,
    requested: Sequence[Any], count: int, numbers: Sequence[type],
    hold: Sequence[tuple[str, ...]], kept: tuple[str, ...], params: int,
    roles: Mapping[str, RoleHint], mesh: Mesh, topology: Topology, where: str, *,
    overlap: bool,
) -> tuple[Assignment, list[Any], list[Spec | None], bool]:  # fmt: skip
    """Assign layouts with and without hints that shard replicated values; return the faster.

    To shard a value that all ranks compute replicated saves work, and may cost a gather where
    another operation requires it replicated.

    Args:
        graph: the graph.
        inputs: for every tensor its spec, and True if its gradient is requested.
        signature: the signature of the call.
        requested: the layout of every result, None where there is none.
        count: number of results; the outputs after them are final values of arguments.
        numbers: the types of the symbolic numbers.
        hold: for each of the first tensors the axes that its layout keeps.
        kept: axes along which operations stay sharded whose operands are.
        params: number of first tensors that operations may gather along these axes, too.
        roles: the roles that are requested of operations, by the names of their nodes.
        mesh: the mesh.
        topology: the topology that layouts are costed on.
        where: name of the function in errors.
        overlap: True to run products beside the gathers and reductions around them.

    Returns:
        The lines, the value ids of the results, their specs, and True if one has a gradient.
    """
    partitions = [p.partition if isinstance(p, Spec) else p for p in requested]
    hints: dict[fx.Node, LayoutHint] = {**layout_hints(graph, mesh, partitions)}
    both = len(hints) > 0
    hints |= {node: roles[node.name] for node in graph.graph.nodes if node.name in roles}
    choices = []
    for shard_replicated in (True, False) if both else (False,):
        assigner = LayoutAssigner(mesh, topology, signature.grad_enabled,
                                  signature.device, hints, shard_replicated, kept)  # fmt: skip
        try:
            results = assigner.assign(graph, inputs, numbers, hold, params)
        except ShardingError as error:
            add_place(error, assigner.place)
            raise
        assignment = assigner.assignment
        outputs, specs, grads = _redistribute_results(
            assignment, results, requested, topology, where
        )
        sources = [out for out, grad in zip(outputs, grads[:count], strict=False) if grad]
        lines = without_unused(assignment.lines, assignment.created, outputs)
        assignment.lines = keep_gradients_of(lines, sources)
        outputs = place_gradient_reductions(assignment, inputs, outputs, grads[:count],
                                            topology)  # fmt: skip
        if overlap:
            overlap_products(assignment, inputs, outputs, grads[:count], topology)
        assignment.lines = with_modules(assignment.lines)
        choices.append((assignment, outputs, specs, bool(sources)))
    if len(choices) == 1:
        return choices[0]

    def seconds(choice: tuple[Assignment, list[Any], list[Spec | None], bool]) -> float:
        has_grad = dict(zip(choice[0].inputs, (grad for _, grad in inputs), strict=False))
        return step_times(choice[0].lines, mesh, topology, grad=choice[3], inputs=has_grad).in_turn

    return min(choices, key=seconds)


def _redistribute_results(
    assignment: Assignment, results: Sequence[Any], requested: Sequence[Any], topology: Topology,
    where: str,
) -> tuple[list[Any], list[Spec | None], list[bool]]:  # fmt: skip
    """Redistribute the results to their requested layouts.

    Returns:
        Their value ids, their specs, and for each True if it has a gradient. A result that is
        not a tensor gives a `NonTensor`, None and False.
    """
    outputs: list[Any] = []
    grads: list[bool] = []
    specs: list[Spec | None] = []
    problems: list[Problem] = []
    for index, (result, p) in enumerate(zip(results, requested, strict=True)):
        if not isinstance(result, TensorVersions):
            is_number = isinstance(result, Number)
            problem = None if is_number else non_tensor_problem(result, p, f"result {index}")
            problems += [] if problem is None else [problem]
            outputs.append(result.value if is_number else NonTensor(result))
            specs.append(None)
            grads.append(False)
            continue
        spec = result.spec
        try:
            if p is not None:
                spec = p if isinstance(p, Spec) else spec.replace(partition=p)
        except ShardingError as error:
            problems += arguments.located(f"result {index}: {p}", error, "out_specs")
            continue
        outputs.append(redistributed(assignment, result, spec, topology, grad=True))
        specs.append(spec)
        grads.append(result.grad)
    raise_if(f"{where}: out_specs", problems)
    return outputs, specs, grads


def copy_aliased_results(
    assignment: Assignment, outputs: list[Any], count: int, written: set[int]
) -> None:
    """Copy those of the first `count` results that may share memory with a written argument."""
    aliases = set(written)
    for line in assignment.lines:
        aliases.update(out for out, operand in aliases_of(line) if operand in aliases)
    for index, value in enumerate(outputs[:count]):
        if type(value) is int and value in aliases:
            outputs[index] = assignment.add_copy(value)
