"""`SearchLayout`: a layout as a light value, made for each edge that the search looks at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fshard.layout.partition_spec import Kinds, PartitionSpec
from fshard.layout.spec import Spec

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]
DimSizes = tuple[int, ...] | None


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
        return cls(p.dims, p.unreduced_kinds, p.reduced_kinds, spec.sizes)

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
            (*self.sizes[:dim], sizes, *self.sizes[dim + 1 :]),
        )


def add_kinds(kinds: Kinds, axes: Axes, kind: object) -> Kinds:
    """Return `kinds` with every axis of `axes` added, sorted by axis."""
    return tuple(sorted((*kinds, *((axis, str(kind)) for axis in axes))))


def subsets(names: Sequence[str]) -> Iterator[Axes]:
    """Yield every non-empty choice of axes, in the order given."""
    for count in range(1, len(names) + 1):
        yield from itertools.combinations(names, count)
