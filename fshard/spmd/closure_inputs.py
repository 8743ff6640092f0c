"""What a mapped function closes over and differentiates: inputs that are no arguments.

In a simulation the ranks' graphs are kept apart from the caller's. What they hang on beside the
ranks' own inputs is found when they are there: leaves, and tensors with a history that the
function holds. A history that was not found is followed to its leaves, by every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from fshard.layout.tree import flatten, is_pair

__all__ = ["find_closure_inputs", "graph_leaves", "without_hooks"]

Edge = tuple[Any, int]
"""A node of an autograd graph and which of its outputs: what identifies a tensor there."""

LEAF = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


def find_closure_inputs(
    fn: Callable[..., Any], xs: Iterable[torch.Tensor], ys: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The tensors beside `xs` that `ys`, results of `fn` that require grad, depend on.

    Each requires grad, and no one depends on another, whose gradient would then count twice.
    """
    roots = [_edge(y) for y in ys if y.requires_grad]
    own = {_edge(x) for x in xs if x.requires_grad}
    if _reached(roots, own).keys() <= own:
        return ()
    held = {_edge(each): each for each in _held(fn)}
    while True:
        found = [edge for edge in _reached(roots, {*own, *held}) if edge not in own]
        ends = set(found)
        behind = {edge: _reached(_before(edge), ends) for edge in found if edge in held}
        through = [edge for edge, reached in behind.items() if not ends.isdisjoint(reached)]
        if not through:
            return tuple(held[edge] if edge in held else edge[0].variable for edge in found)
        for edge in through:
            del held[edge]


def graph_leaves(ys: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The leaves that a graph goes back to from `ys`."""
    ends = _reached([_edge(y) for y in ys if y.requires_grad], frozenset())
    return tuple(edge[0].variable for edge in ends)


@contextmanager
def without_hooks(xs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Run a block in which gradients of tensors meet no hooks of theirs, nor are retained.

    What single ranks find for a tensor that is not theirs is a part of its gradient: the whole has
    yet to come to it, once.
    """
    hooked = [(x._backward_hooks, dict(x._backward_hooks)) for x in xs if x._backward_hooks]
    retained = [(x, x.grad) for x in xs if x.retains_grad]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)
        for x, grad in retained:
            x.grad = grad


def _edge(x: torch.Tensor) -> Edge:
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def _before(edge: Edge) -> list[Edge]:
    return [each for each in edge[0].next_functions if each[0] is not None]


def _reached(roots: Iterable[Edge], stops: Set[Edge]) -> dict[Edge, None]:
    """The leaves that a graph goes back to from `roots`, and those of `stops` on the way."""
    ends: dict[Edge, None] = {}
    seen, todo = set(), list(roots)
    while todo:
        edge = todo.pop()
        if edge in stops or type(edge[0]) is LEAF:
            ends[edge] = None
        elif edge[0] not in seen:
            seen.add(edge[0])
            todo += _before(edge)
    return ends


def _held(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """Tensors with a history that a function can get at without being given them.

    In its closure, its defaults, the globals it names, the object it is a method of, the modules
    among these, and what `functools.partial` has bound; in containers of them.
    """
    seen: set[int] = set()
    todo: list[Any] = [fn, vars(type(fn)).get("__call__"), getattr(fn, "__dict__", None)]
    alive: list[Any] = []  # an id is one object's for as long as that lives
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
            todo += _of_function(value)
        elif isinstance(value, MethodType):
            todo += [value.__func__, value.__self__, getattr(value.__self__, "__dict__", None)]
        elif isinstance(value, functools.partial):
            todo += [value.func, value.args, value.keywords]
        elif isinstance(value, torch.nn.Module):
            todo.append(vars(value))
        elif is_pair(value):
            todo.append(value[0])
        else:
            leaves, _ = flatten(value)
            todo += [leaf for leaf in leaves if leaf is not value]


def _of_function(fn: FunctionType) -> list[Any]:
    values: list[Any] = [fn.__defaults__, fn.__kwdefaults__]
    for cell in fn.__closure__ or ():
        with suppress(ValueError):  # a name that has no value yet
            values.append(cell.cell_contents)
    return values + [fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__]


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return (*code.co_names, *inner)
