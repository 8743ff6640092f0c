"""Calls on every simulated rank, and the function that records one.

A mapped function is a function of one rank's tensors. It runs once: in forward mode with tangents
beside values, under `vmap` on batches. Each rank's autograd graph is recorded, from which
`derived_calls` computes its derivatives: the user's code never runs again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import torch

from fshard._torch.autograd_state import (
    HOOKED_MODULE,
    UNSAFE_VIEW,
    library_operation,
    nodes_behind,
)
from fshard._torch.functorch import (
    apply_function,
    has_tangent,
    run_with_tangents,
    transforms_active,
    without_transforms,
)
from fshard._torch.memory import own_memory
from fshard._torch.modes import DisableTorchFunction
from fshard._torch.saved_tensors import SavedValues, innermost_hooks
from fshard._util.dtypes import is_inexact
from fshard._util.errors import fail
from fshard.run.transports.simulator import run_ranks
from fshard.spmd.closure_inputs import GradientHook, gradients_within
from fshard.spmd.mesh_scope import Scope

T = TypeVar("T")
Locals = tuple[torch.Tensor, ...]
RankFunction = Callable[[int, Locals], Locals]
"""A rank and its locals to its results."""
Graph = tuple[Locals, Locals]
"""Inputs and outputs of one rank's autograd graph."""


@dataclass(slots=True)
class Batches:
    """A call under a level of `vmap`: the call below it, and the batch dims of its tensors.

    Attributes:
        call: the call on the batches.
        inputs: position of the batch dim of each of a rank's inputs, None without one.
        outputs: position of the batch dim of each of a rank's outputs, () until the call has run.
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


@dataclass(slots=True)
class Duals:
    """A call in forward mode: the call with tangents beside its tensors.

    Attributes:
        call: the call of a rank's tensors and tangents; its outputs are followed by their tangents.
        inputs: index of each of its inputs among the tensors of a rank followed by their tangents.
    """

    call: RankCall
    inputs: tuple[int, ...]


class RankCall(ABC):
    """Function of one rank's tensors, for a run on every rank.

    Attributes:
        graphs: every rank's graph, once it is recorded.
    """

    graphs: list[Graph] | None

    @property
    @abstractmethod
    def keeps_tangents(self) -> bool:
        """True if the graphs keep the tangents of values, until their level ends."""

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

    @abstractmethod
    def duals(self, level: int, width: int) -> Duals | None:
        """Return the call with tangents at a level that its root ran in forward mode at, else None.

        Args:
            level: the level.
            width: number of a rank's tensors, without tangents.
        """


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
        forward: the call under those levels of forward mode that it has run at.
        primal: until it has run, the call of the first inputs and outputs, whose tangents are the
            last ones.
        columns: indices of the inputs of `primal` that have a tangent.
        has_inner: True if gradients within the level of the tangents may be taken.
        add_tangents: function from another call of the first inputs to one with these tangents.
        level: the innermost `grad` or `jvp` that runs at the call, 0 without one.
        hooks: gradient hooks in the function, shared by the calls on batches and tangents.
        transformed: True under a transform of `torch.func`; no tensor then repeats its memory.
        constant_at: levels at which its values are constants, for `no_grad` around a transform.
        saved: what the graphs of the ranks save, where hooks of saved tensors are active.
        graphs: every rank's graph, once it has run.
    """

    scope: Scope
    function: RankFunction
    levels: tuple[int | None, ...]
    check: Callable[[RecordedCall], None]
    grad_mode: bool = True
    closures: Locals = ()
    batches: dict[int, Batches] = field(default_factory=dict)
    forward: dict[int, Duals] = field(default_factory=dict)
    primal: RecordedCall | None = None
    columns: Sequence[int] = ()
    has_inner: bool = False
    add_tangents: Callable[[RecordedCall], RecordedCall] | None = None
    level: int = 0
    hooks: list[GradientHook] = field(default_factory=list)
    transformed: bool = False
    constant_at: frozenset[int] = frozenset()
    saved: SavedValues = field(default_factory=SavedValues)
    graphs: list[Graph] | None = None

    @property
    def root(self) -> RecordedCall:
        """The call itself."""
        return self

    @property
    def keeps_tangents(self) -> bool:
        """True if its tangents are of the outermost level of a rank, and gradients are within."""
        return (
            self.has_inner
            and not self.forward
            and all(batches.call.keeps_tangents for batches in self.batches.values())
        )

    def run(self, rows: Sequence[Locals], *, record: bool) -> list[Locals]:
        """Run the function on every rank."""
        tracked = [level is not None for level in self.levels]
        is_hooked = innermost_hooks() is not None

        def run(rank: Any, xs: Locals) -> tuple[Graph, Locals]:
            # A rank's graph begins at its inputs, which share memory with the caller's.
            owned = map(own_memory, xs) if self.transformed else xs
            leaves = tuple([leaf(x) if t else x for x, t in zip(owned, tracked, strict=True)])
            if not is_hooked:
                is_leaf = [x.is_leaf and x.requires_grad for x in xs]  # so it is on processes
                pairs = zip(leaves, is_leaf, tracked, strict=True)
                args = tuple([x if own or not t else argument(x) for x, own, t in pairs])
                ys = self.function(rank.rank, args)
                return (leaves, ys), ys
            with self.saved.collecting():  # the ends of the graph are of no other use
                ends = tuple([x if x.requires_grad else x.detach() for x in leaves])
                ys = self.function(rank.rank, tuple(map(argument, ends)))
                return (ends, tuple([UNSAFE_VIEW(y, y.shape) for y in ys])), ys

        with torch.set_grad_enabled(self.grad_mode or any(tracked)):
            runs = run_ranks(self.scope.mesh, run, rows)
        self.graphs = [graph for graph, _ in runs]
        self.check(self)
        if self.primal is not None:
            check_forward_mode(self.graphs)
        call = self
        while call.primal is not None:
            assert call.graphs is not None
            primal, width = call.primal, len(call.primal.levels)
            primal.graphs = [(xs[:width], ys[: len(ys) // 2]) for xs, ys in call.graphs]
            call.primal = None  # no cycle of references keeps graphs
            call = primal
        return [ys for _, ys in runs]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run and make nodes in the block; under hooks of saved tensors graphs keep no values."""
        if innermost_hooks() is None:
            yield
            return
        with self.saved.holding():
            yield
        with without_transforms(), DisableTorchFunction():
            for xs, ys in chain.from_iterable(call.graphs or () for call in self.family()):
                for x in (*xs[: len(xs) - len(self.closures)], *ys):  # closures are the caller's
                    x.data = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)

    def family(self) -> Iterator[RecordedCall]:
        """Yield the call, and its forms on batches and with tangents."""
        yield self
        for batches in self.batches.values():
            yield from batches.call.root.family()
        for duals in self.forward.values():
            yield from duals.call.root.family()

    def graph(self, index: int, xs: Locals) -> Graph:
        """Return the recorded graph."""
        assert self.graphs is not None
        return self.graphs[index]

    def any_graphs(self) -> Sequence[Graph]:
        """Return its graphs, or those of its run on batches or with tangents."""
        return next((call.graphs for call in self.family() if call.graphs), ())

    def check_level(self, level: int) -> None:
        """Raise `ShardingError` for hooks that a gradient of a level must not reach."""
        if level == self.level:
            return
        hooks = list(self.hooks)
        nodes = nodes_behind([y for _, ys in self.graphs or () for y in ys])
        if any(isinstance(node, HOOKED_MODULE) for node in nodes):
            hooks.insert(0, GradientHook("a mapped function", "a module's full backward hooks"))
        if hooks:
            hooks[0].refuse_outer_level()

    def rebased(self, level: int) -> Batches | None:
        """Return the call that has run under a level."""
        return self.batches.get(level)

    def batched(
        self, level: int, size: int, dims: Sequence[int | None], randomness: str
    ) -> Batches:
        """Return the function under `vmap`.

        Inputs that are differentiated inside of the level have a gradient for each element, and so
        need a batch. Tangents are added to the batches: their level is the outermost of a rank.
        """
        inputs = tuple(
            0 if dim is not None or (inner is not None and inner > level) else None
            for dim, inner in zip(dims, self.levels, strict=True)
        )
        if self.primal is not None:
            return self._primal_batched(level, size, inputs, randomness)

        has_inner = any(inner is not None and inner > level for inner in self.levels)
        element = self.function

        def function(rank: int, xs: Locals) -> Locals:
            one = torch.func.vmap(lambda *xs: element(rank, xs), inputs, 0, randomness)
            with gradients_within() if has_inner else nullcontext():
                ys: Locals = one(*xs)
            return ys

        call = replace(self, function=function, batches={}, forward={})
        self.batches[level] = Batches(call, inputs)
        return self.batches[level]

    def _primal_batched(
        self, level: int, size: int, dims: Sequence[int | None], randomness: str
    ) -> Batches:
        """Return the call with tangents of the batched call without."""
        assert self.primal is not None
        assert self.add_tangents is not None
        width = len(self.primal.levels)
        of_tangents = dict(zip(self.columns, dims[width:], strict=True))
        both = [of_tangents.get(i) if dim is None else dim for i, dim in enumerate(dims[:width])]
        primal = self.primal.batched(level, size, both, randomness)
        inputs = (*primal.inputs, *(primal.inputs[i] for i in self.columns))
        self.batches[level] = Batches(self.add_tangents(primal.call.root), inputs, primal=primal)
        return self.batches[level]

    def duals(self, level: int, width: int) -> Duals | None:
        """Return the call that has run in forward mode at a level, with or without inner levels."""
        if level in self.forward:
            return self.forward[level]
        for inner in self.forward.values():
            outer = inner.call.duals(level, len(inner.inputs))
            if outer is not None:
                # Nothing reads the inner tangents: each is given as the input that it is one of.
                n, call = len(inner.inputs), outer.call.root
                places = [inner.inputs[i % n] % width + i // n * width for i in outer.inputs]
                return Duals(call.without_inner_tangents(self.num_outputs), tuple(places))
        return None

    def without_inner_tangents(self, n: int) -> RecordedCall:
        """Return the call in forward mode without the tangents of the innermost level.

        The first `n` outputs are values, the next ones their tangents of this level, and so on.
        """

        def kept(outputs: tuple[T, ...]) -> tuple[T, ...]:
            return tuple(y for i, y in enumerate(outputs) if i // n % 2 == 0)

        batches, forward = {}, {}
        for level, batch in self.batches.items():
            call = batch.call.root.without_inner_tangents(n)
            batches[level] = Batches(call, batch.inputs, kept(batch.outputs))
        for level, duals in self.forward.items():
            forward[level] = Duals(duals.call.root.without_inner_tangents(n), duals.inputs)
        graphs = self.graphs and [(xs, kept(ys)) for xs, ys in self.graphs]
        return replace(self, graphs=graphs, batches=batches, forward=forward, primal=None)

    @property
    def num_outputs(self) -> int:
        """The number of a rank's outputs in the run, which may have been one on batches."""
        call = self
        while call.graphs is None:
            call = next(iter(call.batches.values())).call.root
        return len(call.graphs[0][1])

    def with_tangents(
        self, level: int, columns: Sequence[int], levels: Sequence[int | None], *, has_inner: bool
    ) -> RecordedCall:
        """Return the function in forward mode: with tangents of some inputs, and of all outputs.

        Args:
            level: the level of the tangents.
            columns: indices of the inputs that have a tangent, each an input after the others.
            levels: levels of all inputs.
            has_inner: True if gradients within the level may be taken.
        """
        primal, width = self.function, len(self.levels)
        inputs = (*range(width), *(width + i for i in columns))

        def add_tangents(call: RecordedCall) -> RecordedCall:
            return call.with_tangents(level, columns, levels, has_inner=has_inner)

        def function(rank: int, xs: Locals) -> Locals:
            tangents: list[torch.Tensor | None] = [None] * width
            for index, tangent in zip(columns, xs[width:], strict=True):
                tangents[index] = tangent
            is_outermost = not (transforms_active() or any(map(has_tangent, xs)))
            with gradients_within() if has_inner else nullcontext():
                ys, ts = run_with_tangents(
                    lambda *xs: primal(rank, xs),
                    xs[:width],
                    tangents,
                    within_jvp=has_inner and is_outermost,  # derivatives of gradients need them
                )
            return ys + ts

        # The graphs show which operations on tangents have none.
        tracked = [
            0 if known is None and (i >= width or i in columns) else known
            for i, known in enumerate(levels)
        ]
        call = replace(
            self, function=function, levels=tuple(tracked), batches={}, forward={},
            primal=self, columns=columns, has_inner=has_inner, add_tangents=add_tangents,
        )  # fmt: skip
        self.forward[level] = Duals(call, inputs)
        return call


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


def leaf(x: torch.Tensor) -> torch.Tensor:
    """Return a leaf with the memory of `x`, which requires grad if it can have one."""
    return x.detach().requires_grad_(is_inexact(x))


class _LeafAlias(torch.autograd.Function):
    """Return a tensor with the memory and the version of a leaf, not a view that autograd knows.

    On processes too a function gets a result of the boundary, which it may write in place.
    """

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Locals, output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def argument(x: torch.Tensor) -> torch.Tensor:
    """Return the argument of a function whose graph begins at the leaf `x`."""
    y: torch.Tensor = apply_function(_LeafAlias, x)
    return y
