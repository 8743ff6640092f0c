"""Differentiable inputs of a mapped function that are not arguments: the tensors it closes over.

In a simulation the ranks' graphs are separate from the caller's. The inputs that they depend on
beside the ranks' own arguments are leaves, and tensors with a history that the function can reach.
A history whose tensor is not found is followed down to its leaves, by every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from fshard._torch.autograd_state import backward_hooks_of
from fshard._util.code_names import global_names
from fshard.layout.tree import flatten, is_pair

Edge = tuple[Any, int]
"""A node of an autograd graph and the index of its output: the identity of a tensor there."""

LEAF = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


def find_closure_inputs(
    fn: Callable[..., Any], xs: Iterable[torch.Tensor], ys: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the tensors beside `xs` that `ys`, results of `fn`, depend on in autograd's graph.

    Each requires grad, and none depends on another, whose gradient would then count twice.
    """
    roots = [_edge(y) for y in ys if y.requires_grad]
    args = {_edge(x) for x in xs if x.requires_grad}
    if _find_ends(roots, args).keys() <= args:
        return ()
    reachable = {_edge(x): x for x in _reachable_tensors(fn)}
    while True:
        inputs = [edge for edge in _find_ends(roots, {*args, *reachable}) if edge not in args]
        ends = set(inputs)
        behind = {edge: _find_ends(_next_edges(edge), ends) for edge in inputs if edge in reachable}
        dependent = [edge for edge, reached in behind.items() if not ends.isdisjoint(reached)]
        if not dependent:
            return tuple(reachable[e] if e in reachable else e[0].variable for e in inputs)
        for edge in dependent:
            del reachable[edge]


def graph_leaves(ys: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the leaves of the autograd graphs of `ys`."""
    ends = _find_ends([_edge(y) for y in ys if y.requires_grad], frozenset())
    return tuple(edge[0].variable for edge in ends)


@contextmanager
def without_hooks(xs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Disable the gradient hooks and `retain_grad` of tensors in the block.

    A single rank's gradient of a shared tensor is only a part of it: hooks must see the sum, once.
    """
    hooked = [(hooks, dict(hooks)) for hooks in map(backward_hooks_of, xs) if hooks]
    retained = [(x, x.grad) for x in xs if x.retains_grad]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, saved in hooked:
            hooks.update(saved)
        for x, grad in retained:
            x.grad = grad


def _edge(x: torch.Tensor) -> Edge:
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def _next_edges(edge: Edge) -> list[Edge]:
    return [following for following in edge[0].next_functions if following[0] is not None]


def _find_ends(roots: Iterable[Edge], stops: Set[Edge]) -> dict[Edge, None]:
    """Return the leaves behind `roots`, and the edges of `stops` that are on the way."""
    ends: dict[Edge, None] = {}
    seen, todo = set(), list(roots)
    while todo:
        edge = todo.pop()
        if edge in stops or type(edge[0]) is LEAF:
            ends[edge] = None
        elif edge[0] not in seen:
            seen.add(edge[0])
            todo += _next_edges(edge)
    return ends


def _reachable_tensors(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """Yield tensors with a history that a function can reach without receiving them.

    They are in its closure, its defaults, the globals it names, the object it is a method of,
    modules among these, arguments bound by `functools.partial`, and containers of them.
    """
    seen: set[int] = set()
    todo: list[Any] = [fn, vars(type(fn)).get("__call__"), getattr(fn, "__dict__", None)]
    alive: list[Any] = []  # keeps ids unique
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        alive.append(value)
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                yield value
        elif isinstance(value, FunctionType):
            todo += _function_values(value)
        elif isinstance(value, MethodType):
            todo += [value.__func__, value.__self__, getattr(value.__self__, "__dict__", None)]
        elif isinstance(value, functools.partial):
            todo += [value.func, value.args, value.keywords]
        elif isinstance(value, torch.nn.Module):
            todo.append(vars(value))
        elif is_pair(value):
            local, _ = value
            todo.append(local)
        else:
            leaves, _ = flatten(value)
            todo += [leaf for leaf in leaves if leaf is not value]


def _function_values(fn: FunctionType) -> list[Any]:
    """Return the defaults, closure and named globals of a function."""
    values: list[Any] = [fn.__defaults__, fn.__kwdefaults__]
    for cell in fn.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    names = sorted(global_names(fn.__code__) & fn.__globals__.keys())
    return values + [fn.__globals__[name] for name in names]
