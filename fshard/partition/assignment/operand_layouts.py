"""Layouts of the operands of one operation: the fastest strategy, and the axes that are kept.

The layouts of arguments are intentions: an axis that shards an operand is kept by the operations on
it and on its results, unless they have no such rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fshard.layout.partition_spec import LINEAR, PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.cache_keys import freeze
from fshard.ops.core.call import fill_call, map_call
from fshard.ops.propagate.choice_hints import LayoutHint
from fshard.ops.propagate.propagate import strategy_for
from fshard.ops.strategy.strategy import Strategy
from fshard.partition.assignment.tensor_versions import Assignment, TensorVersions
from fshard.program.cost.topology import Topology

MAX_COMBINATIONS = 16
"""Combinations of the operands' layouts that are tried for one operation."""


def best_strategy(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[TensorVersions],
    assignment: Assignment, topology: Topology, hint: LayoutHint, *, grad: bool,
) -> Strategy:  # fmt: skip
    """Return the fastest strategy of a call over the layouts that its operands have.

    Args:
        op: the operation.
        args: its arguments, with `operands` in the places of tensors.
        kwargs: its keyword arguments, likewise.
        operands: the tensors, in order.
        assignment: the lines before, whose launches gathers of arguments share.
        topology: the topology to cost strategies on.
        hint: the preferred layout of the first result, or the roles of the axes.
        grad: the grad mode.
    """
    tracked = grad and any(tensor.grad for tensor in operands)
    layouts = [tensor.sources(grad) for tensor in operands]
    held, kept = (
        frozenset((i, axis) for i, axes in enumerate(rows) for axis in axes)
        for rows in ([x.held for x in operands], [x.kept for x in operands])
    )
    arguments = assignment.arguments_of(operands)
    combinations = itertools.islice(itertools.product(*layouts), MAX_COMBINATIONS)
    strategies = (
        strategy_for(op, *fill_call(args, kwargs, TensorVersions, specs), topology, tracked, hint,
                     held, kept, arguments)
        for specs in combinations
    )  # fmt: skip
    return min(strategies, key=lambda strategy: strategy.time)


def kept_axes(operands: Sequence[TensorVersions]) -> tuple[str, ...]:
    """Return the axes along which operations on a result of these operands stay sharded."""
    return tuple(dict.fromkeys(axis for operand in operands for axis in operand.kept))


def moved_bytes(operands: Sequence[TensorVersions], strategy: Strategy) -> int:
    """Return the bytes of operands whose dim is not sharded any more along an axis that is kept.

    If no other dim is sharded along it either, they are those of all its ranks, with results that
    all of them compute.
    """
    moved, gathered = 0, set()
    for operand, src, dst in zip(operands, strategy.sources, strategy.shard_specs, strict=True):
        others = {*itertools.chain(*dst.partition.dims)}
        for axes, after in zip(src.partition.dims, dst.partition.dims, strict=True):
            axes_moved = [axis for axis in axes if axis in operand.kept and axis not in after]
            gathered |= {*axes_moved} - others
            moved += sum(src.nbytes * _copies(src, axis, others) for axis in axes_moved)
    for spec in filter(None, strategy.out_specs if gathered else ()):
        others = {*itertools.chain(*spec.partition.dims)}
        moved += sum(spec.nbytes * _copies(spec, axis, others) for axis in gathered - others)
    return moved


def _copies(spec: Spec, axis: str, sharding: Collection[str]) -> int:
    """Return the number of ranks along an axis that hold the same values."""
    return 1 if axis in sharding else spec.mesh.axis_size(axis)


def with_dual(spec: Spec) -> Spec:
    """Return a spec that has a dual: axes unreduced by another kind than a sum are invariant."""
    p = spec.partition
    linear = tuple((axis, kind) for axis, kind in p.unreduced_kinds if kind in LINEAR)
    return spec.replace(partition=PartitionSpec._of(p.dims, linear, p.reduced_kinds))


def call_key(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a call without its tensors, as a key."""
    placed, named = map_call(args, kwargs, TensorVersions, lambda _: None)
    return op, freeze(placed), freeze(named)


def elements_of(operands: Sequence[TensorVersions]) -> int:
    """Return the number of elements of all operands."""
    return sum(math.prod(tensor.spec.shape) for tensor in operands)
