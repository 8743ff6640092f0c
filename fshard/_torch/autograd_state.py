"""Grad mode, autocast, running backward passes and views, as autograd records them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.autograd.profiler as _profiler
from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction

SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""Target of the graph nodes that switch the grad mode."""

is_any_autocast_enabled = torch._C._is_any_autocast_enabled
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Id of the backward pass that runs in this thread, -1 outside of one."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the node of autograd that runs in this thread, None outside of one."""
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Call a function when the running backward pass has ended without an error."""
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Return True if the running backward pass has `retain_graph=True`."""


def runs_in_backward(node: Any) -> bool:
    """Return True if the running backward pass needs the gradient of a node's outputs."""
    if node is None:
        return False
    try:
        needed: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf among the inputs of torch.autograd.grad
        return True
    return needed


sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Number of a node in the order of recording; of those that can run, the last one runs first."""

is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
view_base: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""Tensor that a view is a view of, None for a tensor that is not a view."""
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Number of in-place writes to the memory of a tensor."""
backward_hooks_of: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
HOOKED_MODULE: type = BackwardHookFunction._backward_cls
"""Type of the nodes at the arguments and results of a module with full backward hooks."""
ONCE_DIFFERENTIABLE: type = type(
    torch._C._functions.DelayedError(b"", 1)(torch.ones(1, requires_grad=True)).grad_fn
)
"""Type of the nodes of gradients from a backward that is marked `@once_differentiable`."""


def library_operation(node: Any) -> str | None:
    """Return the name of the `torch.library` operation whose registered gradient a node is.

    Such an operation has no derivative in forward mode; PyTorch gives it no tangent.
    """
    name = type(node).__name__
    return name[len(_GENERATED) : -len("Backward")] if name.startswith(_GENERATED) else None


def custom_function(kind: type) -> type[torch.autograd.Function] | None:
    """Return the user's `autograd.Function` of a type of nodes, None for other types."""
    if not issubclass(kind, BackwardCFunction):
        return None
    function: type[torch.autograd.Function] = kind._forward_cls  # type: ignore[attr-defined]
    return None if function.__module__.startswith("fshard.") else function


def has_unequal_orders(node: Any) -> str | None:
    """Return the name of a function whose gradient of a tangent may be another second derivative.

    Such are custom functions, of which both are independent, and those of PyTorch whose tangent is
    computed from saved results that it takes as constants: norms, determinants, solvers.
    """
    function = custom_function(type(node))
    if function is not None:
        return function.__name__
    name = type(node).__name__
    return name.removesuffix("Backward0") if name.startswith(_CONSTANT_RESULTS) else None


_CONSTANT_RESULTS = "Native", "BatchNorm", "Cudnn", "Miopen", "Linalg", "Cholesky", "Lu"
_GENERATED = "GeneratedBackwardFor_"
GRAD_FN: Any = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
"""The function that a function mode sees where `x.grad_fn` is read."""
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def unviewed(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or if it is a view the same memory as a tensor that autograd takes for no view.

    Its memory must not be written through other views with gradients.
    """
    if not is_view(x):
        return x
    unsafe_view = UNSAFE_VIEW if torch.compiler.is_compiling() else UNSAFE_VIEW._op
    result: torch.Tensor = unsafe_view(x, x.shape)
    return result


_ORDERED = 1 << 60
"""Sequence numbers from here on are of nodes that `order_nodes` has ordered."""
_GRAPHS = itertools.count()


def order_nodes(outputs: Iterable[torch.Tensor], earlier: Iterable[torch.Tensor]) -> None:
    """Order the nodes behind `outputs` after those behind `earlier`, and all ordered before.

    Backward runs nodes in the reverse order of their creation, which each thread counts for itself.
    Graphs of one rank may come from several threads; its collectives must run in one order.
    """
    seen: set[Any] = set()
    _collect_nodes(earlier, seen)
    nodes = _collect_nodes(outputs, seen)
    if nodes:
        numbers = [node._sequence_nr() for node in nodes]
        start = _ORDERED + (next(_GRAPHS) << 32) - min(numbers)
        for node, number in zip(nodes, numbers, strict=True):
            node._set_sequence_nr(start + number)


def nodes_behind(ys: Iterable[torch.Tensor]) -> set[Any]:
    """Return the nodes of the graphs of tensors."""
    seen: set[Any] = set()
    todo = [y.grad_fn for y in ys]
    while todo:
        node: Any = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return seen


def _collect_nodes(ys: Iterable[torch.Tensor], seen: set[Any]) -> list[Any]:
    """Return nodes behind tensors that are not in `seen`, to which they are added, nor ordered."""
    nodes, todo = [], [y.grad_fn for y in ys]
    while todo:
        node: Any = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if node._sequence_nr() < _ORDERED:
                nodes.append(node)
                todo += [following for following, _ in node.next_functions]
    return nodes


def is_profiling() -> bool:
    """Return True while a profiler records, in this thread or in others.

    `_profiler_enabled` is False in the threads of a profiler with `profile_all_threads`.
    """
    return bool(_profiler._is_profiler_enabled)
