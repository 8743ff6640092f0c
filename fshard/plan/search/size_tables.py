"""`SizeTables`: values derived from the sizes of many uneven shards, computed once in a search.

They are too large to be kept: searches whose layouts are alike share them while they run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fshard.plan.search.search_layout import DimSizes, hashed_once
from fshard.program.cost.rank_overlap import shard_stops
from fshard.program.cost.traffic import Traffic, uneven_gather_traffic
from fshard.program.infer import split_sizes


class SizeTables:
    """Memo tables of the sizes of a dim's shards."""

    def __init__(self) -> None:
        self._joined: dict[tuple[DimSizes, int], DimSizes] = {}
        self._chunks: dict[tuple[int, int, DimSizes, int], DimSizes] = {}
        self._stops: dict[tuple[int, ...], list[int]] = {}
        self._widest: dict[tuple[int, ...], int] = {}
        self._gathers: dict[tuple[tuple[int, ...], int], Traffic] = {}

    def joined(self, sizes: DimSizes, n: int) -> DimSizes:
        """Return the shard sizes of a dim after merging each `n` neighbours, None if equal."""
        if sizes is None or n == 1:
            return sizes
        key = sizes, n
        if key not in self._joined:
            stops = self.stops(sizes)[::n]
            joined = hashed_once(tuple(map(operator.sub, stops[1:], stops)))
            self._joined[key] = None
            if joined is not None and len({*joined}) > 1:
                self._joined[key], self._stops[joined] = joined, stops
        return self._joined[key]

    def stops(self, sizes: tuple[int, ...]) -> list[int]:
        """Return `shard_stops` of the sizes."""
        if sizes not in self._stops:
            self._stops[sizes] = shard_stops(sizes)
        return self._stops[sizes]

    def chunks(self, size: int, shards: int, sizes: DimSizes, n: int) -> DimSizes:
        """Return the shard sizes of a dim after splitting as `torch.chunk` does, None if equal."""
        key = size, shards, sizes, n
        if key not in self._chunks:
            chunks = split_sizes(*key, chunk=True)
            assert not isinstance(chunks, str)
            self._chunks[key] = hashed_once(chunks)
        return self._chunks[key]

    def widest(self, sizes: tuple[int, ...]) -> int:
        """Return the largest of the sizes."""
        if sizes not in self._widest:
            self._widest[sizes] = max(sizes)
        return self._widest[sizes]

    def gather_traffic(self, sizes: tuple[int, ...], n: int, item: int) -> Traffic:
        """Return the traffic of an all-gather of each `n` neighbours, `item` bytes an element."""
        key = sizes, n
        if key not in self._gathers:
            self._gathers[key] = uneven_gather_traffic(*key)
        return self._gathers[key].scaled(item)


_SHARED: ContextVar[SizeTables | None] = ContextVar("shared_size_tables", default=None)


@contextmanager
def shared_size_tables() -> Iterator[None]:
    """Share the tables of all searches in the block, after which they are freed."""
    token = _SHARED.set(SizeTables())
    try:
        yield
    finally:
        _SHARED.reset(token)


def size_tables() -> SizeTables:
    """Return the tables of this block, or new ones."""
    return _SHARED.get() or SizeTables()
