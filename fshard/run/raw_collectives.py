"""Collectives that bypass fshard, as events: `torch.distributed`, functional ones, DTensor's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fshard._torch.collective_ops import CollectiveOps, RawCollective
from fshard._torch.process_groups import resolve_group
from fshard.program.cost.traffic import all_gather_traffic, all_reduce_traffic, all_to_all_traffic
from fshard.run.transports.base import LABEL, notify


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
    notify(call.operation, (names,), _sent(call, len(ranks), is_root), dist.get_rank(), call.dtype)


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
