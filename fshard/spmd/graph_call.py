"""Calls of a mapped function that are a part of a graph of `torch.compile`, on a rank.

The tracer of Python follows the function itself, its modules and closures. Arguments become locals,
and locals results, in one node each. With a check the function's graph is called where autograd is
traced, with types tracked: casts are inserted once for all calls of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fshard._torch.dynamo import (
    call_in_graph,
    call_while_tracing,
    graph_constant,
    run_uncompiled,
    skip_frames_below,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from fshard._torch.memory import unaliased_all
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.run.graphs.graph_node import graph_node, warn_last_graph, with_planned_sizes
from fshard.run.transports.base import current_transport, is_simulated
from fshard.spmd.axis_env import GRAPH_AXES, BoundAxes, current_axes, current_tracker
from fshard.spmd.tracking.typed_body import new_tracker, pause_types, set_argument_types, track_body

if TYPE_CHECKING:
    from fshard.spmd.mapped_function import MappedFunction

UNTRACED = "simulated ranks, calls in a body and checks of values run uncompiled"
ENDS_GRAPHS = ("values", "collectives")
"""Values of `check` with which calls run uncompiled."""
CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types of leaves, besides callables, that nodes do not take and that are not sharded."""


@graph_constant
@dataclass(frozen=True)
class Static:
    """Stand-in for leaf `index` of a tree, which is neither a tensor nor a pair."""

    index: int


def traceable(
    function: MappedFunction, uncompiled: Callable[..., Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return the function that the tracer follows in the place of a mapped function's call."""
    is_checked, fn, traced = function.check is not False, function.fn, list[bool]()

    @call_while_tracing  # the tracer then reads what it has put into the list
    def prepare() -> None:
        traced.clear()
        transport, mesh = current_transport(), function.mesh
        if transport is None or is_simulated() or function.check in ENDS_GRAPHS:
            return
        if mesh is None or transport.rank in mesh:
            traced.append(True)

    @skip_frames_below(UNTRACED)
    def untraced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return uncompiled(*args, **kwargs)

    def locals_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = planned(function, args, kwargs)
        call, tracker = function.rank_call(args, kwargs), current_tracker()
        with pause_types(tracker):
            locals_ = call.locals_()
        if tracker is not None:
            set_argument_types(tracker, call.scope, call.arguments, call.values, locals_)
        return call.local_tree(locals_)

    def assemble(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        args, kwargs, result = planned(function, args, kwargs, result)
        call, tracker = function.rank_call(args, kwargs), current_tracker()
        transport = current_transport()
        assert transport is not None
        ys = call.typed_result(tracker, transport.rank, result)
        tensors = [x.local if isinstance(x, Sharded) else x for x in call.values]
        outs = unaliased_all(ys, [x for x in tensors if isinstance(x, torch.Tensor)])
        with pause_types(tracker):
            return call.assemble([call.returned[transport.rank]], outs, transport)

    locals_node, assemble_node = (graph_node(fn, symbolic=True) for fn in (locals_of, assemble))

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (args, kwargs), static = _split((args, kwargs))
        local_args, local_kwargs = _merge(locals_node(args, kwargs), static)
        result, static = _split(fn(*local_args, **local_kwargs))
        return _merge(assemble_node(args, kwargs, result), static)

    def typed(graph: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: _run_typed(function, graph, tensors)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        prepare()
        axes = _axes_of(function, args, kwargs)
        if not traced or axes is None or GRAPH_AXES[0] is not None:
            return untraced(args, kwargs)
        GRAPH_AXES[0] = axes
        result = call_in_graph(typed, run, args, kwargs) if is_checked else run(args, kwargs)
        GRAPH_AXES[0] = None
        return result

    return call


def compile_on_ranks(
    mapped: Callable[..., Any], compile_: Callable[..., Any], fn: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a mapped function that runs compiled on a rank, and as it is in all other places.

    `fn` is the compiled body, whose name it gets.
    """
    compiled = compile_(mapped)

    @run_uncompiled
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return mapped(*args, **kwargs)
        on_rank = current_transport() is not None and not is_simulated() and current_axes() is None
        return (compiled if on_rank else mapped)(*args, **kwargs)

    return functools.update_wrapper(call, fn, updated=())


def planned(
    function: MappedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], *others: Any
) -> tuple[Any, ...]:
    """Return arguments and results of a mapped function, with the sizes that plans need.

    A `Spec`, of a pair or of the function, has integer sizes, and a simulation runs the code of
    each rank. Partitions on a rank only divide the sizes of tensors, which may be symbols.
    """
    leaves = tree_flatten((args, kwargs, function.in_specs, function.out_specs), _has_sizes)[0]
    trees = args, kwargs, *others
    on_rank = current_transport() is not None and not is_simulated()
    if on_rank and not any(map(_has_sizes, leaves)):
        return trees
    warn_last_graph()
    planned_trees: tuple[Any, ...] = with_planned_sizes(trees)
    return planned_trees


def _run_typed(
    function: MappedFunction, graph: Callable[..., Any], tensors: Sequence[torch.Tensor]
) -> Any:
    """Run the graph of a mapped function on its inputs and closures, and track its types."""
    scope = function.scope_of_rank()
    with BoundAxes(scope.named_mesh, scope.bound_axes):
        tracker = new_tracker(function.check, scope, function.where)
        assert tracker is not None
        with track_body(tracker, inner=False):
            return graph(*tensors)


def _axes_of(function: MappedFunction, args: Any, kwargs: Any) -> Any:
    """Return the mesh and the axes that a call maps; None without a mesh."""
    mesh = function.mesh
    if mesh is None:
        for leaf in tree_flatten((args, kwargs), _is_pair)[0]:
            if isinstance(leaf, Sharded):
                mesh = leaf.spec.mesh
            elif isinstance(leaf, Spec):
                mesh = leaf.mesh
    return None if mesh is None else (mesh, function.axis_names or frozenset(mesh.axes))


@skip_frames_below("a leaf that is not a tensor, a pair or a constant")
def _refuse() -> None:
    """End the graph before the call of the mapped function."""


def _split(tree: Any) -> tuple[Any, list[Any]]:
    """Return a tree with stand-ins for the leaves that nodes do not take, and all leaves."""
    leaves, structure = tree_flatten(tree, _is_pair)
    values: list[Any] = []
    for index, leaf in enumerate(leaves):
        if leaf is None or isinstance(leaf, (torch.Tensor, Sharded, Spec)):
            values.append(leaf)
        elif isinstance(leaf, CONSTANTS) or callable(leaf):
            values.append(Static(index))
        else:
            _refuse()
    return tree_unflatten(values, structure), leaves


def _merge(tree: Any, leaves: list[Any]) -> Any:
    """Return a tree with the leaves in the places of their stand-ins."""

    def original(x: Any) -> Any:
        return leaves[x.index] if isinstance(x, Static) else x

    return tree_map(original, tree, is_leaf=_is_pair)


def _is_pair(x: Any) -> bool:
    return isinstance(x, Sharded)


def _has_sizes(x: Any) -> bool:
    return isinstance(x, Sharded | Spec)
