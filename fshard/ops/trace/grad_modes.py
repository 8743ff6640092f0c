"""Grad modes and saved tensors of traced functions: graphs of operations have neither.

Operands of operations without gradients are detached, blocks of `torch.inference_mode` become
blocks of `no_grad`, and code that autograd runs is seen by the mode of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from fshard._torch.autograd_state import SET_GRAD_ENABLED, graph_task_id
from fshard._torch.fake_tensors import recorded_node
from fshard._torch.functorch import is_batched_at_any_level
from fshard._torch.memory import innermost
from fshard._torch.modes import DispatchMode, function_modes, pushed_function_modes
from fshard._torch.operators import is_query
from fshard._util.dtypes import is_inexact
from fshard.layout.tree import tensors_in
from fshard.ops.core.call import map_call, map_instances
from fshard.ops.trace.functionalize import base_of, written_operands

DETACH = torch.ops.aten.detach.default
_INFERENCE: ContextVar[bool] = ContextVar("fshard_traced_inference", default=False)
"""True in an inference block of a traced function, where gradients cannot be enabled."""


@contextmanager
def inference_without_grad(depth: Callable[[], int]) -> Iterator[None]:
    """Make inference blocks set the grad mode alone; `depth` is 0 in threads that do not trace."""
    cls: Any = torch.inference_mode
    enter, leave = cls.__enter__, cls.__exit__
    key = "_fshard_before"

    def enter_traced(self: Any) -> None:
        if not depth():
            enter(self)
            return
        vars(self).setdefault(key, []).append((_INFERENCE.get(), torch.is_grad_enabled()))
        _INFERENCE.set(self.mode)
        torch.set_grad_enabled(not self.mode)

    def leave_traced(self: Any, *error: Any) -> None:
        if not vars(self).get(key):
            leave(self, *error)
            return
        before, enabled = vars(self)[key].pop()
        _INFERENCE.set(before)
        torch.set_grad_enabled(enabled)

    cls.__enter__, cls.__exit__ = enter_traced, leave_traced
    try:
        yield
    finally:
        cls.__enter__, cls.__exit__ = enter, leave


def as_traced(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of a call in a trace: no gradients are enabled in an inference block."""
    return (False,) if func is SET_GRAD_ENABLED and _INFERENCE.get() else args


class AutogradRecord(DispatchMode):
    """Dispatch mode that records in the graph of a trace what autograd does apart from operations.

    The graph has no grad mode: operands of operations without gradients are detached, and a write
    to a detached operand is one that gradients pass by. Autograd's detached copies of saved tensors
    are noted; `undo_detach` puts the originals back, so that second derivatives reach them.

    Attributes:
        detaches: True while operations have no gradients; the function mode of the trace sets it.
        unpacks: False while the function itself detaches a tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.detaches, self.unpacks = False, True
        self.saved: dict[fx.Node, bool] = {}
        self.unpacked: set[fx.Node | None] = set()
        self.written: set[fx.Node | None] = set()
        """Nodes of tensors that the function writes, which get gradients of what is written, and
        of those whose views they are."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_query(func):
            # Autograd asks a leaf for its device while it holds the mutex that `is_leaf` takes.
            return func(*args, **(kwargs or {}))
        for x in tensors_in((args, kwargs or {})):
            node = node_of(x) if x.requires_grad else None
            # No other tensor is asked if it is a leaf: a view of a base that was written since
            # replays itself for the answer, and cannot below autograd.
            if node is None or node.target is not DETACH:
                continue
            # A tensor that the function detaches has no gradient, or is a leaf of its own.
            if node in self.unpacked or not (x.is_leaf or node in self.written):
                self.saved[node] = x.is_leaf
        # Operations on lists return no new tensors for those that they write.
        for x in tensors_in(written_operands(func, args, kwargs or {})):
            node = node_of(x)
            while node is not None:
                self.written.add(node)
                node = base_of(node)
        if self.detaches and func is not DETACH and torch.Tag.inplace_view not in func.tags:
            return _run_detached(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if func is DETACH and self.unpacks and graph_task_id() != -1:  # autograd runs backward
            self.unpacked.add(node_of(out))
        return out

    @contextmanager
    def during(self, *, detaches: bool, unpacks: bool = True) -> Iterator[None]:
        """Set both attributes in the block."""
        before = self.detaches, self.unpacks
        self.detaches, self.unpacks = detaches, unpacks
        try:
            yield
        finally:
            self.detaches, self.unpacks = before

    def undo_detach(self) -> None:
        """Replace every unpacked tensor in the graph by the tensor that was saved."""
        for node, is_leaf in self.saved.items():
            source = node
            # A leaf can be detached from another tensor by the function, a result cannot.
            while source.target is DETACH and (not is_leaf or source in self.unpacked):
                source = source.args[0]  # type: ignore[assignment]
            node.replace_all_uses_with(source)


def _run_detached(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on detached operands; return those that it writes as they were given.

    While the backward of a custom function is recorded, cotangents do not say that they have a
    gradient.
    """
    originals: dict[int, torch.Tensor] = {}  # by aliases, which `args` and `kwargs` keep alive
    is_backward = bool(RUNNING_BACKWARDS.get())

    def detached(x: torch.Tensor) -> torch.Tensor:
        has_gradient = x.requires_grad or (is_backward and is_inexact(x) and node_of(x) is not None)
        if not has_gradient:
            return x
        alias: torch.Tensor = DETACH(x)
        originals[id(alias)] = x
        return alias

    args, kwargs = map_call(args, kwargs, torch.Tensor, detached)
    out = func(*args, **kwargs)
    return map_instances(out, torch.Tensor, lambda x: originals.get(id(x), x))


def node_of(x: torch.Tensor) -> fx.Node | None:
    """Return the node of a tensor in the graph that is being traced, None for other tensors."""
    return recorded_node(x if is_batched_at_any_level(x) else innermost(x))


RUNNING_BACKWARDS: ContextVar[tuple[type, ...]] = ContextVar("fshard_backwards", default=())
"""Custom functions whose backward is being recorded, outermost first."""
FUNCTION_MODE: ContextVar[TorchFunctionMode] = ContextVar("fshard_function_mode")
"""Function mode of the innermost trace below autograd."""


def within_mode(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs under the function mode of the trace below autograd.

    The mode is off while autograd runs code of the function: backwards, and checkpointed calls.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        mode = FUNCTION_MODE.get(None)
        missing = [] if mode is None or mode in function_modes() else [mode]
        with pushed_function_modes(missing):
            return fn(*args, **kwargs)

    return run
