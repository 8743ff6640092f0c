"""`auto`: the layouts of a function's arguments, chosen by what a step would take.

In two passes. The first labels the function's graph with one role for every operation and one
state for every argument, mesh axis after mesh axis, or several as one, so that moving, computing
and the gradient's way back take the least together: exactly, by eliminating variables
(`variable_elimination`). It weighs every use of a value for itself. The second lays the function
out for real, as `fs.partition` does, where what is moved once is moved once: all choices where they
are few, else it changes arguments one by one while that helps. After Alpa (arXiv 2201.12023) and
PyTorch's AutoParallel, whose integer programs are per mesh, not per axis.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fshard._util.errors import fail
from fshard._util.text import below, bytes_text, columns, time_text
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten, is_pair, paths, unflatten
from fshard.ops.core.call import Meta, name_of
from fshard.ops.propagate.role_costs import change_cost, compute_time, nbytes
from fshard.ops.strategy.axis_roles import INVARIANT, AxisState, Role, factor_sizes, roles_of
from fshard.partition.call_signature import wants_grad
from fshard.partition.ir import Constant, Move, Operation
from fshard.partition.layout_hints import call_at
from fshard.partition.partition import Partition
from fshard.partition.partitioned_call import Partitioned
from fshard.partition.step_time import FORWARD_AND_BACKWARD, lines_time
from fshard.partition.variable_elimination import Labelling
from fshard.program.cost.model import collective_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import all_gather_traffic, max_local_nbytes
from fshard.program.program import as_topology

__all__ = ["Auto", "auto", "step_memory", "step_time"]

FEW = 1024
"""So many choices are all laid out."""
BEGINS = 2
"""So many of the first choices are changed argument by argument."""
PRICES = (0.0, *(10.0**power for power in range(-16, -7)))
"""Seconds for a byte that a rank holds: what arguments are charged to fit into memory."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Auto:
    """What `fs.auto` chose: `in_specs` like the arguments, and the function partitioned so.

    `time` is the modelled time of a step, forward and backward, `memory` the bytes of a rank;
    `others` both with one argument laid otherwise, the fastest first.
    """

    in_specs: list[Any]
    partition: Partition
    partitioned: Partitioned
    time: float
    memory: int
    others: tuple[tuple[str, PartitionSpec, float, int], ...]

    def explain(self) -> str:
        """The choice: every argument's layout, what the nearest others cost, and every line."""
        leaves, _ = flatten(self.in_specs)
        names = paths(self.in_specs, "args")
        width = max(map(len, names))
        text = [f"{name:<{width}}  {p}" for name, p in zip(names, leaves, strict=True)]
        text.append(_taken(self.time, self.memory))
        rows = [(f"{name} as {p}", _taken(spent, held)) for name, p, spent, held in self.others]
        text += columns(rows) or below(rows)
        return "\n".join((*text, str(self.partitioned)))

    def __str__(self) -> str:
        return self.explain()

    __repr__ = __str__

    def __call__(self, *args: Any) -> Any:
        """Run the partitioned function."""
        return self.partition(*args)


def _taken(time: float, memory: int) -> str:
    return f"{time_text(time)} a step, {bytes_text(memory)} on a rank"


def auto(
    fn: Callable[..., Any],
    mesh: Mesh,
    example_args: Sequence[Any],
    *,
    memory: int | None = None,
    cost: Topology | None = None,
    fixed: Mapping[int, Any] | None = None,
    seconds: float = 20.0,
) -> Auto:
    """Choose how the arguments of a function lie on a mesh.

    `example_args` are tensors, or specs of their shapes and dtypes; a step is its forward pass,
    and the backward pass where one of them requires grad (specs do). `memory` bounds the bytes
    that a rank holds: arguments, their gradients, and what operations return. `fixed` gives the
    specs of arguments, by their number, that are not to choose. After `seconds` the best so far
    is taken.

    Raises `ShardingError` where nothing that was tried fits into `memory`.

    >>> import fshard as fs
    >>> args = [fs.Spec(fs.Mesh(x=4), fs.P(), shape=s) for s in ((65536, 1024), (1024, 1024))]
    >>> auto(lambda x, w: (x @ w).relu(), fs.Mesh(x=4), args).in_specs
    [P('x', None), P(None, None)]
    """
    if not isinstance(example_args, list | tuple):
        fail("fs.auto", f"example_args of type {type(example_args).__name__}",
             "they are the arguments of a call, one after the other",
             "fs.auto(fn, mesh, [x])")  # fmt: skip
    topology = as_topology("fs.auto", cost)
    search = _Search(fn, mesh, list(example_args), topology, memory, dict(fixed or {}))
    return search.run(time.monotonic() + seconds)


# -- what a step takes ----------------------------------------------------------------------


def step_time(made: Partitioned, topology: Topology) -> float:
    """Modelled seconds of a step: programs and their transposes, and what ranks compute."""
    return lines_time(made.lines, made.mesh, topology, grad=made.grad)


def step_memory(made: Partitioned) -> int:
    """Bytes that a rank holds: arguments, gradients of those that have one, and all results.

    Results are kept for the backward pass; without one the largest is counted.
    """
    inputs = sum(max_local_nbytes(spec) * (2 if made.grad and spec.dtype.is_floating_point else 1)
                 for spec in made.in_specs)  # fmt: skip
    results = [
        sum(max_local_nbytes(spec) for spec in line.strategy.out_specs if spec is not None)
        for line in made.lines if isinstance(line, Operation)
    ] + [max_local_nbytes(line.program.dst) for line in made.lines
         if isinstance(line, Move) and not line.program.is_local]  # fmt: skip
    wholes = [line.tensor.nbytes for line in made.lines if isinstance(line, Constant)]
    return inputs + sum(wholes) + (sum(results) if made.grad else max(results, default=0))


# -- the search -----------------------------------------------------------------------------


class _Search:
    """One call of `auto`: the graph, and the choices that were weighed."""

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh, args: list[Any], topology: Topology,
        memory: int | None, fixed: dict[int, Any],
    ) -> None:  # fmt: skip
        self.mesh, self.topology, self.memory = mesh, topology, memory
        leaves, self.tree = flatten(args)
        self.metas = [_meta(leaf) for leaf in leaves]
        self.names = paths(args, "args")
        self.args = unflatten(self.tree, [
            leaf if m is None
            else torch.empty(m.shape, dtype=m.dtype, device="meta", requires_grad=wants_grad(leaf))
            for leaf, m in zip(leaves, self.metas, strict=True)
        ])  # fmt: skip
        self.wants = [
            meta is not None and wants_grad(x) for x, meta in zip(leaves, self.metas, strict=True)
        ]
        self.traces: dict[Any, Any] = {}
        self.fn = fn
        at = [number for number, arg in enumerate(args) for _ in flatten(arg)[0]]
        asked = {n: flatten(spec)[0] for n, spec in fixed.items()}
        firsts = {n: at.index(n) for n in asked}
        self.fixed = {firsts[n] + i: p for n, ps in asked.items() for i, p in enumerate(ps)}
        self.seen: dict[tuple[Any, ...], tuple[float, int, Partition, Partitioned]] = {}

    def run(self, until: float) -> Auto:
        start = self.whole()
        self.weigh(start)
        smallest = self.smallest()
        for choice in (smallest, self.batch()):
            self.weigh(choice)
        graph = self.seen[start][3].source
        assert graph is not None
        for price, order in itertools.product(
            PRICES if self.memory is not None else PRICES[:1], _orders(self.mesh)
        ):
            if time.monotonic() < until:
                self.weigh(_Labels(graph, self, price).run(order))
        listed = [
            [p] if at in self.fixed or self.metas[at] is None else self.layouts(at)
            for at, p in enumerate(start)
        ]
        if math.prod(map(len, listed)) <= FEW:
            for choice in itertools.product(*listed):
                if time.monotonic() < until:
                    self.weigh(choice)
        begins = sorted(self.seen, key=self.rank)[:BEGINS]
        for begun in dict.fromkeys((*begins, *([smallest] if self.memory is not None else []))):
            choice, better = begun, self.improved(begun, until)
            while better != choice and time.monotonic() < until:
                choice, better = better, self.improved(better, until)
        return self.chosen(self.best())

    def whole(self) -> tuple[Any, ...]:
        return tuple(
            self.fixed.get(at, None if meta is None else PartitionSpec(*[None] * meta.ndim))
            for at, meta in enumerate(self.metas)
        )

    def batch(self) -> tuple[Any, ...]:
        """What asks for no gradient in as many parts as it can be, all else whole."""
        whole, least = self.whole(), self.smallest()
        return tuple(
            w if wants else p for w, p, wants in zip(whole, least, self.wants, strict=True)
        )

    def smallest(self) -> tuple[Any, ...]:
        """Every argument in as many parts as it can be, its first dims first."""
        parts = lambda p: self.mesh.axis_size(p.axes)  # noqa: E731
        return tuple(
            self.fixed.get(at, None if meta is None else max(
                sorted(self.layouts(at), key=lambda p: [-len(axes) for axes in p.dims]), key=parts))
            for at, meta in enumerate(self.metas)
        )  # fmt: skip

    def weigh(self, choice: tuple[Any, ...]) -> tuple[float, int]:
        """Time and memory of a choice, laid out for real."""
        if choice not in self.seen:
            in_specs = unflatten(self.tree, list(choice))
            made = Partition(self.fn, self.mesh, in_specs, None, None, self.topology,
                             self.traces, where=f"fs.auto({name_of(self.fn)})")  # fmt: skip
            laid = made.trace(*self.args)
            self.seen[choice] = (step_time(laid, self.topology), step_memory(laid), made, laid)
        return self.seen[choice][:2]

    def rank(self, choice: tuple[Any, ...]) -> tuple[bool, float, int]:
        """What choices are ordered by: fitting into memory, time, memory."""
        spent, held = self.weigh(choice)
        over = self.memory is not None and held > self.memory
        return over, held if over else spent, held

    def best(self) -> tuple[Any, ...]:
        return min(self.seen, key=self.rank)

    def improved(self, choice: tuple[Any, ...], until: float) -> tuple[Any, ...]:
        """The best choice after every argument has been laid otherwise, largest first."""
        sizes = {at: nbytes(m) for at, m in enumerate(self.metas) if m is not None}
        order = sorted(set(sizes) - set(self.fixed), key=lambda at: (-sizes[at], at))
        for at in order:
            for p in self.layouts(at):
                if time.monotonic() > until:
                    return self.best()
                other = (*choice[:at], p, *choice[at + 1 :])
                if self.rank(other) < self.rank(choice):
                    choice = other
        return choice

    def layouts(self, at: int) -> list[PartitionSpec]:
        """Every layout of an argument that cuts dims evenly, one dim or none for every axis."""
        meta, found = self.metas[at], []
        assert meta is not None
        for dims in itertools.product((None, *range(meta.ndim)), repeat=len(self.mesh.axes)):
            cut = [tuple(a for a, d in zip(self.mesh.axes, dims, strict=True) if d == dim)
                   for dim in range(meta.ndim)]  # fmt: skip
            sizes = [self.mesh.axis_size(axes) for axes in cut]
            if all(size % n == 0 and size for size, n in zip(meta.shape, sizes, strict=True)):
                found.append(PartitionSpec(*(axes or None for axes in cut)))
        return found

    def chosen(self, best: tuple[Any, ...]) -> Auto:
        spent, held, made, laid = self.seen[best]
        if self.memory is not None and held > self.memory:
            fail("fs.auto", f"memory={self.memory}",
                 f"of {len(self.seen)} choices the smallest takes {held} bytes on a rank",
                 f"memory={held}, or a larger mesh")  # fmt: skip
        others = []
        for choice, (other, size, _, _) in self.seen.items():
            differ = [at for at, (a, b) in enumerate(zip(choice, best, strict=True)) if a != b]
            if len(differ) == 1:
                others.append((self.names[differ[0]], choice[differ[0]], other, size))
        nearest = tuple(sorted(others, key=lambda each: each[2])[:8])
        return Auto(unflatten(self.tree, list(best)), made, laid, spent, held, nearest)


def _meta(leaf: Any) -> Meta | None:
    given = leaf[1] if is_pair(leaf) else leaf
    if isinstance(given, torch.Tensor | Spec):
        return Meta(tuple(given.shape), given.dtype)
    return None


MOST_ORDERS = 24


def _orders(mesh: Mesh) -> list[tuple[tuple[str, ...], ...]]:
    """The axes in the orders in which they are labelled: alone, several as one, or left out.

    What every axis is best at alone may be worse than one cut by all of them, or by some.
    """
    orders = itertools.islice(itertools.permutations(mesh.axes), 6)
    found: list[tuple[tuple[str, ...], ...]] = [
        tuple((axis,) for axis in order) for order in orders
    ]
    for count in range(len(mesh.axes), 0, -1):
        for some in itertools.combinations(mesh.axes, count):
            rest: list[tuple[str, ...]] = [(axis,) for axis in mesh.axes if axis not in some]
            found += [(some, *rest), (*rest, some), (some,)]
    return list(dict.fromkeys(found))[:MOST_ORDERS]


# -- labels ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Value:
    """A tensor in the labelling: its variable, its state under each label; `grad` if it has one."""

    variable: int
    states: list[AxisState]
    grad: bool


class _Labels:
    """Roles for all operations of a graph, axis after axis."""

    def __init__(self, graph: fx.GraphModule, search: _Search, price: float) -> None:
        self.graph, self.search, self.price = graph, search, price
        self.cut: dict[fx.Node, int] = {}
        self.factors: dict[tuple[fx.Node, Any], int] = {}
        self.dims: list[list[list[str]]] = [
            [[] for _ in range(m.ndim)] for m in search.metas if m is not None
        ]

    def run(self, order: Sequence[tuple[str, ...]]) -> tuple[Any, ...]:
        for axes in order:
            self.label(axes)
        mine = iter(self.dims)
        places = {axis: at for at, axis in enumerate(self.search.mesh.axes)}
        choice: list[Any] = []
        for at, meta in enumerate(self.search.metas):
            if meta is None:
                choice.append(None)
                continue
            cut = [tuple(sorted(each, key=places.__getitem__)) or None for each in next(mine)]
            choice.append(self.search.fixed.get(at, PartitionSpec(*cut)))
        return tuple(choice)

    def label(self, axes: tuple[str, ...]) -> None:
        """Label the graph for one axis, or for several as one, and count what is cut."""
        made, values = Labelling(), dict[fx.Node, Any]()
        nodes: list[tuple[fx.Node, int, list[Any]]] = []
        inputs = iter(at for at, m in enumerate(self.search.metas) if m is not None)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = self.input(made, node, next(inputs), axes)
                nodes.append((node, values[node].variable, values[node].states))
            elif node.op == "call_function":
                self.operation(made, node, axes, values, nodes)
        labels, _ = made.solve()
        n, place = self.search.mesh.axis_size(axes), 0
        for node, variable, options in nodes:
            picked = options[labels[variable]]
            if node.op == "placeholder":
                if picked.name == "sharded":
                    self.dims[place][picked.dim] += axes
                    self.cut[node] = self.cut.get(node, 1) * n
                    self.factors[node, picked.dim] = self.factors.get((node, picked.dim), 1) * n
                place += 1
            elif picked.factor is not None:
                self.cut[node] = self.cut.get(node, 1) * n
                key = node, picked.factor
                self.factors[key] = self.factors.get(key, 1) * n

    def input(self, made: Labelling, node: fx.Node, at: int, axes: tuple[str, ...]) -> _Value:
        meta, n = self.search.metas[at], self.search.mesh.axis_size(axes)
        assert meta is not None
        states = [INVARIANT] + [
            AxisState("sharded", dim) for dim, size in enumerate(meta.shape)
            if size and size % (n * self.factors.get((node, dim), 1)) == 0
        ]  # fmt: skip
        fixed = self.search.fixed.get(at)
        if fixed is not None:
            p = fixed.partition if isinstance(fixed, Spec) else fixed
            held = [AxisState("sharded", d) for d, cut in enumerate(p.dims) if {*axes} & {*cut}]
            states = held[:1] or [INVARIANT]
        local = nbytes(meta) // self.cut.get(node, 1)
        weights = [self.price * local / (1 if s == INVARIANT else n) for s in states]
        return _Value(made.variable(weights), states, self.search.wants[at])

    def operation(
        self, made: Labelling, node: fx.Node, axes: tuple[str, ...], values: dict[fx.Node, Any],
        nodes: list[tuple[fx.Node, int, list[Any]]],
    ) -> None:  # fmt: skip
        """The variable of an operation, and its ties to those of its operands."""
        if getattr(node.target, "__name__", "") == "getitem":
            source, place = node.args
            several = values.get(source)  # type: ignore[arg-type]
            values[node] = several[place] if isinstance(several, list) else several  # type: ignore[index]
            return
        found = call_at(node)
        if found is None:
            return
        call, rule, operands = found
        n, topology = self.search.mesh.axis_size(axes), self.search.topology
        if rule is None:
            roles = [
                Role("invariant", (INVARIANT,) * len(operands), (INVARIANT,) * len(call.results))
            ]
            work = 0.0
        else:
            sizes = factor_sizes(rule, call)
            roles = [r for r in roles_of(rule, call, grad=True)
                     if _counts(r) and self.fits(node, r, sizes, n)]  # fmt: skip
            work = FORWARD_AND_BACKWARD * compute_time(topology, rule, call, sizes)
        work /= self.cut.get(node, 1)
        variable = made.variable([work / (n if role.factor else 1) for role in roles])
        nodes.append((node, variable, roles))
        link = topology.link(self.search.mesh, axes)
        grad = False
        for place, (operand, meta) in enumerate(zip(operands, call.operands, strict=True)):
            value = values.get(operand)
            if not isinstance(value, _Value):
                continue
            grad = grad or value.grad
            cut = self.cut.get(operand, 1)
            table = [
                [self.way(link, n, have, role.operands[place], meta, cut, value.grad)
                 for role in roles] for have in value.states
            ]  # fmt: skip
            made.pair(value.variable, variable, table)
        states = [
            _Value(variable, [_led(role.results[at]) for role in roles], grad)
            for at in range(len(call.results))
        ]
        single = len(states) == 1 and isinstance(node.meta.get("val"), torch.Tensor)
        values[node] = states[0] if single else states

    def fits(self, node: fx.Node, role: Role, sizes: Mapping[str, int], n: int) -> bool:
        """Whether this axis can cut a factor too, evenly, and it leads all dims that it is on."""
        if role.factor is None:
            return True
        taken = self.factors.get((node, role.factor), 1)
        leads = all(s is None or s.position == 0 for s in (*role.operands, *role.results))
        return leads and sizes[role.factor] > 0 and sizes[role.factor] % (n * taken) == 0

    def way(
        self, link: Any, n: int, have: AxisState, asked: AxisState, meta: Meta, cut: int, grad: bool
    ) -> float:
        """Seconds of a value's way to an operand, and of the gradient's way back if it has one.

        The value is in `cut` parts on other axes.
        """
        if asked.name == "any":
            return 0.0
        topology, local = self.search.topology, nbytes(meta) // cut
        local = local // n if have.name == "sharded" else local
        weight = change_cost(topology, link, n, have, _led(asked), local, meta.dtype.itemsize)
        back = weight.back
        if (have.name, asked.name) == ("invariant", "sharded"):
            # Slicing sends nothing; the gradients of the slices are gathered.
            back = collective_time(topology, link, all_gather_traffic(n, local // n), local)
        return weight.time + (back if grad else 0.0)


def _counts(role: Role) -> bool:
    """Whether a role can come up: arguments are never unreduced, so what is so was summed."""
    kinds = {s.kind for s in role.operands if s.name == "unreduced"}
    return role.name != "reduced" and kinds <= {"sum"}


def _led(state: AxisState | None) -> AxisState:
    """A state without the place of its factor, which leads its dim."""
    if state is None:
        return INVARIANT
    return AxisState("sharded", state.dim) if state.name == "sharded" else state
