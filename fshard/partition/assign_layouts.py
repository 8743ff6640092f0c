"""From a graph of operations to lines with layouts: what `partition` decides, in one pass.

Operations come in order, each with the layouts that its operands have by then. A value keeps every
layout that it was brought to, so nothing is moved there twice, and an operation chooses among them.
Where an operation would have to move operands and can be done by others, both ways are laid out and
the one that moves for less time is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from fshard._torch.autograd_state import SET_GRAD_ENABLED
from fshard._torch.operators import schema_of, torch_decomposition
from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import LINEAR, PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.cache_keys import freeze
from fshard.ops.core.call import Meta, StaticResult, fill_call, instances_in, map_call
from fshard.ops.core.registry import decomposition_of, row_of
from fshard.ops.propagate.propagate import strategy_for
from fshard.ops.strategy.strategy import Strategy
from fshard.ops.trace.functionalize import has_no_gradient
from fshard.ops.trace.trace import constraint_of, decompose
from fshard.partition.ir import Constant, GradMode, Line, Move, Operation, Pick, Ref, Whole
from fshard.plan.redistribute import redistribute
from fshard.program.cost.topology import Topology
from fshard.program.program import Program

__all__ = ["Assigned", "Known", "assign", "brought"]

MOST_CHOICES = 16
"""So many combinations of the operands' layouts are tried for one operation."""


@dataclass(slots=True)
class Known:
    """A tensor while lines are made: its layouts, each with the number of the value in it.

    `quiet` are layouts that it was brought to where no gradient is tracked, for use there alone.
    """

    spec: Spec
    grad: bool
    versions: dict[Spec, int]
    quiet: dict[Spec, int] = field(default_factory=dict)

    def known(self, grad: bool) -> dict[Spec, int]:
        """The layouts to choose from where gradients are tracked, or are not."""
        return self.versions if grad or not self.quiet else {**self.quiet, **self.versions}


@dataclass(slots=True)
class Assigned:
    """The lines of a function, the values that come in and go out, and the seconds of moving."""

    lines: list[Line] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    time: float = 0.0
    count: int = 0

    def copy(self) -> Assigned:
        """The same so far, to try a way and leave it."""
        return Assigned(list(self.lines), self.inputs, self.time, self.count)


def assign(
    graph: fx.GraphModule,
    inputs: Sequence[tuple[Spec, bool]],
    topology: Topology,
    *,
    grad: bool,
    device: torch.device,
    wishes: Mapping[fx.Node, PartitionSpec],
    bold: bool,
) -> tuple[Assigned, list[Any]]:
    """The lines of a graph whose placeholders lie as `inputs`; and what it returns.

    An input is a spec and whether its gradient is asked for; what is returned are `Known`s and
    other values. `device` is where tensors are that an operation's decomposition makes. `wishes`
    are how values had better lie; only if `bold` they cut what all ranks
    have whole. Raises `ShardingError` for an operation that no rule and no other way is for.
    """
    made = Assigned()
    known: list[Any] = []
    for spec, wanted in inputs:
        known.append(Known(spec, grad and wanted, {spec: made.count}))
        made.inputs.append(made.count)
        made.count += 1
    mesh = inputs[0][0].mesh
    walk = _Walk(made, mesh, topology, grad, device, wishes, bold)
    returned = walk.run(graph, known)
    return walk.made, returned


class _Walk:
    """The pass over a graph; `made` is what it has made so far."""

    def __init__(
        self, made: Assigned, mesh: Mesh, topology: Topology, grad: bool, device: torch.device,
        wishes: Mapping[fx.Node, PartitionSpec], bold: bool,
    ) -> None:  # fmt: skip
        self.made, self.mesh, self.topology, self.grad = made, mesh, topology, grad
        self.device, self.wishes, self.bold = device, wishes, bold
        self.within: list[Any] = []

    def run(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        env: dict[fx.Node, Any] = {}
        given = iter(inputs)
        returned: list[Any] = []
        for node in graph.graph.nodes:
            match node.op:
                case "placeholder":
                    env[node] = next(given)
                case "get_attr":
                    env[node] = self.constant(getattr(graph, node.target))
                case "call_function":
                    env[node] = self.call(node, env)
                case "output":
                    listed = node.args[0]
                    listed = listed if isinstance(listed, list | tuple) else [listed]
                    returned = [env[x] if isinstance(x, fx.Node) else x for x in listed]
        return returned

    def new(self) -> int:
        self.made.count += 1
        return self.made.count - 1

    def constant(self, tensor: torch.Tensor) -> Known:
        out = self.new()
        self.made.lines.append(Constant(out, tensor))
        return self.whole(tensor, out)

    def whole(self, tensor: torch.Tensor, out: int) -> Known:
        spec = Spec(self.mesh, PartitionSpec(), shape=tuple(tensor.shape), dtype=tensor.dtype)
        # What a function closes over may be a parameter; what it makes is fake, and none.
        return Known(spec, self.grad and tensor.requires_grad, {spec: out})

    def call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        op = node.target
        value = lambda each: env[each] if isinstance(each, fx.Node) else each  # noqa: E731
        args, kwargs = map_call(node.args, node.kwargs, fx.Node, value)
        name = getattr(op, "__name__", "")
        if name == "getitem":
            return args[0][args[1]]
        if op is SET_GRAD_ENABLED:
            self.grad_mode(args[0])
            return None
        return self.operation(op, args, kwargs, node)

    def grad_mode(self, enabled: bool) -> None:
        self.grad = enabled
        self.made.lines.append(GradMode(enabled))

    def operation(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], node: fx.Node
    ) -> Any:
        """One operation: by its rule, or by others; what it returns."""
        known = instances_in((*args, *kwargs.values()), Known)
        if not known:
            return self.from_nothing(op, args, kwargs, node)
        if op is torch.ops.fshard.constrain.default:
            return self.constrained(*args)
        # Within its own decomposition an operation is itself, of what is held constant, say;
        # with other arguments, as the sum that a mean is made of, it may be done by others too.
        how = None if _call_of(op, args, kwargs) in self.within else decomposition_of(op)
        if row_of(op) is None:
            if how is None and torch_decomposition(op) is None:
                self.refuse(op, args, kwargs)
            return self.by_others(op, how, args, kwargs)
        chosen = self.choose(op, args, kwargs, known, self.wish(node, known))
        if how is None or not chosen.sends:
            return self.emit(chosen, op, args, kwargs, known, node)
        return self.cheaper(chosen, how, op, args, kwargs, known, node)

    def refuse(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        """Raise what `fs.propagate` says of an operation without a rule."""
        specs, named = map_call(args, kwargs, Known, lambda k: k.spec)
        strategy_for(op, specs, named, self.topology, self.grad)
        raise AssertionError(f"{op} has no row")

    def from_nothing(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], node: fx.Node
    ) -> Any:
        """A tensor that every rank makes for itself, the same everywhere."""
        if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
            fail(f"fs.partition: {op}", f"{node.name} draws numbers",
                 "a rank's generator is not the whole tensor's",
                 "with fs.random.keyed(key): around it draws by a key; or draw before, and give "
                 "the function the tensor")  # fmt: skip
        out, made = self.new(), node.meta.get("val")
        self.made.lines.append(Whole(out, op, tuple(args), dict(kwargs), node.name))
        if not isinstance(made, torch.Tensor):
            fail(f"fs.partition: {op}", f"{node.name} returns {type(made).__name__}",
                 "an operation without operands returns one tensor",
                 "make it before, and give the function the tensors")  # fmt: skip
        return self.whole(made, out)

    def constrained(self, x: Known, written: str, place: str) -> Known:
        """The value as `fs.constrain` asks for it, which is its layout from there on."""
        asked = constraint_of(written)
        try:
            spec = x.spec.replace(partition=asked, uneven="chunk")
        except ShardingError as error:
            raise_if(f"fs.constrain{place}", [
                Problem(f"{asked} for {x.spec}: {each.given}", each.rule, each.fix)
                for each in error.problems
            ])  # fmt: skip
            raise
        return Known(spec, x.grad, {spec: self.moved(x, spec)})

    # -- by the rule -----------------------------------------------------------------------

    def wish(self, node: fx.Node, known: Sequence[Known]) -> PartitionSpec | None:
        """How the result of an operation had better lie, as far as that is followed."""
        wish = self.wishes.get(node)
        if wish is None or self.bold:
            return wish
        partitions = [k.spec.partition for k in known]
        there = {axis for p in partitions for dim in p.dims for axis in dim}
        there |= {axis for p in partitions for axis in p.unreduced}
        return PartitionSpec(*(tuple(a for a in dim if a in there) or None for dim in wish.dims))

    def choose(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], known: Sequence[Known],
        wish: PartitionSpec | None,
    ) -> Strategy:  # fmt: skip
        """The best strategy over the layouts that the operands have by now."""
        grad = self.grad and any(k.grad for k in known)
        listed = [list(k.known(self.grad)) for k in known]
        best: Strategy | None = None
        for specs in itertools.islice(itertools.product(*listed), MOST_CHOICES):
            filled = fill_call(args, kwargs, Known, specs)
            found = strategy_for(op, *filled, self.topology, grad, wish)
            if best is None or found.time < best.time:
                best = found
        assert best is not None
        return best

    def emit(
        self, chosen: Strategy, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
        known: Sequence[Known], node: fx.Node,
    ) -> Any:  # fmt: skip
        """The lines of an operation: programs for its operands, itself, its results apart."""
        refs = [Ref(self.moved(k, s)) for k, s in zip(known, chosen.in_specs, strict=True)]
        filled = fill_call(args, kwargs, Known, refs)
        out, single = self.new(), type(chosen.tree) is int
        self.made.lines.append(Operation(out, chosen, *filled, single, node.name))
        grad = self.grad and any(k.grad for k in known) and not has_no_gradient(op)
        results: list[Known | None] = []
        for at, spec in enumerate(chosen.out_specs):
            if spec is None:
                results.append(None)
                continue
            value = out
            if not single:
                value = self.new()
                self.made.lines.append(Pick(value, Ref(out), at))
            inexact = spec.dtype.is_floating_point or spec.dtype.is_complex
            results.append(Known(spec, grad and inexact, {spec: value}))
        return _as_tree(chosen.tree, results)

    def moved(self, x: Known, spec: Spec) -> int:
        """The value of `x` laid as `spec`; a program brings it there if it was not before."""
        return brought(self.made, x, spec, self.topology, grad=self.grad)

    # -- by others -------------------------------------------------------------------------

    def by_others(self, op: Any, how: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The lines of an operation that is done by others."""
        metas, named = map_call(args, kwargs, Known, lambda k: Meta.of(k.spec))
        graph = decompose(op, how, metas, named, self.device)
        if graph is None:
            self.refuse(op, args, kwargs)
        grad = self.grad
        self.within.append(_call_of(op, args, kwargs))
        made = self.run(graph, instances_in((*args, *kwargs.values()), Known))
        self.within.pop()
        if self.grad != grad:
            self.grad_mode(grad)
        returns = schema_of(op).returns
        many = len(returns) != 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)
        return made if many else made[0]

    def cheaper(
        self, chosen: Strategy, how: Any, op: Any, args: Sequence[Any],
        kwargs: Mapping[str, Any], known: Sequence[Known], node: fx.Node,
    ) -> Any:  # fmt: skip
        """The operation by its rule or by others, whichever moves for less time."""
        before = _State.of(self, known)
        direct = self.emit(chosen, op, args, kwargs, known, node)
        after = _State.of(self, known)
        before.restore(self)
        others = self.by_others(op, how, args, kwargs)
        if after.made.time > self.made.time:
            return others
        after.restore(self)
        return direct


@dataclass(frozen=True, slots=True)
class _State:
    """Where a walk stands: what it has made, and the layouts that some tensors have."""

    made: Assigned
    grad: bool
    layouts: tuple[tuple[Known, dict[Spec, int], dict[Spec, int]], ...]

    @staticmethod
    def of(walk: _Walk, known: Sequence[Known]) -> _State:
        """That of a walk, of which only these tensors can get other layouts until it is back."""
        layouts = tuple((k, dict(k.versions), dict(k.quiet)) for k in known)
        return _State(walk.made.copy(), walk.grad, layouts)

    def restore(self, walk: _Walk) -> None:
        """Set the walk back to where it stood; once, for it goes on with what is in here."""
        walk.made, walk.grad = self.made, self.grad
        for k, versions, quiet in self.layouts:
            k.versions, k.quiet = versions, quiet


def brought(made: Assigned, x: Known, spec: Spec, topology: Topology, *, grad: bool) -> int:
    """The value of `x` laid as `spec`; a program brings it there from the nearest that it has."""
    there = x.known(grad)
    if spec in there:
        return there[spec]

    def seconds(prog: Program) -> float:
        """A program's time, with that of the gradient's way back if it has one."""
        time = prog.cost(topology).time
        return time + prog.T.cost(topology).time if x.grad and prog.is_linear else time

    progs = [(_way(have, spec, topology), at) for have, at in there.items()]
    prog, at = min(progs, key=lambda each: seconds(each[0]))
    out, made.count = made.count, made.count + 1
    made.lines.append(Move(out, Ref(at), prog, grad and x.grad))
    made.time += seconds(prog)
    (x.quiet if x.grad and not grad else x.versions)[spec] = out
    return out


def _way(src: Spec, dst: Spec, topology: Topology) -> Program:
    """The program between two layouts; candidates that are to be addends are reduced before."""
    p, to = src.partition, dict(dst.partition.unreduced_kinds)
    kept = tuple(
        (axis, kind) for axis, kind in p.unreduced_kinds
        if to.get(axis, kind) == kind or {kind, to[axis]} <= set(LINEAR)
    )  # fmt: skip
    if kept == p.unreduced_kinds:
        return redistribute(src, dst, topology=topology)
    via = src.replace(partition=PartitionSpec._of(p.dims, kept, p.reduced_kinds))
    return redistribute(src, via, topology=topology) >> redistribute(via, dst, topology=topology)


def _call_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A call without its tensors."""
    placed, named = map_call(args, kwargs, Known, lambda _: None)
    return op, freeze(placed), freeze(named)


def _as_tree(tree: Any, results: Sequence[Any]) -> Any:
    if type(tree) is int:
        return results[tree]
    if isinstance(tree, list | tuple):
        return [_as_tree(each, results) for each in tree]
    return tree.value if isinstance(tree, StaticResult) else tree
