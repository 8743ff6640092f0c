"""Size limit of caches, and a dictionary that keeps to it."""

from __future__ import annotations

from typing import TypeVar

CACHE_SIZE = 8192
"""Entries of a cache without a limit of its own."""

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """Dictionary for a cache whose keys are not the arguments of a function.

    Assignment of a new key to a dictionary of `limit` entries, by default `CACHE_SIZE`, removes all
    others first.
    """

    __slots__ = ("limit",)

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = CACHE_SIZE if limit is None else limit

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self and len(self) >= self.limit:
            self.clear()
        super().__setitem__(key, value)
