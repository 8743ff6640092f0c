"""First pass of `fs.auto`: layouts of arguments from an exact labelling of the traced graph.

Every operation gets one of its roles as label, every argument a state, for one group of mesh axes
after the other. Weights are modelled times. A layout that several uses of a value share is costed
for each of them, so the second pass plans the choices again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.ops.core.call import Meta
from fshard.ops.propagate.role_costs import (
    AxisLinks,
    axis_links,
    change_cost,
    compute_time,
    nbytes,
)
from fshard.ops.strategy.axis_roles import INVARIANT, AxisState, Role, factor_sizes, roles_of
from fshard.partition.arguments import requires_grad
from fshard.partition.assignment.layout_hints import call_of_node
from fshard.partition.layout_search.variable_elimination import Labelling
from fshard.partition.training_time import FORWARD_AND_BACKWARD
from fshard.program.cost.model import collective_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import all_gather_traffic


@dataclass(frozen=True, slots=True)
class ArgumentLeaf:
    """Leaf of the arguments: `meta` is None unless it is a tensor, `fixed` its given layout."""

    meta: Meta | None
    requires_grad: bool
    fixed: PartitionSpec | Spec | None

    @staticmethod
    def of(leaf: Any, fixed: PartitionSpec | Spec | None) -> ArgumentLeaf:
        """Return the leaf of a tensor, a pair, a spec or another value."""
        tensor = leaf.spec if isinstance(leaf, Sharded) else leaf
        if not isinstance(tensor, torch.Tensor | Spec):
            return ArgumentLeaf(None, False, fixed)
        return ArgumentLeaf(Meta.of(tensor), requires_grad(leaf), fixed)

    @property
    def is_free(self) -> bool:
        """True for a tensor whose layout is to be chosen."""
        return self.meta is not None and self.fixed is None

    @property
    def ndim(self) -> int:
        """Number of dims of a tensor."""
        return 0 if self.meta is None else self.meta.ndim


@dataclass(slots=True)
class _LabelledTensor:
    """Tensor in the labelling: its variable, its state by label, True if it has a gradient."""

    variable: int
    states: list[AxisState]
    grad: bool


class GraphLabels:
    """Labelling of a graph for one group of mesh axes after the other.

    Args:
        graph: the traced graph.
        mesh: the mesh.
        leaves: the leaves of the arguments.
        topology: the topology to cost labels on.
        price: seconds charged per byte of an argument on a rank.
    """

    def __init__(
        self, graph: fx.GraphModule, mesh: Mesh, leaves: Sequence[ArgumentLeaf],
        topology: Topology, price: float,
    ) -> None:  # fmt: skip
        self.graph, self.mesh, self.leaves = graph, mesh, leaves
        self.topology, self.price = topology, price
        self.shards: dict[fx.Node, int] = {}
        self.factor_shards: dict[tuple[fx.Node, Any], int] = {}
        self.dims: list[list[list[str]]] = [
            [[] for _ in range(leaf.meta.ndim)] for leaf in leaves if leaf.meta is not None
        ]

    def run(self, order: Sequence[tuple[str, ...]]) -> tuple[Any, ...]:
        """Label the graph for every group of axes, and return the layouts of the arguments."""
        for axes in order:
            self.label(axes)
        dims = iter(self.dims)
        position = {axis: index for index, axis in enumerate(self.mesh.axes)}
        choice: list[Any] = []
        for leaf in self.leaves:
            if leaf.meta is None:
                choice.append(None)
                continue
            entries = [tuple(sorted(axes, key=position.__getitem__)) or None for axes in next(dims)]
            choice.append(PartitionSpec(*entries) if leaf.fixed is None else leaf.fixed)
        return tuple(choice)

    def label(self, axes: tuple[str, ...]) -> None:
        """Label the graph for a group of axes as one, and record the factors they shard."""
        labelling, values = Labelling(), dict[fx.Node, Any]()
        labelled: list[tuple[fx.Node, int, list[Any]]] = []
        inputs = iter(leaf for leaf in self.leaves if leaf.meta is not None)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = self.input(labelling, node, next(inputs), axes)
                labelled.append((node, values[node].variable, values[node].states))
            elif node.op == "call_function":
                self.operation(labelling, node, axes, values, labelled)
        labels, _ = labelling.solve()
        n, index = self.mesh.axis_size(axes), 0
        for node, variable, options in labelled:
            option = options[labels[variable]]
            if node.op == "placeholder":
                if option.name == "sharded":
                    self.dims[index][option.dim] += axes
                    self.record(node, option.dim, n)
                index += 1
            elif option.factor is not None:
                self.record(node, option.factor, n)

    def record(self, node: fx.Node, factor: Any, n: int) -> None:
        """Record that `n` devices shard a factor of an operation, or a dim of an argument."""
        self.shards[node] = self.shards.get(node, 1) * n
        self.factor_shards[node, factor] = self.factor_shards.get((node, factor), 1) * n

    def input(
        self, labelling: Labelling, node: fx.Node, leaf: ArgumentLeaf, axes: tuple[str, ...]
    ) -> _LabelledTensor:
        """Add the variable of an argument."""
        meta, fixed, n = leaf.meta, leaf.fixed, self.mesh.axis_size(axes)
        assert meta is not None
        states = [INVARIANT] + [
            AxisState("sharded", dim) for dim, size in enumerate(meta.shape)
            if size and size % (n * self.factor_shards.get((node, dim), 1)) == 0
        ]  # fmt: skip
        if fixed is not None:
            p = fixed.partition if isinstance(fixed, Spec) else fixed
            sharded = [AxisState("sharded", d) for d, by in enumerate(p.dims) if {*axes} & {*by}]
            states = sharded[:1] or [INVARIANT]
        local = nbytes(meta) // self.shards.get(node, 1)
        weights = [self.price * local / (1 if state == INVARIANT else n) for state in states]
        return _LabelledTensor(labelling.variable(weights), states, leaf.requires_grad)

    def operation(
        self, labelling: Labelling, node: fx.Node, axes: tuple[str, ...],
        values: dict[fx.Node, Any], labelled: list[tuple[fx.Node, int, list[Any]]],
    ) -> None:  # fmt: skip
        """Add the variable of an operation, and its pairs with those of its operands."""
        if getattr(node.target, "__name__", "") == "getitem":
            source, index = node.args
            results = values.get(source)  # type: ignore[arg-type]
            values[node] = results[index] if isinstance(results, list) else results  # type: ignore[index]
            return
        described = call_of_node(node)
        if described is None:
            return
        call, rule, operands = described
        n, topology = self.mesh.axis_size(axes), self.topology
        roles = [Role("invariant", (INVARIANT,) * len(operands), (INVARIANT,) * len(call.results))]
        work = 0.0
        if rule is not None:
            sizes = factor_sizes(rule, call)
            roles = [role for role in roles_of(rule, call, grad=True)
                     if _is_reachable(role) and self.fits(node, role, sizes, n)]  # fmt: skip
            work = FORWARD_AND_BACKWARD * compute_time(topology, rule, call, sizes)
        work /= self.shards.get(node, 1)
        variable = labelling.variable([work / (n if role.factor else 1) for role in roles])
        labelled.append((node, variable, roles))
        links = axis_links(topology, self.mesh, axes)
        grad = False
        for index, (operand, meta) in enumerate(zip(operands, call.operands, strict=True)):
            value = values.get(operand)
            if not isinstance(value, _LabelledTensor):
                continue
            grad = grad or value.grad
            local = nbytes(meta) // self.shards.get(operand, 1)
            table = [
                [self.change_time(links, n, src, role.operands[index], meta, local, value.grad)
                 for role in roles] for src in value.states
            ]  # fmt: skip
            labelling.pair(value.variable, variable, table)
        tensors = [
            _LabelledTensor(variable, [_leading(role.results[index]) for role in roles], grad)
            for index in range(len(call.results))
        ]
        single = len(tensors) == 1 and isinstance(node.meta.get("val"), torch.Tensor)
        values[node] = tensors[0] if single else tensors

    def fits(self, node: fx.Node, role: Role, sizes: Mapping[str, int], n: int) -> bool:
        """Return True if the axes can shard the role's factor evenly, and it leads all its dims."""
        if role.factor is None:
            return True
        taken = self.factor_shards.get((node, role.factor), 1)
        leads = all(s is None or s.position == 0 for s in (*role.operands, *role.results))
        return leads and sizes[role.factor] > 0 and sizes[role.factor] % (n * taken) == 0

    def change_time(
        self, links: AxisLinks, n: int, src: AxisState, dst: AxisState, meta: Meta, local: int,
        grad: bool,
    ) -> float:  # fmt: skip
        """Return the seconds to change a value's state, and with `grad` that of its gradient.

        `local` are the bytes of the value on a rank, unsharded on the labelled axes.
        """
        if dst.name == "any":
            return 0.0
        topology = self.topology
        local = local // n if src.name == "sharded" else local
        change = change_cost(topology, links, n, src, _leading(dst), local, meta.dtype.itemsize)
        back = change.back
        if (src.name, dst.name) == ("invariant", "sharded"):
            # Slicing sends nothing; the gradients of the slices are gathered.
            back = collective_time(topology, links.gather, all_gather_traffic(n, local // n), local)
        return change.time + (back if grad else 0.0)


def _is_reachable(role: Role) -> bool:
    """Return True if the role can occur: arguments are never unreduced, only sums arise."""
    kinds = {state.kind for state in role.operands if state.name == "unreduced"}
    return role.name != "reduced" and kinds <= {"sum"}


def _leading(state: AxisState | None) -> AxisState:
    """Return the state with the factor position reset to 0."""
    if state is None:
        return INVARIANT
    return AxisState("sharded", state.dim) if state.name == "sharded" else state
