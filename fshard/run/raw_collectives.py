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
    if LABEL.get() is not None or not call.operands:
        return  # launched by fshard, which has notified already
    group = call.group
    if isinstance(group, str):
        group = resolve_group(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    ranks = dist.get_process_group_ranks(group)
    local = sum(x.nbytes for x in call.operands)
    first = call.operands[0]
    sent = _sent(call.operation, len(ranks), local, first.element_size())
    names = f"ranks {', '.join(map(str, ranks))}"
    notify(call.operation, (names,), sent, dist.get_rank(), first.dtype)


def _sent(operation: str, n: int, local: int, item: int) -> int:
    """Return the bytes that a rank sends, by the formulas of programs; others send the operand."""
    match operation:
        case "all_reduce":
            return all_reduce_traffic(n, local, item).sent
        case "all_gather":
            return all_gather_traffic(n, local).sent
        case "reduce_scatter" | "all_to_all":
            return all_to_all_traffic(n, local).sent
    return local
