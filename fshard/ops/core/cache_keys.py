"""Hashable cache keys of arguments, which distinguish values that are equal in Python alone.

`1`, `1.0` and `True` are different keys, as are `[1]` and `(1,)`. Symbolic sizes of a trace become
concrete numbers, which installs a guard: the trace then holds for these sizes alone. `unfreeze`
turns a key back into its argument; `spmd/collectives/argument_key.py` has faster keys that only
compare.
"""

from __future__ import annotations

from typing import Any

import torch

from fshard.layout.spec import Spec

_SYMBOLS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class _List(tuple[Any, ...]):
    """Key of a list, unequal to the tuple of the same items."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is _List and tuple.__eq__(self, other)

    def __hash__(self) -> int:
        return tuple.__hash__(self) ^ 1


class _TypedNumber(tuple[Any, ...]):
    """Key of a number: its type and its value."""

    __slots__ = ()


def freeze(value: Any) -> Any:
    """Return the cache key of an argument: hashable, and specific to the types of numbers.

    >>> freeze(1) == freeze(True), freeze([1]) == freeze((1,)), freeze(0.0) == freeze(-0.0)
    (False, False, False)
    """
    kind = type(value)
    if kind is Spec or value is None or kind is str:
        return value
    if kind is tuple:
        return tuple(map(freeze, value))
    if kind is list:
        return _List(map(freeze, value))
    if kind is dict:
        return tuple((name, freeze(item)) for name, item in value.items())
    if kind in (bool, int, float, complex):
        # repr distinguishes 0.0 from -0.0, and makes NaN equal to itself.
        return _TypedNumber((kind, repr(value) if kind in (float, complex) else value))
    return freeze(concrete_number(value)) if kind in _SYMBOLS else value


def concrete_number(value: Any) -> Any:
    """Return the concrete number of a symbolic one, and any other value unchanged."""
    convert = _SYMBOLS.get(type(value))
    return value if convert is None else convert(value)


def unfreeze(value: Any) -> Any:
    """Return the argument of a key; a mapping comes back as a tuple of items."""
    kind = type(value)
    if kind is _TypedNumber:
        number = value[1]
        return value[0](number.strip("()")) if isinstance(number, str) else number
    if kind is _List:
        return list(map(unfreeze, value))
    if kind is tuple:
        return tuple(map(unfreeze, value))
    return value


def unfreeze_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of a call from their keys."""
    return tuple(map(unfreeze, args)), {name: unfreeze(arg) for name, arg in kwargs}
