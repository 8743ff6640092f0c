"""Differentiable inputs of a mapped function that are not arguments: the tensors it closes over.

In a simulation the ranks' graphs are separate from the caller's. The inputs that they depend on
beside the ranks' own arguments are leaves, and tensors with a history that the function can reach.
A history whose tensor is not found is followed down to its leaves, by every rank.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from fshard._torch.autograd_state import GRAD_FN, backward_hooks_of, custom_function
from fshard._torch.functorch import (
    innermost_level,
    is_foreign,
    is_wrapped,
    transforms_active,
    unwrap_if_dead,
)
from fshard._torch.memory import innermost
from fshard._torch.modes import DisableTorchFunction
from fshard._util.code_names import global_names
from fshard._util.errors import fail
from fshard._util.tracebacks import runs_users_operation
from fshard.layout.tree import flatten, is_pair, map_leaves
from fshard.spmd.axis_env import current_tracker

Tree = TypeVar("Tree")
Result = TypeVar("Result")

Edge = tuple[Any, int]
"""A node of an autograd graph and the index of its output: the identity of a tensor there."""

FUNCTION_TYPE: type = type(torch.autograd.Function)
LEAF: Any = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


def find_closure_inputs(
    fn: Callable[..., Any],
    xs: Iterable[torch.Tensor],
    ys: Iterable[torch.Tensor],
    nodes: set[Any] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the tensors beside `xs` that `ys`, results of `fn`, depend on in autograd's graph.

    Each requires grad, and none depends on another, whose gradient would then count twice. All
    nodes of the graph are added to `nodes`.
    """
    roots, xs = [edge_of(y) for y in ys if y.requires_grad], list(xs)
    own = set(map(id, xs))
    ends = [node for node, _ in _find_ends(roots, frozenset(), nodes)]
    if all(type(node) is LEAF and id(node.variable) in own for node in ends):
        return ()
    args = {edge_of(x) for x in xs if x.requires_grad}
    reachable = {edge_of(x): x for x in _reachable_tensors(fn) if x.grad_fn is not None}
    while True:
        inputs = [edge for edge in _find_ends(roots, {*args, *reachable}) if edge not in args]
        leaves = {*inputs, *args}  # a function may keep what it has made of its arguments
        behind = {e: _find_ends(next_edges(e), leaves) for e in inputs if e in reachable}
        dependent = [edge for edge, reached in behind.items() if not leaves.isdisjoint(reached)]
        if not dependent:
            return tuple(reachable[e] if e in reachable else e[0].variable for e in inputs)
        for edge in dependent:
            del reachable[edge]


def find_rank_leaves(
    fn: Callable[..., Any],
    ranks: Iterable[Iterable[torch.Tensor]],
    closures: Sequence[torch.Tensor],
) -> set[int]:
    """Return the ids of the `closures` that a rank has created in `fn`, as a module's parameters.

    They are leaves that `fn` does not reach, in the graph of one of the `ranks`' results alone.
    """
    reachable = set(map(id, _reachable_tensors(fn)))
    created = {id(x) for x in closures if x.grad_fn is None} - reachable
    if not created:
        return created
    counts = Counter(id(x) for ys in ranks for x in graph_leaves(ys))
    return {x for x in created if counts[x] == 1}


def find_transformed_closures(fn: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    """Return the tensors that `fn` can reach and that a running transform concerns."""
    tensors = {id(x): x for x in _reachable_tensors(fn)}
    return tuple(
        x
        for x in tensors.values()
        if is_wrapped(unwrap_if_dead(x)) or innermost_level(x) is not None
    )


class GradientHook(NamedTuple):
    """Use of a gradient hook in a body of a transform: the name of the body, and the call."""

    where: str
    call: str

    def refuse(self) -> NoReturn:
        """Raise for a hook of a batch or a value with a tangent, whose graph has more than one."""
        fail(self.where, f"{self.call} in a body of which a vmap or forward mode goes around "
             "gradients",
             "a hook must see the gradient of one element, and a simulation has that of the batch, "
             "and of tangents with it",
             "s * y + ((1 - s) * y).detach() scales the gradient of y by s; an autograd.Function "
             "with generate_vmap_rule changes it otherwise")  # fmt: skip

    def refuse_outer_level(self) -> NoReturn:
        """Raise for a gradient of a level at which PyTorch does not call the hook."""
        fail(self.where, f"{self.call} in a body, and a gradient of a level outside of the "
             "innermost transform of torch.func",
             "a hook must see gradients of the innermost level alone, and a simulation passes "
             "those of every level through one graph",
             "y = first(x); y.register_hook(...); second(x, y) calls the hook between two mapped "
             "functions")  # fmt: skip


class ReplacingMode(TorchFunctionMode):
    """Function mode of a rank that replaces tensors from outside of it by its own.

    Raises `ShardingError` for others of a transform that does not run in this thread. Gradient
    hooks are added to `hooks`, always if `is_nested`: only some of their gradients would be right.
    """

    def __init__(
        self,
        where: str,
        replacements: Mapping[int, torch.Tensor],
        hooks: list[GradientHook],
        is_nested: bool,
    ) -> None:
        super().__init__()
        self.where, self.replacements = where, replacements
        self.hooks, self.is_nested = hooks, is_nested
        self.active = False

    @property
    def is_needed(self) -> bool:
        """True unless it replaces nothing and types are tracked, which sees every tensor too."""
        tracked = current_tracker() is not None
        return bool(self.replacements) or not tracked or self.is_nested or _GRADIENTS_WITHIN.get()

    @runs_users_operation
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GRADIENT_QUERIES and innermost(args[0]).requires_grad:
            hook = GradientHook(self.where, _GRADIENT_QUERIES[func])
            if not is_wrapped(args[0]):
                self.hooks += [hook] if func != _REQUIRES_GRAD else []
            elif _GRADIENTS_WITHIN.get():
                return True if func == _REQUIRES_GRAD else hook.refuse()
        if kwargs:
            return func(*self.replaced(args), **self.replaced(kwargs))
        return func(*self.replaced(args))

    def replaced(self, value: Any) -> Any:
        """Return a value with replaced tensors: one, or a tuple, list or dict."""
        if isinstance(value, torch.Tensor):
            replacement = self.replacements.get(id(value))
            if replacement is not None:
                return replacement
            live = unwrap_if_dead(value)
            if is_wrapped(live) and is_foreign(live):
                refuse_closure(self.where, value)
        elif type(value) in (tuple, list):
            return type(value)(map(self.replaced, value))
        elif type(value) is dict:
            return {key: self.replaced(item) for key, item in value.items()}
        return value


def check_backwards(where: str, nodes: Iterable[Any], xs: Iterable[torch.Tensor]) -> None:
    """Raise for a differentiated tensor that only the backward of a custom function refers to.

    No function of the body shows that it is used, and nothing replaces it on a rank.

    Args:
        where: name of the body, for errors.
        nodes: the nodes of the graphs of ranks.
        xs: the inputs of these graphs.
    """
    own = set(map(id, xs))
    for kind in set(map(type, nodes)):
        function = custom_function(kind)
        if function is None:
            continue
        is_new_style = function.setup_context is not torch.autograd.Function.setup_context
        for name in "backward", "jvp", "setup_context" if is_new_style else "forward":
            for x in _reachable_tensors(getattr(function, name)):
                leaves = graph_leaves([innermost(x)])
                if innermost_level(x) or any(id(leaf) not in own for leaf in leaves):
                    fail(where, f"a tensor of shape {tuple(x.shape)} with a gradient, which "
                         f"{function.__name__}.{name} closes over",
                         "a tensor that a backward uses must be an argument of apply",
                         f"{function.__name__}.apply(..., tensor), and ctx.save_for_backward in "
                         "setup_context")  # fmt: skip


def refuse_closure(where: str, x: torch.Tensor) -> NoReturn:
    """Raise for a tensor from outside of a function, which does not visibly refer to it."""
    fail(where, f"a tensor of shape {tuple(x.shape)} with a gradient or a batch, from outside of "
         "the function, under a transform of torch.func",
         "it must be an argument, or in a closure, global, module or container that the function "
         "refers to", "pass it as an argument with P(), or detach() it before")  # fmt: skip


_REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_GRADIENT_QUERIES = {
    torch.Tensor.register_hook: "x.register_hook(...)", torch.Tensor.retain_grad: "x.retain_grad()",
    GRAD_FN: "x.grad_fn", _REQUIRES_GRAD: "x.requires_grad",
}  # fmt: skip
_GRADIENTS_WITHIN = ContextVar("fshard_gradients_within", default=False)


@contextmanager
def gradients_within() -> Iterator[None]:
    """Run a body under a `vmap` or forward mode within which gradients are taken."""
    token = _GRADIENTS_WITHIN.set(True)
    try:
        yield
    finally:
        _GRADIENTS_WITHIN.reset(token)


_REPLACING: ContextVar[ReplacingMode | None] = ContextVar("fshard_replacing", default=None)


@contextmanager
def replacing(
    where: str,
    closures: Sequence[torch.Tensor],
    locals_: Sequence[torch.Tensor],
    hooks: list[GradientHook],
    is_nested: bool,
) -> Iterator[None]:
    """Replace closures by a rank's own tensors in functions called by `call_function`.

    Args:
        where: name of the function, for errors.
        closures: tensors that it closes over.
        locals_: the rank's own tensor for each.
        hooks: list to which gradient hooks in the function are added.
        is_nested: True if tensors are differentiated at a level that is not the innermost.
    """
    replacements = {id(x): local for x, local in zip(closures, locals_, strict=True)}
    token = _REPLACING.set(ReplacingMode(where, replacements, hooks, is_nested))
    try:
        yield
    finally:
        _REPLACING.reset(token)


def call_function(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return `fn(*args, **kwargs)`, a mapped function of one rank, its closures replaced."""
    mode = _REPLACING.get()
    if mode is None or mode.active or not mode.is_needed:
        return fn(*args, **kwargs)
    mode.active = True
    with mode:
        return fn(*args, **kwargs)


def replaced_closures(tree: Tree) -> Tree:
    """Return a tree in whose place tensors are the rank's own, for code that no mode sees."""
    mode = _REPLACING.get()
    if mode is None or not mode.active:
        return tree
    return map_leaves(mode.replaced, tree)


def unreplaced(fn: Callable[..., Result]) -> Callable[..., Result]:
    """Return `fn` for a call on replaced tensors: its operations are seen by no function mode."""
    mode = _REPLACING.get()
    if mode is None or not mode.active:
        return fn

    def run(*args: Any) -> Result:
        with DisableTorchFunction():
            return fn(*args)

    return run


def graph_leaves(ys: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the leaves of the autograd graphs of `ys`."""
    return tuple(edge[0].variable for edge in _leaf_edges(ys))


def _leaf_edges(ys: Iterable[torch.Tensor]) -> Iterable[Edge]:
    """Return the edges of the leaves of the autograd graphs of `ys`."""
    return _find_ends([edge_of(y) for y in ys if y.requires_grad], frozenset())


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


def edge_of(x: torch.Tensor) -> Edge:
    """Return the edge of a tensor that requires grad."""
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def edges_in_graph(ys: Iterable[torch.Tensor], xs: Collection[torch.Tensor]) -> list[Edge | None]:
    """Return the edge of each of `xs` in the graphs of `ys`, None for a tensor without one.

    Only a graph shows the edge of a leaf of a level of `torch.func` that is not the innermost, or
    has ended, as that of `vjp`.
    """
    if not transforms_active() and all(unwrap_if_dead(x) is x for x in xs):
        return [edge_of(x) if x.requires_grad else None for x in xs]
    leaves = {id(edge[0].variable): edge for edge in _leaf_edges(ys)}
    return [leaves.get(id(x)) if x.grad_fn is None else edge_of(x) for x in xs]


def depends_on(y: torch.Tensor, xs: Iterable[torch.Tensor]) -> bool:
    """Return True if a result depends on one of `xs` in autograd's graph."""
    stops = {edge_of(x) for x in xs if x.requires_grad}
    return y.requires_grad and not stops.isdisjoint(_find_ends([edge_of(y)], stops))


def next_edges(edge: Edge) -> list[Edge]:
    """Return the edges to which a node passes cotangents."""
    return [following for following in edge[0].next_functions if following[0] is not None]


def _find_ends(
    roots: Iterable[Edge], stops: Set[Edge], nodes: set[Any] | None = None
) -> dict[Edge, None]:
    """Return the leaves behind `roots`, and the edges of `stops` on the way; add all nodes."""
    ends: dict[Edge, None] = {}
    seen, todo = set() if nodes is None else nodes, list(roots)
    while todo:
        edge = todo.pop()
        if edge in stops or type(edge[0]) is LEAF:
            ends[edge] = None
        elif edge[0] not in seen:
            seen.add(edge[0])
            todo += next_edges(edge)
    return ends


def _reachable_tensors(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """Yield tensors that a function can reach without receiving them.

    They are in its closure, its defaults, the globals it names, the object it is a method of,
    modules among these, arguments bound by `functools.partial`, and containers of them.
    """
    seen: set[int] = set()
    todo: list[Any] = [fn, vars(type(fn)).get("__call__"), getattr(fn, "__dict__", None)]
    alive: list[Any] = []  # keeps ids unique
    while todo:
        value = todo.pop()
        if type(value) in _HOLDS_NOTHING or id(value) in seen:
            continue
        seen.add(id(value))
        alive.append(value)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, FunctionType):
            todo += _function_values(value)
        elif isinstance(value, MethodType):
            todo += [value.__func__, value.__self__, getattr(value.__self__, "__dict__", None)]
        elif isinstance(value, FUNCTION_TYPE):
            todo += [item.__func__ for item in vars(value).values() if type(item) is staticmethod]
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


_HOLDS_NOTHING = {NoneType, bool, int, float, str, type, ModuleType, BuiltinFunctionType}


def _function_values(fn: FunctionType) -> list[Any]:
    """Return the defaults, closure and named globals of a function."""
    values: list[Any] = [fn.__defaults__, fn.__kwdefaults__]
    for cell in fn.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    names = sorted(global_names(fn.__code__) & fn.__globals__.keys())
    return values + [fn.__globals__[name] for name in names]
