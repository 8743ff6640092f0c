"""Writes in graphs of operations: which values share memory, and which writes only one can see.

In a partitioned function a write makes another value. That is the same as writing where no other
tensor that is used later lies in the same memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fshard.errors import fail

__all__ = ["same_tensors"]


def same_tensors(target: fx.Node, node: fx.Node) -> list[fx.Node]:
    """The values that are the tensor which `node` writes as `target`.

    Raises `ShardingError` where it is an argument, a tensor that the function closes over or a
    view, and where a view of it is used after `node`.
    """
    root, views = target, []
    while (below := _below(root)) is not None:
        views += [root] * _is_view(root)
        root = below
    if not views and root.op in ("placeholder", "get_attr"):
        what = "argument" if root.op == "placeholder" else "constant"
        fail("fs.partition", f"{node.name} writes the {what} {root.name}",
             "a partitioned function writes nothing that it was given",
             "write a clone(), or return the new value")  # fmt: skip
    shared = list(_above(root, False))
    views += [each for each, view in shared if view and each < node and _used_after(each, node)]
    if views:
        fail("fs.partition", f"{node.name} writes {target.name}, and {views[0].name} is a view",
             "what is written in place shares memory with no other tensor that is used",
             "torch.where, index_put or select_scatter return new tensors")  # fmt: skip
    return [root, *(each for each, view in shared if not view)]


def _used_after(value: fx.Node, node: fx.Node) -> bool:
    return any(node < user for user in value.users)


def _below(node: fx.Node) -> fx.Node | None:
    """The value in whose memory an operation's result is, or may be."""
    if _is_pick(node):
        # Of several results, which share memory if they are views all.
        return _below(node.args[0]) if _is_view(node) else None  # type: ignore[arg-type]
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None or all(each.alias_info is None for each in schema.returns):
        return None
    given = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
    given |= node.kwargs
    found = [given.get(each.name) for each in schema.arguments if each.alias_info is not None]
    return next((each for each in found if isinstance(each, fx.Node)), None)


def _above(node: fx.Node, view: bool) -> Iterator[tuple[fx.Node, bool]]:
    """The values in the memory of one, and whether they are views of it."""
    for user in node.users:
        if _below(user) is node or (_is_pick(user) and user.args[0] is node and _is_view(user)):
            seen = view or _is_view(user)
            yield user, seen
            yield from _above(user, seen)


def _is_pick(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_view(node: fx.Node) -> bool:
    if _is_pick(node):
        return _is_view(node.args[0])  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    if not isinstance(node.target, torch._ops.OpOverload) or schema is None:
        return False
    read = [each for each in schema.arguments
            if each.alias_info is not None and not each.alias_info.is_write]  # fmt: skip
    return bool(read) and any(each.alias_info is not None for each in schema.returns)
