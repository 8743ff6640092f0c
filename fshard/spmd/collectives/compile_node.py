"""Collectives under `torch.compile`: each is one node of the graph, traced into below autograd.

The tracer of Python does not need to follow plans and programs. The call is put into its graph;
functional collectives and the transposes of the backward pass are traced where autograd is. The
mesh is an input of the node: another mesh is another graph.
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

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def as_node(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `fn` as one node in graphs of `torch.compile`; its mesh is bound, or given."""
    node = _Node(fn)

    def compiled(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        node.create()
        options = _split_options(kwargs)
        result: Result = node.created[0](args, *options, _mesh_key(COMPILE_MESH[0]))
        return result

    return _eager_or_compiled(fn, compiled)


def tree_as_node(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `as_node(fn)` for a function from a tree, its first argument, to an equal one."""
    return _eager_or_compiled(fn, tree_node(fn))


def _eager_or_compiled(
    fn: Callable[Arguments, Result], compiled: Callable[Arguments, Result]
) -> Callable[Arguments, Result]:
    """Return a function that calls `compiled` while a graph is traced, else `fn`."""

    @functools.wraps(fn)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        return fn(*args, **kwargs)

    return call


def tree_node(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the node of `tree_as_node`, which must be called while a graph is traced."""
    node = _Node(fn)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # Nodes do not take None, and return lists and tuples only.
        leaves, structure = tree_flatten(args[0])
        tensors = [leaf for leaf in leaves if leaf is not None]
        node.create()
        options = _split_options(kwargs)
        outputs = iter(node.created[0]((tensors, *args[1:]), *options, _mesh_key(COMPILE_MESH[0])))
        result: Result = tree_unflatten(
            [None if leaf is None else next(outputs) for leaf in leaves], structure
        )
        return result

    return call


class _Node:
    """A function that the tracer does not follow, created when it is first needed."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.created: list[Any] = []

        # The tracer calls it, and then reads what it has put into the list.
        @call_while_tracing
        def create() -> None:
            _check_rank(fn.__name__)
            if not self.created:
                self.created.append(one_node(_with_mesh(fn)))

        self.create = create


def _with_mesh(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(args: Any, options: Any, mesh_key: Any, bound_key: Any) -> Any:
        """Call `fn`; `bound_key` makes the graph depend on the mesh of the axis names."""
        if mesh_key:
            axes, sizes, devices = mesh_key
            grid = dict(zip(axes, map(int, sizes), strict=True))
            options = {**options, "mesh": Mesh(grid, devices=map(int, devices))}
        return fn(*args, **options)

    return call


def _check_rank(name: str) -> None:
    """Raise `ShardingError` unless the process is a rank."""
    if is_simulated() or current_transport() is None:
        fail(f"fs.{name} under torch.compile",
             "a simulated rank" if is_simulated() else "a process that is not a rank",
             "a graph has the collectives of one process, which must be a rank under torchrun",
             "call the function uncompiled")  # fmt: skip


def _split_options(kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the keyword arguments of a node that are not None, and the mesh among them."""
    options = {name: x for name, x in kwargs.items() if name != "mesh" and x is not None}
    return options, _mesh_key(kwargs.get("mesh"))


def _mesh_key(mesh: Mesh | None) -> tuple[Any, ...]:
    return () if mesh is None else (mesh.axes, mesh.sizes, tuple(mesh.devices))
