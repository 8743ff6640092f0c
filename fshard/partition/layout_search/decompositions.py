"""Decompositions of the operations of a graph, and the least time that one takes.

In a decomposition every operation reads its operands and writes its results, in as many shards as
the mesh has devices at most. So the seconds of all of its operations on one device, divided by the
number of devices, are a lower bound, whatever layouts the operations have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fshard._util.dtypes import is_inexact
from fshard.ops.core.call import Meta, map_call
from fshard.ops.core.registry import decomposition_of, is_mapped
from fshard.ops.propagate.role_costs import compute_time
from fshard.ops.strategy.axis_roles import factor_sizes
from fshard.ops.trace.functionalize import has_no_gradient
from fshard.ops.trace.trace import decompose
from fshard.partition.assignment.layout_hints import call_of_node
from fshard.partition.training_time import FORWARD_AND_BACKWARD
from fshard.program.cost.topology import Topology


def decomposition_graph(
    node: fx.Node, requires_grad: Sequence[bool] = ()
) -> fx.GraphModule | None:  # fmt: skip
    """Return the graph of a node's operation in terms of others, None if there is none."""

    def as_meta(operand: fx.Node) -> Any:
        value = operand.meta["val"]
        return Meta.of(value) if isinstance(value, torch.Tensor) else value

    args, kwargs = map_call(node.args, node.kwargs, fx.Node, as_meta)
    return decompose(node.target, decomposition_of(node.target), args, kwargs,
                     torch.device("meta"), requires_grad)  # fmt: skip


def decomposed_time(
    node: fx.Node, requires_grad: Sequence[bool], topology: Topology, outer: Sequence[Any] = ()
) -> float:
    """Return the least seconds of a node's decomposition on one device, in all passes.

    Args:
        node: the node, whose operation has a decomposition.
        requires_grad: for every operand, if its gradient is computed.
        topology: the topology to cost the operations on.
        outer: the operations that it is in the decomposition of; those are not decomposed again.
    """
    graph = decomposition_graph(node, requires_grad)
    if graph is None:
        return 0.0
    time, flags, grads = 0.0, iter(requires_grad), dict[fx.Node, bool]()
    for part in graph.graph.nodes:
        if part.op == "placeholder":
            grads[part] = next(flags, False)
        elif any(operand in grads for operand in part.all_input_nodes):
            grads[part] = not is_constant(part) and any(
                grads.get(operand, False) for operand in part.all_input_nodes
            )
            time += _least_time(part, grads, topology, (*outer, node.target))
    return time


def _least_time(
    node: fx.Node, grads: dict[fx.Node, bool], topology: Topology, outer: Sequence[Any]
) -> float:
    """Return the least seconds of an operation on one device, by its rule or decomposed."""
    call, rule, operands = call_of_node(node) or (None, None, [])
    if call is None or rule is None or is_mapped(call.op):
        return 0.0
    passes = FORWARD_AND_BACKWARD if grads[node] else 1
    time = passes * compute_time(topology, rule, call, factor_sizes(rule, call)).total
    if decomposition_of(call.op) is None or call.op in outer:
        return time
    requires_grad = [grads[node] and grads.get(operand, False) for operand in operands]
    return min(time, decomposed_time(node, requires_grad, topology, outer))


def differentiable(graph: fx.GraphModule) -> dict[fx.Node, bool]:
    """Return for every node of a graph if the gradient of a result comes back to it."""
    result: dict[fx.Node, bool] = {}
    for node in reversed(graph.graph.nodes):
        result[node] = node.op == "output" or (
            any(result[user] for user in node.users) and not is_constant(node)
        )
    return result


def is_constant(node: fx.Node) -> bool:
    """Return True for an operation whose results have no gradient."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    return has_no_gradient(node.target) or not any(map(is_inexact, tensors))
