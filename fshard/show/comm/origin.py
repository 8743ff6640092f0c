"""Origin of a collective: the call, the module and the user's source line that launched it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from fshard.run.transports.base import LABEL
from fshard.run.transports.divergence_report import position

_MODULES: ContextVar[tuple[tuple[torch.nn.Module, str], ...]] = ContextVar(
    "fshard_modules", default=()
)
"""Modules whose forward runs in this thread, outermost first, with their paths."""
_NAMES: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
"""Names of the submodules of modules, by their ids."""


class Origin(NamedTuple):
    """Call, module path and `file:line` that launched a collective; "" where there is none."""

    call: str
    module: str
    line: str


def current_origin() -> Origin:
    """Return the origin of the collective that is launched in this thread."""
    label, modules = LABEL.get(), _MODULES.get()
    call = "" if label is None else f"{label.name} {label.arguments}".strip()
    line = label.line if label is not None and label.line else position()
    return Origin(call, modules[-1][1] if modules else "", line)


@contextmanager
def tracked_modules() -> Iterator[None]:
    """Record in the block which module's forward runs, in each thread."""
    hooks = torch.nn.modules.module
    handles = (
        hooks.register_module_forward_pre_hook(_enter),
        hooks.register_module_forward_hook(_leave, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(module: torch.nn.Module, _: Any) -> None:
    stack = _MODULES.get()
    _MODULES.set((*stack, (module, _path(module, stack))))


def _leave(module: torch.nn.Module, _: Any, __: Any) -> None:
    stack = _MODULES.get()
    if stack and stack[-1][0] is module:
        _MODULES.set(stack[:-1])


def _path(module: torch.nn.Module, stack: tuple[tuple[torch.nn.Module, str], ...]) -> str:
    """Return the path of a module from the outermost running one, named by its class."""
    for parent, path in reversed(stack):
        if parent not in _NAMES:
            _NAMES[parent] = {id(child): name for name, child in parent.named_modules()}
        if name := _NAMES[parent].get(id(module)):
            return f"{path}.{name}"
    return type(module).__name__
