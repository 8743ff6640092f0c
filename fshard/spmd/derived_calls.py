"""Functions derived from a recorded call of every simulated rank: gradients, tangents, batches.

The vector-Jacobian product, its tangents, and batches of them, are functions of one rank again,
computed from the recorded graphs. Each is linear in its last tensors, the cotangents or tangents,
and takes those of its base before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fshard._torch.autograd_state import (
    HOOKED_MODULE,
    ONCE_DIFFERENTIABLE,
    nodes_behind,
    order_nodes,
)
from fshard._util.errors import fail
from fshard.run.transports.base import backward_phase
from fshard.run.transports.simulator import run_ranks
from fshard.spmd.axis_env import BoundAxes
from fshard.spmd.closure_inputs import without_hooks
from fshard.spmd.rank_calls import Batches, Duals, Graph, Locals, RankCall, RecordedCall, leaf

LinearPart = Callable[[Locals], Locals]


@dataclass(eq=False)
class DerivedCall(RankCall):
    """Function that is linear in its last tensors, computed from the graphs of `base`.

    Attributes:
        base: the call that it is derived from.
        base_width: number of a rank's tensors before the last ones, the inputs of the graphs.
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

    def duals(self, level: int, width: int) -> Duals | None:
        """Return the gradients and their tangents as the gradient of the base in forward mode.

        The gradient of `ct * dy + dct * y` for `dx` and `x`, where dy is the tangent of y, is that
        of `ct * y` for x and its tangent. So values that the graph has as constants, such as those
        of `no_grad`, keep their tangents.
        """
        base = self.base.duals(level, self.base_width)
        if base is None:
            return None
        if self.root.hooks:
            self.root.hooks[0].refuse()
        w, tangents = self.base_width, range(width + self.base_width, 2 * width)
        inputs = (
            *(i if i < w else i - w + width for i in base.inputs),
            *tangents,
            *range(w, width),
        )
        ends = [base.inputs.index(i) for i in (*(w + i for i in self.needs), *self.needs)]
        call = Vjp(base.call, len(base.inputs), tuple(ends), self.retain_graph)
        return Duals(call, tuple(inputs))


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

    def duals(self, level: int, width: int) -> Duals | None:
        """Return the tangents of the base in forward mode."""
        base, w = self.base.duals(level, self.base_width), self.base_width
        if base is None:
            return None
        inputs = [i if i < w else i + w for i in base.inputs]
        return Duals(Jvp(base.call, len(inputs)), (*inputs, *(i + w for i in inputs)))


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

    def duals(self, level: int, width: int) -> Duals | None:
        """Return the batched call of the base in forward mode."""
        base = self.base.duals(level, width)
        if base is None:
            return None
        call, dims = base.call, self.dims * 2
        assert isinstance(call, DerivedCall)
        batched = BatchedCall(
            call, call.base_width, self.size, tuple([dims[i] for i in base.inputs])
        )
        return Duals(batched, base.inputs)


def _requiring_grad(xs: Locals) -> Locals:
    """Return tensors, with a gradient where they can have one."""
    return tuple([x if x.requires_grad else leaf(x) for x in xs])


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
