"""Origin of a collective: the call, the module and the user's source line that launched it."""

from __future__ import annotations

import sys
import weakref
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from fshard._torch.module_state import hook_forwards
from fshard.run.transports.base import LABEL, MODULES, Label, current_module
from fshard.run.transports.divergence_report import Place, place_of, position_text

_NAMES: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
"""Names of the submodules of modules, by their ids."""


class Origin(NamedTuple):
    """Label, module path and place in the source of a collective that is launched."""

    label: Label | None
    module: str
    place: Place | None

    @property
    def call(self) -> str:
        """The name and the arguments of the label, "" if there is none."""
        return "" if self.label is None else f"{self.label.name} {self.label.arguments}".strip()

    @property
    def line(self) -> str:
        """`file:line` of the user's code, "" if there is none."""
        if self.label is not None and self.label.line:
            return self.label.line
        return "" if self.place is None else position_text(*self.place)

    @property
    def redistribution(self) -> str:
        """Source and target layout of a program, "" for other calls."""
        return "" if self.label is None else " -> ".join(map(str, self.label.ends))


def current_origin() -> Origin:
    """Return the origin of the collective that is launched in this thread.

    In a backward pass the module is that of the forward call.
    """
    label = LABEL.get()
    module = current_module() or (label.module if label is not None else "")
    return Origin(label, module, place_of(sys._getframe()))


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
