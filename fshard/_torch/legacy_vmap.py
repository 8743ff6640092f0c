"""Batches that `torch.autograd.grad(is_grads_batched=True)` passes to a backward function.

Its wrapped tensors, of levels from 1 on, are older than those of `torch.func`. They support few
operations, and an `autograd.Function` applied to one has no history: such a function is applied to
the wrapped tensors instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensors = Sequence[torch.Tensor]

is_legacy_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def nesting_level() -> int:
    """Return the level of the innermost legacy vmap around this thread's code, 0 without one."""
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def batch_level(xs: Tensors) -> int:
    """Return the highest level of the batches of `xs`, 0 without one.

    It is not `nesting_level()`: backward functions on other devices run in threads without one.
    """
    level = 0
    while any(map(is_legacy_batched, xs)):
        level += 1
        xs = [torch._remove_batch_dim(x, level, 1, 0) for x in xs]
    return level


def unwrap(xs: Tensors, level: int, dim: int) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Return the batch size of a level (1 without a batch) and `xs` with the batch as dim `dim`."""
    n = max(torch._remove_batch_dim(x, level, 1, 0).shape[0] for x in xs)
    return n, tuple(torch._remove_batch_dim(x, level, n, 0).movedim(0, dim) for x in xs)


def map_batch_dims(function: Callable[[Tensors], Tensors], xs: Tensors) -> tuple[torch.Tensor, ...]:
    """Return `function(xs)`, batches passed as leading dims, which `function` must keep."""
    return _map_dims(function, xs, batch_level(xs))


def _map_dims(
    function: Callable[[Tensors], Tensors], xs: Tensors, level: int
) -> tuple[torch.Tensor, ...]:
    if level == 0:
        return tuple(function(xs))
    _, unwrapped = unwrap(xs, level, 0)
    ys = _map_dims(function, unwrapped, level - 1)
    return tuple(torch._add_batch_dim(y, 0, level) for y in ys)


def map_batch_elements(
    function: Callable[[Tensors], Sequence[torch.Tensor | None]], xs: Tensors
) -> tuple[torch.Tensor | None, ...]:
    """Return `function(xs)`, called once for every element of the batches; results are stacked."""
    return _map_elements(function, xs, batch_level(xs))


def _map_elements(
    function: Callable[[Tensors], Sequence[torch.Tensor | None]], xs: Tensors, level: int
) -> tuple[torch.Tensor | None, ...]:
    if level == 0:
        return tuple(function(xs))
    _, unwrapped = unwrap(xs, level, 0)
    rows = [_map_elements(function, row, level - 1) for row in zip(*unwrapped, strict=True)]
    return tuple(
        None if ys[0] is None else torch._add_batch_dim(torch.stack(ys), 0, level)
        for ys in zip(*rows, strict=True)
    )
