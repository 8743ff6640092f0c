"""Origin of a collective: the call, the module and the user's source line that launched it."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from fshard._torch.module_state import hook_forwards
from fshard.layout.spec import Spec
from fshard.run.transports.base import MODULES, ObservedCall

_NAMES: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
"""Names of the submodules of modules, by their ids."""


class Origin(NamedTuple):
    """Call, layouts of a program, module path and source line of a collective."""

    name: str
    arguments: str
    ends: tuple[Spec, ...]
    module: str
    line: str

    @property
    def call(self) -> str:
        """The call of fshard with its arguments, "" for another's."""
        return f"{self.name} {self.arguments}".strip()

    @property
    def redistribution(self) -> str:
        """Source and target layout of a program, "" for other calls."""
        return " -> ".join(map(str, self.ends))


def origin_of(call: ObservedCall) -> Origin:
    """Return the origin of an observed call; backward the line and module are the forward's."""
    label = call.label
    if label is None:
        return Origin("", "", (), call.module, call.line)
    return Origin(label.name, label.arguments, label.ends, call.module, call.line)


def tracked_modules() -> AbstractContextManager[None]:
    """Record in the block which module's forward runs, in each thread."""
    return hook_forwards(_enter, _leave)


def _enter(module: torch.nn.Module, _: Any) -> None:
    stack = MODULES.get()
    MODULES.set((*stack, (module, _path(module, stack))))


def _leave(module: torch.nn.Module, _: Any, __: Any) -> None:
    stack = MODULES.get()
    if stack and stack[-1][0] is module:
        MODULES.set(stack[:-1])


def _path(module: torch.nn.Module, stack: tuple[tuple[torch.nn.Module, str], ...]) -> str:
    """Return the path of a module from the outermost running one, named by its class."""
    for parent, path in reversed(stack):
        if parent not in _NAMES:
            _NAMES[parent] = {id(child): name for name, child in parent.named_modules()}
        if name := _NAMES[parent].get(id(module)):
            return f"{path}.{name}"
    return type(module).__name__
