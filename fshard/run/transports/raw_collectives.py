"""Collectives that bypass fshard, as events: `torch.distributed`, functional ones, DTensor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fshard._torch.dynamo import tree_flatten
from fshard._torch.modes import DispatchMode, is_dispatching_subclass
from fshard._torch.operators import schema_of
from fshard._torch.process_groups import resolve_group
from fshard.program.cost.traffic import all_gather_traffic, all_reduce_traffic, all_to_all_traffic
from fshard.run.transports.base import LABEL
from fshard.run.transports.observed_calls import notify_collective

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


class CollectiveOps(DispatchMode):
    """Dispatch mode that calls `report` for every collective in the block, also DTensor's."""

    def __init__(self, report: Callable[[RawCollective], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.report = report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        """Report the operation if it is a collective, and run it."""
        if any(is_dispatching_subclass(kind) for kind in types):
            return NotImplemented  # a subclass runs operations of its own, which come here again
        if func.namespace in NAMESPACES:
            self._report(schema_of(func), args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _report(self, schema: Any, args: Any, kwargs: Any) -> None:
        given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
        name = schema.name.partition("::")[2].strip("_")
        starts = [start for start in OPERATIONS if name.startswith(start)]
        if starts:
            operand = next((given[key] for key in OPERANDS if key in given), ())
            tensors = tuple(x for x in tree_flatten(operand)[0] if isinstance(x, torch.Tensor))
            dtypes = [x.dtype for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor)]
            group = given.get("group_name", given.get("process_group"))
            root = given.get("root_rank", given.get("src"))
            operation = OPERATIONS[max(starts, key=len)]
            dtype = dtypes[0] if dtypes else None
            self.report(RawCollective(operation, group, tensors, dtype, root))


@contextmanager
def observed_raw_collectives() -> Iterator[None]:
    """Notify observers of collectives of PyTorch in the block that fshard did not launch.

    Every operation in the block passes a dispatch mode, which costs some microseconds each.
    """
    with CollectiveOps(_notify):
        yield


def _notify(call: RawCollective) -> None:
    if LABEL.get() is not None:
        return  # launched by fshard, which has notified already
    group = call.group
    if isinstance(group, str):
        group = resolve_group(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    ranks = dist.get_process_group_ranks(group)
    is_root = call.root is None or ranks[call.root] == dist.get_rank()
    names = f"ranks {', '.join(map(str, ranks))}"
    sent = _sent(call, len(ranks), is_root)
    notify_collective(call.operation, (names,), sent, dist.get_rank(), call.dtype)


def _sent(call: RawCollective, n: int, is_root: bool) -> int:
    """Return the bytes that this rank sends to others, by the formulas of programs."""
    local = sum(x.nbytes for x in call.operands)
    match call.operation:
        case "all_reduce":
            item = 1 if call.dtype is None else call.dtype.itemsize
            return all_reduce_traffic(n, local, item).sent
        case "all_gather":
            return all_gather_traffic(n, local).sent
        case "reduce_scatter" | "all_to_all":
            return all_to_all_traffic(n, local).sent
        case "broadcast":
            return (n - 1) * local if is_root else 0
        case "scatter":
            return local - local // n if is_root else 0
        case "reduce" | "gather":
            return 0 if is_root else local
    return local
