"""Collectives under `torch.compile`: each is one node, in which the axis names are bound."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from fshard.run.graphs.graph_node import graph_node
from fshard.spmd.axis_env import GRAPH_AXES, BoundAxes, current_axes

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def as_node(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `fn` as one node in graphs of `torch.compile`."""
    node = bound_node(fn)

    @functools.wraps(fn)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_dynamo_compiling():
            return node(*args, **kwargs)
        return fn(*args, **kwargs)

    return call


def bound_node(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the node of `fn`, in which the axes are bound that are bound where it is called."""

    def run(bound: tuple[Any, ...] | None, args: Any, kwargs: Any) -> Result:
        if bound is None or current_axes() is not None:
            return fn(*args, **kwargs)
        mesh, axes = bound
        with BoundAxes(mesh, frozenset(axes)):
            return fn(*args, **kwargs)

    run.__name__ = fn.__name__
    node = graph_node(run, symbolic=True)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        bound = GRAPH_AXES[0]
        return node(None if bound is None else (bound[0], sorted(bound[1])), args, kwargs)

    return call
