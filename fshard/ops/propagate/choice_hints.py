"""Circumstances of one call that its strategy depends on, beside its operands' layouts."""

from __future__ import annotations

from typing import NamedTuple

from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec

OperandAxes = frozenset[tuple[int, str]]
"""Pairs of the index of an operand and an axis."""


class Arguments(NamedTuple):
    """Operands that exist before the call, whose equal collectives are one launch.

    `launched` are the axis, the states before and after, and the bytes of an element of those
    collectives that are launched for other operations anyway.
    """

    operands: frozenset[int] = frozenset()
    launched: frozenset[tuple[str, str, str, int]] = frozenset()


NO_ARGUMENTS = Arguments()


class RoleHint(NamedTuple):
    """Names of the roles that are requested of a call, with their axes."""

    roles: tuple[tuple[str, str], ...]


LayoutHint = PartitionSpec | RoleHint | None
"""Partition that the first result is requested in later, or the roles that are requested."""


def gathers(src: Spec, dst: Spec) -> set[tuple[str, str, str, int]]:
    """Return the gathers between two layouts, as in `Arguments.launched`."""
    p, q = src.partition, dst.partition
    kept = {axis for dim in q.dims for axis in dim}
    return {
        (axis, "sharded", "reduced" if axis in q.reduced else "invariant", src.dtype.itemsize)
        for dim in p.dims
        for axis in dim
        if axis not in kept
    }
