"""Function modes and dispatch modes of this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DisableTorchFunction", "DispatchMode", "current_dispatch_mode", "disable_dispatch_modes",
    "dispatch_modes", "function_modes", "is_dispatching_subclass", "num_dispatch_modes",
    "pop_dispatch_mode", "pop_function_mode",
    "push_dispatch_mode", "pushed_function_modes", "replaced_function_modes",
    "without_dispatch_modes",
]  # fmt: skip


class DispatchMode(TorchDispatchMode):
    """Dispatch mode that runs without the compiler, whose import takes a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_dispatching_subclass(cls: type) -> bool:
    """Return True for subclasses of tensors that run operations themselves, such as DTensor."""
    plain = torch._C._disabled_torch_dispatch_impl
    return getattr(cls, "__torch_dispatch__", plain) is not plain


DisableTorchFunction = torch._C.DisableTorchFunction
"""Context in which no function mode sees an operation."""

function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
"""Return the function modes of this thread, outermost first."""
push_function_mode: Callable[[Any], None] = overrides._push_mode
pop_function_mode: Callable[[], Any] = overrides._pop_mode

dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
"""Return the dispatch modes of this thread, outermost first."""


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of dispatch modes of this thread."""
current_dispatch_mode: Callable[[], Any] = _python_dispatch._get_current_dispatch_mode
push_dispatch_mode: Callable[[Any], None] = _python_dispatch._push_mode
pop_dispatch_mode: Callable[[], Any] = _python_dispatch._pop_mode
disable_dispatch_modes = _python_dispatch._disable_current_modes
"""Context without dispatch modes, pre-dispatch ones of the process included."""


@contextmanager
def pushed_function_modes(modes: Iterable[Any]) -> Iterator[None]:
    """Push function modes for a block, which may have been entered already, outermost first."""
    with ExitStack() as stack:
        for mode in modes:
            push_function_mode(mode)
            stack.callback(pop_function_mode)
        yield


@contextmanager
def replaced_function_modes(modes: Iterable[Any]) -> Iterator[None]:
    """Replace the function modes of this thread by the given ones in a block."""
    hidden = [pop_function_mode() for _ in function_modes()]
    try:
        with pushed_function_modes(modes):
            yield
    finally:
        for mode in reversed(hidden):
            push_function_mode(mode)


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Hide the operations of a block from tracers and fake modes of the surrounding code."""
    # Pre-dispatch modes belong to the process, not to the thread: modes of others are left alone.
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        with disable_dispatch_modes():
            yield
        return
    modes = [pop_dispatch_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            push_dispatch_mode(mode)
