"""Size limit of all caches, and a dictionary that keeps to it."""

from __future__ import annotations

from typing import TypeVar

CACHE_SIZE = 8192
"""Entries that a cache holds at most."""

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """Dictionary for a cache whose keys are not the arguments of a function.

    Adding a key to `CACHE_SIZE` others removes them first.
    """

    __slots__ = ()

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= CACHE_SIZE:
            self.clear()
        super().__setitem__(key, value)
