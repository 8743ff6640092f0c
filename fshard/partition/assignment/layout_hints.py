"""Layouts that are requested later in a graph, as hints to the operations before.

`out_specs` and `fs.constrain` request the layout of a value. By the rules, such a request implies
which factors the operations before it should better shard. A hint only makes a new sharding as good
as one that an operand already has: a reduce-scatter then does not count as half of an all-reduce,
and a replicated computation may be sharded, since slicing sends nothing. A tensor that is joined
with sharded ones has their layout as a hint.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fshard._torch.operators import OpOverload
from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import Meta, OpCall, instances_in, map_call
from fshard.ops.core.rule import Dims, Rule
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
    assert rule.results[0] is not None
    return [_partition_like(dims, rule.results[0], spec, sizes) for dims in rule.operands]


def _partition_like(
    operand: Dims, dims: Dims, spec: Spec, sizes: Mapping[str, int]
) -> PartitionSpec:
    """Return the partition of an operand that shards the factors of `dims` as their spec does."""
    axes_of: dict[str, list[str]] = {}
    for axis, state in axis_states(dims, spec, sizes).items():
        if state.name == "sharded" and state.position >= 0:
            axes_of.setdefault(dims[state.dim][state.position], []).append(axis)
    # A factor that is not the first of its dim can be sharded only where those before it are
    # sharded into parts of size 1: no hint is worth that.
    return PartitionSpec(
        *(tuple(axes_of.get(factors[0], ())) or None if factors else None for factors in operand)
    )


def on_busy_axes(hint: PartitionSpec, specs: Sequence[Spec]) -> PartitionSpec:
    """Return a hint on the axes alone that shard some operand, or along which one is unreduced."""
    busy = {axis for spec in specs for dim in spec.partition.dims for axis in dim}
    busy |= {axis for spec in specs for axis in spec.partition.unreduced}
    return PartitionSpec(*(tuple(a for a in dim if a in busy) or None for dim in hint.dims))


def sibling_hint(
    node: fx.Node, operands: Sequence[Spec], values: Mapping[fx.Node, Any], axes: Collection[str]
) -> PartitionSpec | None:
    """Return the layout of the sharded tensors that an expanded value is joined with.

    An operation that makes a large tensor from a small one, as an interpolation of one pixel does,
    computes a part of it alone on each rank if a use of it has operands of such a layout.

    Args:
        node: the operation.
        operands: the layouts of its operands.
        values: the values that are assigned, `TensorVersions` among them.
        axes: the axes that may shard the value.

    Returns:
        None if the value is not larger than the operands, if the layouts of these mention all
        axes, and without such a use.
    """
    value, busy = node.meta.get("val"), {a for spec in operands for a in spec.partition.axes}
    free = {*axes} - busy
    if not free or not isinstance(value, torch.Tensor):
        return None
    if value.numel() <= sum(math.prod(spec.shape) for spec in operands):
        return None
    for user in node.users:
        call, rule, nodes = call_of_node(user) or (None, None, [])
        if call is None or rule is None:
            continue
        for other, dims in zip(nodes, rule.operands, strict=True):
            spec = getattr(values.get(other), "spec", None)
            if isinstance(spec, Spec) and any(spec.partition.dims):
                mine, sizes = rule.operands[nodes.index(node)], factor_sizes(rule, call)
                hint = _partition_like(mine, dims, spec, sizes)
                return PartitionSpec(
                    *(tuple(a for a in dim if a in free) or None for dim in hint.dims)
                )
    return None
