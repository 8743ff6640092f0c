"""Collectives of PyTorch itself, seen by a dispatch mode: c10d's and the functional ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = {"_c10d_functional", "c10d", "_dtensor"}
OPERATIONS = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "allgather": "all_gather",
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
    "all_to_all": "all_to_all", "shard_dim_alltoall": "all_to_all", "broadcast": "broadcast",
    "reduce": "reduce", "gather": "gather", "scatter": "scatter", "send": "send", "isend": "send",
}  # fmt: skip
"""Operations by the start of their names in a schema, longer names last; others send nothing."""
OPERANDS = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors", "tensor")


class RawCollective(NamedTuple):
    """Call of a collective of PyTorch.

    Attributes:
        operation: fshard's name of it.
        group: the process group, or its name.
        operands: tensors that this rank sends, none where it only receives.
        dtype: dtype of the tensors.
        root: index in the group of the rank that alone sends or receives, or None.
    """

    operation: str
    group: Any
    operands: tuple[torch.Tensor, ...]
    dtype: torch.dtype | None
    root: int | None


class CollectiveOps(TorchDispatchMode):
    """Dispatch mode that calls `report` for every collective in the block, also DTensor's."""

    def __init__(self, report: Callable[[RawCollective], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.report = report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        """Report the operation if it is a collective, and run it."""
        plain = torch._C._disabled_torch_dispatch_impl
        if any(kind.__torch_dispatch__ is not plain for kind in types):
            return NotImplemented  # a subclass runs operations of its own, which come here again
        if func.namespace in NAMESPACES:
            self._report(func._schema, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _report(self, schema: Any, args: Any, kwargs: Any) -> None:
        given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
        name = schema.name.partition("::")[2].strip("_")
        starts = [start for start in OPERATIONS if name.startswith(start)]
        if starts:
            operand = next((given[key] for key in OPERANDS if key in given), ())
            tensors = tuple(x for x in tree_leaves(operand) if isinstance(x, torch.Tensor))
            dtypes = [x.dtype for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
            group = given.get("group_name", given.get("process_group"))
            root = given.get("root_rank", given.get("src"))
            operation = OPERATIONS[max(starts, key=len)]
            dtype = dtypes[0] if dtypes else None
            self.report(RawCollective(operation, group, tensors, dtype, root))
