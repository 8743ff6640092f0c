"""Layouts that are requested later in a graph, as hints to the operations before.

`out_specs` and `fs.constrain` request the layout of a value. By the rules, such a request implies
which factors the operations before it should better shard. A hint only makes a new sharding as good
as one that an operand already has: a reduce-scatter then does not count as half of an all-reduce,
and a replicated computation may be sharded, since slicing sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fshard._torch.operators import OpOverload
from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import Meta, OpCall, instances_in, map_call
from fshard.ops.core.rule import Rule
from fshard.ops.propagate.propagate import rule_of
from fshard.ops.strategy.axis_roles import axis_states, factor_sizes
from fshard.ops.trace.trace import Constraint


def layout_hints(
    graph: fx.GraphModule, mesh: Mesh, outputs: Sequence[PartitionSpec | None]
) -> dict[fx.Node, PartitionSpec]:
    """Return each value's layout requested downstream; the nearest request wins.

    Args:
        graph: the graph.
        mesh: the mesh of the layouts.
        outputs: the requested partition of every result, None where there is none.

    Raises:
        ShardingError: for a constraint on axes that the mesh lacks.
    """
    hints: dict[fx.Node, PartitionSpec] = {}
    for node in reversed(graph.graph.nodes):
        if node.op == "output":
            results = node.args[0]
            results = results if isinstance(results, list | tuple) else [results]
            for result, p in zip(results, outputs, strict=True):
                if isinstance(result, fx.Node) and p is not None and {*p.axes} <= {*mesh.axes}:
                    hints.setdefault(result, p)
        elif node.target is torch.ops.fshard.constrain.default:
            operand, written, place = node.args
            constraint = Constraint.read(written)
            mesh.check_axes(constraint.axes or constraint.partition.axes, f"fs.constrain{place}")
            hints[operand] = constraint.partition
        elif node in hints and isinstance(node.target, OpOverload):
            for operand, p in _operand_hints(node, hints[node], mesh):
                hints.setdefault(operand, p)
    return hints


def _operand_hints(
    node: fx.Node, hint: PartitionSpec, mesh: Mesh
) -> list[tuple[fx.Node, PartitionSpec]]:
    """Return the hints for the operands of an operation that a hint for its result implies."""
    described = call_of_node(node)
    if described is None or described[1] is None or not isinstance(node.meta["val"], torch.Tensor):
        return []
    call, rule, operands = described
    result = call.results[0]
    assert result is not None
    assert rule is not None
    try:
        sizes = factor_sizes(rule, call)
        spec = Spec(mesh, hint, shape=result.shape, dtype=result.dtype, uneven="chunk")
    except ShardingError:
        return []
    return list(zip(operands, _operand_partitions(rule, spec, sizes), strict=True))


def call_of_node(node: fx.Node) -> tuple[OpCall, Rule | None, list[fx.Node]] | None:
    """Return the call of a node of a traced graph, its rule, and the nodes of its operands.

    Returns:
        None for a node that is not an operation on tensors; a rule of None for one without a rule.
    """
    value = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or value is None:
        return None
    operands: list[fx.Node] = []

    def as_meta(operand: fx.Node) -> Any:
        tensor = operand.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return tensor
        operands.append(operand)
        return Meta.of(tensor)

    args, kwargs = map_call(node.args, node.kwargs, fx.Node, as_meta)
    metas = tuple(instances_in((*args, *kwargs.values()), Meta))
    results = tuple(
        Meta.of(result) if isinstance(result, torch.Tensor) else None
        for result in (value if isinstance(value, list | tuple) else [value])
    )
    call = OpCall(node.target, args, kwargs, metas, results)
    try:
        return call, rule_of(call), operands
    except ShardingError:
        return call, None, operands


def _operand_partitions(rule: Rule, spec: Spec, sizes: Mapping[str, int]) -> list[PartitionSpec]:
    """Return partitions of the operands that shard the factors which the result's spec shards."""
    dims = rule.results[0]
    assert dims is not None
    axes_of: dict[str, list[str]] = {}
    for axis, state in axis_states(dims, spec, sizes).items():
        if state.name == "sharded" and state.position >= 0:
            axes_of.setdefault(dims[state.dim][state.position], []).append(axis)
    # A factor that is not the first of its dim can be sharded only where those before it are
    # sharded into parts of size 1: no hint is worth that.
    return [
        PartitionSpec(*(tuple(axes_of.get(factors[0], ())) or None if factors else None
                        for factors in operand))
        for operand in rule.operands
    ]  # fmt: skip
