"""Labels of one operation: a role for every mesh axis, with even shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch

from fshard.ops.core.call import OpCall
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.strategy.axis_roles import ANY, INVARIANT, AxisState, Role
from fshard.partition.layout_search.state_distances import state_code

BY_PARTS = " by parts"
"""End of the names of roles that a decomposition may have."""
MAX_LABELS = 1500
"""Most labels of an operation, and most layouts of a tensor."""

Unreduced = frozenset[tuple[int, str]]
"""Axes, by index, on which some label leaves a tensor unreduced, with the reduction."""
OperandAxes = Sequence[Unreduced | None]
"""`Unreduced` of every operand, None for one that is not labelled, which may have any state."""


class TooManyLabels(Exception):
    """Raised for a mesh or an operation with more labels than `MAX_LABELS`."""


def labels_of(
    roles: Sequence[Role], rule: Rule, sizes: Mapping[str, int], axes: Sequence[int],
    unreduced: OperandAxes, *, all_axes: bool,
) -> tuple[list[tuple[Role, ...]], torch.Tensor]:  # fmt: skip
    """Return the roles of the axes for every label, and their codes, labels x tensors x axes.

    The first row of a label is 1 on the axes that shard a factor, else 0; then come the codes of
    operands and results.

    Args:
        roles: the roles of the operation.
        rule: its rule.
        sizes: the size of every factor.
        axes: the size of every axis.
        unreduced: the axes on which operands may be unreduced.
        all_axes: True if the mesh has no other axes, which may shard factors too.

    Raises:
        TooManyLabels: for more than `MAX_LABELS`.
    """
    per_axis = [
        list({_row(role): role for role in reversed(roles)
              if _is_possible(role, axis, n, sizes, unreduced)}.values())
        for axis, n in enumerate(axes)
    ]  # fmt: skip
    labels = [
        combined for combined in itertools.product(*per_axis)
        if _is_even(combined, rule, sizes, axes, all_axes=all_axes)
    ]  # fmt: skip
    if len(labels) > MAX_LABELS:
        raise TooManyLabels
    codes = [[*zip(*map(_row, combined), strict=True)] for combined in labels]
    width = 1 + len(rule.operands) + len(rule.results)
    return labels, torch.tensor(codes, dtype=torch.long).reshape(len(labels), width, len(axes))


def _is_possible(
    role: Role, axis: int, n: int, sizes: Mapping[str, int], unreduced: OperandAxes
) -> bool:
    """Return True if an axis divides the role's factor, or operands may be unreduced."""
    if role.factor is not None:
        return sizes[role.factor] > 0 and sizes[role.factor] % n == 0
    required = [(axes, state.kind) for axes, state in zip(unreduced, role.operands, strict=True)
                if state.name == "unreduced"]  # fmt: skip
    return not required or any(axes is None or (axis, kind) in axes for axes, kind in required)


def reductions(result: int, roles: Iterable[Role], count: int, unreduced: OperandAxes) -> Unreduced:
    """Return the axes on which some role leaves a result unreduced, with the reduction.

    Args:
        result: the index of the result.
        roles: the roles of the operation.
        count: number of axes.
        unreduced: the axes on which operands may be unreduced.
    """
    return frozenset(
        (axis, state.kind) for role in roles for state in [role.results[result]]
        if state is not None and state.name == "unreduced"
        for axis in range(count)
        if role.factor is not None or any(
            axes is None or (axis, source.kind) in axes
            for axes, source in zip(unreduced, role.operands, strict=True)
            if source.name == "unreduced"
        )
    )  # fmt: skip


def _row(role: Role) -> tuple[int, ...]:
    """Return 1 if a role shards a factor, else 0, and the codes of operands and results."""
    results = (INVARIANT if state is None else state for state in role.results)
    return (int(role.factor is not None), *map(state_code, (*role.operands, *results)))


def _is_even(
    roles: Sequence[Role], rule: Rule, factors: Mapping[str, int], axes: Sequence[int], *,
    all_axes: bool,
) -> bool:  # fmt: skip
    """Return True if shards are even, and no factor is sharded behind one that has parts left."""
    shards: dict[str, int] = {}
    for role, n in zip(roles, axes, strict=True):
        for name in rule.with_slices(role.factor) if role.factor is not None else ():
            shards[name] = shards.get(name, 1) * n
    if any(factors[name] % n for name, n in shards.items() if name in factors):
        return False
    dims = [dim for x in (*rule.operands, *rule.results) for dim in x or ()
            if len(dim) > 1 and all_axes]  # fmt: skip
    return not any(
        shards.get(dim[place], 1) > 1 and shards.get(dim[place - 1], 1) != factors[dim[place - 1]]
        for dim in dims for place in range(1, len(dim))
    )  # fmt: skip


def roles_by_parts(
    rule: Rule, call: OpCall, sizes: Mapping[str, int]
) -> tuple[list[Role], dict[str, int]]:
    """Return roles that shard what the rule keeps unsharded, as a decomposition may.

    An operand without the factor may have any state; a result without it has the required one. A
    dim of an operand without a factor is one, which no other tensor has.

    Args:
        rule: the rule of the call.
        call: the call.
        sizes: the sizes of its factors.

    Returns:
        The roles, and the sizes of all factors.
    """
    factors = [x for x in rule.factors
               if rule.kind(x) in ("unsharded", "permuted") or x in rule.no_grad]  # fmt: skip
    operands, sizes = [[*dims] for dims in rule.operands], dict(sizes)
    for index, (dims, meta) in enumerate(zip(operands, call.operands, strict=True)):
        for dim, size in enumerate(meta.shape):
            if not dims[dim] and size > 1:
                name = f"dim {dim} of operand {index}"
                dims[dim], sizes[name] = (name,), size
                factors.append(name)

    def state(dims: Dims | None, factor: str) -> AxisState:
        return next((AxisState("sharded", dim) for dim, names in enumerate(dims or ())
                     if factor in names), ANY)  # fmt: skip

    return [
        Role(f"{factor}{BY_PARTS}", tuple(state(tuple(dims), factor) for dims in operands),
             tuple(state(dims, factor) for dims in rule.results), factor)
        for factor in factors
    ], sizes  # fmt: skip
