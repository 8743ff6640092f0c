"""`SearchLayout`: a layout as a light value, made for each edge that the search looks at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fshard.layout.partition_spec import Kinds, PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.steps import AllToAll, Exchange

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]
DimSizes = tuple[int, ...] | None

LONG = 256
"""Most shards of a dim whose sizes are hashed each time."""


class LongSizes(tuple[int, ...]):  # noqa: SLOT001 - it stores its hash
    """Sizes of many shards, hashed once: a search looks layouts up many times."""

    def __hash__(self) -> int:
        value: int | None = self.__dict__.get("hash")
        if value is None:
            value = self.__dict__["hash"] = super().__hash__()
        return value


def hashed_once(sizes: DimSizes) -> DimSizes:
    """Return sizes as `LongSizes` if there are many.

    >>> type(hashed_once((1, 2))), type(hashed_once((1, 2) * LONG))
    (<class 'tuple'>, <class 'fshard.plan.search.search_layout.LongSizes'>)
    """
    long = sizes is not None and len(sizes) > LONG and type(sizes) is tuple
    return LongSizes(sizes) if long and sizes is not None else sizes


class SearchLayout(NamedTuple):
    """Layout met by the search: the parts of a `Spec` that steps change."""

    dims: Dims
    unreduced: Kinds
    reduced: Kinds
    sizes: tuple[DimSizes, ...]

    @classmethod
    def of(cls, spec: Spec) -> SearchLayout:
        """Return the layout of a spec."""
        p = spec.partition
        sizes = tuple(map(hashed_once, spec.sizes))
        return cls(p.dims, p.unreduced_kinds, p.reduced_kinds, sizes)

    @property
    def partition(self) -> PartitionSpec:
        """The layout as a `PartitionSpec`."""
        return PartitionSpec._of(self.dims, self.unreduced, self.reduced)

    def replace_dim(self, dim: int, axes: Axes, sizes: DimSizes) -> SearchLayout:
        """Return the layout with one dim sharded over `axes` into `sizes`."""
        return SearchLayout(
            (*self.dims[:dim], axes, *self.dims[dim + 1 :]),
            self.unreduced,
            self.reduced,
            (*self.sizes[:dim], hashed_once(sizes), *self.sizes[dim + 1 :]),
        )


def exchange_to(target: SearchLayout) -> Exchange:
    """Return the exchange to a layout."""
    return Exchange(target.partition, target.sizes)


def all_to_all_of(pairs: tuple[tuple[Axes, int, int, DimSizes], ...]) -> AllToAll:
    """Return the all-to-all of runs of axes: each from its dim to its dim of sizes."""
    first, *others = pairs
    return AllToAll(*first, also=tuple(AllToAll(*pair) for pair in others))


def add_kinds(kinds: Kinds, axes: Axes, kind: object) -> Kinds:
    """Return `kinds` with every axis of `axes` added, sorted by axis."""
    return tuple(sorted((*kinds, *((axis, str(kind)) for axis in axes))))


def subsets(names: Sequence[str]) -> Iterator[Axes]:
    """Yield every non-empty choice of axes, in the order given."""
    for count in range(1, len(names) + 1):
        yield from itertools.combinations(names, count)
