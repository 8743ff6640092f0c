"""Calls of mapped functions in traced functions: one operation of the graph, run on locals.

The body is not traced: it runs at every call of the partitioned function, and may read values. Its
results' layouts are those of one run on locals without values, or on zeros if it reads values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from fshard._torch.fake_tensors import FakeTensor
from fshard._torch.modes import (
    TorchDispatchMode,
    function_modes,
    pop_function_mode,
    push_function_mode,
    without_dispatch_modes,
)
from fshard._util.errors import fail
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import TreeDef, flatten, tensors_in, unflatten
from fshard.ops.prng.keyed_block import keyed_block_hook
from fshard.ops.trace.inner_gradients import TraceMode
from fshard.run.transports.base import as_rank
from fshard.run.transports.shape_only import ShapeTransport
from fshard.spmd.mapped_function import MAP_RECORDER, MappedFunction

_REGIONS: ContextVar[list[MappedRegion]] = ContextVar("fshard_mapped_regions")
"""Regions of the function that is being traced, by the number in their operation."""


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
    """

    function: MappedFunction
    tree: TreeDef
    leaves: tuple[Any, ...]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    grad: bool

    @property
    def __name__(self) -> str:
        """Name of the call in graphs and tables."""
        return self.function.where

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs' locals, from the inputs' locals of one rank or tuples of all."""
        pairs = map(Sharded, inputs, self.in_specs)
        leaves = [next(pairs) if isinstance(leaf, Spec) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(self.tree, leaves)
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


def _tensor_results(results: Any) -> list[Sharded]:
    return [leaf for leaf in flatten(results)[0] if isinstance(leaf, Sharded)]


# -- while a function is traced -------------------------------------------------------------


@contextmanager
def recorded_regions() -> Iterator[list[MappedRegion]]:
    """Record the calls of mapped functions in the block; return the list of regions."""
    regions: list[MappedRegion] = []
    tokens = _REGIONS.set(regions), MAP_RECORDER.set(_record)
    try:
        yield regions
    finally:
        _REGIONS.reset(tokens[0])
        MAP_RECORDER.reset(tokens[1])


def name_regions(graph: fx.GraphModule, regions: Sequence[MappedRegion]) -> None:
    """Replace the operation of every region by a node that calls the region."""
    for node in graph.graph.find_nodes(op="call_function", target=MAPPED_REGION):
        inputs, index = node.args
        node.target, node.args = regions[index], (inputs,)


def _record(function: MappedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a mapped call as values of the graph that is being traced."""
    if keyed_block_hook.call() is not None:
        fail(
            function.where,
            "a fs.random.keyed block around a mapped function in a traced function",
            "the block must be in the mapped function: its body runs when the block has ended",
            "with fs.random.keyed(key): in the body, with the key as an argument",
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
    in_specs = tuple(spec for spec in specs if spec is not None)
    results, results_tree, grad = _shapes_of(function, template, tree, in_specs)
    out_specs = tuple(leaf.spec for leaf in results if isinstance(leaf, Sharded))
    regions = _REGIONS.get()
    regions.append(MappedRegion(function, tree, template, in_specs, out_specs, grad))
    outputs = iter(MAPPED_REGION(inputs, len(regions) - 1))
    return unflatten(
        results_tree, [next(outputs) if isinstance(x, Sharded) else x for x in results]
    )


def _is_unplanned(leaf: Any, spec: Spec | None) -> bool:
    symbols = torch.SymInt, torch.SymFloat, torch.SymBool
    return isinstance(leaf, symbols) or (spec is None and isinstance(leaf, Tensor))


def _shapes_of(
    function: MappedFunction, leaves: Sequence[Any], tree: TreeDef, in_specs: Sequence[Spec]
) -> tuple[list[Any], TreeDef, bool]:
    """Run a mapped function as one rank without communication.

    Returns:
        The leaves of its result, pairs in the place of tensors; their tree; and True if results
        depend on tensors that require grad, which the body closes over.
    """
    rank = in_specs[0].mesh.ranks[0]
    body = function.with_body(_without_traced_tensors(function.fn, function.where))

    def run(device: str) -> Any:
        pairs = [
            Sharded(torch.zeros(x.local_shape(rank), dtype=x.dtype, device=device), x)
            if isinstance(x, Spec)
            else x
            for x in leaves
        ]
        args, kwargs = unflatten(tree, pairs)
        return body.call(args, kwargs)

    def run_as_rank() -> Any:
        with _without_tracers(), as_rank(ShapeTransport(rank)):
            try:
                return run("meta")
            except Exception:  # noqa: BLE001 - it reads values, or fails again
                return run("cpu")

    result = Context().run(run_as_rank)  # in which no function is traced
    results, results_tree = flatten(result)
    grad = any(x.local.requires_grad for x in results if isinstance(x, Sharded))
    return results, results_tree, grad


def _without_traced_tensors(fn: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Return `fn` with an error for tensors of the trace that it closes over."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _RefuseTracedTensors(where):
            return fn(*args, **kwargs)

    return run


class _RefuseTracedTensors(TorchDispatchMode):
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


@contextmanager
def _without_tracers() -> Iterator[None]:
    """Hide the operations of a block from the tracer; other function modes see them."""
    modes = [pop_function_mode() for _ in function_modes()]
    others = [mode for mode in reversed(modes) if not isinstance(mode, TraceMode)]
    for mode in others:
        push_function_mode(mode)
    try:
        with without_dispatch_modes():
            yield
    finally:
        for _ in others:
            pop_function_mode()
        for mode in reversed(modes):
            push_function_mode(mode)
