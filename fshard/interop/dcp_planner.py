"""Plan of `torch.distributed.checkpoint` (DCP) for boxes of pairs; imported when one is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


class BoxPlanner(DefaultSavePlanner):
    """Writes boxes of tensors, and values other than tensors on the first rank.

    Args:
        boxes: by name and offsets the part of a tensor that this process writes.
        shapes: by name the global shape of each of these tensors.
        values: other values, by name.
        paths: by name the keys of each leaf in its containers.
    """

    def __init__(
        self,
        boxes: Mapping[tuple[str, tuple[int, ...]], torch.Tensor],
        shapes: Mapping[str, Sequence[int]],
        values: Mapping[str, Any],
        paths: Mapping[str, tuple[Any, ...]],
    ) -> None:
        super().__init__()
        self.boxes, self.shapes, self.values = boxes, shapes, values
        self.paths = dict(paths)

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Record the role of this rank; the state was given to the constructor."""
        self.state_dict, self.mappings = dict(self.values), self.paths
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return a write of every box, and on the first rank of every other value."""
        items = [
            WriteItem(
                MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), box.shape),
                    properties=TensorProperties.create_from_tensor(box),
                    size=torch.Size(self.shapes[name]),
                ),
            )
            for (name, offsets), box in self.boxes.items()
        ]  # fmt: skip
        if self.is_coordinator:
            items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self.values]
        self.plan = SavePlan(items, planner_data=self.paths)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the box or the value of an item."""
        if index.offset is None:
            return self.values[index.fqn]
        return self.boxes[index.fqn, tuple(index.offset)]
