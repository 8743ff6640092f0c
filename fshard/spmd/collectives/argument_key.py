"""Cache keys of arguments: equal exactly for equal values of equal types, however nested.

Arguments that can change or that compare by identity, such as tensors, have no key. Values that are
equal need not mean the same: 0 and 0.0 have different keys. These keys only compare, and are fast
to compute; the keys of `ops/core/cache_keys.py` turn back into the arguments.
"""

from __future__ import annotations

import marshal
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

import torch

from fshard._util.cache import CACHE_SIZE
from fshard.layout.mesh import Mesh

SEQUENCES = frozenset((list, tuple))
PLAIN = frozenset((int, bool, str, type(None), torch.dtype, Mesh))
SERIALIZED = object()
"""Marks the next item as the bytes of a list or tuple."""


def plain_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Return a key of arguments, None if one is not a plain value or a list or tuple of those."""
    try:
        return _token(SERIALIZED, marshal.dumps(args, 0), **kwargs)
    except (TypeError, ValueError):  # a mesh or dtype by position, a list by keyword
        pass
    try:
        return (_token(*_serialized((*args, *kwargs.values()))), *kwargs)
    except (TypeError, ValueError):
        return None


def _serialized(values: tuple[Any, ...]) -> list[Any]:
    """Replace lists and tuples by their bytes; raise for ones that cannot be serialized."""
    items: list[Any] = []
    for value in values:
        if type(value) in SEQUENCES:
            items += SERIALIZED, marshal.dumps(value, 0)
        else:
            items.append(value)
    return items


@lru_cache(maxsize=CACHE_SIZE, typed=True)
def _token(*args: Any, **kwargs: Any) -> object:
    """Return one object for equal values of equal types; raise `TypeError` for others.

    The cache compares the types of arguments, but not those of a tuple's items.
    """
    values = iter((*args, *kwargs.values()))
    for value in values:
        if value is SERIALIZED:  # an array serializes as bytes, and is read back as bytes
            plain = _is_plain(marshal.loads(next(values)))
        elif type(value) is tuple:
            plain = {str}.issuperset(map(type, value))
        else:
            plain = type(value) in PLAIN
        if not plain:
            raise TypeError
    return object()


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) in SEQUENCES else type(value) in PLAIN
