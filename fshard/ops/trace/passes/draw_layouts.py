"""Layouts of random draws in graphs, taken from the tensors they are combined with.

`x + s * torch.randn(x.shape)` draws a tensor by its shape; replicated, every rank would draw all of
it and keep its part. A draw depends on its key and shape alone, so it can be drawn in the layout of
`x` at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fshard.ops.prng.draw_ops import DRAW_OPS, DRAW_SCHEMAS

MAX_HOPS = 8
"""Number of operations that a search follows from a draw."""
_DRAWS = {getattr(DRAW_OPS, name).default for name in DRAW_SCHEMAS if name != "permutation"}


def assign_draw_layouts(graph: fx.GraphModule) -> None:
    """Give an unconstrained draw the layout of a same-shaped operand that it is combined with.

    Only operands that are computed before the draw are considered; no node changes its position.
    """
    before: set[fx.Node] = set()
    for node in graph.graph.nodes:
        before.add(node)
        if node.target in _DRAWS and node.args[0] is None:
            operand = next(_same_shaped_operands(node, before), None)
            if operand is not None:
                node.args = (operand, *node.args[1:])


def _same_shaped_operands(draw: fx.Node, before: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield operands of the shape of a draw, nearest first, through results of that shape."""
    results, seen = [draw], {draw}
    for node in results:
        if len(results) > MAX_HOPS:
            return
        for user in node.users:
            if user in seen or _shape(user) != _shape(draw):
                continue
            for operand in user.all_input_nodes:
                if operand in before and operand not in seen and _shape(operand) == _shape(draw):
                    yield operand
            results.append(user)
            seen.add(user)


def _shape(node: fx.Node) -> torch.Size | None:
    value = node.meta.get("val")
    return value.shape if isinstance(value, torch.Tensor) and value.dim() else None
