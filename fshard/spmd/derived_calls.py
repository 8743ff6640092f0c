"""Functions derived from a recorded call of every simulated rank: gradients, tangents, batches.

The vector-Jacobian product, its tangents, and batches of them, are functions of one rank again,
computed from the recorded graphs. Each is linear in its last tensors, the cotangents or tangents,
and takes those of its base before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import torch

from fshard._torch.autograd_state import (
    HOOKED_MODULE,
    ONCE_DIFFERENTIABLE,
    has_unequal_orders,
    nodes_behind,
    order_nodes,
)
from fshard._torch.functorch import forward_ad_level, make_duals, primal_of, unpack_duals
from fshard._torch.saved_tensors import innermost_hooks
from fshard._util.errors import fail
from fshard.run.transports.base import backward_phase
from fshard.run.transports.simulator import run_ranks
from fshard.spmd.axis_env import BoundAxes
from fshard.spmd.closure_inputs import check_backwards, without_hooks
from fshard.spmd.rank_calls import Batches, Duals, Graph, Locals, RankCall, RecordedCall, leaf

T = TypeVar("T")
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

    def check_differentiable(self, level: int, needs: Sequence[int]) -> None:
        """Raise `ShardingError` if gradients of this derivative for some inputs would be wrong.

        A second backward pass goes through a module's results and, for values that the first one
        saved, through its middle. A full backward hook is called once for the sum in PyTorch; here
        the two are apart.
        """
        where = "the second derivative of a mapped function"
        if level in self.root.constant_at and any(i < self.base_width for i in needs):
            fail(where, "a gradient by torch.func in torch.no_grad(), differentiated outside of it",
                 "values that are differentiated must have a history; without one PyTorch "
                 "differentiates the arguments that some operations save, and nothing else",
                 "torch.func.vjp outside of no_grad()")  # fmt: skip
        graphs = [*(self.graphs or ()), *(self.root.graphs or ())]
        nodes = nodes_behind([y for _, ys in graphs for y in ys])
        if any(isinstance(node, ONCE_DIFFERENTIABLE) for node in nodes):
            fail(where, "an autograd.Function whose backward is marked @once_differentiable",
                 "a backward must be differentiable for a second derivative",
                 "leave the mark out, if its operations are PyTorch's")  # fmt: skip
        inputs = [x for xs, _ in self.root.graphs or () for x in xs]
        closures = set(map(id, self.root.closures))
        check_backwards(where, nodes, [x for x in inputs if id(x) not in closures])
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
        root, scope, width = self.root, self.root.scope, self.base_width
        # Tangents in graphs last no longer than their level, and go through recorded functions.
        record = record or (forward_ad_level() >= 0 and bool(root.forward or root.keeps_tangents))

        collecting = root.saved.collecting if innermost_hooks() else nullcontext

        def run(rank: Any, xs: Locals) -> Graph:
            axes = BoundAxes(scope.named_mesh, scope.bound_axes, scope.uneven_axes)
            with axes, collecting():
                if record:  # a rank's graph begins here, not in the caller's
                    inputs, ys = self.graph(rank.index, tuple([x.detach() for x in xs]))
                    outputs = tuple(map(primal_of, ys))
                    order_nodes(outputs, ys)  # they are views in forward mode
                    return inputs, outputs
                _, function = self.linear(rank.index, xs[:width], create_graph=False)
                return (), function(xs[width:])

        with torch.enable_grad(), backward_phase(), without_hooks(root.closures):
            try:
                graphs: list[Graph] = run_ranks(scope.mesh, run, rows)
            except RuntimeError as error:
                if root.keeps_tangents and "modified by an inplace operation" in str(error):
                    _refuse_gradient_of_tangent()
                raise
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


@dataclass(eq=False)
class LinearCall(DerivedCall):
    """Derived call without tangents, which has other ones in forward mode and on batches."""

    @property
    def keeps_tangents(self) -> bool:
        """False: in forward mode it is another call."""
        return False

    @property
    def graph_base(self) -> RankCall:
        """The call from whose graphs it is computed."""
        return self.base

    def batched(
        self, level: int, size: int, dims: Sequence[int | None], randomness: str
    ) -> Batches:
        """Return the function on batches."""
        return Batches(BatchedCall(self, self.base_width, size, tuple(dims)), tuple(dims))

    def duals(self, level: int, width: int) -> Duals | None:
        """Return the function in forward mode, on the graphs of its base in forward mode."""
        base = self.graph_base.duals(level, self.base_width)
        if base is None:
            return None
        if self.root.hooks:
            self.root.hooks[0].refuse()
        if not base.call.keeps_tangents:
            _check_orders(self.root.any_graphs())
            return self.symmetric_duals(base, width)
        w, last = self.base_width, range(self.base_width, width)
        inputs = [i if i < w else i - w + width for i in base.inputs]
        call = InForwardMode(base.call, len(inputs), self.with_base(base.call, base.inputs))
        return Duals(call, (*inputs, *last, *(width + i for i in last)))

    @abstractmethod
    def with_base(self, base: RankCall, inputs: Sequence[int]) -> LinearCall:
        """Return the function of the first half of the outputs of another base.

        Args:
            base: the call.
            inputs: index of each of its inputs among those of the base followed by their tangents.
        """

    @abstractmethod
    def symmetric_duals(self, base: Duals, width: int) -> Duals:
        """Return the function in forward mode, derived from that of the tangents of the base.

        It is right where derivatives in several directions can be interchanged.
        """


@dataclass(eq=False)
class Vjp(LinearCall):
    """Gradients of some inputs of `base`, from its inputs and cotangents of its outputs.

    Attributes:
        needs: indices of the inputs.
        retain_graph: False if the graphs of `base` may be freed.
        is_half: True if the last half of the outputs of `base`, their tangents, is left out.
    """

    needs: tuple[int, ...]
    retain_graph: bool
    is_half: bool = False

    def linear(self, index: int, xs: Locals, *, create_graph: bool) -> tuple[Locals, LinearPart]:
        """Return the inputs of the graph of `base`, and its gradient."""
        inputs, ys = self.base.graph(index, xs)
        ys = _half(ys) if self.is_half else ys
        needed = tuple([inputs[i] for i in self.needs])
        retain = self.retain_graph or create_graph
        return inputs, lambda cts: _gradients(needed, ys, cts, retain, create_graph)

    def rebased(self, level: int) -> Batches | None:
        """Return the gradients of the batched base."""
        batches = self.base.rebased(level)
        if batches is None:
            return None
        dims, outputs = batches.inputs, batches.outputs
        last = _half(outputs) if self.is_half else outputs
        call = replace(self, base=batches.call)
        return Batches(call, dims + last, tuple([dims[i] for i in self.needs]))

    def with_base(self, base: RankCall, inputs: Sequence[int]) -> Vjp:
        """Return the gradient of the first half of the outputs of another base."""
        needs = tuple(map(inputs.index, self.needs))
        return replace(self, base=base, base_width=len(inputs), needs=needs, is_half=True)

    def symmetric_duals(self, base: Duals, width: int) -> Duals:
        """Return the gradients and their tangents as the gradient of the base in forward mode.

        The gradient of `ct * dy + dct * y` for `dx` and `x`, where dy is the tangent of y, is that
        of `ct * y` for x and its tangent. So values that the graph has as constants, such as those
        of `no_grad`, keep their tangents.
        """
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
class Jvp(LinearCall):
    """Tangents of the outputs of `base`, from its inputs and their tangents.

    The graph is transposed twice: the gradient is linear in the cotangents, and its own gradient
    for them is the tangent. So no level of forward mode, of which a process has one, is needed.

    Attributes:
        columns: indices of the inputs that have a tangent.
        is_half: True if the last half of the outputs of `base`, their tangents, is left out.
    """

    columns: Sequence[int]
    is_half: bool = False

    def linear(self, index: int, xs: Locals, *, create_graph: bool) -> tuple[Locals, LinearPart]:
        """Return the inputs of the graph of `base`, and its derivative."""
        inputs, ys = self.base.graph(index, xs)
        ys = _half(ys) if self.is_half else ys
        directions = [inputs[i] for i in self.columns]
        needed = [x.requires_grad for x in directions]
        sources = tuple([x for x in directions if x.requires_grad])
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
        dims, outputs = batches.inputs, batches.outputs
        inputs = (*dims, *(dims[i] for i in self.columns))
        call = replace(self, base=batches.call)
        return Batches(call, inputs, _half(outputs) if self.is_half else outputs)

    def with_base(self, base: RankCall, inputs: Sequence[int]) -> Jvp:
        """Return the tangents of the first half of the outputs of another base."""
        _check_orders(self.root.any_graphs())
        columns = tuple(map(inputs.index, self.columns))
        return replace(self, base=base, base_width=len(inputs), columns=columns, is_half=True)

    def symmetric_duals(self, base: Duals, width: int) -> Duals:
        """Return the tangents of the base in forward mode."""
        w = self.base_width
        inputs = [i if i < w else i + w for i in base.inputs]
        call = Jvp(base.call, len(inputs), range(len(inputs)))
        return Duals(call, (*inputs, *(i + w for i in inputs)))


@dataclass(eq=False)
class BatchedCall(LinearCall):
    """A derived call on batches: of its last tensors at once, of others for each element.

    Attributes:
        size: the number of elements.
        dims: 0 for each input that is batched, None for others.
    """

    base: LinearCall
    size: int
    dims: tuple[int | None, ...]

    @property
    def graph_base(self) -> RankCall:
        """The call from whose graphs it is computed."""
        return self.base.graph_base

    def linear(self, index: int, xs: Locals, *, create_graph: bool) -> tuple[Locals, LinearPart]:
        """Return the inputs of the graph, and the batched function of the last tensors."""
        dims, last_dims = self.dims[: len(xs)], self.dims[len(xs) :]
        if not any(dim is not None for dim in dims):
            leaves, function = self.base.linear(index, xs, create_graph=create_graph)
            # A checkpoint that computes values again draws the same ones for each element.
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
        assert isinstance(call, LinearCall)
        outputs = tuple([None if p is None else p + 1 for p in batches.outputs])
        return Batches(BatchedCall(call, self.base_width, self.size, self.dims), inputs, outputs)

    def with_base(self, base: RankCall, inputs: Sequence[int]) -> BatchedCall:
        """Return the batched call with another base."""
        w = self.base_width
        dims = *(self.dims[i % w] for i in inputs), *self.dims[w:]
        return BatchedCall(self.base.with_base(base, inputs), len(inputs), self.size, dims)

    def symmetric_duals(self, base: Duals, width: int) -> Duals:
        """Return the batched call of the base in forward mode."""
        duals = self.base.symmetric_duals(base, width)
        call, dims = duals.call, self.dims * 2
        assert isinstance(call, LinearCall)
        batched = BatchedCall(
            call, call.base_width, self.size, tuple([dims[i] for i in duals.inputs])
        )
        return Duals(batched, duals.inputs)


@dataclass(eq=False)
class InForwardMode(DerivedCall):
    """A derived call and its tangents, on graphs that keep the tangents of values.

    Its last tensors are those of the call, and their tangents. It is the derivative of what
    backward computes, also where that is not a gradient, or has one that PyTorch gets wrong.

    Attributes:
        call: the derived call, with the same base.
        batches: the function under those levels of `vmap` that it has run at.
    """

    call: LinearCall
    batches: dict[int, Batches] = field(default_factory=dict, init=False)

    @property
    def keeps_tangents(self) -> bool:
        """True: it is recorded in forward mode, too."""
        return True

    def linear(self, index: int, xs: Locals, *, create_graph: bool) -> tuple[Locals, LinearPart]:
        """Return the inputs of the graph of `base`, and the function of the last tensors."""
        inputs, function = self.call.linear(index, xs, create_graph=create_graph)

        def with_tangents(last: Locals) -> Locals:
            half = len(last) // 2
            values, tangents = unpack_duals(function(make_duals(last[:half], last[half:])))
            return values + tangents

        return inputs, with_tangents

    def rebased(self, level: int) -> Batches | None:
        """Return the function on the batched base, or on other batches that it has run on."""
        if level not in self.batches:
            base, batches = self.base.rebased(level), self.call.rebased(level)
            if base is None or batches is None:
                return None
            self._set_batches(level, base.call, batches)
            self.batches[level].outputs = batches.outputs * 2
        return self.batches[level]

    def batched(
        self, level: int, size: int, dims: Sequence[int | None], randomness: str
    ) -> Batches:
        """Return the function on batches, of values and of their tangents."""
        w, half = self.base_width, (len(dims) - self.base_width) // 2
        pairs = zip(dims[w : w + half], dims[w + half :], strict=True)
        last = tuple([t if x is None else x for x, t in pairs])
        batches = self.call.batched(level, size, (*dims[:w], *last), randomness)
        return self._set_batches(level, self.base, batches)

    def _set_batches(self, level: int, base: RankCall, batches: Batches) -> Batches:
        """Return the function at a level of batches, from the call there."""
        assert isinstance(batches.call, LinearCall)
        call = InForwardMode(base, self.base_width, batches.call)
        last = batches.inputs[self.base_width :]
        self.batches[level] = Batches(call, batches.inputs + last)
        return self.batches[level]

    def duals(self, level: int, width: int) -> Duals | None:
        """Return None: the level of the tangents is the outermost that the root has run at."""
        return None


def _refuse_gradient_of_tangent() -> NoReturn:
    fail("a gradient of a tangent of a mapped function",
         "gradients within the tangent, and an operation whose tangent PyTorch computes in place",
         "values that a gradient needs must not be written, as by the tangents of softmax, "
         "logsumexp and norm",
         "the tangent of the gradient as a gradient, grad(lambda x: (grad(f)(x) * t).sum())(x)",
    )  # fmt: skip


def _check_orders(graphs: Sequence[Graph]) -> None:
    """Raise `ShardingError` for operations whose derivatives must not be interchanged."""
    nodes = nodes_behind([y for _, ys in graphs for y in ys])
    names = sorted({name for node in nodes if (name := has_unequal_orders(node))})
    if names:
        fail("a tangent of a tangent of a gradient of a mapped function", ", ".join(names),
             "a simulation takes the inner tangent of gradients as the gradient of a tangent, and "
             "the two must be equal",
             "the same function in elementary operations of PyTorch")  # fmt: skip


def _half(xs: tuple[T, ...]) -> tuple[T, ...]:
    """Return the first half of a tuple."""
    return xs[: len(xs) // 2]


def _requiring_grad(xs: Locals) -> Locals:
    """Return tensors, with a gradient where they can have one."""
    return tuple([x if x.requires_grad else leaf(x) for x in xs])


def _gradients(
    xs: Locals, ys: Locals, cts: Locals, retain_graph: bool, create_graph: bool
) -> Locals:
    """Return the gradients of `ys` for all `xs`, zeros for those without one."""
    outs = [(y, ct) for y, ct in zip(ys, cts, strict=True) if y.requires_grad]
    inputs = [x for x in xs if x.requires_grad]
    gradients: Sequence[torch.Tensor | None] = ()
    if outs and inputs:
        gradients = torch.autograd.grad(
            [y for y, _ in outs],
            inputs,
            [ct for _, ct in outs],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    by_input = iter(gradients or [None] * len(inputs))
    grads = [next(by_input) if x.requires_grad else None for x in xs]
    return tuple([torch.zeros_like(x) if g is None else g for g, x in zip(grads, xs, strict=True)])
