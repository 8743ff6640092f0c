"""Modules whose forward runs, with their paths, for collectives in logs and for traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from fshard._torch.module_state import calls_by
from fshard.run.transports.base import OBSERVERS, RUNNING, Running

T = TypeVar("T")
_NAMES: WeakKeyDictionary[torch.nn.Module, WeakKeyDictionary[torch.nn.Module, str]] = (
    WeakKeyDictionary()
)
"""Names of the submodules of modules."""


def current_module() -> str:
    """Return the path of the module whose forward runs, "" if nothing records it."""
    return RUNNING.get().module


def recorded_modules() -> AbstractContextManager[None]:
    """Record in the block which module's forward runs, in each thread."""
    return calls_by(_call)


def _call(original: Callable[..., T], module: torch.nn.Module, *args: Any, **kwargs: Any) -> T:
    phase, _, modules = RUNNING.get()
    path = _path(module, modules)
    token = RUNNING.set(Running(phase, path, (*modules, (module, path))))
    try:
        return original(module, *args, **kwargs)
    finally:
        RUNNING.reset(token)


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
    token = RUNNING.set(Running(RUNNING.get().phase, path))
    try:
        return function(*args)
    finally:
        RUNNING.reset(token)
