"""Function modes and dispatch modes of this thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import (
    _get_current_function_mode_stack as function_modes,
)
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)
from torch.utils._python_dispatch import _disable_current_modes as disable_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

__all__ = [
    "DisableTorchFunction",
    "TorchDispatchMode",
    "current_dispatch_mode",
    "disable_dispatch_modes",
    "dispatch_modes",
    "function_modes",
    "pop_dispatch_mode",
    "pop_function_mode",
    "push_dispatch_mode",
    "push_function_mode",
    "without_dispatch_modes",
]

DisableTorchFunction = torch._C.DisableTorchFunction
"""Context in which no function mode sees an operation."""


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
