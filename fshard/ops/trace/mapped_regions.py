"""Calls of mapped functions in traced functions: one operation of the graph, run on locals.

The body is not traced: it runs at every call of the partitioned function, and may read values. Its
results' layouts and its collectives are those of one run on locals without values, or on zeros if
it reads values. That run sees the function modes and the autocast that the body will run under, as
if the traced function was running; it draws no random values, and nothing observes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from fshard._torch.fake_tensors import FakeTensor
from fshard._torch.functorch import is_transformed, without_transforms
from fshard._torch.modes import (
    DispatchMode,
    function_modes,
    pushed_function_modes,
    replaced_function_modes,
    without_dispatch_modes,
)
from fshard._torch.thread_state import ThreadSettings
from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import ShardingError, fail
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import TreeDef, flatten, tensors_in, unflatten
from fshard.ops.trace.inner_gradients import TraceMode
from fshard.run.transports.base import as_rank, unobserved
from fshard.run.transports.shape_only import RecordedCollective, RecordingTransport
from fshard.spmd.closure_inputs import graph_leaves
from fshard.spmd.mapped_function import MAP_RECORDER, MappedFunction

_REGIONS: ContextVar[list[MappedRegion]] = ContextVar("fshard_mapped_regions")
"""Regions of the function that is being traced, by the number in their operation."""
_AMBIENT: ContextVar[tuple[Any, ...]] = ContextVar("fshard_ambient_modes")
"""Function modes around the trace."""


@torch.library.custom_op("fshard::mapped_region", mutates_args=())
def _mapped_region(inputs: list[Tensor], index: int) -> list[Tensor]:
    raise AssertionError("fshard::mapped_region is for graphs alone")


@_mapped_region.register_fake
def _(inputs: list[Tensor], index: int) -> list[Tensor]:
    specs = _REGIONS.get()[index].out_specs
    return [inputs[0].new_empty(spec.shape, dtype=spec.dtype) for spec in specs]


def _refuse_gradient(ctx: Any, *grads: Tensor) -> NoReturn:
    """Raise `ShardingError`: the function that is traced takes a gradient through a region."""
    fail(
        "fs.partition",
        "a gradient that the function takes through a mapped function",
        "the body of a mapped function is not traced, so its gradient is taken outside",
        "return the loss, and torch.autograd.grad of it; or take the gradient in the body",
    )


_mapped_region.register_autograd(_refuse_gradient)

MAPPED_REGION = torch.ops.fshard.mapped_region.default


def _surroundings() -> ThreadSettings:
    """Return the settings that the function that is traced has entered.

    Autocast and function modes, as a block of `fs.random.keyed`, are entered around the body again.
    """
    modes = function_modes()
    last = max(i for i, mode in enumerate(modes) if isinstance(mode, TraceMode))
    settings = ThreadSettings.current()
    return replace(settings, function_modes=tuple(modes[last + 1 :]), dispatch_modes=())


@contextmanager
def _entered(surroundings: ThreadSettings) -> Iterator[None]:
    """Enter the surroundings of a region in a block."""
    with surroundings.autocasting(), pushed_function_modes(surroundings.function_modes):
        yield


@dataclass(frozen=True, eq=False)
class MappedRegion:
    """Target of a graph node `(inputs,) -> outputs`: a call of a mapped function.

    Attributes:
        function: the mapped function.
        tree: the tree of its arguments.
        leaves: the leaves, with a `Spec` in the place of every tensor.
        in_specs: the specs of the inputs.
        out_specs: the specs of the outputs.
        grad: True if the body closes over tensors that require grad.
        forward: the collectives of the first rank.
        surroundings: the settings that it runs with.
    """

    function: MappedFunction
    tree: TreeDef
    leaves: tuple[Any, ...]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    grad: bool
    forward: tuple[RecordedCollective, ...]
    surroundings: ThreadSettings
    _backward: dict[tuple[bool, ...], tuple[RecordedCollective, ...]] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        """Name of the call in graphs and tables."""
        return self.function.where

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs' locals, from the inputs' locals of one rank or tuples of all."""
        pairs = map(Sharded, inputs, self.in_specs)
        leaves = [next(pairs) if isinstance(leaf, Spec) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(self.tree, leaves)
        with _entered(self.surroundings):
            outputs = _tensor_results(self.function.call(args, kwargs))
        for pair, spec in zip(outputs, self.out_specs, strict=True):
            if pair.spec != spec:
                fail(
                    self.function.where,
                    f"a result of {pair.spec}, which was {spec} while tracing",
                    "in a partitioned function the shapes of results must not depend on values",
                    "pad the result to a static shape",
                )
        return [pair.local for pair in outputs]

    def backward(self, grads: tuple[bool, ...]) -> tuple[RecordedCollective, ...]:
        """Return the collectives of the first rank's backward pass.

        Args:
            grads: for every input, if its gradient is requested.
        """
        if grads not in self._backward:
            run = ShapeRun(self.function, self.leaves, self.tree, self.surroundings, grads)
            self._backward[grads] = tuple(run.transport.backward)
        return self._backward[grads]


def _tensor_results(results: Any) -> list[Sharded]:
    return [leaf for leaf in flatten(results)[0] if isinstance(leaf, Sharded)]


# -- while a function is traced -------------------------------------------------------------


@contextmanager
def recorded_regions() -> Iterator[list[MappedRegion]]:
    """Record the calls of mapped functions in the block; return the list of regions."""
    regions: list[MappedRegion] = []
    ambient = tuple(function_modes())
    tokens = _REGIONS.set(regions), MAP_RECORDER.set(_record), _AMBIENT.set(ambient)
    try:
        yield regions
    finally:
        _REGIONS.reset(tokens[0])
        MAP_RECORDER.reset(tokens[1])
        _AMBIENT.reset(tokens[2])


def name_regions(graph: fx.GraphModule, regions: Sequence[MappedRegion]) -> None:
    """Replace the operation of every region by a node that calls the region."""
    for node in graph.graph.find_nodes(op="call_function", target=MAPPED_REGION):
        inputs, index = node.args
        node.target, node.args = regions[index], (inputs,)


def _record(function: MappedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a mapped call as values of the graph that is being traced."""
    if is_transformed():
        fail(
            function.where,
            "a call that torch.func transforms in a traced function, by vmap, grad, jvp or the "
            "like, or in a dual_level",
            "the body of a mapped function is not traced, so it must be called untransformed",
            "take the transform in the body; or torch.autograd.grad of the partitioned function's "
            "result",
        )
    specs = function.specs_of_arguments(args, kwargs)
    leaves, tree = flatten((args, kwargs))
    inputs = [x for x, spec in zip(leaves, specs, strict=True) if spec is not None]
    if not inputs or any(map(_is_unplanned, leaves, specs)):
        fail(
            function.where,
            f"{len(inputs)} tensors with a spec in a traced function",
            "a mapped function in a partitioned one must have tensors, each with a spec, and "
            "numbers with known values",
            "P() for a replicated tensor",
        )
    template = tuple(x if spec is None else spec for x, spec in zip(leaves, specs, strict=True))
    region, run_results = _region_of(function, tree, template, _surroundings())
    results, results_tree = flatten(run_results)
    regions = _REGIONS.get()
    regions.append(region)
    outputs = iter(MAPPED_REGION(inputs, len(regions) - 1))
    return unflatten(
        results_tree, [next(outputs) if isinstance(x, Sharded) else x for x in results]
    )


def _region_of(
    function: MappedFunction, tree: TreeDef, template: tuple[Any, ...], surroundings: ThreadSettings
) -> tuple[MappedRegion, Any]:
    """Return the region of a call, and its results on a rank, from leaves with specs of tensors."""
    run = ShapeRun(function, template, tree, surroundings)
    tensors = _tensor_results(run.results)
    in_specs = tuple(leaf for leaf in template if isinstance(leaf, Spec))
    region = MappedRegion(
        function, tree, template, in_specs, tuple(pair.spec for pair in tensors),
        any(pair.local.requires_grad for pair in tensors), tuple(run.transport.forward),
        surroundings,
    )  # fmt: skip
    return region, run.results


@lru_cache(maxsize=CACHE_SIZE)
def planned_region(function: MappedFunction, in_specs: tuple[Spec, ...]) -> MappedRegion:
    """Return the region of a mapped function of tensors of these layouts, under no modes."""
    leaves, tree = flatten((in_specs, {}))
    settings = ThreadSettings.current()
    settings = replace(settings, autocast=(), function_modes=(), dispatch_modes=())
    return _region_of(function, tree, tuple(leaves), settings)[0]


def _is_unplanned(leaf: Any, spec: Spec | None) -> bool:
    symbols = torch.SymInt, torch.SymFloat, torch.SymBool
    return isinstance(leaf, symbols) or (spec is None and isinstance(leaf, Tensor))


class ShapeRun:
    """Run of a mapped function as the first rank of its mesh, without values and communication.

    Attributes:
        results: the result, with pairs in the place of tensors.
        transport: the transport, which has recorded the collectives.
    """

    def __init__(
        self,
        function: MappedFunction,
        leaves: Sequence[Any],
        tree: TreeDef,
        surroundings: ThreadSettings,
        grads: Sequence[bool] | None = None,
    ) -> None:
        """Run the function.

        Args:
            function: the mapped function.
            leaves: the leaves of its arguments, with a `Spec` in the place of every tensor.
            tree: the tree of its arguments.
            surroundings: the settings to run with.
            grads: for every tensor, if its gradient is computed; None runs no backward pass.
        """
        self.function = function.with_body(_without_traced_tensors(function.fn, function.where))
        self.leaves, self.tree, self.grads = leaves, tree, grads
        modes = _AMBIENT.get(None)
        ambient = tuple(function_modes()) if modes is None else modes
        Context().run(self.run, ambient, surroundings)  # in which no function is traced

    def run(self, ambient: Sequence[Any], surroundings: ThreadSettings) -> None:
        """Run on meta tensors; on zeros if the body reads values, has others, or is autocast.

        PyTorch raises errors of several types for a meta tensor.
        """
        with (
            without_transforms(),
            replaced_function_modes(ambient),
            without_dispatch_modes(),
            torch.random.fork_rng(devices=()),
            unobserved(),
            _entered(surroundings),
        ):
            if not surroundings.autocast:
                with suppress(RuntimeError, TypeError, ShardingError):
                    self.run_on("meta")
                    return
            self.run_on("cpu")

    def run_on(self, device: str) -> None:
        """Run on zeros on a device, forward and backward."""
        mesh = next(x.mesh for x in self.leaves if isinstance(x, Spec))
        rank, grads = mesh.ranks[0], iter(self.grads or ())
        self.transport = RecordingTransport(rank, mesh)

        def zeros(spec: Spec) -> Sharded:
            x = torch.zeros(spec.local_shape(rank), dtype=spec.dtype, device=device)
            return Sharded(x.requires_grad_(next(grads, False)), spec)

        leaves = [zeros(leaf) if isinstance(leaf, Spec) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(self.tree, leaves)
        differentiated = self.grads is not None
        with (
            as_rank(self.transport),
            torch.set_grad_enabled(differentiated or torch.is_grad_enabled()),
        ):
            self.results = self.function.call(args, kwargs)
            if differentiated:
                ys = [x.local for x in _tensor_results(self.results) if x.local.requires_grad]
                cotangents = list(map(torch.zeros_like, ys))
                torch.autograd.grad(ys, graph_leaves(ys), cotangents, allow_unused=True)


def _without_traced_tensors(fn: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Return `fn` with an error for tensors of the trace that it closes over."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _RefuseTracedTensors(where):
            return fn(*args, **kwargs)

    return run


class _RefuseTracedTensors(DispatchMode):
    """Mode that refuses operands that are values of a trace."""

    def __init__(self, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(isinstance(x, FakeTensor) for x in tensors_in((args, kwargs))):
            fail(
                self.where,
                f"{func} of a tensor of the function that is traced",
                "a mapped function in a partitioned one must take such tensors as arguments",
                "fs.shard_map(lambda w, x: x @ w, ...)(w, x)",
            )
        return func(*args, **(kwargs or {}))
