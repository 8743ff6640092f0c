"""A small registry low in the layers, so that values never import what runs or draws them.

`run/`, `show/` and `interop` register here what a value's method needs: a program's call,
its table, a spec's placements. A value only asks for a hook by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["call", "register"]

_HOOKS: dict[str, Callable[..., Any]] = {}
F = TypeVar("F", bound=Callable[..., Any])


def register(name: str) -> Callable[[F], F]:
    """Decorator that makes a function the hook called `name`; the last one wins."""

    def keep(function: F) -> F:
        _HOOKS[name] = function
        return function

    return keep


def call(name: str, *args: Any, **options: Any) -> Any:
    """Call the hook `name`; `fshard/__init__.py` imports every module that registers one."""
    return _HOOKS[name](*args, **options)
