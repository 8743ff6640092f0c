"""Fake tensors, which have a shape and a device but no values, and functional tensors.

Modules of PyTorch that trace are imported in functions: the import takes a second.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException",
    "FakeTensor", "FakeTensorMode", "FunctionalTensor", "depends_on_inputs", "from_functional",
    "functional_mode", "graph_recorder", "is_recording", "is_recording_below_autograd",
    "recording_differentiably", "shares_memory", "sync_functional", "to_functional",
    "unpatched_modules", "without_cudnn", "without_fake_tensor_logs",
]  # fmt: skip

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
shares_memory: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
"""Return True if the storages behind two functional tensors' elements are one."""


def graph_recorder(
    fn: Callable[..., Any], *, above_autograd: bool
) -> Callable[..., torch.fx.GraphModule]:
    """Return a function that runs `fn` and returns the graph of its operations.

    No operation is decomposed: by default PyTorch 2.14 records `detach` as `alias`, which passes
    gradients on.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fn, {}, pre_dispatch=above_autograd)


@contextmanager
def without_fake_tensor_logs() -> Iterator[None]:
    """Run a block without the long messages that PyTorch logs of a function that fails."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def is_recording() -> bool:
    """Return True while `make_fx` records operations in a graph."""
    tracer: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracer is not None and tracer.get_proxy_mode() is not None


def recorded_node(x: torch.Tensor) -> fx.Node | None:
    """Return the node of a tensor in the graph that `make_fx` records, None for other tensors."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(x, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def depends_on_inputs(x: torch.Tensor) -> bool:
    """Return True if the graph that `make_fx` records has `x` as a function of its inputs."""
    first = recorded_node(x)
    seen, todo = set[fx.Node](), [] if first is None else [first]
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            return True
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return False


def is_recording_below_autograd() -> bool:
    """Return True while `make_fx` records operations as they are dispatched; fast in other code."""
    return torch._C._len_torch_dispatch_stack() > 0 and is_recording()


def recording_differentiably() -> AbstractContextManager[Any]:
    """Record operations that are differentiable everywhere in the graph that `make_fx` records.

    Custom functions detach tensors below autograd, where the derivatives of a function that
    `torch.func.linearize` returns would end; `vmap` does not map lazy copies. A tensor that a
    user detaches has no tangent, and so is not in that graph.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    aten: Any = torch.ops.aten
    replaced = {
        aten.detach.default: aten.alias.default, aten._lazy_clone.default: aten.clone.default,
    }  # fmt: skip
    context: AbstractContextManager[Any] = mode.enable_decompositions(
        {**mode.decomposition_table, **replaced}
    )
    return context


def functional_mode(*, pre_dispatch: bool) -> AbstractContextManager[Any]:
    """Return a mode in which writes into functional tensors become new values, as in an export."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    mode: AbstractContextManager[Any] = FunctionalTensorMode(pre_dispatch=pre_dispatch, export=True)
    return mode


def to_functional(x: torch.Tensor) -> Any:
    """Return a functional tensor of the value of `x`."""
    from torch._functorch._aot_autograd.functional_utils import to_fun

    return to_fun(x)


def from_functional(x: Any) -> Any:
    """Return the current value of a functional tensor, any other argument as it is."""
    from torch._functorch._aot_autograd.functional_utils import from_fun

    return from_fun(x)


def sync_functional(x: Any) -> None:
    """Apply pending writes into views to the value of a functional tensor."""
    from torch._functorch._aot_autograd.functional_utils import sync_functional_tensor

    sync_functional_tensor(x)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Run PyTorch's operations in place of cuDNN's own, as traces on the CPU do.

    cuDNN's batch norm writes running statistics, which its schema does not declare, and its
    recurrent networks are one operation.
    """
    before = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(before)


@contextmanager
def unpatched_modules() -> Iterator[None]:
    """Let `make_fx` leave the methods of `torch.nn.Module` as they are.

    It replaces two of them by functions that do the same, four times a trace, which takes many
    milliseconds where packages have defined thousands of modules. Other tracers need theirs.
    """
    from torch.fx._symbolic_trace import _Patcher
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    original = _Patcher.patch_method

    def patch_method(
        self: Any, cls: type, name: str, new_fn: Any, deduplicate: bool = True
    ) -> None:
        closure = dict(zip(new_fn.__code__.co_freevars, new_fn.__closure__ or (), strict=True))
        if "self" not in closure or type(closure["self"].cell_contents) is not PythonKeyTracer:
            original(self, cls, name, new_fn, deduplicate)

    _Patcher.patch_method = patch_method  # type: ignore[method-assign]
    try:
        yield
    finally:
        _Patcher.patch_method = original  # type: ignore[method-assign]
