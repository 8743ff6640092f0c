"""Batches that `torch.autograd.grad(is_grads_batched=True)` brings into a backward pass.

Its wrappers, of levels from 1 on, are older than those of `torch.func`. They know few operations,
and what an `autograd.Function` makes of one has no history: such a function sees what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["along", "around", "each", "held", "is_batched"]

Tensors = Sequence[torch.Tensor]

is_batched = torch._C._functorch.is_legacy_batchedtensor


def around() -> int:
    """How many there are around what is running in this thread, so the level of the innermost."""
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def held(xs: Tensors, level: int, dim: int) -> tuple[int, tuple[torch.Tensor, ...]]:
    """The size of the batch of a level, 1 where there is none, and `xs` with it as a dim."""
    n = max(torch._remove_batch_dim(x, level, 1, 0).shape[0] for x in xs)
    return n, tuple(torch._remove_batch_dim(x, level, n, 0).movedim(0, dim) for x in xs)


def along(function: Callable[[Tensors], Tensors], xs: Tensors) -> tuple[torch.Tensor, ...]:
    """`function(xs)`, which takes dims at the front as they come: batches are such dims."""
    if not any(map(is_batched, xs)):
        return tuple(function(xs))
    return _along(function, xs, around())


def _along(
    function: Callable[[Tensors], Tensors], xs: Tensors, level: int
) -> tuple[torch.Tensor, ...]:
    if level == 0:
        return tuple(function(xs))
    _, wide = held(xs, level, 0)
    return tuple(torch._add_batch_dim(y, 0, level) for y in _along(function, wide, level - 1))


def each(
    function: Callable[[Tensors], Sequence[torch.Tensor | None]], xs: Tensors
) -> tuple[torch.Tensor | None, ...]:
    """`function(xs)`, which knows of no batches: it is called for every element of them."""
    if not any(map(is_batched, xs)):
        return tuple(function(xs))
    return _each(function, xs, around())


def _each(
    function: Callable[[Tensors], Sequence[torch.Tensor | None]], xs: Tensors, level: int
) -> tuple[torch.Tensor | None, ...]:
    if level == 0:
        return tuple(function(xs))
    _, wide = held(xs, level, 0)
    rows = [_each(function, row, level - 1) for row in zip(*wide, strict=True)]
    return tuple(
        None if ys[0] is None else torch._add_batch_dim(torch.stack(ys), 0, level)
        for ys in zip(*rows, strict=True)
    )
