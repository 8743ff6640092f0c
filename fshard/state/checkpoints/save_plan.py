"""`SavePlan`: the boxes of tensors that each rank writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard._util.errors import Problem, raise_if
from fshard.layout.sharded import Sharded

Box = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Rank that writes a box of a tensor, first index of the box in each dim, and its sizes."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Boxes of all tensors, and the rank that writes each of them.

    Attributes:
        ranks: ranks that may write.
        boxes: by the index of a leaf that is a tensor its boxes, which cover each element once.
    """

    ranks: tuple[int, ...]
    boxes: Mapping[int, Sequence[Box]]

    @staticmethod
    def of(leaves: Sequence[Any], world: Any) -> SavePlan:
        """Return the plan, equal on every rank: replicas are shared out by their bytes.

        Args:
            leaves: pairs, tensors that are equal on every rank, and other values.
            world: all ranks, None in a simulation, where they are those of the meshes.
        """
        meshes = {rank for leaf in leaves if isinstance(leaf, Sharded) for rank in leaf.mesh.ranks}
        ranks = tuple(sorted(meshes if world is None else world)) or (0,)
        load: dict[int, int] = defaultdict(int)
        boxes: dict[int, list[Box]] = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Sharded | torch.Tensor):
                continue
            boxes[index] = []
            for (offsets, shape), candidates in _holders(leaf, ranks).items():
                owner = min(candidates, key=lambda rank: (load[rank], rank))
                load[owner] += leaf.dtype.itemsize * torch.Size(shape).numel()
                boxes[index].append((owner, offsets, shape))
        return SavePlan(ranks, boxes)

    @property
    def writers(self) -> tuple[int, ...]:
        """The ranks that write a file."""
        return tuple(sorted({owner for boxes in self.boxes.values() for owner, *_ in boxes}))

    def locals(
        self, leaves: Sequence[Any], rank: int, simulated: bool
    ) -> Iterator[tuple[int, tuple[int, ...], torch.Tensor]]:
        """Yield the boxes that a rank writes: index of the leaf, offsets, and the local."""
        for index, boxes in self.boxes.items():
            leaf = leaves[index]
            for owner, offsets, _ in boxes:
                if owner != rank:
                    continue
                x = leaf.local if isinstance(leaf, Sharded) else leaf
                if isinstance(leaf, Sharded) and simulated:
                    x = leaf.local[list(leaf.mesh.ranks).index(rank)]
                yield index, offsets, x


def _holders(leaf: Any, ranks: Sequence[int]) -> dict[Any, list[int]]:
    """Return the ranks that hold each box `(offsets, shape)` of a tensor; no empty box, or one."""
    if not isinstance(leaf, Sharded):
        return {((0,) * leaf.ndim, tuple(leaf.shape)): list(ranks)}
    holders: dict[Any, list[int]] = defaultdict(list)
    for rank in leaf.mesh.ranks:
        holders[leaf.spec.offsets(rank), leaf.spec.local_shape(rank)].append(rank)
    full = {box: candidates for box, candidates in holders.items() if all(box[1])}
    return full or dict([next(iter(holders.items()))])


def check_reduced(where: str, names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise `ShardingError` for pairs that are unreduced."""
    raise_if(where, [
        Problem(f"{name}: a pair of {leaf.spec}", "a tensor that is saved must not be unreduced",
                f"fs.reshard({name}, fs.P(...)), which sums it")
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, Sharded) and leaf.spec.partition.unreduced_kinds
    ])  # fmt: skip
