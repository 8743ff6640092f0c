"""Arguments as keys of caches: what is equal to Python and other to PyTorch stays apart.

Symbols, as tensors of symbolic sizes have them while something is traced, are read as the numbers
that they stand for: whoever traces is told that what it makes holds for these alone.
"""

from __future__ import annotations

from typing import Any

import torch

from fshard.layout.spec import Spec

__all__ = ["concrete_number", "freeze", "unfreeze", "unfreeze_call"]

_SYMBOLS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class _List(tuple[Any, ...]):
    """A list as it is in a key: other than a tuple of the same."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is _List and tuple.__eq__(self, other)

    def __hash__(self) -> int:
        return tuple.__hash__(self) ^ 1


class _Number(tuple[Any, ...]):
    """A number with its type, as it is in a key: 1, 1.0 and True are three."""

    __slots__ = ()


def freeze(value: Any) -> Any:
    """An argument as it can be a key: lists as tuples, numbers with their types.

    >>> freeze(1) == frozen(True), frozen([1]) == frozen((1,)), frozen(0.0) == frozen(-0.0)
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
        return tuple((key, freeze(each)) for key, each in value.items())
    if kind in (bool, int, float, complex):
        # Zeros differ by their sign, and NaN from itself.
        return _Number((kind, repr(value) if kind in (float, complex) else value))
    return freeze(concrete_number(value)) if kind in _SYMBOLS else value


def concrete_number(value: Any) -> Any:
    """A symbol as the number that it stands for, anything else as it is."""
    number = _SYMBOLS.get(type(value))
    return value if number is None else number(value)


def unfreeze(value: Any) -> Any:
    """The argument that a key was made of; of mappings what they were is not told."""
    kind = type(value)
    if kind is _Number:
        given = value[1]
        return value[0](given.strip("()")) if isinstance(given, str) else given
    if kind is _List:
        return list(map(unfreeze, value))
    if kind is tuple:
        return tuple(map(unfreeze, value))
    return value


def unfreeze_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, by place and by name, from their keys."""
    return tuple(map(unfreeze, args)), {key: unfreeze(each) for key, each in kwargs}
