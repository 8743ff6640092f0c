"""`fs.auto`: layouts of a function's arguments, chosen by the modelled time of a step.

The search has two passes. The first, in `label_graph`, labels the function's graph so that
redistributions, computation and the redistribution of gradients take the least time together, but
costs every use of a value by itself. The second plans the function as `fs.partition` does, where
a redistribution that several uses share runs once: all choices if they are few, else it changes one
argument at a time while that helps. After Alpa (arXiv 2201.12023) and PyTorch's AutoParallel, whose
integer programs are per mesh, not per axis.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard._util.errors import fail
from fshard._util.notebook_view import NotebookView
from fshard._util.text import below, bytes_text, columns, time_text
from fshard.layout.mesh import Mesh, as_mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.tree import flatten, paths, unflatten
from fshard.layout.validation import check_plain_tensor
from fshard.ops.core.call import name_of
from fshard.ops.propagate.role_costs import nbytes
from fshard.partition.function_traces import FunctionTraces
from fshard.partition.ir import ClosureTensor, Operation, Redistribution
from fshard.partition.label_graph import ArgumentLeaf, GraphLabels
from fshard.partition.partition import Partition
from fshard.partition.partitioned_call import PartitionedCall
from fshard.partition.training_time import lines_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes
from fshard.program.program_arguments import as_topology

MAX_EXHAUSTIVE = 1024
"""Number of choices up to which all of them are planned."""
MAX_STARTS = 2
"""Number of the best choices that are improved argument by argument."""
MAX_ORDERS = 24
MAX_ALTERNATIVES = 8
MEMORY_PRICES = (0.0, *(10.0**power for power in range(-16, -7)))
"""Seconds charged per byte of an argument on a rank, so that choices fit into the memory."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Auto(NotebookView):
    """Layouts that `fs.auto` chose, and the function partitioned with them.

    Called with arguments, it runs the partitioned function.

    Attributes:
        in_specs: the layouts of the arguments, in the trees of the arguments.
        partition: the function as `fs.partition` returns it.
        partitioned: its `PartitionedCall` for the example arguments.
        time: modelled seconds of a step, forward and backward.
        memory: modelled bytes of a rank.
        alternatives: the name of an argument, another layout of it, and the time and memory with
            that layout; the fastest first.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=4)
    >>> x = fs.Spec(mesh, fs.P(), shape=(65536, 1024))
    >>> choice = fs.auto(torch.relu, mesh, [x])
    >>> choice.in_specs, choice.memory // 2**20
    ([P('x', None)], 192)
    """

    in_specs: list[Any]
    partition: Partition
    partitioned: PartitionedCall
    time: float
    memory: int
    alternatives: tuple[tuple[str, PartitionSpec, float, int], ...]
    _args: list[Any]
    """The example arguments, with specs in the places of tensors."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.in_specs, self.partition, self.time, self.memory,
                          self.alternatives, self._args)  # fmt: skip

    def explain(self) -> str:
        """Return the layout of every argument, the nearest alternatives, and every operation."""
        leaves, _ = flatten(self.in_specs)
        names = paths(self.in_specs, "args")
        width = max(map(len, names))
        text = [f"{name:<{width}}  {p}" for name, p in zip(names, leaves, strict=True)]
        text.append(_cost_text(self.time, self.memory))
        rows = [
            (f"{name} as {p}", _cost_text(time, memory))
            for name, p, time, memory in self.alternatives
        ]
        text += columns(rows) or below(rows)
        return "\n".join((*text, str(self.partitioned)))

    def __str__(self) -> str:
        return self.explain()

    __repr__ = __str__

    def __call__(self, *args: Any) -> Any:
        """Run the partitioned function on pairs or global tensors."""
        return self.partition(*args)


def _rebuild(in_specs: list[Any], partition: Partition, *others: Any) -> Auto:
    """Return an `Auto` from its pickle; the partitioned call is planned again."""
    return Auto(in_specs, partition, partition.trace(*others[-1]), *others)


def _cost_text(time: float, memory: int) -> str:
    return f"{time_text(time)} a step, {bytes_text(memory)} on a rank"


def auto(
    fn: Callable[..., Any],
    mesh: Mesh,
    example_args: Sequence[Any],
    *,
    memory: int | None = None,
    topology: Topology | None = None,
    fixed: Mapping[int, Any] | None = None,
    seconds: float = 20.0,
) -> Auto:
    """Choose the layouts of a function's arguments in which a step takes the least time.

    A step is the forward pass, and the backward pass if an argument requires grad (a spec of a
    floating dtype does). Times and bytes are those of the cost model.

    Args:
        fn: the function.
        mesh: the mesh of the layouts.
        example_args: its arguments in order: tensors, also on the meta device, or specs of their
            shapes and dtypes.
        memory: bytes that a rank may hold: arguments, their gradients, and results of operations
            that are kept for the backward pass; None is unlimited.
        topology: the topology that layouts are costed on; None is one node.
        fixed: layouts of arguments that are not to be chosen, by the index of the argument.
        seconds: time after which the best choice so far is taken.

    Returns:
        An `Auto` with the chosen `in_specs`, and the function partitioned with them.

    Raises:
        ShardingError: if no choice that was tried fits into `memory`.

    >>> import fshard as fs
    >>> args = [fs.Spec(fs.Mesh(x=4), fs.P(), shape=s) for s in ((65536, 1024), (1024, 1024))]
    >>> fs.auto(lambda x, w: (x @ w).relu(), fs.Mesh(x=4), args).in_specs
    [P('x', None), P(None, None)]
    """
    mesh = as_mesh(mesh, "fs.auto")
    if not isinstance(example_args, list | tuple):
        fail("fs.auto", f"example_args of type {type(example_args).__name__}",
             "example_args must be a list of the arguments of a call",
             "fs.auto(fn, mesh, [x])")  # fmt: skip
    on = as_topology("fs.auto", topology, meshes=(mesh,))
    search = _Search(fn, mesh, list(example_args), on, memory, dict(fixed or {}))
    return search.run(time.monotonic() + seconds)


# -- memory of a step -------------------------------------------------------------------------


def step_memory(call: PartitionedCall) -> int:
    """Return the bytes that a rank holds: arguments, their gradients, constants and results.

    All results are kept for the backward pass; without one only the largest is counted.
    """
    inputs = sum(max_local_nbytes(spec) * (2 if call.grad and spec.dtype.is_floating_point else 1)
                 for spec in call.in_specs)  # fmt: skip
    results = [
        sum(max_local_nbytes(spec) for spec in line.strategy.out_specs if spec is not None)
        for line in call.lines if isinstance(line, Operation)
    ] + [max_local_nbytes(line.program.dst) for line in call.lines
         if isinstance(line, Redistribution) and not line.program.is_local]  # fmt: skip
    constants = [line.tensor.nbytes for line in call.lines if isinstance(line, ClosureTensor)]
    return inputs + sum(constants) + (sum(results) if call.grad else max(results, default=0))


# -- the search -----------------------------------------------------------------------------


Choice = tuple[Any, ...]
"""A layout for every leaf of the arguments, None for one that is not a tensor."""


class _Search:
    """One call of `auto`: the arguments, and all choices planned so far with their costs."""

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh, args: list[Any], topology: Topology,
        memory: int | None, fixed: dict[int, Any],
    ) -> None:  # fmt: skip
        self.mesh, self.topology, self.memory = mesh, topology, memory
        flat, self.tree = flatten(args)
        arg_of_leaf = [number for number, arg in enumerate(args) for _ in flatten(arg)[0]]
        layouts = {
            arg_of_leaf.index(number) + offset: p
            for number, spec in fixed.items() for offset, p in enumerate(flatten(spec)[0])
        }  # fmt: skip
        self.names = paths(args, "args")
        for name, x in zip(self.names, flat, strict=True):
            if isinstance(x, torch.Tensor):
                check_plain_tensor(x, f"fs.auto: {name}")
        self.leaves = [ArgumentLeaf.of(x, layouts.get(i)) for i, x in enumerate(flat)]
        self.args = unflatten(self.tree, [
            x if leaf.meta is None
            else torch.empty(leaf.meta.shape, dtype=leaf.meta.dtype, device="meta",
                             requires_grad=leaf.requires_grad)
            for x, leaf in zip(flat, self.leaves, strict=True)
        ])  # fmt: skip
        self.fn, self.traces = fn, FunctionTraces(fn, f"fs.auto({name_of(fn)})")
        self.costs: dict[Choice, tuple[float, int, Partition, PartitionedCall]] = {}

    def run(self, deadline: float) -> Auto:
        """Search until a time of `time.monotonic()`, and return the best choice."""
        replicated, smallest = self.replicated(), self.smallest()
        for choice in (replicated, smallest, self.sharded_data()):
            self.cost(choice)
        graph = self.costs[replicated][3].source
        for price, order in itertools.product(
            MEMORY_PRICES if self.memory is not None else MEMORY_PRICES[:1], _orders(self.mesh)
        ):
            if time.monotonic() < deadline:
                labels = GraphLabels(graph, self.mesh, self.leaves, self.topology, price)
                self.cost(labels.run(order))
        layouts = [
            self.layouts(i) if leaf.is_free else [p]
            for i, (leaf, p) in enumerate(zip(self.leaves, replicated, strict=True))
        ]
        if math.prod(map(len, layouts)) <= MAX_EXHAUSTIVE:
            for choice in itertools.product(*layouts):
                if time.monotonic() < deadline:
                    self.cost(choice)
        starts = sorted(self.costs, key=self.rank)[:MAX_STARTS]
        for start in dict.fromkeys((*starts, *([smallest] if self.memory is not None else []))):
            choice, better = start, self.improved(start, deadline)
            while better != choice and time.monotonic() < deadline:
                choice, better = better, self.improved(better, deadline)
        return self.result(self.best())

    def replicated(self) -> Choice:
        """Return the choice with every argument replicated."""
        return tuple(
            PartitionSpec(*[None] * leaf.ndim) if leaf.is_free else leaf.fixed
            for leaf in self.leaves
        )

    def sharded_data(self) -> Choice:
        """Return the choice with arguments without gradient sharded most, others replicated."""
        layouts = zip(self.replicated(), self.smallest(), self.leaves, strict=True)
        return tuple(p if leaf.requires_grad else sharded for p, sharded, leaf in layouts)

    def smallest(self) -> Choice:
        """Return the choice with every argument in the most shards, over its first dims."""
        key = lambda p: (self.mesh.axis_size(p.axes), [len(axes) for axes in p.dims])  # noqa: E731
        return tuple(
            max(self.layouts(i), key=key) if leaf.is_free else leaf.fixed
            for i, leaf in enumerate(self.leaves)
        )

    def cost(self, choice: Choice) -> tuple[float, int]:
        """Plan a choice, and return its time and memory."""
        if choice not in self.costs:
            in_specs = unflatten(self.tree, list(choice))
            part = Partition(self.fn, self.mesh, in_specs, None, None, self.topology,
                             self.traces, where=self.traces.where,
                             replicate=self.mesh.axes)  # fmt: skip
            call = part.trace(*self.args)
            self.costs[choice] = (
                lines_time(call.lines, call.mesh, self.topology, grad=call.grad),
                step_memory(call), part, call,
            )  # fmt: skip
        return self.costs[choice][:2]

    def rank(self, choice: Choice) -> tuple[bool, float, int]:
        """Return the sort key of a choice: exceeds the memory, time, memory."""
        step, held = self.cost(choice)
        over = self.memory is not None and held > self.memory
        return over, held if over else step, held

    def best(self) -> Choice:
        """Return the best choice so far."""
        return min(self.costs, key=self.rank)

    def improved(self, choice: Choice, deadline: float) -> Choice:
        """Return the best choice after one pass that changes every argument, largest first."""
        sizes = {i: nbytes(x.meta) for i, x in enumerate(self.leaves) if x.is_free and x.meta}
        for leaf in sorted(sizes, key=lambda i: (-sizes[i], i)):
            for p in self.layouts(leaf):
                if time.monotonic() > deadline:
                    return self.best()
                other = (*choice[:leaf], p, *choice[leaf + 1 :])
                if self.rank(other) < self.rank(choice):
                    choice = other
        return choice

    def layouts(self, leaf: int) -> list[PartitionSpec]:
        """Return the layouts of an argument with even shards: each axis shards a dim or none."""
        meta, partitions = self.leaves[leaf].meta, []
        assert meta is not None
        for dims in itertools.product((None, *range(meta.ndim)), repeat=len(self.mesh.axes)):
            entries = [tuple(a for a, d in zip(self.mesh.axes, dims, strict=True) if d == dim)
                       for dim in range(meta.ndim)]  # fmt: skip
            sizes = [self.mesh.axis_size(axes) for axes in entries]
            if all(size % n == 0 and size for size, n in zip(meta.shape, sizes, strict=True)):
                partitions.append(PartitionSpec(*(axes or None for axes in entries)))
        return partitions

    def result(self, best: Choice) -> Auto:
        """Return the answer of `auto` for the best choice; raise if it exceeds the memory."""
        step, held, part, call = self.costs[best]
        if self.memory is not None and held > self.memory:
            fail("fs.auto", f"memory={self.memory}",
                 f"of {len(self.costs)} choices the smallest takes {held} bytes on a rank",
                 f"memory={held}, or a larger mesh")  # fmt: skip
        alternatives = []
        for choice, (other_time, other_memory, _, _) in self.costs.items():
            changed = [i for i, (a, b) in enumerate(zip(choice, best, strict=True)) if a != b]
            if len(changed) == 1:
                leaf = changed[0]
                alternatives.append((self.names[leaf], choice[leaf], other_time, other_memory))
        nearest = tuple(sorted(alternatives, key=lambda item: item[2])[:MAX_ALTERNATIVES])
        specs = iter(call.in_specs)
        args = [leaf if x.meta is None else next(specs)
                for x, leaf in zip(self.leaves, flatten(self.args)[0], strict=True)]  # fmt: skip
        return Auto(unflatten(self.tree, list(best)), part, call, step, held, nearest,
                    unflatten(self.tree, args))  # fmt: skip


def _orders(mesh: Mesh) -> list[tuple[tuple[str, ...], ...]]:
    """Return orders in which axes are labelled: one by one, several as one, or some left out.

    The best for every axis alone may be worse than one factor sharded over all, or over some.
    """
    permutations = itertools.islice(itertools.permutations(mesh.axes), 6)
    orders: list[tuple[tuple[str, ...], ...]] = [
        tuple((axis,) for axis in order) for order in permutations
    ]
    for count in range(len(mesh.axes), 0, -1):
        for group in itertools.combinations(mesh.axes, count):
            rest: list[tuple[str, ...]] = [(axis,) for axis in mesh.axes if axis not in group]
            orders += [(group, *rest), (*rest, group), (group,)]
    return list(dict.fromkeys(orders))[:MAX_ORDERS]
