"""Labelling of a traced graph by the roles of its operations on all mesh axes at once.

Every operation gets one role for each axis as its label, every argument a layout. Its weights are
modelled times that no plan of `fs.partition` undercuts: a redistribution that several uses share is
weighed as a mean of the uses, which is at most the one of them that takes longest, with the
gradient if a result's comes back by this use; operations that can be decomposed may shard any
factor, in the least time of their parts (`call_labels`); operations without a rule, factories,
halos, and what users map over the mesh take no time, nor does the backward pass of a custom
function. An operation takes an operand unreduced only by a reduction that the operand may come
with, as in plans: a sum becomes a mean by communication. So the least
weight is a lower bound of the time of a step, over all layouts of the arguments and all strategies
of the operations: the linear relaxation of Alpa's integer program (arXiv 2201.12023) need not be
solved, as the labelling is exact.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from fshard._torch.autograd_state import SET_GRAD_ENABLED
from fshard._util.dtypes import is_inexact
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.registry import decomposition_of, is_mapped
from fshard.ops.core.rule import Rule
from fshard.ops.propagate.choice_hints import RoleHint
from fshard.ops.propagate.role_costs import compute_time, nbytes
from fshard.ops.strategy.axis_roles import Role, factor_sizes
from fshard.ops.trace.custom_functions import TracedBackward
from fshard.partition.assignment.layout_hints import call_of_node
from fshard.partition.assignment.overlapped_products import FACTORS
from fshard.partition.layout_search.argument_layouts import ArgumentLeaf
from fshard.partition.layout_search.call_labels import CallLabeller, is_by_parts
from fshard.partition.layout_search.decompositions import (
    decomposed_time,
    decomposition_graph,
    differentiable,
)
from fshard.partition.layout_search.role_labels import (
    MAX_LABELS,
    TooManyLabels,
    Unreduced,
)
from fshard.partition.layout_search.state_distances import (
    FIRST_DIM,
    REDUCED_CODE,
    UNREDUCED_CODE,
    AxisTuple,
    distances,
    gradient_distances,
    joint_indices,
)
from fshard.partition.layout_search.variable_elimination import EqualTables, Labelling
from fshard.program.cost.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class _Value:
    """Tensor of the graph: its variable, its joint state by label, and if it has a gradient.

    `unreduced` has the axes on which some label leaves it unreduced, with the reduction.
    """

    variable: int
    states: torch.Tensor
    meta: Meta
    grad: bool
    unreduced: Unreduced


class LabelledLayouts(NamedTuple):
    """Labels of least weight.

    Attributes:
        layouts: the layout of every leaf of the arguments, None for one that is not a tensor.
        roles: the roles of operations, by the names of their nodes.
        weight: the weight in seconds.
    """

    layouts: tuple[Any, ...]
    roles: dict[str, RoleHint]
    weight: float


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """Use of a value by the labels of a variable, in the joint states that they require."""

    value: _Value
    variable: int
    states: torch.Tensor
    grad: bool
    """True if the gradient of the value comes back from it."""


class JointLabels:
    """Labelling of a graph for all axes of a mesh together.

    Args:
        graph: the traced graph.
        mesh: the mesh.
        layouts: for every leaf of the arguments its layouts, None if it is not a tensor.
        leaves: the leaves of the arguments.
        results: the layout that each result is redistributed to, None for one that is not.
        topology: the topology that layouts are costed on.
        grad: True if some result has a gradient.
        axes: the axes that are labelled; None is all. Along others all tensors are taken to be
            sharded, at no cost, so that the least weight is a bound still.

    Raises:
        TooManyLabels: for a mesh or an operation with too many labels.
    """

    def __init__(
        self, graph: fx.GraphModule, mesh: Mesh, layouts: Sequence[Sequence[Any] | None],
        leaves: Sequence[ArgumentLeaf], results: Sequence[Any], topology: Topology, *, grad: bool,
        axes: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.mesh, self.topology, self.results = mesh, topology, results
        self.axes = AxisTuple.of(mesh, topology, axes)
        self.fine, self.parts = self.axes, [*range(len(self.axes.names))]
        """Axes with distances between states, and the labelled axes that they are parts of."""
        if axes is None:
            self.fine, self.parts = AxisTuple.refined(mesh, topology)
        self.layouts = [None if options is None else self.distinct(options) for options in layouts]
        self.leaves = leaves
        self.has_grad = grad
        self.weights: list[torch.Tensor] = []
        self.replicated: dict[int, torch.Tensor] = {}
        """True for the labels of an operation whose axes shard no factor, by its variable."""
        self.local_bytes: dict[int, torch.Tensor] = {}
        """Bytes of an argument on a rank, by its variable and label."""
        self.uses: list[_Use] = []
        self.named: dict[str, tuple[int, list[tuple[Role, ...]]]] = {}
        """The variable and the roles by label of operations, by the names of their nodes."""
        self.of_calls = CallLabeller(self.axes, self.parts, topology)
        self.tables: dict[tuple[Any, ...], torch.Tensor] = {}
        self.products: set[int] = set()
        """Variables of products, which may hide collectives."""
        self.in_decomposition = False
        self.equal = EqualTables()
        self.differentiable = dict[fx.Node, bool]()
        self.grad_enabled = True
        inputs = [
            self.argument(leaf, options)
            for leaf, options in zip(leaves, self.layouts, strict=True)
            if options is not None
        ]
        self.arguments = [value.variable for value in inputs]
        self.run(graph, inputs, results)
        counts = Counter(id(use.value) for use in self.uses)
        self.equal_shares = [1 / counts[id(use.value)] for use in self.uses]
        self.product_uses = Counter(
            id(use.value) for use in self.uses if use.variable in self.products
        )
        self.shares = self.equal_shares
        self.labels: list[int] = []

    # -- solutions -------------------------------------------------------------------------

    def solve(
        self, *, shared: bool = True, price: float = 0.0, compute: float = 1.0,
        arguments: float = 1.0, layouts: Sequence[Any] | None = None, overlap: bool = False,
    ) -> LabelledLayouts:  # fmt: skip
        """Return the labels of least weight.

        Args:
            shared: weigh each use of a value by its share of all uses (`self.shares`), as the
                bound requires; else in full, as if no two uses shared a redistribution.
            price: seconds charged for every byte of an argument on a rank.
            compute: factor of the seconds of operations.
            arguments: factor of the seconds to redistribute arguments.
            layouts: the layouts of the leaves of the arguments, which are then labelled with equal
                shares; None to choose them.
            overlap: True if products hide the gathers and reductions around them.
        """
        labelling = Labelling(equal=self.equal)
        for variable, weights in enumerate(self.weights):
            held = self.local_bytes.get(variable)
            labelling.variable(compute * weights if held is None else price * held)
        if layouts is not None:
            self.fix(labelling, layouts)
        shares = self.shares if layouts is None else self.equal_shares
        for use, share in zip(self.uses, shares, strict=True):
            factor = (share if shared else 1.0) * (
                arguments if use.value.variable in self.local_bytes else 1.0
            )
            table = self.table(use)
            if overlap and not self.products.isdisjoint((use.variable, use.value.variable)):
                table, factor = self.exposed(use, table), factor * compute
            labelling.pair(use.value.variable, use.variable, self.equal.scaled(table, factor))
        labels, weight = labelling.solve()
        if shared and layouts is None:
            self.labels = labels
        chosen = iter(self.arguments)
        labelled = tuple(
            None if options is None else options[labels[next(chosen)]] for options in self.layouts
        )
        return LabelledLayouts(labelled, self.roles(labels), weight)

    def exposed(self, use: _Use, table: torch.Tensor) -> torch.Tensor:
        """Return the seconds of a use that the products beside it do not hide.

        A product hides at most its own time; several products of one value hide it together, which
        no pair of labels shows, so that they are taken to hide all of it.
        """
        if use.variable in self.products:
            if self.product_uses[id(use.value)] > 1:
                return torch.zeros_like(table)
            table = table - self.weights[use.variable][None]
        if use.value.variable in self.products:
            table = table - self.weights[use.value.variable][:, None]
        return table.clamp(min=0.0)

    def improve_shares(self, rate: float) -> None:
        """Give the uses that take longest in the last labels a larger share of their values.

        The bound is a concave function of the shares, with the seconds of the uses as supergradient
        (Lagrangian relaxation, Held and Karp 1971).

        Args:
            rate: exponent of the change for the use that takes longest.
        """
        uses: dict[int, list[int]] = defaultdict(list)
        for index, use in enumerate(self.uses):
            uses[id(use.value)].append(index)
        self.shares = [*self.shares]
        for indices in uses.values():
            seconds = [
                float(self.table(self.uses[i])[self.labels[self.uses[i].value.variable],
                                               self.labels[self.uses[i].variable]])
                for i in indices
            ]  # fmt: skip
            longest = max(seconds)
            if len(indices) == 1 or not longest:
                continue
            changed = [self.shares[i] * math.exp(rate * (time / longest - 1))
                       for i, time in zip(indices, seconds, strict=True)]  # fmt: skip
            for i, share in zip(indices, changed, strict=True):
                self.shares[i] = share / sum(changed)

    def fix(self, labelling: Labelling, layouts: Sequence[Any]) -> None:
        """Leave every argument the label of one layout."""
        rows = zip(self.layouts, layouts, strict=True)
        fixed = [options.index(p) for options, p in rows if options is not None]
        for variable, label in zip(self.arguments, fixed, strict=True):
            weights = torch.full((labelling.labels[variable],), math.inf, dtype=torch.float64)
            weights[label] = 0.0
            labelling.weigh(variable, weights)

    def roles(self, labels: Sequence[int]) -> dict[str, RoleHint]:
        """Return the roles of operations in a labelling; decomposed ones have none."""
        hints = {}
        for name, (variable, options) in self.named.items():
            roles = options[labels[variable]]
            if not is_by_parts(roles):
                pairs = zip(self.axes.names, (role.name for role in roles), strict=True)
                hints[name] = RoleHint(tuple(pairs))
        return hints

    def table(self, use: _Use) -> torch.Tensor:
        """Return the seconds from every state of a value to every state that a use requires."""
        value, (ndim, size) = use.value, (use.value.meta.ndim, nbytes(use.value.meta))
        key = id(value.states), id(use.states), ndim, size, use.grad
        if key not in self.tables:
            time = distances(self.fine, self.topology, ndim, size)
            if use.grad:
                time = time + gradient_distances(self.fine, self.topology, ndim, size)
            self.tables[key] = self.equal.unique(time[value.states][:, use.states])
        return self.tables[key]

    # -- the graph -------------------------------------------------------------------------

    def variable(self, weights: torch.Tensor) -> int:
        """Add a variable."""
        self.weights.append(weights)
        return len(self.weights) - 1

    def argument(self, leaf: ArgumentLeaf, layouts: Sequence[Any]) -> _Value:
        """Add an argument, with a label for each of its layouts."""
        assert leaf.meta is not None
        if len(layouts) > MAX_LABELS:
            raise TooManyLabels
        partitions = [p.partition if isinstance(p, Spec) else p for p in layouts]
        variable = self.variable(torch.zeros(len(layouts), dtype=torch.float64))
        codes = torch.tensor([self.codes(p) for p in partitions]).reshape(len(layouts), -1)
        self.local_bytes[variable] = torch.tensor([
            nbytes(leaf.meta) / self.axes.left_out
            / self.mesh.axis_size([a for dim in p.dims for a in dim if a in self.axes.names])
            for p in partitions
        ], dtype=torch.float64)  # fmt: skip
        unreduced = frozenset(
            (self.axes.names.index(axis), kind)
            for p in partitions
            for axis, kind in p.unreduced_kinds
            if axis in self.axes.names
        )
        return _Value(variable, joint_indices(codes[:, self.parts], leaf.meta.ndim), leaf.meta,
                      leaf.requires_grad, unreduced)  # fmt: skip

    def distinct(self, layouts: Sequence[Any]) -> list[Any]:
        """Return the layouts that differ along the labelled axes."""
        if self.axes.left_out == 1:
            return [*layouts]
        rows = {tuple(self.codes(p.partition if isinstance(p, Spec) else p)): p
                for p in reversed(layouts)}  # fmt: skip
        return [*rows.values()]

    def codes(self, p: PartitionSpec) -> list[int]:
        """Return the code of a partition on every axis."""
        code = {axis: FIRST_DIM + dim for dim, axes in enumerate(p.dims) for axis in axes}
        code |= dict.fromkeys((axis for axis, _ in p.reduced_kinds), REDUCED_CODE)
        code |= dict.fromkeys((axis for axis, _ in p.unreduced_kinds), UNREDUCED_CODE)
        return [code.get(axis, 0) for axis in self.axes.names]

    def run(
        self, graph: fx.GraphModule, inputs: Iterable[_Value | None], results: Sequence[Any] = ()
    ) -> list[Any]:
        """Add the operations of a graph, and return its results."""
        env, remaining = dict[fx.Node, Any](), iter(inputs)
        outputs: list[Any] = []
        self.differentiable |= differentiable(graph)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(remaining, None)
            elif node.op == "call_function":
                env[node] = self.call(node, env)
            elif node.op == "output":
                outputs = (
                    [*node.args[0]] if isinstance(node.args[0], list | tuple) else [node.args[0]]
                )
        for result, p in zip(outputs, results, strict=False):
            value = env.get(result)
            if p is not None and isinstance(value, _Value):
                self.result(value, p)
        return [env.get(x) if isinstance(x, fx.Node) else x for x in outputs]

    def result(self, value: _Value, p: Any) -> None:
        """Require a layout of a result."""
        partition = p.partition if isinstance(p, Spec) else p
        states = joint_indices(torch.tensor([self.codes(partition)]).reshape(1, -1)[:, self.parts],
                               value.meta.ndim)  # fmt: skip
        variable = self.variable(torch.zeros(1, dtype=torch.float64))
        self.uses.append(_Use(value, variable, states, value.grad and self.has_grad))

    def call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """Add an operation, and return its results; None for one that is not weighed."""
        if getattr(node.target, "__name__", "") == "getitem":
            source, index = node.args
            results = env.get(source)  # type: ignore[arg-type]
            return results[index] if isinstance(results, list) else results  # type: ignore[index]
        if node.target is SET_GRAD_ENABLED:
            self.grad_enabled = bool(node.args[0])
            return None
        if isinstance(node.target, TracedBackward):
            inputs, outputs = ([env.get(x) for x in arg] for arg in node.args[:2])  # type: ignore[union-attr, arg-type]
            grad = self.grad_enabled and any(isinstance(x, _Value) and x.grad for x in inputs)
            return [replace(x, grad=grad) if isinstance(x, _Value) else x for x in outputs]
        described = call_of_node(node)
        if described is None:
            return None
        call, rule, operands = described
        values = [env.get(operand) for operand in operands]
        if not any(isinstance(value, _Value) for value in values):
            return None  # it depends on no argument: every layout of it can be created
        if rule is None:
            return self.decomposed(node, values)
        grads, parts = self.gradients(node, values), None
        if decomposition_of(call.op) is not None:
            kinds = {rule.kind(factor) for factor in rule.factors}
            if kinds <= {"unsharded", "permuted"} and not is_mapped(call.op):
                return self.by_parts(node, call, rule, values)
            parts = decomposed_time(node, grads, self.topology)
        results = self.operation(call, rule, values, grads, parts, node.name)
        single = len(results) == 1 and isinstance(node.meta.get("val"), torch.Tensor)
        return results[0] if single else results

    def gradients(self, node: fx.Node, values: Sequence[Any]) -> tuple[bool, ...]:
        """Return for every operand of a node if its gradient comes back from it."""
        grad = self.has_grad and self.grad_enabled and self.differentiable[node]
        return tuple(grad and isinstance(value, _Value) and value.grad for value in values)

    def decomposed(self, node: fx.Node, values: Sequence[Any]) -> Any:
        """Add the operations of a decomposition of an operation without a rule."""
        grads, outer = self.gradients(node, values), (self.grad_enabled, self.in_decomposition)
        graph = decomposition_graph(node, grads)
        if graph is None:
            return None
        self.grad_enabled, self.in_decomposition = any(grads), True
        results = self.run(graph, values)
        self.grad_enabled, self.in_decomposition = outer
        return results if isinstance(node.meta["val"], list | tuple) else results[0]

    def by_parts(self, node: fx.Node, call: OpCall, rule: Rule, values: Sequence[Any]) -> Any:
        """Add the decomposition of an operation that has no role to shard a factor.

        Replicated, all parts take at most the time of the operation.
        """
        first = len(self.weights)
        results = self.decomposed(node, values)
        parts = range(first, len(self.weights))
        most = [float(self.weights[i][self.replicated[i]].max()) for i in parts]
        once = sum(compute_time(self.topology, rule, call, factor_sizes(rule, call)).tensors)
        share = once / sum(most) if sum(most) > once else 1.0
        for index in parts:
            self.weights[index] = (
                torch.where(self.replicated[index], share, 1.0) * (self.weights[index])
            )
        return results

    def operation(
        self, call: OpCall, rule: Rule, values: Sequence[Any], grads: tuple[bool, ...],
        parts: float | None, name: str,
    ) -> list[_Value | None]:  # fmt: skip
        """Add the variable of an operation, with a label for the roles of all axes.

        Args:
            call: the call.
            rule: its rule.
            values: its operands.
            grads: for every operand, if its gradient comes back.
            parts: the seconds of its decomposition on one device, None if it has none.
            name: the name of its node.
        """
        unreduced = tuple(v.unreduced if isinstance(v, _Value) else None for v in values)
        labels = self.of_calls.labels(call, rule, unreduced, grads, parts)
        variable, states = self.variable(labels.seconds), labels.states
        self.replicated[variable] = labels.replicated
        if call.op in FACTORS:
            self.products.add(variable)
        if not self.in_decomposition:
            self.named[name] = variable, labels.roles
        for value, state, grad in zip(values, states, grads, strict=False):
            if isinstance(value, _Value):
                self.uses.append(_Use(value, variable, state, grad))
        return [
            None if meta is None
            else _Value(variable, state, meta, any(grads) and is_inexact(meta), axes)
            for meta, state, axes in zip(
                call.results, states[len(call.operands) :], labels.unreduced, strict=True)
        ]  # fmt: skip
