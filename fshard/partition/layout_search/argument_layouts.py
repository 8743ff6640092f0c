"""Leaves of the arguments of `fs.auto`, and their layouts with even shards."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.ops.core.call import Meta
from fshard.partition.arguments import requires_grad


@dataclass(frozen=True, slots=True)
class ArgumentLeaf:
    """Leaf of the arguments: `meta` is None unless it is a tensor, `fixed` its given layout."""

    meta: Meta | None
    requires_grad: bool
    fixed: PartitionSpec | Spec | None

    @staticmethod
    def of(leaf: Any, fixed: PartitionSpec | Spec | None) -> ArgumentLeaf:
        """Return the leaf of a tensor, a pair, a spec or another value."""
        tensor = leaf.spec if isinstance(leaf, Sharded) else leaf
        if not isinstance(tensor, torch.Tensor | Spec):
            return ArgumentLeaf(None, False, fixed)
        return ArgumentLeaf(Meta.of(tensor), requires_grad(leaf), fixed)

    @property
    def is_free(self) -> bool:
        """True for a tensor whose layout is to be chosen."""
        return self.meta is not None and self.fixed is None

    @property
    def ndim(self) -> int:
        """Number of dims of a tensor."""
        return 0 if self.meta is None else self.meta.ndim

    def layouts(self, mesh: Mesh) -> list[PartitionSpec]:
        """Return the layouts with even shards: each axis shards a dim or none.

        A dim without elements is not sharded.
        """
        meta, partitions = self.meta, []
        assert meta is not None
        for dims in itertools.product((None, *range(meta.ndim)), repeat=len(mesh.axes)):
            entries = [tuple(a for a, d in zip(mesh.axes, dims, strict=True) if d == dim)
                       for dim in range(meta.ndim)]  # fmt: skip
            sizes = [mesh.axis_size(axes) for axes in entries]
            ends = zip(meta.shape, sizes, strict=True)
            if all(n == 1 or (size and size % n == 0) for size, n in ends):
                partitions.append(PartitionSpec(*(axes or None for axes in entries)))
        return partitions
