"""Draws that nothing tells how to lie, in graphs: they follow what they are computed with.

`x + s * torch.randn(x.shape)` draws a tensor of a shape; every rank would make all of it and keep
its part. As a draw depends on its key and shape alone, it may lie as `x` does from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fshard.ops.prng.draw_ops import DRAWN, OPS

__all__ = ["follow"]

MOST_HOPS = 8
"""So many operations are looked at from a draw on."""
_DRAWS = {getattr(OPS, name).default for name in DRAWN if name != "permutation"}


def follow(graph: fx.GraphModule) -> None:
    """Have every draw that is like nothing lie as a tensor of its shape that it is combined with.

    That is one that is there before the draw: nothing is moved in the graph.
    """
    before: set[fx.Node] = set()
    for node in graph.graph.nodes:
        before.add(node)
        if node.target in _DRAWS and node.args[0] is None:
            leader = next(_partners(node, before), None)
            if leader is not None:
                node.args = (leader, *node.args[1:])


def _partners(draw: fx.Node, before: set[fx.Node]) -> Iterator[fx.Node]:
    """Tensors of the shape of a draw that it meets, the nearest first, through others of it."""
    met, seen = [draw], {draw}
    for node in met:
        if len(met) > MOST_HOPS:
            return
        for user in node.users:
            if user in seen or _shape(user) != _shape(draw):
                continue
            for operand in user.all_input_nodes:
                if operand in before and operand not in seen and _shape(operand) == _shape(draw):
                    yield operand
            met.append(user)
            seen.add(user)


def _shape(node: fx.Node) -> torch.Size | None:
    value = node.meta.get("val")
    return value.shape if isinstance(value, torch.Tensor) and value.dim() else None
