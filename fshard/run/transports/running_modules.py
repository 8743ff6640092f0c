"""Modules whose forward runs, with their paths, for collectives in logs and for traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from fshard._torch.module_state import calls_by
from fshard.run.transports.base import OBSERVERS

T = TypeVar("T")
MODULES: ContextVar[tuple[tuple[torch.nn.Module, str], ...]] = ContextVar(
    "fshard_modules", default=()
)
"""Modules whose forward runs in this thread, outermost first, with their paths, if recorded."""
_NAMES: WeakKeyDictionary[torch.nn.Module, WeakKeyDictionary[torch.nn.Module, str]] = (
    WeakKeyDictionary()
)
"""Names of the submodules of modules."""
_TRACED = torch.nn.Module()
"""Stands for the module of a traced operation, of which the path alone is kept."""


def current_module() -> str:
    """Return the path of the module whose forward runs, "" if nothing records it."""
    modules = MODULES.get()
    return modules[-1][1] if modules else ""


def recorded_modules() -> AbstractContextManager[None]:
    """Record in the block which module's forward runs, in each thread."""
    return calls_by(_call)


def _call(original: Callable[..., T], module: torch.nn.Module, *args: Any, **kwargs: Any) -> T:
    stack = MODULES.get()
    token = MODULES.set((*stack, (module, _path(module, stack))))
    try:
        return original(module, *args, **kwargs)
    finally:
        MODULES.reset(token)


def _path(module: torch.nn.Module, stack: tuple[tuple[torch.nn.Module, str], ...]) -> str:
    """Return the path of a module from the outermost running one, named by its class."""
    for parent, path in reversed(stack):
        names = _NAMES.get(parent)
        if names is None or module not in names:  # it may have been added since
            names = _NAMES[parent] = WeakKeyDictionary(
                {child: name for name, child in parent.named_modules()}
            )
        if name := names.get(module):
            return f"{path}.{name}"
    return type(module).__name__


def as_in_module(path: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function, as in the forward of the module of a path for observers; "" is none."""
    if not (path and OBSERVERS.get()):
        return function(*args)
    token = MODULES.set(((_TRACED, path),))
    try:
        return function(*args)
    finally:
        MODULES.reset(token)
