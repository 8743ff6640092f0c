"""Layouts that are asked for later, brought back to where a choice is made.

`out_specs` and `fs.constrain` say how a value is to lie; by the rules they also say which factors
the operations before it had better cut. A wish only makes a cut that nothing asks for yet worth as
much as one that is there: a reduce-scatter is then no half of an all-reduce, and what every rank
computes whole may be computed in parts, since slicing sends nothing.
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
from fshard.ops.trace.trace import constraint_of

__all__ = ["call_at", "wishes"]


def wishes(
    graph: fx.GraphModule, mesh: Mesh, outputs: Sequence[PartitionSpec | None]
) -> dict[fx.Node, PartitionSpec]:
    """Of every value how it is asked to lie, if something after it asks; the nearest counts.

    Raises `ShardingError` for a constraint on axes that the mesh has not.
    """
    found: dict[fx.Node, PartitionSpec] = {}
    for node in reversed(graph.graph.nodes):
        if node.op == "output":
            listed = node.args[0]
            listed = listed if isinstance(listed, list | tuple) else [listed]
            for each, p in zip(listed, outputs, strict=True):
                if isinstance(each, fx.Node) and p is not None and {*p.axes} <= {*mesh.axes}:
                    found.setdefault(each, p)
        elif node.target is torch.ops.fshard.constrain.default:
            operand, written, place = node.args
            found[operand] = constraint_of(written)
            mesh.check_axes(found[operand].axes, f"fs.constrain{place}")
        elif node in found and isinstance(node.target, OpOverload):
            for operand, p in _before(node, found[node], mesh):
                found.setdefault(operand, p)
    return found


def _before(node: fx.Node, wish: PartitionSpec, mesh: Mesh) -> list[tuple[fx.Node, PartitionSpec]]:
    """How the operands of an operation are asked to lie if its result is."""
    found = call_at(node)
    if found is None or found[1] is None or not isinstance(node.meta["val"], torch.Tensor):
        return []
    call, rule, operands = found
    result = call.results[0]
    assert result is not None
    assert rule is not None
    try:
        sizes = factor_sizes(rule, call)
        spec = Spec(mesh, wish, shape=result.shape, dtype=result.dtype, uneven="chunk")
    except ShardingError:
        return []
    return list(zip(operands, _asked(rule, spec, sizes), strict=True))


def call_at(node: fx.Node) -> tuple[OpCall, Rule | None, list[fx.Node]] | None:
    """The call of a node of a traced graph, its rule, and the nodes of its operands.

    None for what is no operation on tensors; no rule where none is for it.
    """
    value = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or value is None:
        return None
    operands: list[fx.Node] = []

    def as_meta(each: fx.Node) -> Any:
        got = each.meta.get("val")
        if not isinstance(got, torch.Tensor):
            return got
        operands.append(each)
        return Meta.of(got)

    args, kwargs = map_call(node.args, node.kwargs, fx.Node, as_meta)
    metas = tuple(instances_in((*args, *kwargs.values()), Meta))
    results = tuple(
        Meta.of(each) if isinstance(each, torch.Tensor) else None
        for each in (value if isinstance(value, list | tuple) else [value])
    )
    call = OpCall(node.target, args, kwargs, metas, results)
    try:
        return call, rule_of(call), operands
    except ShardingError:
        return call, None, operands


def _asked(rule: Rule, spec: Spec, sizes: Mapping[str, int]) -> list[PartitionSpec]:
    """The partition of every operand that cuts the factors which the result's spec cuts."""
    dims = rule.results[0]
    assert dims is not None
    states = axis_states(dims, spec, sizes)
    cut: dict[str, list[str]] = {}
    for axis, state in states.items():
        if state.name == "sharded" and state.position >= 0:
            cut.setdefault(dims[state.dim][state.position], []).append(axis)
    # A factor that is not the first of its dim can be cut only where those before it are whole
    # in no part: no wish is worth that.
    return [
        PartitionSpec(*(tuple(cut.get(factors[0], ())) or None if factors else None
                        for factors in each))
        for each in rule.operands
    ]  # fmt: skip
