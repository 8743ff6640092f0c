"""Labels of one call on all labelled axes: roles, states, and seconds that no plan undercuts.

A call by its rule takes the seconds of its roles, as in plans. The rule keeps factors unsharded
that a decomposition may shard, and a mapped function too; labels that shard them stand for all of
these plans. Operands and results without such a factor may have any state, and redistributions
within are left out. The seconds of a decomposition are those of its operations on one device by
the number of devices: none of them is in more shards. Those of a mapped function are its
collectives: at least one launch. If results lack the factor, all of them depend on all shards, and
every device receives the shards that it lacks; backward it sends as much, if their gradients are
computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import is_mapped
from fshard.ops.core.rule import Rule
from fshard.ops.propagate.role_costs import compute_time, nbytes
from fshard.ops.strategy.axis_roles import Role, factor_sizes, roles_of
from fshard.partition.layout_search.role_labels import (
    BY_PARTS,
    OperandAxes,
    Unreduced,
    labels_of,
    reductions,
    roles_by_parts,
)
from fshard.partition.layout_search.state_distances import (
    ANY_CODE,
    FIRST_DIM,
    AxisTuple,
    joint_indices,
)
from fshard.partition.training_time import FORWARD_AND_BACKWARD
from fshard.program.cost.topology import Topology


class CallLabels(NamedTuple):
    """Labels of a call.

    Attributes:
        roles: the roles of every label, one for each axis.
        seconds: the seconds of every label.
        replicated: True for labels whose axes shard no factor.
        states: the joint states of operands and results, by label.
        unreduced: for every result the axes on which some label leaves it unreduced.
    """

    roles: list[tuple[Role, ...]]
    seconds: torch.Tensor
    replicated: torch.Tensor
    states: list[torch.Tensor]
    unreduced: list[Unreduced]


class CallLabeller:
    """Labels of calls on some axes; equal calls have the same ones.

    Args:
        axes: the labelled axes.
        columns: the labelled axis of every axis that joint states are of.
        topology: the topology that calls are costed on.
    """

    def __init__(self, axes: AxisTuple, columns: Sequence[int], topology: Topology) -> None:
        self.axes, self.columns, self.topology = axes, [*columns], topology
        self.cached: dict[Any, CallLabels] = {}

    def labels(
        self, call: OpCall, rule: Rule, unreduced: OperandAxes, grads: tuple[bool, ...],
        parts: float | None,
    ) -> CallLabels:  # fmt: skip
        """Return the labels of a call.

        Args:
            call: the call.
            rule: its rule.
            unreduced: the axes on which operands may be unreduced.
            grads: for every operand, if its gradient comes back.
            parts: the seconds of its decomposition on one device, None if it has none.

        Raises:
            TooManyLabels: for more than `MAX_LABELS`.
        """
        key = rule, call.operands, call.results, unreduced, grads, parts, is_mapped(call.op)
        if key not in self.cached:
            self.cached[key] = self._labels(call, rule, unreduced, grads, parts)
        return self.cached[key]

    def _labels(
        self, call: OpCall, rule: Rule, unreduced: OperandAxes, grads: tuple[bool, ...],
        parts: float | None,
    ) -> CallLabels:  # fmt: skip
        """Return the labels of a call; of those with equal states one of the least seconds."""
        roles, sizes = [*roles_of(rule, call, grad=any(grads))], factor_sizes(rule, call)
        products, tensors = compute_time(self.topology, rule, call, sizes)
        if parts is not None:
            others, sizes = roles_by_parts(rule, call, sizes)
            roles, products = roles + others, 0.0
        labels, rows = labels_of(
            roles, rule, sizes, self.axes.sizes, unreduced, all_axes=self.axes.left_out == 1
        )
        sharded = (rows >= FIRST_DIM) | (rows == ANY_CODE)
        sharded[:, 0] = rows[:, 0] == 1
        shards = torch.where(sharded, torch.tensor(self.axes.sizes), 1).prod(2)
        states = [joint_indices(code[:, self.columns], 0 if meta is None else meta.ndim)
                  for code, meta in zip(rows.unbind(1)[1:], (*call.operands, *call.results),
                                        strict=True)]  # fmt: skip
        times = torch.tensor((products, *tensors), dtype=torch.float64) / shards
        seconds = torch.maximum(times[:, 0], times[:, 1:].sum(1)) / self.axes.left_out
        seconds *= FORWARD_AND_BACKWARD if any(grads) else 1
        if parts is not None:
            other = torch.tensor([self._time_by_parts(call, x, grads, parts) for x in labels],
                                 dtype=torch.float64)  # fmt: skip
            # Along axes that are left out every call may be decomposed.
            by_rule = seconds if self.axes.left_out == 1 else torch.minimum(seconds, other)
            by_parts = torch.tensor([*map(is_by_parts, labels)], dtype=torch.bool)
            seconds = torch.where(by_parts, other, by_rule)
        first: dict[tuple[int, ...], int] = {}
        for index in seconds.argsort(stable=True).tolist():
            first.setdefault(tuple(int(state[index]) for state in states), index)
        kept = sorted(first.values())
        return CallLabels(
            [labels[i] for i in kept], seconds[kept], (shards[:, 0] == 1)[kept],
            [state[kept] for state in states],
            [reductions(i, roles, len(self.axes.sizes), unreduced)
             for i in range(len(call.results))],
        )  # fmt: skip

    def _time_by_parts(
        self, call: OpCall, roles: Sequence[Role], grads: Sequence[bool], parts: float
    ) -> float:
        """Return the least seconds of a call that is decomposed or a mapped function."""
        decomposed = parts / self.axes.device_count
        if not is_mapped(call.op):
            return decomposed
        mapped = launch = self.topology.launch
        for axis, (role, n) in enumerate(zip(roles, self.axes.sizes, strict=True)):
            if role.name.endswith(BY_PARTS) and not role.sharded_dims:
                sharded = [state.name == "sharded" for state in role.operands]
                held = sum(map(nbytes, itertools.compress(call.operands, sharded)))
                lacking = held * (n - 1) / self.axes.device_count
                passes = 2 if all(itertools.compress(grads, sharded)) else 1
                links = self.axes.links[1 << axis]
                seconds = (launch + min(link.latency for link in links)
                           + lacking / max(link.bandwidth for link in links))  # fmt: skip
                mapped = max(mapped, passes * seconds)
        return min(decomposed, mapped)


def is_by_parts(roles: Iterable[Role]) -> bool:
    """Return True for roles that only a decomposition or a mapped function has."""
    return any(role.name.endswith(BY_PARTS) for role in roles)
