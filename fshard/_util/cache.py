"""Size limit of caches, and a dictionary that keeps to it."""

from __future__ import annotations

from typing import TypeVar

CACHE_SIZE = 8192
"""Entries of a cache without a limit of its own."""

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """Dictionary for a cache whose keys are not the arguments of a function.

    Assignment of a new key to a full dictionary removes all others first.
    """

    __slots__ = ()

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self and len(self) >= CACHE_SIZE:
            self.clear()
        super().__setitem__(key, value)
