"""Removal of merged dims that only operations on rows use.

`view(linear(view(x, [a * b, k])), [a, b, n])` computes `linear(x)`. A merged dim has shards of its
major dim `a` alone: with `b` sharded, as the batch is in `torch.nn.MultiheadAttention`, all rows
would be exchanged. Without the merge each of the two dims has its own layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fshard._torch.operators import OpOverload

aten = torch.ops.aten
_RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints,
    aten.unflatten.int,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MergedRows:
    """Uses of a merged dim, the product of the sizes `dims`.

    `operations` are those on rows; `splits` are the reshapes that split the rows into `dims`.
    """

    dims: tuple[int, ...]
    operations: tuple[fx.Node, ...]
    splits: tuple[fx.Node, ...]


def separate_rows(graph: fx.GraphModule) -> None:
    """Keep leading dims apart that a reshape merges and other reshapes split in the same way.

    All uses of the merged dim must be operations on rows: `linear`, or elementwise ones whose other
    operands have no rows. Values and gradients of results do not change.
    """
    for node in graph.graph.nodes:
        if node.target in _RESHAPES and (merged := _merged_rows(node)) is not None:
            _separate(node, merged)


def _merged_rows(merge: fx.Node) -> MergedRows | None:
    """Return the uses of a merged dim 0, or None if it is not one or must stay merged."""
    before, after = _shape(merge.args[0]), _shape(merge)
    counts = range(2, len(before) + 1) if after else ()
    count = next((n for n in counts if math.prod(before[:n]) == after[0]), 0)
    if not count or after[0] == before[0]:
        return None
    dims, rows, splits = before[:count], [merge], []
    for node in rows:
        for user in node.users:
            if _operates_on_rows(user, node):
                rows += [] if user in rows else [user]
            elif user.target in _RESHAPES and _shape(user)[:count] == dims:
                splits.append(user)
            else:
                return None
    return MergedRows(dims, tuple(rows[1:]), tuple(splits)) if splits else None


def _operates_on_rows(node: fx.Node, operand: fx.Node) -> bool:
    """Return True if each row of a result depends on the same row of an operand alone."""
    others = [x for x in node.all_input_nodes if x is not operand]
    if node.target is aten.linear.default:
        return node.args[0] is operand and operand not in node.args[1:]
    is_elementwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    shape = _shape(node)
    return is_elementwise and shape == _shape(operand) and all(
        len(_shape(x)) < len(shape) for x in others
    )  # fmt: skip


def _separate(merge: fx.Node, merged: MergedRows) -> None:
    """Replace the rows of a merge and of the operations by the dims that are merged in them."""
    for node in (merge, *merged.operations):
        node.meta["val"] = node.meta["val"].reshape(merged.dims + _shape(node)[1:])
    for node in (merge, *merged.splits):
        operand: Any = node.args[0]
        if _shape(operand) == _shape(node):
            node.replace_all_uses_with(operand)
            node.graph.erase_node(node)
        else:
            node.target = aten.reshape.default
            node.args, node.kwargs = (operand, [*_shape(node)]), {}


def _shape(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
