"""Functions that are one node in graphs of `torch.compile`, traced into below autograd.

The tracer of Python does not follow plans and programs. It puts the call into its graph; functional
collectives and the transposes of the backward pass are traced where autograd is. Only the process
of a rank has such graphs: in a simulation, which runs all ranks, a graph ends before the call.

A plan belongs to integer sizes, and the best layouts of one size need not be those of another. So a
graph in which tensors of a call have symbols as sizes ends before the call, which plans by size and
runs uncompiled; all that surrounds it is compiled once for all sizes. A function that must be one
graph (`fullgraph=True`) is compiled again for each size.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from fshard._torch.dynamo import (
    call_while_tracing,
    end_graph,
    graph_constant,
    last_graph_of,
    one_node,
    run_uncompiled,
    skip_frames_below,
    tree_flatten,
    tree_map,
)
from fshard._torch.fake_tensors import is_recording_below_autograd
from fshard._torch.symbolic_numbers import has_symbolic_sizes
from fshard._util.errors import ShardingError
from fshard.run.transports.base import current_transport, is_simulated

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

UNPLANNED = "a call is planned by size, and here sizes are symbols: it runs uncompiled"
UNTRACED = "a graph has the work of one rank, under torchrun; simulated ranks run uncompiled"


@graph_constant
@dataclass(frozen=True)
class GraphConstant:
    """None or a function among the arguments and results of nodes, which do not take them bare."""

    value: Any


def graph_node(
    fn: Callable[Arguments, Result], *, symbolic: bool = False
) -> Callable[Arguments, Result]:
    """Return `fn` as one node of graphs: of tensors, pairs, constants, and trees of them.

    For sizes that are symbols see `with_planned_sizes`; with `symbolic` the function takes them as
    they are.
    """

    def run(args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(_unwrap, (args, kwargs))
        if not symbolic:
            args, kwargs = with_planned_sizes((args, kwargs))
        try:
            return tree_map(_wrap, fn(*args, **kwargs))
        except ShardingError as error:  # for which the tracer has a text of its own
            warnings.warn(f"no graph of torch.compile has this call:\n{error}", stacklevel=2)
            raise

    run.__name__ = fn.__name__
    created: list[Callable[[Any, Any], Any]] = []  # on a rank, the function as the tracer takes it

    @call_while_tracing  # the tracer then reads what it has put into the list
    def create() -> None:
        if not symbolic:
            warn_last_graph()
        if is_simulated() or current_transport() is None:
            created.clear()
        elif not created:
            created.append(one_node(run))

    @run_uncompiled
    @functools.wraps(fn)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.compiler.is_dynamo_compiling():
            if not symbolic and is_recording_below_autograd():
                args, kwargs = tree_map(with_integer_sizes, (args, kwargs))
            return fn(*args, **kwargs)
        create()
        if not created:
            return outside(*args, **kwargs)
        result: Result = tree_map(_unwrap, created[0](*tree_map(_wrap, (args, kwargs))))
        return result

    @skip_frames_below(UNTRACED)
    def outside(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return fn(*args, **kwargs)

    return call


def warn_last_graph() -> None:
    """Warn in the last graph of a function if it has a spec: calls with others run uncompiled."""
    limit = last_graph_of()
    if limit is not None:
        warnings.warn(
            f"the last of {limit} graphs of a function whose pairs, programs or partitioned calls "
            "have specs: a graph holds for its specs, and calls with others run uncompiled from "
            "here on (with fullgraph=True they raise). Without fullgraph=True graphs end before "
            "calls whose sizes change; or pad tensors to a few sizes, which take a graph each, or "
            "pass tensors, not pairs, to fs.shard_map or a collective, which take one for all "
            "sizes; torch.compile(fn, recompile_limit=...) allows more graphs",
            stacklevel=2,
        )


def _wrap(x: Any) -> Any:
    return GraphConstant(x) if x is None or callable(x) else x


def _unwrap(x: Any) -> Any:
    return x.value if isinstance(x, GraphConstant) else x


def with_planned_sizes(tree: Any) -> Any:
    """Return the arguments of a traced call with the sizes that it is planned for.

    Symbols end the graph before the call. A function that must be one graph holds for the integers.
    """
    leaves = tree_flatten(tree)[0]
    if any(isinstance(x, torch.Tensor) and has_symbolic_sizes(x) for x in leaves):
        end_graph(UNPLANNED)
    return tree_map(with_integer_sizes, tree)


def with_integer_sizes(x: Any) -> Any:
    """Return a tensor of the same values whose sizes are not symbols: plans depend on them."""
    if isinstance(x, torch.Tensor) and has_symbolic_sizes(x):
        return x.view(tuple(map(int, x.shape)))
    return x
