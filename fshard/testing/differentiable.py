"""Arguments that require gradients, and backward passes over whatever a function returned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fshard._util.dtypes import is_inexact
from fshard.layout.sharded import Sharded
from fshard.layout.tree import flatten, map_leaves


def requiring_grad(args: Any) -> Any:
    """Return a tree with its floating tensors, also in pairs, as leaves that require grad."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Sharded):
            local = value.local
            parts = map(leaf, local) if isinstance(local, tuple | list) else leaf(local)
            return Sharded(tuple(parts) if isinstance(local, tuple | list) else parts, value.spec)
        if isinstance(value, torch.Tensor) and is_inexact(value):
            return value.detach().clone().requires_grad_()
        return value

    return map_leaves(leaf, args)


def run_backward(outputs: Any) -> None:
    """Run the backward pass of the sum of all elements of a function's results.

    A shard of a pair counts once for every rank that has it: the cotangent of every local is ones.
    """
    tensors = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree, and those of its pairs."""
    for leaf in flatten(tree)[0]:
        local = leaf.local if isinstance(leaf, Sharded) else leaf
        for tensor in local if isinstance(local, tuple | list) else (local,):
            if isinstance(tensor, torch.Tensor):
                yield tensor
