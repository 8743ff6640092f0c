"""Typed slots in lower folders for functions of higher ones.

A value such as `Program` has methods that run it or draw it, but its module must not import `run/`
or `show/`. It declares a `Hook` instead, whose signature and docstring are a function's, and a
module of the higher folder sets it with `@run_program_hook.set`. `run_program_hook.call(...)` is
then that function itself. `fshard/__init__.py` imports every module that sets a hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Hook(Generic[P, R]):
    """Slot for one function of a higher folder, made by decorating its declaration.

    Attributes:
        call: the function, or before `set` the declaration, which raises `NotImplementedError`.

    >>> @Hook
    ... def area_hook(width: int, height: int) -> int:
    ...     "Return an area; set by a higher folder."
    ...     raise NotImplementedError
    >>> @area_hook.set
    ... def area(width: int, height: int) -> int:
    ...     return width * height
    >>> area_hook.call(2, 3)
    6
    """

    call: Callable[P, R]

    def __init__(self, declaration: Callable[P, R]) -> None:
        self.call = declaration
        self.__doc__ = declaration.__doc__

    def set(self, function: Callable[P, R]) -> Callable[P, R]:
        """Set the function and return it, so that this is a decorator."""
        self.call = function
        return function
