"""From a graph of operations to lines with layouts, in one pass.

Operations get layouts in order, each from the layouts that its operands have by then. A tensor
keeps every layout that it was redistributed to, so no redistribution runs twice, and an operation
chooses among them. Where an operation would send and can be decomposed, both are planned, and the
one that takes less time is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import fx

from fshard._torch.autograd_state import SET_GRAD_ENABLED
from fshard._torch.operators import OpOverload, schema_of, torch_decomposition
from fshard._util.dtypes import is_inexact
from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten
from fshard.ops.core.call import Meta, OpCall, fill_call, instances_in, map_call
from fshard.ops.core.registry import MappedStrategy, decomposition_of, mapped_strategy, row_of
from fshard.ops.propagate.choice_hints import LayoutHint, RoleHint
from fshard.ops.propagate.propagate import rule_of, strategy_for
from fshard.ops.rules.elementwise.pointwise import pointwise
from fshard.ops.strategy.strategy import Strategy
from fshard.ops.trace.checkpoints import CheckpointMark
from fshard.ops.trace.custom_functions import TracedBackward
from fshard.ops.trace.functionalize import has_no_gradient
from fshard.ops.trace.mapped_regions import MappedRegion, planned_region
from fshard.ops.trace.source_places import module_of_node, place_of_node
from fshard.ops.trace.trace import Constraint, decompose
from fshard.partition import ir
from fshard.partition.assignment.created_tensors import CreatedByFactory, created_by, with_sources
from fshard.partition.assignment.layout_hints import on_busy_axes, sibling_hint
from fshard.partition.assignment.operand_layouts import (
    best_strategy,
    call_key,
    elements_of,
    kept_axes,
    moved_bytes,
    with_dual,
)
from fshard.partition.assignment.tensor_versions import (
    Assignment,
    TensorVersions,
    extended,
    in_one_layout,
    redistributed,
)
from fshard.partition.ir import Ref
from fshard.partition.partitioned_call import PartitionedCall
from fshard.program.cost.topology import Topology
from fshard.program.program import Program
from fshard.run.autograd.planned_gradient import OutputGradient
from fshard.run.transports.base import Label

NAN = float("nan")


class LayoutAssigner:
    """Pass over a graph that chooses the layouts of its values, and adds lines to `assignment`.

    Args:
        mesh: the mesh of the layouts.
        topology: the topology to cost layouts on.
        grad: the grad mode at the beginning.
        device: the device of tensors that decompositions create.
        hints: preferred layouts of nodes, or the roles of their axes.
        shard_replicated: True if hints may shard a tensor that is replicated so far.
        kept: axes along which operations stay sharded whose operands are.
    """

    def __init__(
        self, mesh: Mesh, topology: Topology, grad: bool, device: torch.device,
        hints: Mapping[fx.Node, LayoutHint], shard_replicated: bool, kept: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.assignment, self.mesh, self.topology, self.grad = Assignment(), mesh, topology, grad
        self.device, self.hints, self.shard_replicated = device, hints, shard_replicated
        self.kept = kept
        self.decomposing: list[tuple[Any, int]] = []  # calls, and elements of their operands
        self.place = self.module = ""

    def assign(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[tuple[Spec, bool]],
        numbers: Sequence[type] = (),
        held: Sequence[tuple[str, ...]] = (),
        params: int = 0,
    ) -> list[Any]:
        """Add the lines of a function's graph.

        Args:
            graph: the graph.
            inputs: for every tensor its spec, and True if its gradient is requested.
            numbers: the types of symbolic numbers, whose placeholders follow.
            held: for the first tensors, axes along which they stay sharded where they are used.
            params: number of first tensors that may be gathered, as parameters are.

        Returns:
            The results: `TensorVersions` and other values.

        Raises:
            ShardingError: for an operation without a rule and without a decomposition.
        """
        tensors = list[TensorVersions]()
        for spec, requires_grad in inputs:
            value = self.assignment.new_value()
            tensor = TensorVersions(spec, self.grad and requires_grad, {spec: value})
            tensor.is_argument = True
            tensor.kept = self.kept if len(tensors) >= params else ()
            tensors.append(tensor)
            self.assignment.inputs.append(value)
        for tensor, axes in zip(tensors, held, strict=False):
            tensor.held = axes
        symbols = [ir.Number(self.assignment.new_value(), kind is float) for kind in numbers]
        self.assignment.inputs += [symbol.value for symbol in symbols]
        return self.run(graph, [*tensors, *symbols])

    def run(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Add the lines of a graph on these inputs, and return its results."""
        env: dict[fx.Node, Any] = {}
        remaining = iter(inputs)
        results: list[Any] = []
        for node in graph.graph.nodes:
            match node.op:
                case "placeholder":
                    env[node] = next(remaining)
                case "get_attr":
                    env[node] = self.constant(getattr(graph, node.target))
                case "call_function":
                    env[node] = self.call(node, env)
                case "output":
                    outputs = node.args[0]
                    outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
                    results = [env[x] if isinstance(x, fx.Node) else x for x in outputs]
        return results

    def constant(self, tensor: torch.Tensor) -> TensorVersions:
        """Add a tensor that the function closes over."""
        value = self.assignment.new_value()
        self.assignment.lines.append(ir.ClosureTensor(value, tensor))
        return self.replicated(tensor, value)

    def replicated(self, tensor: torch.Tensor, value: int) -> TensorVersions:
        """Return the versions of a replicated tensor."""
        spec = Spec(self.mesh, PartitionSpec(), shape=tuple(tensor.shape), dtype=tensor.dtype)
        # A tensor from a closure may be a parameter; a fake result of a factory is not.
        return TensorVersions(spec, self.grad and tensor.requires_grad, {spec: value})

    def call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """Add the lines of a node that calls a function, and return its results."""
        op = node.target
        if not self.decomposing:
            self.place, self.module = place_of_node(node), module_of_node(node)
        args, kwargs = map_call(node.args, node.kwargs, fx.Node, env.__getitem__)
        if getattr(op, "__name__", "") == "getitem":
            result = args[0][args[1]]
            if result is None and isinstance(node.meta.get("val"), torch.Tensor):
                fail(f"fs.partition: {node.args[0]}", f"result {args[1]} is used",
                     "a result that is used must have a layout, which the rule leaves out",
                     "only the results before; fs.apply returns all, unsharded")  # fmt: skip
            return result
        if op is SET_GRAD_ENABLED:
            self.set_grad_mode(args[0])
            return None
        if isinstance(op, CheckpointMark):
            if op.call is None:
                return self.assignment.end_checkpoint()
            return self.assignment.begin_checkpoint(op.call)
        if isinstance(op, TracedBackward):
            return self.custom_gradient(op, *args)
        if isinstance(op, MappedRegion):
            return self.mapped_region(op, *args)
        if instances_in((*args, *kwargs.values()), ir.Number):
            return self.with_numbers(op, args, kwargs, node)
        return self.operation(op, args, kwargs, node, env)

    def with_numbers(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], node: fx.Node
    ) -> Any:
        """Add the lines of a call with symbolic numbers: of Python, or a pointwise operation.

        Raises:
            NeedsValue: for an operation whose layouts may depend on a number.
        """
        refs, named = map_call(args, kwargs, ir.Number, lambda number: Ref(number.value))
        operands = instances_in((*args, *kwargs.values()), TensorVersions)
        if not operands and not isinstance(op, OpOverload):
            out = self.assignment.new_value()
            self.assignment.lines.append(ir.NumberOperation(out, op, tuple(refs), named))
            return ir.Number(out, isinstance(node.meta["val"], torch.SymFloat))
        row = row_of(op)
        if not operands or row is None or row.generator is not pointwise:
            raise ir.NeedsValue
        # NaN is neither finite nor of a sign, so that no rule relies on it.
        inexact = any(tensor.spec.dtype.is_floating_point for tensor in operands)
        stand_in = lambda number: NAN if inexact or number.is_float else 7  # noqa: E731
        placed, keywords = map_call(args, kwargs, ir.Number, stand_in)
        hint = self.hint(node, operands, {})
        strategy = best_strategy(op, placed, keywords, operands, self.assignment, self.topology,
                                 hint, grad=self.grad)  # fmt: skip
        return self.by_rule(strategy, op, refs, named, operands, node)

    def set_grad_mode(self, enabled: bool) -> None:
        """Add a switch of the grad mode."""
        self.grad = enabled
        self.assignment.lines.append(ir.GradMode(enabled))

    def operation(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], node: fx.Node,
        env: Mapping[fx.Node, Any],
    ) -> Any:  # fmt: skip
        """Add the lines of one operation, by its rule or decomposed, and return its results."""
        operands = instances_in((*args, *kwargs.values()), TensorVersions)
        if not operands:
            return self.factory(op, args, kwargs, node)
        if op is torch.ops.fshard.constrain.default:
            return self.constrained(*args)
        # Every decomposition ends: in it the same operation is decomposed again if its operands are
        # smaller, as maxima of blocks, and once with other arguments, as the sum in a mean.
        key, elements = call_key(op, args, kwargs), elements_of(operands)
        outer = [call for call, size in self.decomposing if call[0] is op and size <= elements]
        nested = len(outer) > 1 or key in outer
        decomposition = None if nested else decomposition_of(op)
        if row_of(op) is None:
            if nested or (decomposition is None and torch_decomposition(op) is None):
                self.refuse(op, args, kwargs)
            return self.decomposed(op, decomposition, args, kwargs)
        hint = self.hint(node, operands, env)
        strategy = best_strategy(op, args, kwargs, operands, self.assignment, self.topology, hint,
                                 grad=self.grad)  # fmt: skip
        runs = [lambda: self.by_rule(strategy, op, args, kwargs, operands, node)]
        may_decompose = strategy.sends and not isinstance(hint, RoleHint)
        if decomposition is not None and may_decompose:
            runs.append(lambda: self.decomposed(op, decomposition, args, kwargs))
        specs = [tensor.spec for tensor in operands]
        may_map = may_decompose and all(key[0] is not op for key, _ in self.decomposing)
        mapped = mapped_strategy(strategy.call, specs) if may_map else None
        if mapped is not None:
            runs.append(lambda: self.mapped(mapped, operands))
            if strategy.local_nbytes > (self.topology.capacity or math.inf):
                del runs[:-1]
        by_time = mapped is not None and not mapped.keeps_sharded
        return runs[0]() if len(runs) == 1 else self.fastest(runs, operands, by_time)

    def refuse(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        """Raise the error of `fs.propagate` for an operation without a rule."""
        specs, named = map_call(args, kwargs, TensorVersions, lambda tensor: tensor.spec)
        strategy_for(op, specs, named, self.topology, self.grad)
        raise AssertionError(f"{op} has no row")

    def factory(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], node: fx.Node
    ) -> Any:
        """Add an operation without operands, replicated; uses create it in other layouts."""
        result = node.meta.get("val")
        rule = None
        if row_of(op) is not None and isinstance(result, torch.Tensor):
            rule = rule_of(OpCall(op, tuple(args), kwargs, (), (Meta.of(result),)))
        elif torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
            fail(f"fs.partition: {op}", f"{node.name} draws random values",
                 "the generator of a rank must not draw parts of a global tensor",
                 "with fs.random.keyed(key): around it draws by a key; or draw before, and give "
                 "the function the tensor")  # fmt: skip
        if not isinstance(result, torch.Tensor):
            fail(f"fs.partition: {op}", f"{node.name} returns {type(result).__name__}",
                 "an operation without operands must return one tensor",
                 "call it before, and give the function the tensors")  # fmt: skip
        value = self.assignment.new_value()
        tensor = self.replicated(result, value)
        line = ir.Factory(value, op, tuple(args), dict(kwargs), node.name, tensor.spec, rule)
        self.assignment.lines.append(line)
        self.assignment.created.add(value)
        tensor.created = None if tensor.grad else CreatedByFactory(line)
        return tensor

    def constrained(self, tensor: TensorVersions, written: str, place: str) -> TensorVersions:
        """Return the tensor in the layout that `fs.constrain` requests, its only one from here."""
        partition = Constraint.read(written).applied(tensor.spec.partition)
        try:
            spec = tensor.spec.replace(partition=partition, uneven="chunk")
        except ShardingError as error:
            raise_if(f"fs.constrain{place}", [
                Problem(f"{partition} for {tensor.spec}: {p.given}", p.rule, p.fix)
                for p in error.problems
            ])  # fmt: skip
            raise
        return in_one_layout(self.assignment, tensor, spec, self.topology, grad=self.grad)

    def custom_gradient(
        self,
        target: TracedBackward,
        inputs: Sequence[TensorVersions],
        outputs: Sequence[TensorVersions],
        saved: Sequence[TensorVersions],
    ) -> list[TensorVersions]:
        """Return outputs with a custom backward, planned for the layouts of this forward."""
        indices = [i for i, x in enumerate(inputs) if x.grad and self.grad]
        if not indices:
            return [*outputs]
        graphs, kept = target.backwards_of(indices)
        tied = [*(inputs[i] for i in indices), *outputs]
        specs = [with_dual(x.spec) for x in tied]
        in_specs, out_specs = specs[: len(indices)], specs[len(indices) :]
        read = [saved[i] for i in kept]
        sources = [next((i for i, y in enumerate(outputs) if y is x), None) for x in read]
        saved_specs = [*map(lambda x, i: x.spec if i is None else out_specs[i], read, sources)]
        calls = {
            used: self.backward_call(graph, [*compress(out_specs, used)], saved_specs, in_specs)
            for used, graph in graphs.items()
        }
        label = Label(target.name, self.mesh, self.place, module=self.module)
        gradient = OutputGradient(calls, len(indices), len(outputs), tuple(sources),
                                  target.materialized, target.once, label)  # fmt: skip
        refs = [Ref(self.redistributed(x, spec)) for x, spec in zip(tied, specs, strict=True)]
        refs += [Ref(x.versions[x.spec]) for x, i in zip(read, sources, strict=True) if i is None]
        out, lines = self.assignment.new_value(), self.assignment.lines
        lines.append(ir.CustomGradient(out, gradient, tuple(refs)))
        results = []
        for index, spec in enumerate(out_specs):
            value = self.assignment.new_value()
            lines.append(ir.Pick(value, Ref(out), index))
            results.append(TensorVersions(spec, True, {spec: value}, kept=outputs[index].kept))
        return results

    def mapped_region(
        self, region: MappedRegion, inputs: Sequence[TensorVersions]
    ) -> list[TensorVersions]:
        """Add a call of a mapped function on operands with the layouts of its `in_specs`."""
        mesh = region.in_specs[0].mesh
        if mesh != self.mesh:
            fail(f"fs.partition: {region.__name__}", f"a function mapped over {mesh}",
                 f"a mapped function must be mapped over the mesh of the partition, {self.mesh}",
                 f"mesh={self.mesh!r}, and specs that leave axes out")  # fmt: skip
        refs = tuple(map(Ref, map(self.redistributed, inputs, region.in_specs)))
        out, lines = self.assignment.new_value(), self.assignment.lines
        grads = tuple(x.grad for x in inputs)
        grad = self.grad and (region.grad or any(grads))
        lines.append(ir.RegionCall(out, region, refs, grads if grad else None, module=self.module))
        results = []
        for index, spec in enumerate(region.out_specs):
            value = self.assignment.new_value()
            lines.append(ir.Pick(value, Ref(out), index))
            has_grad = grad and is_inexact(spec)
            results.append(TensorVersions(spec, has_grad, {spec: value}, kept=kept_axes(inputs)))
        return results

    def backward_call(
        self,
        graph: fx.GraphModule,
        outputs: Sequence[Spec],
        saved: Sequence[Spec],
        inputs: Sequence[Spec],
    ) -> PartitionedCall:
        """Return the plan of a backward from the specs of its forward's values."""
        assigner = LayoutAssigner(self.mesh, self.topology, True, self.device, {}, False, self.kept)
        specs = [*(spec.dual for spec in outputs), *saved]
        grads = tuple(is_inexact(spec) for spec in specs)
        gradients = assigner.assign(graph, [*zip(specs, grads, strict=True)])
        targets = tuple(spec.dual for spec in inputs)
        results = tuple(map(assigner.redistributed, gradients, targets))
        lines, arguments = tuple(assigner.assignment.lines), tuple(assigner.assignment.inputs)
        names, tree = tuple(f"backward[{i}]" for i in range(len(specs))), flatten([*targets])[1]
        layouts, topology = (tuple(specs), targets, arguments, results), self.topology
        return PartitionedCall(self.mesh, lines, *layouts, (), tree, topology, True, graph, names,
                               requires_grad=grads, device=self.device)  # fmt: skip

    # -- by the rule -----------------------------------------------------------------------

    def hint(
        self, node: fx.Node, operands: Sequence[TensorVersions], env: Mapping[fx.Node, Any]
    ) -> LayoutHint:
        """Return the preferred layout of a node; without `shard_replicated` only on busy axes."""
        hint, specs = self.hints.get(node), [tensor.spec for tensor in operands]
        if hint is None:
            return sibling_hint(node, specs, env, kept_axes(operands))
        if isinstance(hint, RoleHint) or self.shard_replicated:
            return hint
        return on_busy_axes(hint, specs)

    def by_rule(
        self, strategy: Strategy, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
        operands: Sequence[TensorVersions], node: fx.Node,
    ) -> Any:  # fmt: skip
        """Add an operation: programs for its operands, the operation, a `Pick` per result."""
        refs = [Ref(self.redistributed(tensor, spec, halo)) for tensor, spec, halo in
                zip(operands, strategy.shard_specs, strategy.in_halos, strict=True)]  # fmt: skip
        self.assignment.moved += moved_bytes(operands, strategy)
        filled = fill_call(args, kwargs, TensorVersions, refs)
        lines, out = self.assignment.lines, self.assignment.new_value()
        single = type(strategy.tree) is int
        line = ir.Operation(out, strategy, *filled, single, node.name, self.place, self.module)
        lines.append(line)
        grad = self.grad and any(tensor.grad for tensor in operands) and not has_no_gradient(op)
        results: list[TensorVersions | None] = []
        held = operands[0].held if len(operands) == 1 else ()
        for index, spec in enumerate(strategy.out_specs):
            if spec is None:
                results.append(None)
                continue
            value = out
            if not single:
                value = self.assignment.new_value()
                lines.append(ir.Pick(value, Ref(out), index))
            inexact = is_inexact(spec)
            halo = strategy.out_halos[index]
            if halo:
                value = self.assignment.add_halo(value, halo, self.topology, grad=grad and inexact)
            result = TensorVersions(spec, grad and inexact, {spec: value}, held=held,
                                    kept=kept_axes(operands))  # fmt: skip
            result.created = None if halo else created_by(line, operands, self.topology)
            if result.created is not None:
                self.assignment.created.add(value)
            results.append(result)
        return strategy.in_tree(results)

    def redistributed(self, tensor: TensorVersions, spec: Spec, halo: Program | None = None) -> int:
        """Return the id of the tensor's value in the layout `spec`, extended by `halo`."""
        if halo is not None:
            return extended(self.assignment, tensor, halo, self.topology, grad=self.grad)
        return redistributed(self.assignment, tensor, spec, self.topology, grad=self.grad)

    # -- decomposed ------------------------------------------------------------------------

    def decomposed(
        self, op: Any, decomposition: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Add the lines of an operation's decomposition, and return its results."""
        metas, named = map_call(args, kwargs, TensorVersions, lambda tensor: Meta.of(tensor.spec))
        grad, operands = self.grad, instances_in((*args, *kwargs.values()), TensorVersions)
        needed = [grad and tensor.grad for tensor in operands]
        graph = decompose(op, decomposition, metas, named, self.device, needed)
        if graph is None:
            self.refuse(op, args, kwargs)
        self.decomposing.append((call_key(op, args, kwargs), elements_of(operands)))
        results = self.run(graph, operands)
        self.decomposing.pop()
        if self.grad != grad:
            self.set_grad_mode(grad)
        returns = schema_of(op).returns
        many = len(returns) != 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)
        return results if many else results[0]

    def mapped(self, strategy: MappedStrategy, operands: Sequence[TensorVersions]) -> Any:
        """Add an operation as a mapped function; computation hides a part of its collectives."""
        region = planned_region(strategy.function, strategy.in_specs)
        results, grads = self.mapped_region(region, operands), tuple(x.grad for x in operands)
        hidden = strategy.hiding / self.topology.flops_per_second(operands[0].spec.dtype)
        backward = region.backward(grads) if self.grad and any(grads) else ()
        for collectives, share in ((region.forward, hidden), (backward, 2 * hidden)):
            time = sum(collective.cost(self.topology).time for collective in collectives)
            self.assignment.time += max(time - share, len(collectives) * self.topology.launch)
        return results[0] if len(results) == 1 else results

    def fastest(
        self, runs: Sequence[Callable[[], Any]], operands: Sequence[TensorVersions], by_time: bool
    ) -> Any:
        """Add an operation by the one of `runs` that redistributes in the least time.

        Unless `by_time`, operands that are kept sharded along axes are first of all moved from them
        as little as possible.
        """
        outcomes: list[tuple[tuple[int, float], Any, Callable[[], None]]] = []
        for run in runs:
            restore_before = self.snapshot(operands)
            results = run()
            moved, time = self.assignment.moved, self.assignment.time
            cost = (0 if by_time else moved, time)
            outcomes.append((cost, results, self.snapshot(operands)))
            restore_before()
        _, results, restore = min(outcomes, key=lambda outcome: outcome[0])
        restore()
        return results

    def snapshot(self, operands: Sequence[TensorVersions]) -> Callable[[], None]:
        """Return a function that resets the pass to its current state, to be called once.

        Until then only `operands`, and what they are created from, may get new versions.
        """
        assignment, grad = self.assignment.copy(), self.grad
        versions = [
            (x, dict(x.versions), dict(x.no_grad_versions), dict(x.windows))
            for x in with_sources(operands)
        ]

        def restore() -> None:
            self.assignment, self.grad = assignment, grad
            for tensor, *saved in versions:
                tensor.versions, tensor.no_grad_versions, tensor.windows = saved  # type: ignore[assignment]

        return restore
