"""`RecentCalls`: the plans of a function's last calls, found by two comparisons in C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fshard._torch.functorch import is_transformed
from fshard._torch.module_state import same_metas
from fshard._torch.symbolic_numbers import has_symbolic_sizes
from fshard.layout.sharded import Sharded
from fshard.layout.tree import TENSORS
from fshard.partition.number_variants import Plan

MAX_RECENT = 4
LEAVES = {*TENSORS, Sharded}
Key = list[Any]
"""Dependences of a plan beside its tensors: the grad mode, the state, containers and specs."""


class _RecentCall(NamedTuple):
    key: Key
    agree: Callable[..., bool]
    plan: Plan


class RecentCalls:
    """Plans of calls whose arguments are tensors and pairs alone.

    A key of all that a plan depends on takes longer to make, to hash and to compare.
    """

    def __init__(self) -> None:
        self.calls: list[_RecentCall] = []

    def find(self, key: Key, tensors: Sequence[torch.Tensor]) -> Plan | None:
        """Return the plan of a call with an equal key and with tensors like these."""
        for recent in self.calls:
            if recent.key == key and recent.agree(*tensors) and not is_transformed():
                return recent.plan
        return None

    def add(
        self, key: Key, leaves: Sequence[Any], tensors: Sequence[torch.Tensor], plan: Plan
    ) -> None:
        """Record a plan, unless the key and the tensors do not show all that it depends on."""
        known = {*map(type, leaves)} <= LEAVES and {*map(type, tensors)} <= TENSORS
        differ = len({*map(id, tensors)}) == len(tensors)
        if known and differ and not (is_transformed() or any(map(has_symbolic_sizes, tensors))):
            recent = _RecentCall(key, same_metas(tensors), plan)
            self.calls = [recent, *self.calls[: MAX_RECENT - 1]]
