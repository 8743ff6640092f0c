"""Calls on every simulated rank: one that is recorded, and functions derived from the record.

A mapped function is a function of one rank's tensors. It runs once: in forward mode with tangents
beside values, under `vmap` on batches. Each rank's autograd graph is recorded. The vector-Jacobian
product, its tangents, and batches of them, are functions of one rank again, computed from the
recorded graphs: the user's code never runs again. Each is linear in its last tensors, the
cotangents or tangents, and takes those of its base before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fshard._torch.autograd_state import (
    HOOKED_MODULE,
    ONCE_DIFFERENTIABLE,
    library_operation,
    nodes_behind,
    order_nodes,
)
from fshard._torch.functorch import run_with_tangents
from fshard._torch.memory import own_memory
from fshard._util.errors import fail
from fshard.run.transports.base import backward_phase
from fshard.run.transports.simulator import run_ranks
from fshard.spmd.axis_env import BoundAxes
from fshard.spmd.closure_inputs import batches_of_gradients, without_hooks
from fshard.spmd.mesh_scope import Scope

Locals = tuple[torch.Tensor, ...]
RankFunction = Callable[[int, Locals], Locals]
"""A rank and its locals to its results."""
Graph = tuple[Locals, Locals]
"""Inputs and outputs of one rank's autograd graph."""
LinearPart = Callable[[Locals], Locals]


@dataclass(slots=True)
class Batches:
    """A call under a level of `vmap`: the call below it, and the batch dims of its tensors.

    Attributes:
        call: the call on the batches.
        inputs: position of the batch dim of each of a rank's inputs, None without one.
        outputs: that of each of a rank's outputs, () until the call has run.
        primal: the batches of the call's `primal`, if it has one.
    """

    call: RankCall
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...] = ()
    primal: Batches | None = None

    def finish(self, width: int) -> None:
        """Record that the call has run, and returned `width` outputs."""
        self.outputs = self.outputs or (0,) * width
        if self.primal is not None:
            self.primal.finish(width // 2)


class RankCall(ABC):
    """Function of one rank's tensors, for a run on every rank.

    Attributes:
        graphs: every rank's graph, once it is recorded.
    """

    graphs: list[Graph] | None

    @property
    @abstractmethod
    def root(self) -> RecordedCall:
        """The recorded call that it is derived from, or is."""

    @abstractmethod
    def run(self, rows: Sequence[Locals], *, record: bool) -> list[Locals]:
        """Return the results of every rank; `record` their graphs for higher derivatives."""

    @abstractmethod
    def graph(self, index: int, xs: Locals) -> Graph:
        """Return the graph of the rank at an index, with inputs in the place of `xs`."""

    @abstractmethod
    def rebased(self, level: int) -> Batches | None:
        """Return the call on the batches of a level that its root was batched at, else None."""

    @abstractmethod
    def batched(
        self, level: int, size: int, dims: Sequence[int | None], randomness: str
    ) -> Batches:
        """Return the call on batches of `size`, for inputs with (0) and without (None) a batch."""


@dataclass(eq=False)
class RecordedCall(RankCall):
    """A call of a function, whose graphs are recorded when it runs.

    Attributes:
        scope: the axes that the call maps.
        function: the function; axis names are not bound in it.
        levels: of each input the innermost level of differentiation, 0 in ordinary autograd, None
            for an input that is not differentiated.
        check: called after all ranks; raises for what they returned.
        grad_mode: the caller's grad mode, for a run without derivatives.
        closures: inputs that all ranks share, the last ones of every graph.
        batches: the call under those levels of `vmap` that it has run at.
        primal: the call of the first inputs and outputs, whose tangents are the last ones.
        transformed: True under a transform of `torch.func`; no tensor then repeats its memory.
        graphs: every rank's graph, once it has run.
    """

    scope: Scope
    function: RankFunction
    levels: tuple[int | None, ...]
    check: Callable[[RecordedCall], None]
    grad_mode: bool = True
    closures: Locals = ()
    batches: dict[int, Batches] = field(default_factory=dict)
    primal: RecordedCall | None = None
    transformed: bool = False
    graphs: list[Graph] | None = None

    @property
    def root(self) -> RecordedCall:
        """The call itself."""
        return self

    def run(self, rows: Sequence[Locals], *, record: bool) -> list[Locals]:
        """Run the function on every rank."""
        tracked = [level is not None for level in self.levels]

        def run(rank: Any, xs: Locals) -> Graph:
            # A rank's graph begins at its inputs, which share memory with the caller's.
            owned = map(own_memory, xs) if self.transformed else xs
            leaves = tuple([_leaf(x) if t else x for x, t in zip(owned, tracked, strict=True)])
            return leaves, self.function(rank.rank, leaves)

        with torch.set_grad_enabled(self.grad_mode or any(tracked)):
            self.graphs = run_ranks(self.scope.mesh, run, rows)
        self.check(self)
        if self.primal is not None:
            check_forward_mode(self.graphs)
        call = self
        while call.primal is not None:
            assert call.graphs is not None
            width = len(call.primal.levels)
            call.primal.graphs = [(xs[:width], ys[: len(ys) // 2]) for xs, ys in call.graphs]
            call = call.primal
        return [ys for _, ys in self.graphs]

    def graph(self, index: int, xs: Locals) -> Graph:
        """Return the recorded graph."""
        assert self.graphs is not None
        return self.graphs[index]

    def rebased(self, level: int) -> Batches | None:
        """Return the call that has run under a level."""
        return self.batches.get(level)

    def batched(
        self, level: int, size: int, dims: Sequence[int | None], randomness: str
    ) -> Batches:
        """Return the function under `vmap`.

        Inputs that are differentiated inside of the level have a gradient for each element, and so
        need a batch.
        """
        inputs = tuple(
            0 if dim is not None or (inner is not None and inner > level) else None
            for dim, inner in zip(dims, self.levels, strict=True)
        )

        has_inner = any(inner is not None and inner > level for inner in self.levels)

        def function(rank: int, xs: Locals) -> Locals:
            one = torch.func.vmap(lambda *xs: self.function(rank, xs), inputs, 0, randomness)
            with batches_of_gradients() if has_inner else nullcontext():
                ys: Locals = one(*xs)
            return ys

        return self._at_level(level, inputs, function)

    def _at_level(
        self, level: int, inputs: tuple[int | None, ...], function: RankFunction
    ) -> Batches:
        """Return the call on batches; that of the primal inputs is recorded within it."""
        call, primal = replace(self, function=function, batches={}), None
        if self.primal is not None:
            width = len(self.primal.levels)
            primal = self.primal._at_level(level, inputs[:width], self.primal.function)
            call.primal = primal.call.root
        self.batches[level] = Batches(call, inputs, primal=primal)
        return self.batches[level]

    def with_tangents(self, columns: Sequence[int], levels: tuple[int | None, ...]) -> RecordedCall:
        """Return the function in forward mode: with tangents of some inputs, and of all outputs.

        Args:
            columns: indices of the inputs that have a tangent, each an input after the others.
            levels: levels of all inputs.
        """
        width = len(self.levels)

        def function(rank: int, xs: Locals) -> Locals:
            tangents: list[torch.Tensor | None] = [None] * width
            for index, tangent in zip(columns, xs[width:], strict=True):
                tangents[index] = tangent
            one = lambda *xs: self.function(rank, xs)  # noqa: E731
            ys, ts = run_with_tangents(one, xs[:width], tangents)
            return ys + ts

        # The graphs show which operations have no tangent.
        tracked = tuple([level or 0 for level in levels])
        return replace(self, function=function, levels=tracked, batches={}, primal=self)


@dataclass(eq=False)
class DerivedCall(RankCall):
    """Function that is linear in its last tensors, computed from the graphs of `base`.

    Attributes:
        base: the call that it is derived from.
        base_width: number of a rank's tensors before the last ones: those of the graphs.
        graphs: every rank's graph of its run, if it was recorded.
    """

    base: RankCall
    base_width: int
    graphs: list[Graph] | None = field(default=None, init=False)

    @property
    def root(self) -> RecordedCall:
        """The recorded call that it is derived from."""
        return self.base.root

    def check_differentiable(self) -> None:
        """Raise `ShardingError` if derivatives of this derivative would be wrong.

        A second backward pass goes through a module's results and, for values that the first one
        saved, through its middle. A full backward hook is called once for the sum in PyTorch; here
        the two are apart.
        """
        where = "the second derivative of a mapped function"
        graphs = [*(self.graphs or ()), *(self.root.graphs or ())]
        nodes = nodes_behind([y for _, ys in graphs for y in ys])
        if any(isinstance(node, ONCE_DIFFERENTIABLE) for node in nodes):
            fail(where, "an autograd.Function whose backward is marked @once_differentiable",
                 "a backward must be differentiable for a second derivative",
                 "leave the mark out, if its operations are PyTorch's")  # fmt: skip
        if any(isinstance(node, HOOKED_MODULE) for node in nodes):
            fail(where, "a module with full backward hooks",
                 "a simulation passes the gradients of a second derivative in parts, and such a "
                 "hook must see their sum",
                 "x.register_hook(...) on the module's argument in forward, if it is linear in the "
                 "gradient; or processes (torchrun)")  # fmt: skip

    @abstractmethod
    def linear(self, index: int, xs: Locals, *, create_graph: bool) -> tuple[Locals, LinearPart]:
        """Return the inputs of the graph of `base`, and the function of the last tensors."""

    def run(self, rows: Sequence[Locals], *, record: bool) -> list[Locals]:
        """Compute the function on every rank from the graphs of `base`."""
        scope, width = self.root.scope, self.base_width

        def run(rank: Any, xs: Locals) -> Graph:
            with BoundAxes(scope.named_mesh, scope.bound_axes, scope.uneven_axes):
                if record:  # a rank's graph begins here, not in the caller's
                    return self.graph(rank.index, tuple([x.detach() for x in xs]))
                _, function = self.linear(rank.index, xs[:width], create_graph=False)
                return (), function(xs[width:])

        with torch.enable_grad(), backward_phase(), without_hooks(self.root.closures):
            graphs: list[Graph] = run_ranks(scope.mesh, run, rows)
        if record:
            self.graphs = graphs
        return [ys for _, ys in graphs]

    def graph(self, index: int, xs: Locals) -> Graph:
        """Return the graph of the function, recorded now if it was not."""
        if self.graphs is not None:
            return self.graphs[index]
        leaves, function = self.linear(index, xs[: self.base_width], create_graph=True)
        last = _requiring_grad(xs[self.base_width :])
        outputs = function(last)
        order_nodes(outputs, self.root.graph(index, xs)[1])
        return (*leaves, *last), outputs

    def batched(
        self, level: int, size: int, dims: Sequence[int | None], randomness: str
    ) -> Batches:
        """Return the function on batches."""
        return Batches(BatchedCall(self, self.base_width, size, tuple(dims)), tuple(dims))


@dataclass(eq=False)
class Vjp(DerivedCall):
    """Gradients of some inputs of `base`, from its inputs and cotangents of its outputs.

    Attributes:
        needs: indices of the inputs.
        retain_graph: False if the graphs of `base` may be freed.
    """

    needs: tuple[int, ...]
    retain_graph: bool

    def linear(self, index: int, xs: Locals, *, create_graph: bool) -> tuple[Locals, LinearPart]:
        """Return the inputs of the graph of `base`, and its gradient."""
        inputs, ys = self.base.graph(index, xs)
        needed = tuple([inputs[i] for i in self.needs])
        retain = self.retain_graph or create_graph
        return inputs, lambda cts: _gradients(needed, ys, cts, retain, create_graph)

    def rebased(self, level: int) -> Batches | None:
        """Return the gradients of the batched base."""
        batches = self.base.rebased(level)
        if batches is None:
            return None
        dims, call = (
            batches.inputs,
            Vjp(batches.call, self.base_width, self.needs, self.retain_graph),
        )
        return Batches(call, dims + batches.outputs, tuple([dims[i] for i in self.needs]))


@dataclass(eq=False)
class Jvp(DerivedCall):
    """Tangents of the outputs of `base`, from its inputs and their tangents.

    The graph is transposed twice: the gradient is linear in the cotangents, and its own gradient
    for them is the tangent. So no level of forward mode, of which a process has one, is needed.
    """

    def linear(self, index: int, xs: Locals, *, create_graph: bool) -> tuple[Locals, LinearPart]:
        """Return the inputs of the graph of `base`, and its derivative."""
        inputs, ys = self.base.graph(index, xs)
        needed = [x.requires_grad for x in inputs]
        sources = tuple([x for x in inputs if x.requires_grad])
        with torch.enable_grad():
            cts = tuple([torch.zeros_like(y, requires_grad=y.requires_grad) for y in ys])
            back = _gradients(sources, ys, cts, True, True)

        def tangents(ts: Locals) -> Locals:
            seeds = tuple([t for t, need in zip(ts, needed, strict=True) if need])
            return _gradients(cts, back, seeds, True, create_graph)

        return inputs, tangents

    def rebased(self, level: int) -> Batches | None:
        """Return the tangents of the batched base."""
        batches = self.base.rebased(level)
        if batches is None:
            return None
        return Batches(Jvp(batches.call, self.base_width), batches.inputs * 2, batches.outputs)


@dataclass(eq=False)
class BatchedCall(DerivedCall):
    """A derived call on batches: of its last tensors at once, of others for each element.

    Attributes:
        size: the number of elements.
        dims: 0 for each input that is batched, None for others.
    """

    base: DerivedCall
    size: int
    dims: tuple[int | None, ...]

    def linear(self, index: int, xs: Locals, *, create_graph: bool) -> tuple[Locals, LinearPart]:
        """Return the inputs of the graph, and the batched function of the last tensors."""
        dims, last_dims = self.dims[: len(xs)], self.dims[len(xs) :]
        if not any(dim is not None for dim in dims):
            leaves, function = self.base.linear(index, xs, create_graph=create_graph)
            # What is computed again, by a checkpoint, draws no other values for each element.
            batched = torch.func.vmap(lambda *last: function(last), last_dims, randomness="same")
            return leaves, lambda last: batched(*last)
        assert self.root.graphs is not None
        fixed, _ = self.root.graphs[index]
        leaves = (*fixed, *_requiring_grad(xs[len(fixed) :]))
        parts = [
            self.base.linear(index, element, create_graph=create_graph)[1]
            for element in self.elements(leaves, dims)
        ]

        def stacked(last: Locals) -> Locals:
            elements = self.elements(last, last_dims)
            rows = [part(element) for part, element in zip(parts, elements, strict=True)]
            return tuple(map(torch.stack, zip(*rows, strict=True)))

        return leaves, stacked

    def elements(self, xs: Locals, dims: Sequence[int | None]) -> list[Locals]:
        """Return the tensors of every element of the batch."""
        return [
            tuple([x if dim is None else x.select(dim, i) for x, dim in zip(xs, dims, strict=True)])
            for i in range(self.size)
        ]

    def rebased(self, level: int) -> Batches | None:
        """Return the batched call of the batched base; the dim of `level` is behind this one."""
        batches = self.base.rebased(level)
        if batches is None:
            return None
        inputs = tuple(
            p if p is None or dim is None else p + 1
            for p, dim in zip(batches.inputs, self.dims, strict=True)
        )
        call = batches.call
        assert isinstance(call, DerivedCall)
        outputs = tuple([None if p is None else p + 1 for p in batches.outputs])
        return Batches(BatchedCall(call, self.base_width, self.size, self.dims), inputs, outputs)


def check_forward_mode(graphs: Sequence[Graph]) -> None:
    """Raise `ShardingError` for operations in graphs to which forward mode gives no tangent."""
    names = {library_operation(node) for node in nodes_behind([y for _, ys in graphs for y in ys])}
    names.discard(None)
    if names:
        fail("a tangent of a mapped function",
             f"the torch.library operation {', '.join(sorted(map(str, names)))}",
             "register_autograd registers a gradient and no tangent, for which PyTorch takes zero",
             "reverse mode, by torch.autograd.grad; or an autograd.Function with a jvp that calls "
             "the operation")  # fmt: skip


def _requiring_grad(xs: Locals) -> Locals:
    """Return tensors, with a gradient where they can have one."""
    return tuple([x if x.requires_grad else _leaf(x) for x in xs])


def _leaf(x: torch.Tensor) -> torch.Tensor:
    """Return a leaf with the memory of `x`, which requires grad if it can have one."""
    return x.detach().requires_grad_(x.is_floating_point() or x.is_complex())


def _gradients(
    xs: Locals, ys: Locals, cts: Locals, retain_graph: bool, create_graph: bool
) -> Locals:
    """Return the gradients of `ys` for all `xs`, zeros for those without one."""
    outs = [(y, ct) for y, ct in zip(ys, cts, strict=True) if y.requires_grad]
    inputs = [x for x in xs if x.requires_grad]
    found: Sequence[torch.Tensor | None] = ()
    if outs and inputs:
        found = torch.autograd.grad(
            [y for y, _ in outs],
            inputs,
            [ct for _, ct in outs],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    by_input = iter(found or [None] * len(inputs))
    grads = [next(by_input) if x.requires_grad else None for x in xs]
    return tuple([torch.zeros_like(x) if g is None else g for g, x in zip(grads, xs, strict=True)])
