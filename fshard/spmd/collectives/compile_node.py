"""Collectives in what `torch.compile` traces: one node each, whose inside is traced as it runs.

The tracer of Python has no need to see plans and programs: it puts the call into its graph, and
what lies below, the functional collectives and the transposes for the backward pass, is traced
where autograd is. The mesh is part of the graph: another mesh is another graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from fshard._torch.dynamo import call_while_tracing, one_node, tree_flatten, tree_unflatten
from fshard._util.errors import fail
from fshard.layout.mesh import Mesh
from fshard.run.transports.base import current_transport, is_simulated
from fshard.spmd.axis_env import COMPILE_MESH

__all__ = ["as_node", "tree_as_node", "tree_node"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def as_node(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`fn`, as one node in the graphs of `torch.compile`; its mesh is bound, or given as `mesh`."""
    node = _Node(fn)

    @functools.wraps(fn)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        node.make()
        found: Result = node.made[0](args, *_options(kwargs), _numbers(COMPILE_MESH[0]))
        return found

    return call


def tree_as_node(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`as_node` of a function that takes a tree first and gives one of the same structure."""
    node = tree_node(fn)

    @functools.wraps(fn)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return node(*args, **kwargs)
        return fn(*args, **kwargs)

    return call


def tree_node(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """What `tree_as_node` makes, to be called in a graph only."""
    node = _Node(fn)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # A node takes no None, and gives lists and tuples alone.
        leaves, structure = tree_flatten(args[0])
        given = [leaf for leaf in leaves if leaf is not None]
        node.make()
        found = node.made[0]((given, *args[1:]), *_options(kwargs), _numbers(COMPILE_MESH[0]))
        left = iter(found)
        done: Result = tree_unflatten(
            [None if leaf is None else next(left) for leaf in leaves], structure
        )
        return done

    return call


class _Node:
    """A function that the tracer does not look into, made when it is first needed."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.made: list[Any] = []

        # The tracer calls it, and then looks for what it made.
        @call_while_tracing
        def make() -> None:
            _check_rank(fn.__name__)
            if not self.made:
                self.made.append(one_node(_traced(fn)))

        self.make = make


def _traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    def traced(args: Any, options: Any, given: Any, bound: Any) -> Any:
        """`bound` is what the names in `args` mean: another mesh is another graph."""
        if given:
            axes, sizes, devices = given
            grid = dict(zip(axes, map(int, sizes), strict=True))
            options = {**options, "mesh": Mesh(grid, devices=map(int, devices))}
        return fn(*args, **options)

    return traced


def _check_rank(name: str) -> None:
    """Raise where the code is that of no rank of its own process."""
    if is_simulated() or current_transport() is None:
        fail(
            f"fs.{name} under torch.compile",
            "a simulated rank" if is_simulated() else "a process that is no rank",
            "a graph has the collectives of one process: that of a rank under torchrun",
            "call the function uncompiled",
        )


def _options(kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Keyword arguments as a node takes them: those that are given, and the mesh."""
    rest = {key: each for key, each in kwargs.items() if key != "mesh" and each is not None}
    return rest, _numbers(kwargs.get("mesh"))


def _numbers(mesh: Mesh | None) -> tuple[Any, ...]:
    return () if mesh is None else (mesh.axes, mesh.sizes, tuple(mesh.devices))
